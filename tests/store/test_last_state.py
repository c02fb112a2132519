"""A task's last state: storage that hangs or refuses it, and is back within the limit, costs nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.core.agent.agent_messages import DiskOrder
from everstep.engine.state.sharded import StateSlice
from everstep.engine.worker.ports import StateParts
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec
from everstep.layout.box import Box
from everstep.node import disk_orders
from everstep.protocol.events import CheckpointCommitted
from everstep.protocol.messages import (
    CheckpointFolder,
    CommitCheckpoint,
    PartWritten,
    SaveFailed,
    Sender,
    TaskEvent,
)
from everstep.protocol.ops import Worker
from everstep.protocol.work import SaveCheckpoint
from everstep.store import folder, state_keeper
from everstep.store.folder import complete_steps
from everstep.store.state_keeper import StateKeeper


class Disk:
    """A checkpoint folder whose writes hang or fail while it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(state_keeper, "LOOK_S", 0.02)
        monkeypatch.setattr(state_keeper, "LAST_STALL_S", 0.6)
        self.answers = threading.Event()
        self.answers.set()
        self.error: Exception | None = None
        real = folder.write_slices

        def write(*args: Any, **options: Any) -> Any:
            assert self.answers.wait(20)
            if self.error is not None:
                raise self.error
            return real(*args, **options)

        monkeypatch.setattr(folder, "write_slices", write)
        self.root, self.said = tmp_path / "kept", list[Any]()
        job = Job(
            model=ModelSpec(preset="gpt-tiny"),
            data=DataSpec(kind="synthetic"),
            checkpoint=CheckpointSpec(folder=str(self.root), interval=1),
            steps=9,
        )
        me = Sender("task", Worker(0, 0), 1)
        self.states = StateKeeper(
            me, job, node="n", memory_root=tmp_path / "memory", secret="00", say=self.said.append
        )
        self.states._to_disk._stall_s = 0.02

    def save(self, step: int, *, last: bool = False) -> None:
        one = StateSlice("w", (4,), Box((0,), (4,)), torch.full((4,), float(step)))
        self.states.save(SaveCheckpoint(step, 0, last=last), StateParts(1, {0: [one]}), [])

    def until(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not what():
            assert time.monotonic() < end, self.said
            time.sleep(0.01)

    def of(self, step: int) -> list[Any]:
        return [one for one in self.said if one.step == step]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    return Disk(monkeypatch, tmp_path)


def test_storage_that_hangs_over_two_states_still_gets_the_last_one(disk: Disk) -> None:
    """It was refused at once, as any third state is, and never offered again."""
    disk.answers.clear()
    for step in (5, 6, 7):
        disk.save(step)
    disk.save(9, last=True)
    assert [type(one) for one in disk.of(9)] == []
    assert [type(one) for one in disk.of(7)] == [SaveFailed], "one that another follows is refused"
    disk.answers.set()
    disk.until(lambda: bool(disk.of(9)))
    assert [type(one) for one in disk.of(9)] == [PartWritten]
    disk.states.finish()
    assert len(disk.of(9)) == 1


def test_a_disk_that_refuses_the_last_state_for_a_while_gets_it(disk: Disk) -> None:
    """It ended the task at once."""
    disk.error = OSError(28, "No space left on device")
    disk.save(8)
    disk.until(lambda: bool(disk.of(8)))
    disk.save(9, last=True)
    time.sleep(0.2)
    assert disk.of(9) == []
    disk.error = None
    disk.until(lambda: bool(disk.of(9)))
    assert [type(one) for one in disk.of(9)] == [PartWritten]


def test_a_disk_that_refuses_it_beyond_the_limit_is_named(disk: Disk) -> None:
    disk.error = OSError(28, "No space left on device")
    disk.save(9, last=True)
    disk.until(lambda: bool(disk.of(9)))
    (failed,) = disk.of(9)
    assert "No space left" in failed.because


def test_the_last_answer_of_a_disk_is_named_if_the_limit_ends_before_the_next_try(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit counts from the save, the tries from the first write: which one ended first was a race."""
    disk.error = OSError(28, "No space left on device")
    monkeypatch.setattr(state_keeper, "LOOK_S", 3.0)  # between two tries; the limit is 0.6 s
    disk.save(9, last=True)
    disk.until(lambda: bool(disk.of(9)))
    (failed,) = disk.of(9)
    assert "No space left" in failed.because
    disk.states.finish()
    assert len(disk.of(9)) == 1


def test_storage_that_hangs_beyond_the_limit_is_named_once(disk: Disk) -> None:
    disk.answers.clear()
    disk.save(8)
    disk.save(9, last=True)
    disk.until(lambda: bool(disk.of(9)))
    assert [type(one) for one in disk.of(9)] == [SaveFailed]
    assert state_keeper.STORAGE_IS_SILENT in disk.of(9)[0].because
    disk.error = FileNotFoundError("step-00000009.partial")  # its folder was removed meanwhile
    disk.answers.set()
    disk.states.finish()
    assert len(disk.of(9)) == 1


def test_a_write_whose_folder_went_while_it_hung_names_the_storage(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_keeper, "STALL_S", 0.01)
    disk.answers.clear()
    disk.save(8)
    time.sleep(0.1)
    disk.error = FileNotFoundError("step-00000008.partial/stage-0.safetensors")
    disk.answers.set()
    disk.until(lambda: bool(disk.of(8)))
    assert state_keeper.STORAGE_IS_SILENT in disk.of(8)[0].because
    assert ".partial" not in disk.of(8)[0].because


@pytest.mark.parametrize("last", [True, False])
def test_the_commit_of_the_last_state_is_tried_again(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    disk.save(9, last=True)
    disk.until(lambda: bool(disk.of(9)))
    real, tries = folder.commit_described, list[int]()

    def commit(*args: Any) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(folder, "commit_described", commit)
    monkeypatch.setattr(disk_orders, "AGAIN_S", 0.01)
    order: DiskOrder = CommitCheckpoint(task="task", step=9, parts=(disk.of(9)[0].part,), last=last)
    at = CheckpointFolder(base=str(disk.root.parent), folder=str(disk.root), keep=3)
    answer = disk_orders.work_on_disk(order, at)
    if last:
        assert answer == TaskEvent(task="task", event=CheckpointCommitted(step=9))
        assert complete_steps(disk.root) == [9]
    else:
        assert isinstance(answer, SaveFailed)
        assert len(tries) == 1
