"""How many microbatches a worker may hold from F to W, so that memory grows with stages, not with batches.

Without a cap a schedule holds whatever shortens it, up to all microbatches of a step, and twice that after a
death. Twice as many as there are stages is enough: over pipelines of 2 to 8 stages, with and without a death,
no period becomes 1 % longer (docs/schedules.md). Where there is one stage, one is enough. Where a step would
be longer, for stages of very different times, the cap is raised, as far as memory allows. What workers have
measured (bytes of a stash, bytes they have for stashes) lowers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from everstep.protocol.ops import Worker
from everstep.schedule.bounds import lower_bound
from everstep.schedule.instance import Instance
from everstep.schedule.planner import plan

LONGER = 0.01  # a cap may make a step this much longer than the bound without one
RAISED = (1.0, 1.5, 2.0, 3.0)  # times the usual cap


def stash_cap(stages: int) -> int:
    """Microbatches a worker may hold from F to W, where memory allows. A worker that waits for no other stage
    gains nothing from a second one.
    """
    return 2 * stages if stages > 1 else 1


@dataclass(frozen=True, slots=True)
class StashRoom:
    """What a worker has reported: bytes of one microbatch, and bytes it has for all of them."""

    held: float
    room: float | None = None  # None: no limit

    @property
    def most(self) -> int | None:
        """Microbatches that fit."""
        return None if self.room is None or self.held <= 0 else max(1, int(self.room // self.held))


def capped(instance: Instance, mode: str, rooms: Mapping[Worker, StashRoom]) -> Instance:
    """The instance without deaths, with the least cap that does not make its step longer."""
    usual = stash_cap(instance.stages)
    bound = lower_bound(instance, mode)
    limits = {s: _least(rooms, s) for s in range(instance.stages)}
    found = instance
    for times in RAISED:
        cap = int(times * usual)
        if cap >= instance.microbatches * instance.replicas:
            break
        found = replace(instance, stash_cap=_caps(instance, cap, limits))
        if plan(found, mode).value <= (1 + LONGER) * bound:
            return found
    if any(limit is not None for limit in limits.values()):
        most = instance.microbatches * instance.replicas
        return replace(instance, stash_cap=_caps(instance, most, limits))
    return found


def _least(rooms: Mapping[Worker, StashRoom], stage: int) -> int | None:
    """Of a stage's workers the one with the least room: who takes over for whom is not known in advance."""
    known = [room.most for worker, room in rooms.items() if worker.stage == stage and room.most is not None]
    return min(known, default=None)


def _caps(instance: Instance, cap: int, limits: Mapping[int, int | None]) -> dict[Worker, int]:
    return {
        worker: cap if (limit := limits[worker.stage]) is None else min(cap, limit)
        for worker in instance.fault_free().workers()
    }
