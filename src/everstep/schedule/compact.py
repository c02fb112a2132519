"""An instance as flat lists of numbers, with replicas that are alike folded into one.

A replica is *clean* when no microbatch enters or leaves it and all its workers live. Clean replicas with
the same times and the same memory run the same schedule and touch no other, so one of them stands for
all. What is left after folding is what the planner pays for: broken replicas, their helpers, and one clean
replica of each sort.

    unit    u = (replica * microbatches + number) * stages + stage     of the folded replicas
    op      3 * u + kind, kind 0: F, 1: I (or B), 2: W
            a fused backward has a W of its own only where a split one was broken off between its I and W
    cell    replica * stages + stage: one part of the model on one replica, with its times and its share of
            the stash; `worker` says who runs it: with one part per worker, of the same number
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.protocol.ops import Kind, Microbatch, Op, Worker
from everstep.schedule.hosts import Place, choose_hosts
from everstep.schedule.instance import Instance

UNLIMITED = float("inf")


@dataclass(slots=True)
class Compact:
    """What the generators work on. Lists are indexed by folded cell or by unit."""

    stages: int
    microbatches: int
    replicas: list[int]  # folded index -> the replica that is simulated
    stands_for: dict[int, int]  # replica -> folded index
    hop: float
    fused: bool
    forward: list[float]
    backward: list[float]  # I, or B when fused
    weight: list[float]
    closing: list[float]  # per stage of workers: reduce and update
    room: list[float]  # what its stash may hold
    shares: (
        bool  # may parts of a worker use each other's? Not where bytes limit, and microbatches are counted
    )
    takes: list[float]  # what F takes of it
    frees_early: list[float]  # what the end of I gives back
    frees_late: list[float]  # what the end of W gives back
    host: list[int]  # per unit: cell
    key: list[int]  # per unit: smaller is more urgent; key % len(key) is the unit
    have_forward: bytearray  # per unit: done before we start
    have_input: bytearray
    have_weight: bytearray
    moved: dict[Place, int]
    worker: list[int]  # per cell: folded replica * stages of workers + stage

    @property
    def is_folded(self) -> bool:
        """Do workers run several parts?"""
        return len(self.closing) < self.stages

    def num_ops(self) -> int:
        if self.fused:
            weights = sum(bool(i and not w) for i, w in zip(self.have_input, self.have_weight, strict=True))
        else:
            weights = len(self.host) - sum(self.have_weight)
        return 2 * len(self.host) - sum(self.have_forward) - sum(self.have_input) + weights

    def op(self, code: int, replica: int) -> Op:
        """The op behind a code, on behalf of `replica` where the simulated one only stands for it."""
        unit, kind = divmod(code, 3)
        batch, stage = divmod(unit, self.stages)
        folded, number = divmod(batch, self.microbatches)
        home = self.replicas[folded]
        if home != replica and self.stands_for[replica] == folded:
            home = replica
        fused = self.fused and not self.have_weight[unit]
        return Op((FUSED_KINDS if fused else SPLIT_KINDS)[kind], Microbatch(home, number), stage)


SPLIT_KINDS = (Kind.F, Kind.I, Kind.W)
FUSED_KINDS = (Kind.F, Kind.B, Kind.W)


def compact(
    instance: Instance,
    *,
    fused: bool,
    stash_cap: Sequence[int] | None = None,
    moved: dict[Place, int] | None = None,
) -> Compact:
    """Choose hosts (unless given), fold clean replicas. `stash_cap` per stage tightens the instance's own."""
    moved = choose_hosts(instance) if moved is None else moved
    replicas, stands_for = _fold(instance, moved)
    stages, count, at = instance.stages, instance.microbatches, instance.fold
    workers = [Worker(k, s) for k in replicas for s in range(stages)]  # cells
    folded = {k: i for i, k in enumerate(replicas)}
    host = [i * stages + s for i in range(len(replicas)) for _ in range(count) for s in range(stages)]
    size = len(host)
    key = [(number * 2 + 1) * size for number in range(count) for _ in range(stages)] * len(replicas)
    for unit in range(size):
        key[unit] += unit
    for (home, number, stage), replica in moved.items():
        unit = (folded[home] * count + number) * stages + stage
        host[unit] = folded[replica] * stages + stage
        key[unit] -= size  # on ties the re-routed go first: more of the pipeline waits for them
    have = _what_is_done(instance, folded, size)
    backward = [instance.input_grad[k][s] for k, s in workers]
    weight = [instance.weight_grad[k][s] for k, s in workers]
    if fused:
        backward = [b + w for b, w in zip(backward, weight, strict=True)]
    limits = [_stash(instance, worker, stash_cap) for worker in workers]
    in_bytes = instance.memory is not None and not _counts(instance, stash_cap)
    sizes = set(map(instance.bytes_per_microbatch, range(stages)))
    room = [limit[0] for limit in limits]
    if in_bytes:  # those that one stands for hold as many microbatches, but may have more bytes
        for k, index in stands_for.items():
            for s in range(stages):
                at_cell = index * stages + s
                room[at_cell] = min(room[at_cell], _stash(instance, Worker(k, s), stash_cap)[0])
    return Compact(
        stages=stages,
        microbatches=count,
        replicas=replicas,
        stands_for=stands_for,
        hop=instance.hop,
        fused=fused,
        forward=[instance.forward[k][s] for k, s in workers],
        backward=backward,
        weight=weight,
        closing=[instance.closing(s) for s in range(at.stages)],
        room=room,
        shares=instance.memory is None or in_bytes or len(sizes) == 1,
        takes=[x[1] for x in limits],
        frees_early=[x[1] - x[2] for x in limits],
        frees_late=[x[2] for x in limits],
        host=host,
        key=key,
        have_forward=have[0],
        have_input=have[1],
        have_weight=have[2],
        moved=moved,
        worker=[i * at.stages + at.stage(s) for i in range(len(replicas)) for s in range(stages)],
    )


