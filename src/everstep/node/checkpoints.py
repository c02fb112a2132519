"""A task's checkpoints: which one to start from, and when one that is being written counts."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterable
from typing import Any, assert_never

from everstep.core.agent.messages import DiskOrder
from everstep.job.job import Job
from everstep.protocol import cluster_messages as msg
from everstep.protocol import events as ev
from everstep.protocol.text import clipped
from everstep.store import folder
from everstep.store.places import place_of
from everstep.store.search import Newest, NoStart, newest_to_use


class CheckpointDirectory:
    def __init__(self, job: Job) -> None:
        self.job = job

    def newest(self, known: int = 0) -> Newest:
        """The newest whole checkpoint; `NoStart` if that cannot be said, or needs an operator's word."""
        spec = self.job.checkpoint
        if spec is None:
            return Newest(0)
        root = folder.root_of(self.job.base, spec.folder)
        return newest_to_use(root, known=known, start_over=spec.start_over)

    def commit(self, step: int, described: list[dict[str, Any]], loss: float | None = None) -> None:
        """All parts of this step lie in the folder: from now on it is a checkpoint."""
        spec = self.job.checkpoint
        assert spec is not None
        root = folder.root_of(self.job.base, spec.folder)
        groups = merged(group for part in described for group in part.get("groups", ()))
        parts = [{key: value for key, value in part.items() if key != "groups"} for part in described]
        folder.commit(root, step, parts, self._meta(step, loss), spec.keep, groups=groups)
        place_of(root).clean(before=step)  # what is not whole by now never will be

    def discard(self, step: int, keep: Collection[int] = ()) -> None:
        """This step will not be a checkpoint: what was written of it makes room."""
        spec = self.job.checkpoint
        if spec is not None:
            folder.discard(folder.root_of(self.job.base, spec.folder), step, keep)

    def _meta(self, step: int, loss: float | None) -> dict[str, Any]:
        """What a run needs besides tensors. Data and random draws are functions of (seed, step, microbatch),
        the rate of the step: the step is the position of them all.
        """
        job, optimizer = self.job, self.job.optimizer
        return {
            "seed": job.seed,
            "steps": job.steps,
            **({} if loss is None or not math.isfinite(loss) else {"loss": loss}),
            "precision": job.precision,
            **job.model_card(),
            "shape": {"replicas": job.replicas, "stages": job.stages, "microbatches": job.microbatches},
            "rng": {"kind": "of (seed, step, microbatch, layer)", "seed": job.seed},
            "scheduler": {
                "decay": optimizer.decay,
                "warmup": optimizer.warmup,
                "floor": optimizer.floor,
                "next_multiplier": job.rate(step),
            },
            "data": {"next_step": step + 1, "microbatches_in_step": job.microbatches_in_step},
        }


def merged(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups of all stages: those of the same numbers are one."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        numbers = {key: value for key, value in group.items() if key != "params"}
        key = json.dumps(numbers, sort_keys=True)
        found.setdefault(key, {"params": [], **numbers})["params"].extend(group["params"])
    return list(found.values())


# What an agent is ordered to do on disk.


def work_on_disk(order: DiskOrder, job: Job | None) -> msg.NodeReport | None:
    """Carry out an order; its answer, if it has one. `job`: None if the task is not known here."""
    match order:
        case msg.FindCheckpoint():
            return _found(order)
        case msg.CommitCheckpoint():
            return _committed(order, job)
        case msg.DiscardPartial():
            if job is not None:
                CheckpointDirectory(job).discard(order.step, order.keep)
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
    try:
        found = CheckpointDirectory(Job.from_dict(order.job)).newest(order.known)
    except NoStart as error:
        return _unusable(order, str(error), passing=error.passing)
    return msg.CheckpointFound(
        task=order.task, step=found.step, refused=found.refused, search=order.search, loss=found.loss
    )


def _committed(order: msg.CommitCheckpoint, job: Job | None) -> msg.NodeReport:
    if job is None:
        return _not_saved(order, "the agent was started anew and does not know the task")
    checkpoints = CheckpointDirectory(job)
    try:
        checkpoints.commit(order.step, list(order.parts), order.loss)
    except Exception as error:  # a full disk, a store that is away: what was written makes room
        with contextlib.suppress(Exception):
            checkpoints.discard(order.step)
        return _not_saved(order, f"{type(error).__name__}: {error}")
    return msg.TaskEvent(task=order.task, event=ev.CheckpointCommitted(step=order.step))


def _not_saved(order: msg.CommitCheckpoint, because: str) -> msg.SaveFailed:
    return msg.SaveFailed(task=order.task, step=order.step, attempt=order.attempt, because=clipped(because))


def _unusable(order: msg.FindCheckpoint, because: str, *, passing: bool) -> msg.CheckpointUnusable:
    return msg.CheckpointUnusable(task=order.task, because=because, passing=passing, search=order.search)
