"""What an agent is ordered to do in a task's checkpoint folder: find the checkpoint to start from, commit one
whose parts are all written, remove what will not become one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from typing import assert_never

from everstep.core.agent.agent_messages import CommitWhole, DiskOrder, PartialsLooked
from everstep.errors import clipped
from everstep.log import say, warn
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.messages import CheckpointFolder
from everstep.store import folder
from everstep.store.places import place_of
from everstep.store.search import Newest, NoStart, newest_to_use

LAST_COMMIT_S = 60.0  # a task's last state is offered to a disk that refuses it for so long
AGAIN_S = 1.0


def newest(
    at: CheckpointFolder | None, known: int = 0, *, verify: bool = False, run: str = "", live: bool = False
) -> Newest:
    """The newest whole checkpoint; `NoStart` if that cannot be said, or needs an operator's word."""
    if at is None:
        return Newest(0)
    root = folder.root_of(at.base, at.folder)
    return newest_to_use(
        root, known=known, start_over=at.start_over, verify=verify, run=run, keep=at.keep, live=live
    )


def commit_whole(
    order: CommitWhole, at: CheckpointFolder | None
) -> tuple[msg.NodeReport | None, PartialsLooked]:
    """Commit what is whole, with or without an order; what is reported, and what is left."""
    if at is None:
        return None, PartialsLooked(order.task)
    root = folder.root_of(at.base, at.folder)
    found = folder.commit_whole(root, run=order.run, keep=at.keep, sealed=order.sealed)
    for step, because in found.kept.items():
        warn(f"the checkpoint of step {step} of task {order.task}: {because}")
    left = PartialsLooked(order.task, (*found.left, *found.kept), committed=bool(found.committed))
    if not found.committed:
        return None, left
    newest = found.committed[-1]
    say(f"committed the checkpoint of step {newest} of task {order.task} without the coordinator")
    return msg.TaskEvent(task=order.task, event=ev.CheckpointCommitted(step=newest)), left


def work_on_disk(order: DiskOrder, at: CheckpointFolder | None) -> msg.NodeReport | None:
    """Carry out an order; its answer, if it has one. `at`: None if the task is not known here."""
    match order:
        case msg.FindCheckpoint(live=True):
            return _looked(order)
        case msg.FindCheckpoint():
            return _found(order)
        case msg.CommitCheckpoint():
            return _committed(order, at)
        case msg.DiscardPartial():
            if at is not None:
                _discard(at, order.step, order.keep)
            return None
        case _:
            assert_never(order)


def failure(order: DiskOrder, error: Exception) -> msg.NodeReport | None:
    """What is answered if an order could not be carried out at all."""
    match order:
        case msg.FindCheckpoint(live=True):
            return _not_looked(order)
        case msg.FindCheckpoint():
            because = f"its checkpoints cannot be looked at: {type(error).__name__}: {error}"
            return _unusable(order, because, passing=True)
        case msg.CommitCheckpoint():
            return _not_saved(order, f"{type(error).__name__}: {error}")
        case _:
            return None


def _looked(order: msg.FindCheckpoint) -> msg.NodeReport:
    """While the task runs: a worker of each of its stages waits to load what is found."""
    try:
        found = newest(order.needs.checkpoints, order.known, run=order.run, live=True)
    except NoStart as error:
        warn(f"task {order.task} restarts from what its coordinator knows: {error}")
        return _not_looked(order)
    looked = ev.CheckpointsLooked(search=order.search, step=found.step)
    return msg.TaskEvent(task=order.task, event=looked)


def _not_looked(order: msg.FindCheckpoint) -> msg.NodeReport:
    return msg.TaskEvent(task=order.task, event=ev.CheckpointsLooked(search=order.search, step=None))


def _found(order: msg.FindCheckpoint) -> msg.NodeReport:
    try:
        found = newest(order.needs.checkpoints, order.known, verify=order.verify, run=order.run)
    except NoStart as error:
        return _unusable(order, str(error), passing=error.passing)
    return msg.CheckpointFound(
        task=order.task,
        step=found.step,
        refused=found.refused,
        search=order.search,
        loss=found.loss,
        compiled=found.compiled,
    )


def _committed(order: msg.CommitCheckpoint, at: CheckpointFolder | None) -> msg.NodeReport:
    if at is None:
        return _not_saved(order, "the agent was restarted and does not know the task")
    began = time.monotonic()
    while True:
        try:
            _commit(at, order)
            break
        except Exception as error:  # a full disk, a store that is away
            with contextlib.suppress(Exception):
                if (done := _done_before(at, order.step)) is not None:
                    return msg.TaskEvent(task=order.task, event=ev.CheckpointCommitted(step=done))
            if order.last and time.monotonic() - began < LAST_COMMIT_S:
                time.sleep(AGAIN_S)
                continue
            with contextlib.suppress(Exception):
                _discard(at, order.step)  # what was written makes room
            return _not_saved(order, f"{type(error).__name__}: {error}")
    return msg.TaskEvent(task=order.task, event=ev.CheckpointCommitted(step=order.step))


def _commit(at: CheckpointFolder, order: msg.CommitCheckpoint) -> None:
    """All parts of this step are in the folder: from now on it is a checkpoint."""
    root = folder.root_of(at.base, at.folder)
    found = [folder.read_description(root, order.step, part) for part in order.parts]
    folder.commit_described(root, order.step, found, at.keep, order.loss)


def _done_before(at: CheckpointFolder, step: int) -> int | None:
    """The step that was committed without this order, if it was: this one, or a later one since."""
    place = place_of(folder.root_of(at.base, at.folder))
    done = max((number for number, _ in place.complete()), default=0)
    is_staged = any(number == step for number, _ in place.staged())
    return done if done >= step and not is_staged else None


def _discard(at: CheckpointFolder, step: int, keep: Collection[int] = ()) -> None:
    """This step will not be a checkpoint: what was written of it makes room."""
    folder.discard(folder.root_of(at.base, at.folder), step, keep)


def _not_saved(order: msg.CommitCheckpoint, because: str) -> msg.SaveFailed:
    return msg.SaveFailed(task=order.task, step=order.step, attempt=order.attempt, because=clipped(because))


def _unusable(order: msg.FindCheckpoint, because: str, *, passing: bool) -> msg.CheckpointUnusable:
    return msg.CheckpointUnusable(task=order.task, because=because, passing=passing, search=order.search)
