"""The queue: who waits for what, and when each is expected to start."""

import json
import time
from pathlib import Path

import pytest

from everstep.cli import main
from everstep.cli.client import Client
from everstep.drive.step_rows import StepRows
from everstep.protocol import messages as msg
from everstep.protocol.shape import Shape
from everstep.server import views, waiting
from everstep.server.record import ClusterRecord
from everstep.server.waiting import Leaving, Waiting, expected_starts
from tests.support.fake_cluster import FakeCluster
from tests.support.served import JOB, served


def starts(
    queue: dict[str, int], running: dict[str, tuple[int, float | None]], free: int
) -> dict[str, float | None]:
    found = expected_starts(
        [Waiting(task=name, slots=slots) for name, slots in queue.items()],
        [Leaving(task=name, slots=slots, in_s=in_s) for name, (slots, in_s) in running.items()],
        free=free,
        total=free + sum(slots for slots, _ in running.values()),
    )
    assert list(found) == list(queue)
    return {name: one.in_s for name, one in found.items()}


def test_a_task_starts_when_the_tasks_before_it_have_left_enough_slots() -> None:
    running = {"a": (4, 600.0), "b": (2, 60.0), "c": (2, 3600.0)}
    assert starts({"x": 2}, running, free=3) == {"x": 0.0}
    assert starts({"x": 2, "y": 2, "z": 4}, running, free=0) == {"x": 60.0, "y": 600.0, "z": 3600.0}
    assert starts({"x": 5, "y": 1}, running, free=1) == {"x": 600.0, "y": 600.0}


def test_what_is_not_known_is_not_promised() -> None:
    assert starts({"x": 3, "y": 1}, {"script": (4, None)}, free=1) == {"x": None, "y": None}
    assert starts({"large": 9, "y": 1}, {"a": (4, 60.0)}, free=0) == {"large": None, "y": 60.0}
    assert starts({"x": 4, "y": 4}, {"a": (4, 60.0)}, free=0) == {"x": 60.0, "y": None}


def test_a_task_that_stands_still_for_want_of_slots_is_in_the_queue() -> None:
    """The queue said: no task waits; 0 of 6 slots are free. Three of the six were on the lost node."""
    cluster = FakeCluster(nodes={"a": 1, "b": 1})
    cluster.submit("light", shape=Shape(1, 2, 2))
    cluster.join("c", 2)
    cluster.submit("heavy", shape=Shape(1, 2, 2), weight=2.0)
    for name in ("heavy", "light"):
        cluster.seal(name)
    record = ClusterRecord()
    record.begin(cluster.coordinator, record.hearts, 0, None)
    assert waiting.document(record)["queue"] == []
    cluster.hear(msg.NodeLeft(node="a"))
    told = waiting.document(record)
    assert (told["free"], told["slots"]) == (0, 3)
    (row,) = told["queue"]
    assert (row["task"], row["state"], row["needs_slots"]) == ("light", "stalled", 1)
    assert row["because"].startswith("it has begun, and a stage is without a worker; ")
    assert row["because"].endswith("; heavy (weight 2) has 2")
    assert row["starts_in_s"] is None
    record.steps["light"] = StepRows()
    record.steps["light"].last_at = time.time() - 60
    row = views.task_row(record, cluster.coordinator.tasks["light"])
    assert row["state"] == "stalled"
    assert row["because"].endswith("slots needed: 1, free: 0")
    cluster.join("d", 1)
    assert waiting.document(record)["queue"] == []


def test_the_command_says_why_a_task_waits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = JOB | {"replicas": 1, "stages": 2, "shards": 1}
    with served(tmp_path / "s", token="one") as address:
        options = ["--address", address, "--token", "one"]
        assert main.run(["queue", *options]) == 0
        assert "no task waits; 0 of 0 slots are free" in capfd.readouterr().out
        client = Client(address=address, token="one")
        client.post("/v1/tasks", {"name": "light", "job": job})
        heavy = {"name": "heavy", "job": job | {"replicas": 3}, "weight": 3, "min_workers": 4}
        client.post("/v1/tasks", heavy)
        assert main.run(["queue", *options, "--json"]) == 0
        rows = json.loads(capfd.readouterr().out)["queue"]
        assert [(row["place"], row["task"], row["needs_slots"]) for row in rows] == [
            (1, "heavy", 4),
            (2, "light", 2),
        ]
        assert rows[0]["starts_in_s"] is None
        assert rows[0]["starts"] == "it needs 4 slots, and the cluster has 0"
        assert main.run(["queue", *options]) == 0
        out = capfd.readouterr().out
        assert "heavy" in out
        assert "not known" in out
