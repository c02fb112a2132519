"""Real processes with sharded optimizer states: odd models and settings, deaths, shapes, memory, resumes.

Every run has the losses of its clean run, to the bit. `bench/sweep.py --shard` has the moments of a death.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.engine.telemetry.faults import parse_fault
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec, OptimizerSpec
from everstep.launch.local.outcome import Outcome
from everstep.launch.local.run import LocalNode, LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.messages import Patience
from everstep.protocol.ops import Worker
from everstep.store import folder
from harness.sweep import Sweep, compare

HERE = str(Path(__file__).parent)
SHARDED = OptimizerSpec(lr=1e-3, shard=True)
JOB = Job(
    model=ModelSpec(preset="gpt-tiny", options={"dropout": 0.1}),
    data=DataSpec(kind="synthetic", rows=1, sequence=16),
    optimizer=SHARDED,
    steps=8,
    replicas=3,
    stages=2,
    microbatches=4,
)
ODD: dict[str, Any] = {
    "model": ModelSpec(build="odd:model"),
    "data": DataSpec(build="odd:Data"),
    "base": HERE,
}
TINY: dict[str, Any] = {**ODD, "model": ModelSpec(build="odd:tiny")}
ONE = ("stage=1,replica=0,step=3,op=I1", "stage=0,replica=1,step=4,op=W2")
TWO_AT_ONCE = ("stage=1,replica=0,step=3,op=F1", "stage=1,replica=1,step=3,op=F1")
# While there are three: of two replicas each holds all chunks, and neither sends weights.
IN_UPDATE = ("stage=0,replica=0,step=3,op=U,when=sending", "stage=0,replica=2,step=5,op=U,when=before")
SETTINGS: dict[str, dict[str, Any]] = {
    "odd sizes and frozen parts": ODD,
    "fewer elements than chunks": TINY,
    "clipped": {"optimizer": replace(SHARDED, clip=0.05)},
    "an average of the weights": {"optimizer": replace(SHARDED, ema=0.9)},
    "bf16": {"precision": "bf16"},
    "sums of 40 bits": {"precision": "bf16"},
    "odd sizes": ODD,
    "recompute": {"recompute": True, "optimizer": replace(SHARDED, name="SGD", options={"momentum": 0.9})},
    "two replicas": {"replicas": 2, "microbatches": 6},
}
QUICK = {("odd sizes and frozen parts", "two at once")}


@pytest.fixture(scope="module")
def sweep(fork_server: ForkServer) -> Sweep:
    return Sweep(fork_server=fork_server)


def cases() -> Iterator[Any]:
    deaths = {"one after the other": ONE, "two at once": TWO_AT_ONCE, "in the update": IN_UPDATE}
    for name, changes in SETTINGS.items():
        for how, faults in deaths.items():
            if name == "two replicas" and how == "in the update":
                continue  # there is no replica 2
            marks = () if (name, how) in QUICK else (pytest.mark.slow,)
            yield pytest.param(changes, faults, id=f"{name}, {how}", marks=marks)


@pytest.mark.parametrize(("changes", "faults"), list(cases()))
def test_whatever_is_trained_deaths_leave_no_trace(
    sweep: Sweep, changes: dict[str, Any], faults: tuple[str, ...]
) -> None:
    job = replace(JOB, **changes)
    clean, healed = sweep.run(job, ()), sweep.run(job, faults)
    found = compare(clean, healed, job)
    assert found["ok"], found
    assert found["max_relative_loss_difference"] == 0.0
    died = {worker for incident in healed.incidents for worker in incident.workers}
    assert died == {parse_fault(fault).worker for fault in faults}, "some planned death did not happen"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"replicas": 2, "microbatches": 6}),
        ({}, {"replicas": 4, "microbatches": 3, "stages": 1}),
        ({}, {"optimizer": replace(SHARDED, shard=False)}),
        ({"optimizer": replace(SHARDED, shard=False)}, {}),
        ({"optimizer": replace(SHARDED, ema=0.9)}, {"optimizer": replace(SHARDED, ema=0.9, shard=False)}),
        (ODD, {**ODD, "replicas": 4, "microbatches": 3}),
    ],
    ids=["other R", "other shape", "unsharded", "from unsharded", "average, unsharded", "odd sizes, other R"],
)
def test_a_run_goes_on_from_a_checkpoint_of_another_kind(
    sweep: Sweep, tmp_path: Path, first: dict[str, Any], then: dict[str, Any]
) -> None:
    clean = sweep.run(replace(JOB, **first), ())
    saving = CheckpointSpec(folder=str(tmp_path), interval=2)
    sweep.run(replace(JOB, **first, checkpoint=saving), (), until=5)
    again = sweep.run(replace(JOB, **then, checkpoint=saving), ())
    assert again.failure is None
    assert again.resumed_from in (2, 4)
    ours, theirs = again.by_step(), clean.by_step()
    assert {s: ours[s].loss for s in ours} == {s: theirs[s].loss for s in theirs if s > again.resumed_from}


@pytest.mark.slow
def test_an_average_of_sharded_weights_is_that_of_whole_ones(sweep: Sweep, tmp_path: Path) -> None:
    found = []
    for shard in (True, False):
        saving = CheckpointSpec(folder=str(tmp_path / str(shard)), interval=8)
        job = replace(JOB, optimizer=replace(SHARDED, ema=0.9, shard=shard), checkpoint=saving)
        assert sweep.run(job, ONE if shard else ()).failure is None
        found.append(folder.open_step(tmp_path / str(shard), "step-00000008").read())
    assert found[0].keys() == found[1].keys()
    assert any(name.startswith("extra/ema/") for name in found[0])
    assert all(found[0][name].equal(found[1][name]) for name in found[0])


# ------------------------------------------------------------------ other shapes, memory


@pytest.fixture(scope="module")
def losses_without_failures(fork_server: ForkServer) -> dict[int, float]:
    return losses(LocalTask(JOB, fork_server=fork_server).run())


def losses(outcome: Outcome) -> dict[int, float]:
    assert outcome.failure is None, outcome.failure
    return {row.step: row.loss for row in outcome.rows}


def run(fork_server: ForkServer, job: Job, at_step: dict[int, Any]) -> LocalTask:
    """`at_step`: what is done once when this step is on record."""
    left = dict(at_step)

    def watch(kind: str, what: Any) -> None:
        if kind == "step" and what.step in left:
            left.pop(what.step)(task)

    patience = Patience(restarts_per_node=99)
    task = LocalTask(job, fork_server=fork_server, watch=watch, node=LocalNode(slots=8), patience=patience)
    task.run()
    assert not left
    return task


@pytest.mark.slow
def test_a_task_with_sharded_states_takes_other_shapes(
    fork_server: ForkServer, losses_without_failures: dict[int, float]
) -> None:
    shapes = {2: (4, 1), 4: (2, 3), 6: (3, 2)}
    task = run(fork_server, JOB, {at: lambda t, s=shape: t.reshape(*s) for at, shape in shapes.items()})
    assert losses(task.outcome) == losses_without_failures
    assert (task.shape.replicas, task.shape.stages) == (3, 2)
    assert not task.outcome.incidents


@pytest.mark.slow
def test_an_owner_that_dies_while_the_shape_ends_changes_nothing(
    fork_server: ForkServer, losses_without_failures: dict[int, float]
) -> None:
    def both(task: LocalTask) -> None:
        task.reshape(2, 2)
        task.kill(Worker(1, 1))

    task = run(fork_server, JOB, {3: both})
    assert losses(task.outcome) == losses_without_failures
    assert (task.shape.replicas, task.shape.stages) == (2, 2)


@pytest.mark.slow
def test_owners_and_guards_that_die_together_come_back_from_memory(
    fork_server: ForkServer, losses_without_failures: dict[int, float]
) -> None:
    def kill_two(task: LocalTask) -> None:
        for replica in range(2):
            task.kill(Worker(replica, 1))

    task = run(fork_server, replace(JOB, memory_interval=1), {5: kill_two})
    assert losses(task.outcome) == losses_without_failures
    incident = task.outcome.incidents[-1]
    assert incident.restored_where == "the memory of nodes"


@pytest.mark.slow
@pytest.mark.parametrize("shard", [True, False], ids=["sharded", "whole"])
def test_a_damaged_copy_in_memory_is_not_used_and_an_older_state_is(
    fork_server: ForkServer, losses_without_failures: dict[int, float], shard: bool
) -> None:
    """One byte of every copy of the newest step is wrong when the holders die."""

    def damage(task: LocalTask) -> None:
        newest = max((task.workers.memory.folder / "task").glob("step-*"))
        for path in newest.glob("*.safetensors"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        damaged.append(int(newest.name[-8:]))
        for replica in range(3):
            task.kill(Worker(replica, 1))

    damaged: list[int] = []
    job = replace(JOB, memory_interval=2, optimizer=replace(SHARDED, shard=shard))
    task = run(fork_server, job, {5: damage})
    assert losses(task.outcome) == losses_without_failures
    restored = [i.restored_from for i in task.outcome.incidents if i.restored_from is not None]
    assert restored
    assert min(restored) < damaged[0]
