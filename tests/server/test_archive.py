"""Records that last: what is over can be found after the coordinator has forgotten it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from everstep.cli import main
from everstep.cli.client import Client
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.faults.detector import Heartbeats
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.incidents import Incident
from everstep.protocol.ops import Worker
from everstep.server import archive as module
from everstep.server.archive import Archive
from everstep.server.record import ClusterRecord
from tests.support.served import JOB, agent, served


def record_of(*numbers: int, leads: bool = True) -> ClusterRecord:
    record, machine = ClusterRecord(), Coordinator()
    record.begin(machine, Heartbeats(patience_s=1.0), 0, None)
    for number in numbers:
        one = machine.log.new(task="t", workers=[Worker(0, 0)], what="killed", step=number, now=float(number))
        one.close(number + 0.5, "training resumed")
    record.leads = leads
    return record


def closed(number: int) -> dict[str, object]:
    return {"at": 1.0, "kind": "IncidentClosed", "incident": number, "because": ""}


def test_what_a_crash_left_out_is_added_and_nothing_twice(tmp_path: Path) -> None:
    first = Archive(record_of(1, 2), tmp_path)
    first.hear(closed(2))  # it leads, and its first word completes the file
    again = Archive(record_of(1, 2, 3), tmp_path)
    again.hear({"at": 1.0, "kind": "Dispatch"})
    again.hear({"at": 1.0, "kind": "Dispatch"})
    rows = again.search(text="", since=0.0, last=100)
    assert sorted(row["number"] for row in rows) == [1, 2, 3]
    found = again.incident(3)
    assert found is not None
    assert found["what"] == "killed"
    assert again.incident(4) is None


def test_an_incident_that_closes_is_the_only_one_that_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that are kept were described for each: where 2,000 nodes were lost at once, for minutes."""
    described: list[int] = []
    right = module.views.incident

    def incident(record: ClusterRecord, one: Incident) -> dict[str, object]:
        described.append(one.number)
        return right(record, one)

    kept = Archive(record_of(*range(1, 30)), tmp_path)
    kept.hear({"at": 1.0, "kind": "Dispatch"})
    monkeypatch.setattr(module.views, "incident", incident)
    kept.hear(closed(7))
    assert described == [7]
    Archive(record_of(*range(1, 31)), tmp_path).hear(closed(30))
    assert described == [7, 30]


@pytest.mark.parametrize("text", ["größe", "GRÖSSE ", '"quoted"', "back\\slash", "日本"])
def test_texts_beyond_ascii_are_found_and_names_of_values_are_not(tmp_path: Path, text: str) -> None:
    """It looked for the text as it is, in a file in which it was escaped; and "kind" found everything."""
    record = record_of(1, 2)
    one = record.machine.log.incidents[0]
    one.what = 'the Größe of "quoted" back\\slash, 日本'
    kept = Archive(record, tmp_path)
    kept.hear(closed(2))
    assert [row["number"] for row in kept.search(text=text.strip(), since=0.0, last=9)] == [1]
    assert kept.search(text="workers", since=0.0, last=9) == []
    assert kept.search(text="kind", since=0.0, last=9) == []


def test_decisions_do_not_wait_while_the_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 128 MB were parsed on the event loop, at the first event after a take-over."""
    record, may_read, loops = record_of(1, 2), threading.Event(), []
    kept = Archive(record, tmp_path)
    right = Archive._archived

    def archived(self: Archive) -> Any:
        with contextlib.suppress(RuntimeError):
            loops.append(asyncio.get_running_loop())
        assert may_read.wait(60)
        return right(self)

    monkeypatch.setattr(Archive, "_archived", archived)

    async def play() -> None:
        kept.hear({"at": 1.0, "kind": "Dispatch"})
        one = record.machine.log.new(task="t", workers=[Worker(0, 0)], what="killed", step=3, now=3.0)
        one.close(3.5, "training resumed")
        kept.hear(closed(3))
        assert not (tmp_path / "archive.jsonl").exists()
        may_read.set()
        while not (tmp_path / "archive.jsonl").exists():
            await asyncio.sleep(0.001)
        kept.hear(closed(3))

    asyncio.run(play())
    assert loops == [], "not on the loop"
    numbers = [row["number"] for row in kept.search(text="", since=0.0, last=9)]
    assert sorted(set(numbers)) == [1, 2, 3]
    assert numbers.count(3) == 2, "only what is heard later is added"


def test_a_coordinator_that_reads_its_journal_adds_nothing(tmp_path: Path) -> None:
    quiet = Archive(record_of(1, leads=False), tmp_path)
    quiet.hear(closed(1))
    assert not (tmp_path / "archive.jsonl").exists()


def test_the_file_begins_again_and_half_a_line_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    Archive(record_of(1), tmp_path).hear(closed(9))
    Archive(record_of(1, 2), tmp_path).hear(closed(9))
    assert (tmp_path / "archive.jsonl.1").exists()
    (tmp_path / "archive.jsonl").write_text('{"kind": "inci')
    rows = Archive(record_of(), tmp_path).search(text="KILLED", since=0.0, last=10)
    assert [row["number"] for row in rows] == [2]


def test_a_task_that_has_ended_is_found_by_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def play(address: str) -> None:
        async with agent(address, "n7") as one:
            client = Client(address=address)
            await asyncio.to_thread(client.post, "/v1/tasks", {"name": "llama", "job": JOB})
            order = await one.until(msg.StartProcess)
            await asyncio.to_thread(client.post, "/v1/tasks/llama/cancel")
            exited = ev.WorkerExited(worker=order.worker, incarnation=1, reason="ended")
            await one.say(1, msg.TaskEvent(task="llama", event=exited))
            await one.acknowledged(1)

    with served(tmp_path) as address:
        asyncio.run(play(address))
        words = ["history", "--address", address]
        while True:
            assert main.run([*words, "LLAMA", "--json"]) == 0
            if rows := json.loads(capfd.readouterr().out)["history"]:
                break
        assert (rows[0]["kind"], rows[0]["task"], rows[0]["state"]) == ("task", "llama", "cancelled")
        assert rows[0]["because"].startswith("an operator cancelled it")
        assert main.run([*words, "nothing-like-it", "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["history"] == []
        assert main.run(words) == 0
        assert "llama (an operator)" in capfd.readouterr().out
