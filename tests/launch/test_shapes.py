"""Real processes: a running task takes other shapes, and comes back from memory, with the losses of one that
never moved.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from everstep.errors import UserError
from everstep.job.job import DataSpec, Job, ModelSpec, OptimizerSpec
from everstep.launch.local.outcome import Outcome
from everstep.launch.local.run import LocalNode, LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.messages import Patience
from everstep.protocol.ops import Worker

JOB = Job(
    model=ModelSpec(preset="gpt-tiny", options={"tied": True, "dropout": 0.1}),
    data=DataSpec(kind="synthetic", rows=1, sequence=16),
    optimizer=OptimizerSpec(lr=1e-3),
    steps=10,
    replicas=2,
    stages=2,
    microbatches=6,
)


@pytest.fixture(scope="module")
def clean(fork_server: ForkServer) -> dict[int, float]:
    return losses(LocalTask(JOB, fork_server=fork_server).run())


def losses(outcome: Outcome) -> dict[int, float]:
    assert outcome.failure is None
    return {row.step: row.loss for row in outcome.rows}


def run(fork_server: ForkServer, job: Job, at_step: dict[int, Callable[[LocalTask], None]]) -> LocalTask:
    """`at_step`: what is done once when this step is on record."""
    left = dict(at_step)

    def watch(kind: str, what: Any) -> None:
        if kind == "step" and what.step in left:
            left.pop(what.step)(task)

    task = LocalTask(
        job,
        fork_server=fork_server,
        watch=watch,
        node=LocalNode(slots=6),
        patience=Patience(restarts_per_node=99),
    )
    task.run()
    assert not left
    return task


def test_a_task_goes_through_other_shapes_without_a_trace_in_its_losses(
    fork_server: ForkServer, clean: dict[int, float]
) -> None:
    shapes = {3: (1, 4), 6: (3, 2)}
    task = run(fork_server, JOB, {step: lambda t, s=shape: t.reshape(*s) for step, shape in shapes.items()})  # type: ignore[misc]
    assert losses(task.outcome) == clean
    assert (task.shape.replicas, task.shape.stages) == (3, 2)
    assert not task.outcome.incidents
    assert len(task.coordinator.tasks["task"].copies.fetched) == len(shapes)


def test_a_running_task_changes_its_shards_too(fork_server: ForkServer, clean: dict[int, float]) -> None:
    """The chain of all three dimensions. Only the order of additions inside a group of shards differs."""
    shapes = {2: (1, 2, 2), 5: (4, 1, 1), 8: (1, 1, 4)}
    task = run(fork_server, JOB, {step: lambda t, s=shape: t.reshape(*s) for step, shape in shapes.items()})  # type: ignore[misc]
    found = losses(task.outcome)
    assert found == pytest.approx(clean, rel=2e-6)
    assert [found[step] for step in (1, 2)] == [clean[step] for step in (1, 2)]
    assert str(task.shape) == "1x1x4"
    assert not task.outcome.incidents
    assert len(task.coordinator.tasks["task"].copies.fetched) == len(shapes)


def test_a_worker_that_dies_while_the_shape_ends_changes_nothing(
    fork_server: ForkServer, clean: dict[int, float]
) -> None:
    def both(task: LocalTask) -> None:
        task.reshape(3, 1)
        task.kill(Worker(1, 1))

    task = run(fork_server, JOB, {3: both})
    assert losses(task.outcome) == clean
    assert (task.shape.replicas, task.shape.stages) == (3, 1)


def test_a_stage_whose_workers_all_die_comes_back_from_memory(
    fork_server: ForkServer, clean: dict[int, float]
) -> None:
    def kill_stage(task: LocalTask) -> None:
        for replica in range(2):
            task.kill(Worker(replica, 1))

    task = run(fork_server, replace(JOB, memory_interval=1), {7: kill_stage})
    assert losses(task.outcome) == clean
    incident = task.outcome.incidents[-1]
    assert incident.restored_where == "the memory of nodes"
    assert incident.restored_from in (5, 6, 7)  # the copy of the last step may still be under way


def test_a_shape_that_does_not_fit_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="12 microbatches, which 5 replicas cannot share evenly"):
        JOB.reshaped(5, 1)
    with pytest.raises(UserError, match=r"shards is 3, which does not divide model\.heads 4"):
        JOB.reshaped(2, 1, 3)
