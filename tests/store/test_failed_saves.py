"""A disk that is full: training goes on, nothing half written stays, and it is an incident."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep.core.cluster.checkpoints import NOT_SAVED, UNSAVED
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec
from everstep.launch.local.api import result_of
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.ops import Worker
from everstep.store.folder import complete_steps

STEPS = 8


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb") as filler:
        free = os.statvfs(disk)
        filler.write(b"x" * (free.f_bavail * free.f_bsize - (64 << 10)))


def trained(
    fork_server: ForkServer,
    folder: Path,
    watch: Callable[[str, Any], None],
    interval: int,
    steps: int = STEPS,
    tasks: list[LocalTask] | None = None,
) -> LocalTask:
    job = Job(
        model=ModelSpec(preset="gpt-tiny", options={"depth": 2}),
        data=DataSpec(kind="synthetic", rows=1, sequence=16),
        checkpoint=CheckpointSpec(folder=str(folder), interval=interval),
        steps=steps,
        replicas=2,
        stages=2,
        microbatches=2,
    )
    task = LocalTask(job, fork_server=fork_server, watch=watch)
    if tasks is not None:
        tasks.append(task)
    task.run()
    return task


def left_over(disk: Path) -> list[str]:
    return sorted(path.name for path in disk.iterdir() if path.name.endswith(".partial"))


def test_a_full_disk_costs_checkpoints_and_nothing_else(fork_server: ForkServer, small_disk: Path) -> None:
    """Before: `.partial` folders stayed and filled the disk, and only a worker's own log said so."""
    fill(small_disk)

    def watch(kind: str, what: Any) -> None:
        if kind == "step" and what.step == 3:
            (small_disk / "filler").unlink()

    task = trained(fork_server, small_disk, watch, interval=1)
    assert task.outcome.failure is None
    assert len(task.outcome.by_step()) == STEPS
    incident = next(i for i in task.coordinator.log.incidents if i.what == NOT_SAVED)
    assert incident.verdict is not None
    assert incident.verdict.kind == "disk full"
    assert "No space left" in incident.evidence[0].text
    assert incident.closed
    assert "is saved" in incident.remedies[-1].outcome
    assert complete_steps(small_disk)[-1] == STEPS
    assert left_over(small_disk) == []


def test_a_disk_that_is_full_at_the_end_gets_the_last_state_when_it_has_room(
    fork_server: ForkServer, small_disk: Path
) -> None:
    """Before: the task ended at once, protected up to step 30. The disk fills up as soon as there is a
    checkpoint: on a busy machine that may be several steps later.
    """

    def watch(kind: str, what: Any) -> None:
        if kind == "step" and complete_steps(small_disk) and not (small_disk / "filler").exists():
            fill(small_disk)
        if kind == "step" and what.step == 59:
            threading.Timer(4.0, (small_disk / "filler").unlink).start()

    task = trained(fork_server, small_disk, watch, interval=30, steps=59)
    known = task.coordinator.tasks["task"]
    assert (known.state, known.protected) == ("finished", 59)
    assert UNSAVED not in known.because
    assert complete_steps(small_disk)[-1] == 59
    assert left_over(small_disk) == []


def test_a_worker_killed_while_it_writes_the_last_state_costs_no_checkpoint(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Before: the task was over with the last seal, and its newest checkpoint was an old one. A pipe that no
    process reads holds up the worker's share until it is killed.
    """
    root, pipe = tmp_path / "checkpoints", tmp_path / "pipe"
    os.mkfifo(pipe)
    tasks: list[LocalTask] = []

    def watch(kind: str, what: Any) -> None:
        if kind == "step" and what.step == STEPS - 2:
            folder = root / f"step-{STEPS:08d}.partial"
            folder.mkdir()
            os.link(pipe, folder / "stage-1-1-of-2-i1.safetensors")
        if kind == "step" and what.step == STEPS:
            tasks[0].kill(Worker(0, 1))

    task = trained(fork_server, root, watch, interval=5, tasks=tasks)
    known = task.coordinator.tasks["task"]
    assert (known.state, known.protected, UNSAVED in known.because) == ("finished", STEPS, False)
    assert complete_steps(root) == [5, STEPS]
    assert left_over(root) == []
    assert sorted(task.outcome.by_step()) == list(range(1, STEPS + 1))


def test_storage_that_hangs_costs_saves_and_no_step(fork_server: ForkServer, tmp_path: Path) -> None:
    """Before: training stood still at the third save, and no incident said so. A pipe that no process reads
    blocks whoever opens it to write, as a dead file server does.
    """
    root, pipes = tmp_path / "checkpoints", tmp_path / "pipes"
    pipes.mkdir()
    readers: list[int] = []

    def hang() -> None:
        parts = itertools.product((20, 21), (0, 1), (1, 2))
        for number, (step, stage, share) in enumerate(parts):
            os.mkfifo(pipes / str(number))
            folder = root / f"step-{step:08d}.partial"
            folder.mkdir(exist_ok=True)
            os.link(pipes / str(number), folder / f"stage-{stage}-{share}-of-2-i1.safetensors")

    def watch(kind: str, what: Any) -> None:
        if kind == "step" and what.step == 4:
            hang()
        if kind == "step" and what.step == 30:
            readers.extend(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) for pipe in sorted(pipes.iterdir()))

    try:
        task = trained(fork_server, root, watch, interval=1, steps=45)
    finally:
        for reader in readers:
            os.close(reader)
    assert len(task.outcome.by_step()) == 45
    incident = next(i for i in task.coordinator.log.incidents if i.what == NOT_SAVED)
    assert incident.verdict is not None
    assert incident.verdict.kind == "remote storage error"
    assert any("the checkpoint storage does not answer" in evidence.text for evidence in incident.evidence)
    assert complete_steps(root)[-1] == 45


def test_the_last_step_is_saved_whatever_the_interval(fork_server: ForkServer, tmp_path: Path) -> None:
    task = trained(fork_server, tmp_path, lambda kind, what: None, interval=5)
    assert complete_steps(tmp_path) == [5, STEPS]
    assert task.coordinator.tasks["task"].protected == STEPS


def test_partial_folders_of_a_dead_run_are_removed_and_complete_ones_are_not(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    trained(fork_server, tmp_path, lambda kind, what: None, interval=5)
    for name in ("step-00000006.partial", "step-00000090.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stage-0-1-of-1-i1.safetensors").write_bytes(b"half")
    trained(fork_server, tmp_path, lambda kind, what: None, interval=5)
    assert left_over(tmp_path) == []
    assert complete_steps(tmp_path) == [5, STEPS]


def test_a_run_resumed_at_its_last_step_knows_its_loss(fork_server: ForkServer, tmp_path: Path) -> None:
    """`result.losses[N]` was a KeyError."""
    first = trained(fork_server, tmp_path, lambda kind, what: None, interval=5)
    again = trained(fork_server, tmp_path, lambda kind, what: None, interval=5)
    assert again.outcome.resumed_from == STEPS
    assert result_of(again.outcome, again.job).losses == {STEPS: first.outcome.by_step()[STEPS].loss}