def _capacity(instance: Instance, cell: Worker) -> tuple[float, float | None]:
    """Of a worker's stash what one of its parts may use: microbatches, and bytes (None: no limit).

    A part further from the end holds each microbatch for longer, so it gets more, in proportion to what lies
    behind it. With one stash for all, and nothing reserved, the first part could fill it with many
    microbatches, and the last part of the first of them, which alone makes room, would never run.
    """
    fold = instance.fold
    worker = Worker(cell.replica, fold.stage(cell.stage))
    count: float = UNLIMITED if instance.stash_cap is None else instance.stash_cap.get(worker, UNLIMITED)
    size = None if instance.memory is None else instance.memory.get(worker)
    if instance.virtual == 1:
        return count, size
    mine = fold.parts_of(worker.stage)
    behind = {part: instance.stages - part for part in mine}
    total = sum(behind.values())
    if count < UNLIMITED:
        counts = {part: 1 + int(count - len(mine)) * behind[part] // total for part in mine}
        counts[mine[0]] += int(count) - sum(counts.values())
        count = counts[cell.stage]
    if size is not None:
        spare = size - sum(map(instance.bytes_per_microbatch, mine))
        size = instance.bytes_per_microbatch(cell.stage) + spare * behind[cell.stage] / total
    return count, size


def stash_limit(instance: Instance, worker: Worker) -> tuple[float, float]:
    """Most microbatches a worker can hold between F and I, and between I and W, each taken alone; of one that
    runs several parts: at this one of them.
    """
    count, size = _capacity(instance, worker)
    if size is None:
        return count, count
    early = instance.held_forward[worker.stage] if instance.held_forward else 0.0
    late = instance.held_weight[worker.stage] if instance.held_weight else 0.0
    if instance.stash_cap is not None and max(early, late):
        early = late = max(early, late)
    return (min(count, size // early) if early else count), (min(count, size // late) if late else count)


def _counts(instance: Instance, stash_cap: Sequence[int] | None) -> bool:
    """Is a number of microbatches given, whatever bytes are?"""
    return stash_cap is not None or instance.stash_cap is not None


def _stash(instance: Instance, worker: Worker, stash_cap: Sequence[int] | None) -> tuple[float, float, float]:
    """(room, what F takes, what is left from I to W), in bytes if only bytes limit, else in microbatches."""
    _, size = _capacity(instance, worker)
    each = instance.bytes_per_microbatch(worker.stage)
    if size is not None and not _counts(instance, stash_cap):
        # F reserves the larger phase: an I that had to wait for memory might never get it.
        late = instance.held_weight[worker.stage] if instance.held_weight else 0.0
        return size, each, late
    count = min(stash_limit(instance, worker))
    if stash_cap is not None:
        count = min(count, stash_cap[worker.stage])
    return max(1.0, count), 1.0, 1.0


def _fold(instance: Instance, moved: dict[Place, int]) -> tuple[list[int], dict[int, int]]:
    touched = {worker.replica for worker in instance.dead}
    for (home, _, _), host in moved.items():
        touched.add(home)
        touched.add(host)
    if instance.done:
        touched = set(range(instance.replicas))
    replicas: list[int] = []
    stands_for: dict[int, int] = {}
    sorts: dict[object, int] = {}
    for k in range(instance.replicas):
        sort: object = k if k in touched else _sort(instance, k)
        if sort not in sorts:
            sorts[sort] = len(replicas)
            replicas.append(k)
        stands_for[k] = sorts[sort]
    return replicas, stands_for


def _sort(instance: Instance, replica: int) -> object:
    limits: object = None
    if instance.stash_cap is not None or instance.memory is not None:
        limits = tuple(stash_limit(instance, Worker(replica, s)) for s in range(instance.stages))
    return instance.forward[replica], instance.input_grad[replica], instance.weight_grad[replica], limits


def _what_is_done(
    instance: Instance, folded: dict[int, int], size: int
) -> tuple[bytearray, bytearray, bytearray]:
    have = bytearray(size), bytearray(size), bytearray(size)
    for (microbatch, stage), done in instance.done.items():
        unit = (folded[microbatch.home] * instance.microbatches + microbatch.number) * instance.stages + stage
        for flags, kind in zip(have, "FIW", strict=True):
            flags[unit] = kind in done.kinds
    return have
