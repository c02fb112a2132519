"""A step as planned and as run: ops are named by the schedule, and only where the numbers agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.engine.telemetry.recorder import WorkerRecorder
from everstep.node.recent_ops import last_steps
from everstep.protocol.actions import ComputePlan
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Fold, Shape
from everstep.schedule.task_scheduler import TaskScheduler
from everstep.server import step_timeline
from harness.cluster import Cluster, small_job

SHAPE = Shape(2, 2, 2)


def desk() -> TaskScheduler:
    made = TaskScheduler(SHAPE, "staggered")
    made.answer(ComputePlan(epoch=1, broken={}, dead=frozenset(), because="test"))
    return made


def run(number: int, *, start_ns: int = 10**9) -> list[list[int]]:
    return [[start_ns + 10**6 * i, start_ns + 10**6 * i + 500_000] for i in range(number)]


def test_before_anything_is_planned_or_run_there_is_nothing_to_show() -> None:
    told = step_timeline.document(TaskScheduler(SHAPE, "staggered"), {})
    assert (told["step"], told["planned"], told["measured"]) == (None, [], [])


def test_ops_are_named_by_the_schedule_in_force() -> None:
    scheduler = desk()
    found = scheduler.in_force()
    assert found is not None
    ops = {str(worker): [str(op) for op in ops] for worker, ops in found[0].schedule.ops.items()}
    told = step_timeline.document(
        scheduler, {worker: {"7": run(len(names))} for worker, names in ops.items()}
    )
    assert told["step"] == 7
    for worker, names in ops.items():
        assert [row[1] for row in told["measured"] if row[0] == worker] == names
        assert [row[1] for row in told["planned"] if row[0] == worker] == names
    assert min(row[2] for row in told["measured"]) == 0.0
    assert told["planned_s"] > 0


def test_the_newest_step_that_all_have_is_shown_and_a_broken_one_without_names() -> None:
    scheduler = desk()
    measured = {"0:0": {"7": run(10), "8": run(10)}, "0:1": {"6": run(3), "7": run(3)}}
    told = step_timeline.document(scheduler, measured)
    assert told["step"] == 7
    assert {row[1] for row in told["measured"] if row[0] == "0:1"} == {""}


def test_the_last_whole_steps_come_from_a_workers_own_recorder(tmp_path: Path) -> None:
    beacon = tmp_path / "beacon-t-0-0-1"
    recorder = WorkerRecorder.beside(str(beacon), Worker(0, 0), replicas=2, fold=Fold(2))
    for step in range(1, 7):
        for op in range(4):
            begun = step * 10**9 + op * 10**6
            recorder.op(step, begun, begun + 500_000, 500_000)
    found = last_steps(beacon)
    assert sorted(found) == ["3", "4", "5"], "the sixth may not be whole"
    assert [len(ops) for ops in found.values()] == [4, 4, 4]
    assert all(ended - begun == 500_000 for begun, ended in found["5"])
    assert last_steps(tmp_path / "nobody") == {}


@pytest.mark.slow
def test_a_running_task_shows_the_time_between_its_stages_and_its_eager_updates(tmp_path: Path) -> None:
    """Two addresses of one machine are two machines to the workers."""
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        for number, node in enumerate("ab", 1):
            cluster.start_agent(node, slots=1, host=f"127.0.0.{number}")
        cluster.nodes_up(2)
        job = small_job(tmp_path, steps=5000, replicas=1, stages=2, optimizer={"clip": False})
        cluster.submit(job, "t")

        def told() -> dict[str, Any]:
            found: dict[str, Any] = cluster.client.get("/v1/tasks/t/gantt")
            return found

        cluster.until(lambda: told().get("hop_s", 0.0) > 0, "the schedule in force knows hops", within_s=120)
        assert told()["hop_s"] < 1.0

        def is_staggered() -> bool:
            """Where updates collide often for a while, as on a busy machine, another mode is taken."""
            found = told()
            return bool(found["mode"] == "staggered" and found["eager_updates"] > 0.3)

        cluster.until(is_staggered, "the stage that ends first does not wait for the norm", within_s=120)
