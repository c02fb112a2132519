"""An agent is replaced under its workers: real agents, real workers, one coordinator."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep.cli.client import Client
from everstep.errors import EverstepError
from everstep.job.job import Job
from everstep.launch.local.api import run_job
from everstep.node.fork_server import InheritedServer
from everstep.procfs import born
from harness.cluster import small_job
from tests.support.processes import until
from tests.support.served import served

EVERSTEP = [sys.executable, "-m", "everstep.cli.main"]
REPLACEMENTS = 20


class Node:
    """A node whose agents come and go."""

    def __init__(self, folder: Path, name: str, address: str, program: Sequence[str], *more: str) -> None:
        self.folder, self.log, self.program = folder / name, folder / f"{name}.log", program
        self.options = ["agent", "--node", name, "--slots", "2", "--coordinator", address]
        self.options += ["--state", str(self.folder), "--no-check", "--grace", "5", *more]
        self.start()

    def start(self, *more: str) -> None:
        command = [*self.program, *self.options, *more]
        with self.log.open("ab") as out:
            self.agent = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

    def upgrade(self, program: Sequence[str]) -> None:
        old, self.program = self.agent, program
        self.start("--replace")
        assert old.wait(120) == 0

    def end(self) -> None:
        if self.agent.poll() is None:
            self.agent.terminate()
            self.agent.wait(60)
        for path in self.folder.glob("fork-*"):  # what was left to a next one ends by itself, but later
            if (server := InheritedServer(path)).ask():
                server.close()  # and its children

    @property
    def boot(self) -> str:
        return str(json.loads((self.folder / "record").read_text().partition("\n")[0])["boot"])


@contextmanager
def nodes(
    folder: Path, address: str, *names: str, program: Sequence[str] = EVERSTEP, more: tuple[str, ...] = ()
) -> Iterator[list[Node]]:
    made: list[Node] = []
    try:
        for name in names:
            made.append(Node(folder, name, address, program, *more))
        yield made
    finally:
        for node in made:
            node.end()


def pids(client: Client) -> dict[str, tuple[int, int]]:
    rows = client.get("/v1/tasks/t/readings")["workers"]
    return {row["worker"]: (row["pid"], born(row["pid"])) for row in rows}


def replaced_during_training(folder: Path, times: int, *, compared: int) -> None:
    """The first agent of two is, in turn, killed and told to make room, while both train one task."""
    job = small_job(folder, steps=1_000_000, optimizer={"decay": "constant"})
    with served(folder / "state") as address, nodes(folder, address, "a", "b") as both:
        client, node = Client(address=address), both[0]

        def step() -> int:
            return int(client.get("/v1/tasks/t")["step"])

        until(lambda: len(client.get("/v1/status")["nodes"]) == 2, "both nodes are there")
        client.post("/v1/tasks", {"name": "t", "job": job})
        until(lambda: step() >= 3, "it trains")
        before, boot = pids(client), node.boot
        assert len(before) == 4
        for turn in range(times):
            old = node.agent
            if turn % 2:
                node.start("--replace")  # it is ready before it tells the other one to leave
            else:
                old.kill()
                node.start()
            assert old.wait(120) == (0 if turn % 2 else -signal.SIGKILL)
            done = step()
            until(lambda done=done: step() > done, "its steps are heard")
            # An agent that is late is left out of an answer: what is compared is an answer with all of them.
            now = until(lambda: pids_of_both(client), "both agents answer")
            assert now == before, f"other processes after replacement {turn + 1}"
        until(lambda: step() >= compared, "enough steps to compare")
        assert node.boot == boot
        rows = client.get("/v1/tasks/t")["rows"]
        assert client.get("/v1/incidents") == []
        client.post("/v1/tasks/t/cancel", {})
        until(lambda: client.get("/v1/tasks/t")["state"] == "cancelled", "it is cancelled")
        until(lambda: not any(alive(*one) for one in before.values()), "its workers are gone")
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, len(steps) + 1)), "every step once, in order"
    clean = run_job(Job.from_dict(job | {"steps": compared})).by_step()
    assert [row["loss"] for row in rows[:compared]] == [clean[s].loss for s in steps[:compared]]


def alive(pid: int, started: int) -> bool:
    return born(pid) == started


def pids_of_both(client: Client) -> dict[str, tuple[int, int]]:
    """Empty: a node is not connected just now."""
    try:
        found = pids(client)
    except EverstepError:
        return {}
    return found if len(found) == 4 else {}


@pytest.mark.slow
def test_an_agent_that_is_replaced_twenty_times_keeps_its_workers(tmp_path: Path) -> None:
    replaced_during_training(tmp_path, REPLACEMENTS, compared=40)
