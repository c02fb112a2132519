"""Lockstep: a step with deaths, run as a fault-free step of fewer and longer pipelines.

Let L be the number of live workers in the worst-hit stage and N the microbatches of the step. Cut the step
into q = ceil(N / L) *slots* of at most L microbatches, no two of one home. In every slot every stage has a
live worker for each microbatch: those whose home lives stay there, and for each homeless one there is a live
worker whose own replica sits the slot out. So all workers can follow the order of *one* fault-free pipeline
with q microbatches, whatever the dead set: in slot t a worker runs what it hosts of slot t, or nothing.

    slot        0  1  2  3  4  5
    replica 0   .  .  0  1  2  3      Three replicas, four microbatches each, one death: L = 2, q = 6. A dot
    replica 1   0  1  .  .  2  3      is a slot that the replica sits out: there its workers are free to host
    replica 2   0  1  2  3  .  .      a homeless microbatch of another.

Nothing queues, since everybody does the same thing at the same time: where every stage lost about as many,
or the stash is so tight that one late microbatch stops a worker, this meets the bound while list scheduling
of the whole step loses up to a sixth. And it costs one pipeline, however many replicas there are. It loses
where one stage lost far more than the others, which then wait in step with it: the planner tries both.

It needs workers of a stage to be alike; a slow one would set the pace of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from everstep.protocol.ops import Microbatch, Op, Worker
from everstep.schedule.best_order import best_order
from everstep.schedule.compact import FUSED_KINDS, SPLIT_KINDS, Compact, compact
from everstep.schedule.hosts import Place
from everstep.schedule.instance import Instance
from everstep.schedule.modes import MODES
from everstep.schedule.timing import Timing

_Limit = TypeVar("_Limit", int, float)


@dataclass(frozen=True, slots=True)
class Lockstep:
    """One pipeline's order and clock, and who hosts what in each slot."""

    pipeline: Compact
    order: list[list[int]]  # per stage of workers
    timing: Timing
    slots: list[list[int]]  # per replica: the slot of each of its microbatches
    moved: dict[Place, int]
    guests: dict[Worker, dict[int, Microbatch]]  # what a cell hosts for others, by slot

    def ops_of(self, worker: Worker) -> tuple[Op, ...]:
        kinds = FUSED_KINDS if self.pipeline.fused else SPLIT_KINDS
        codes = self.order[worker.stage]
        return tuple(
            Op(kinds[code % 3], microbatch, code // 3 % self.pipeline.stages)
            for code, microbatch in zip(codes, self._run_by(worker), strict=True)
            if microbatch is not None
        )

    def starts_of(self, worker: Worker) -> list[float]:
        starts = self.timing.starts[worker.stage]
        return [
            start
            for start, microbatch in zip(starts, self._run_by(worker), strict=True)
            if microbatch is not None
        ]

    def _run_by(self, worker: Worker) -> list[Microbatch | None]:
        """What a worker runs of each op of the pipeline; None: nothing, it sits the slot out."""
        own = {slot: Microbatch(worker.replica, m) for m, slot in enumerate(self.slots[worker.replica])}
        hosted: dict[int, dict[int, Microbatch]] = {}  # by part
        found: list[Microbatch | None] = []
        for code in self.order[worker.stage]:
            slot, part = divmod(code // 3, self.pipeline.stages)
            if part not in hosted:
                hosted[part] = own | self.guests.get(Worker(worker.replica, part), {})
            found.append(hosted[part].get(slot))
        return found


def lockstep(
    instance: Instance, mode: str, bound: float, effort: int, caps: Sequence[int] | None
) -> Lockstep | None:
    """The step in lockstep, or None where it is broken off, or workers of a stage differ."""
    times = _times(instance)
    if times is None or instance.done:
        return None
    worst = min(len(instance.live(s)) for s in range(instance.stages))
    num_slots = -(-instance.replicas * instance.microbatches // worst)
    one = replace(
        instance,
        replicas=1,
        microbatches=num_slots,
        forward=(times[0],),
        input_grad=(times[1],),
        weight_grad=(times[2],),
        stash_cap=_least(instance, instance.stash_cap),
        memory=_least(instance, instance.memory),
        dead=frozenset(),
    )
    pipeline = compact(one, fused=MODES[mode].fused, stash_cap=caps)
    order, timing = best_order(pipeline, mode, bound, effort)
    slots = _slots(instance, num_slots)
    moved = _helpers(instance, slots, num_slots)
    guests: dict[Worker, dict[int, Microbatch]] = {}
    for (home, number, stage), host in moved.items():
        guests.setdefault(Worker(host, stage), {})[slots[home][number]] = Microbatch(home, number)
    return Lockstep(pipeline, order, timing, slots, moved, guests)


def _times(instance: Instance) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]] | None:
    """F, I and W per stage; None if two live workers of a stage differ."""
    found = []
    for grid in (instance.forward, instance.input_grad, instance.weight_grad):
        row = []
        for s in range(instance.stages):
            values = {grid[k][s] for k in instance.live(s)}
            if len(values) > 1:
                return None
            row.append(values.pop())
        found.append(tuple(row))
    return found[0], found[1], found[2]


def _least(instance: Instance, limits: Mapping[Worker, _Limit] | None) -> dict[Worker, _Limit] | None:
    """Of the one pipeline's workers: the least that a live worker of the stage may hold."""
    if limits is None:
        return None
    found: dict[Worker, _Limit] = {}
    for stage in range(instance.fold.stages):
        live = instance.live(instance.fold.parts_of(stage)[0])
        known = [limits[worker] for k in live if (worker := Worker(k, stage)) in limits]
        if known:
            found[Worker(0, stage)] = min(known)
    return found


def _slots(instance: Instance, num_slots: int) -> list[list[int]]:
    """Each replica sits out as many slots as it has too few microbatches, one replica after the other round
    the clock: so every slot is sat out by the same number of replicas, give or take one.
    """
    idle = num_slots - instance.microbatches
    slots = []
    for k in range(instance.replicas):
        out = {(k * idle + i) % num_slots for i in range(idle)}
        slots.append([t for t in range(num_slots) if t not in out])
    return slots


def _helpers(instance: Instance, slots: list[list[int]], num_slots: int) -> dict[Place, int]:
    """A host for each homeless microbatch among those who sit its slot out; the last stage's if it can."""
    sits_out: list[list[int]] = [[] for _ in range(num_slots)]
    for k, mine in enumerate(slots):
        for slot in set(range(num_slots)).difference(mine):
            sits_out[slot].append(k)
    moved: dict[Place, int] = {}
    taken: set[tuple[int, int, int]] = set()  # slot, stage, helper
    for stage in range(instance.stages):
        live = set(instance.live(stage))
        broken = [k for k in range(instance.replicas) if k not in live]
        homeless = [(slot, home, number) for home in broken for number, slot in enumerate(slots[home])]
        # Those that are with a helper already stay with it: a microbatch crosses between replicas once.
        homeless.sort(key=lambda x: (x[0], (x[1], x[2], stage - 1) not in moved, x[1]))
        for slot, home, number in homeless:
            before = moved.get((home, number, stage - 1))
            free = (k for k in sits_out[slot] if k in live and (slot, stage, k) not in taken)
            helper = min(free, key=lambda k: (k != before, k))
            taken.add((slot, stage, helper))
            moved[home, number, stage] = helper
    return moved
