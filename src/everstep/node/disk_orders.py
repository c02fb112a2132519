"""What an agent is ordered to do in a task's checkpoint folder: find the checkpoint to start from, commit one
whose parts are all written, remove what will not become one.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterable
from typing import Any, assert_never

from everstep.core.agent.agent_messages import DiskOrder
from everstep.errors import clipped
from everstep.job.job import Job
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.messages import CheckpointFolder
from everstep.store import folder
from everstep.store.places import place_of
from everstep.store.search import Newest, NoStart, newest_to_use


def newest(at: CheckpointFolder | None, known: int = 0, *, verify: bool = False) -> Newest:
    """The newest whole checkpoint; `NoStart` if that cannot be said, or needs an operator's word."""
    if at is None:
        return Newest(0)
    root = folder.root_of(at.base, at.folder)
    return newest_to_use(root, known=known, start_over=at.start_over, verify=verify)


def work_on_disk(order: DiskOrder, at: CheckpointFolder | None) -> msg.NodeReport | None:
    """Carry out an order; its answer, if it has one. `at`: None if the task is not known here."""
    match order:
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
        case msg.FindCheckpoint():
            because = f"its checkpoints cannot be looked at: {type(error).__name__}: {error}"
            return _unusable(order, because, passing=True)
        case msg.CommitCheckpoint():
            return _not_saved(order, f"{type(error).__name__}: {error}")
        case _:
            return None


def _found(order: msg.FindCheckpoint) -> msg.NodeReport:
    needs = order.needs or Job.from_dict(order.job).needs()
    try:
        found = newest(needs.checkpoints, order.known, verify=order.verify)
    except NoStart as error:
        return _unusable(order, str(error), passing=error.passing)
    return msg.CheckpointFound(
        task=order.task, step=found.step, refused=found.refused, search=order.search, loss=found.loss
    )


def _committed(order: msg.CommitCheckpoint, at: CheckpointFolder | None) -> msg.NodeReport:
    if at is None:
        return _not_saved(order, "the agent was restarted and does not know the task")
    try:
        _commit(at, order)
    except Exception as error:  # a full disk, a store that is away: what was written makes room
        with contextlib.suppress(Exception):
            _discard(at, order.step)
        return _not_saved(order, f"{type(error).__name__}: {error}")
    return msg.TaskEvent(task=order.task, event=ev.CheckpointCommitted(step=order.step))


def _commit(at: CheckpointFolder, order: msg.CommitCheckpoint) -> None:
    """All parts of this step are in the folder: from now on it is a checkpoint."""
    root = folder.root_of(at.base, at.folder)
    # Workers of the version before, and their reports in a journal, tell the whole description.
    found = [
        part if "slices" in part else folder.read_description(root, order.step, part) for part in order.parts
    ]
    groups = merged(group for part in found for group in part.get("groups", ()))
    meta = {key: value for part in found for key, value in part.get("meta", {}).items()}
    if order.loss is not None and math.isfinite(order.loss):
        meta["loss"] = order.loss
    told = ("groups", "meta")  # once, by one part
    parts = [{key: value for key, value in part.items() if key not in told} for part in found]
    folder.commit(root, order.step, parts, meta, at.keep, groups=groups)
    place_of(root).clean(before=order.step)  # what is not whole by now never will be


def _discard(at: CheckpointFolder, step: int, keep: Collection[int] = ()) -> None:
    """This step will not be a checkpoint: what was written of it makes room."""
    folder.discard(folder.root_of(at.base, at.folder), step, keep)


def merged(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups of all stages: those of the same numbers are one."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        numbers = {key: value for key, value in group.items() if key != "params"}
        key = json.dumps(numbers, sort_keys=True)
        found.setdefault(key, {"params": [], **numbers})["params"].extend(group["params"])
    return list(found.values())


def _not_saved(order: msg.CommitCheckpoint, because: str) -> msg.SaveFailed:
    return msg.SaveFailed(task=order.task, step=order.step, attempt=order.attempt, because=clipped(because))


def _unusable(order: msg.FindCheckpoint, because: str, *, passing: bool) -> msg.CheckpointUnusable:
    return msg.CheckpointUnusable(task=order.task, because=because, passing=passing, search=order.search)
