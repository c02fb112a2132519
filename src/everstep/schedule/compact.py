"""An instance as flat lists of numbers, with replicas that are alike folded into one.

A replica is *clean* when no microbatch enters or leaves it and all its workers live. Clean replicas with
the same times and the same memory run the same schedule and touch no other, so one of them stands for
all. What is left after folding is what the planner pays for: broken replicas, their helpers, and one clean
replica of each sort.

    unit    u = (replica * microbatches + number) * stages + stage     of the folded replicas
    op      3 * u + kind, kind 0: F, 1: I, 2: W
    worker  replica * stages + stage
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.protocol.ops import Kind, Microbatch, Op, Worker
from everstep.schedule.hosts import Place, choose_hosts
from everstep.schedule.instance import Instance

UNLIMITED = float("inf")


@dataclass(slots=True)
class Compact:
    """What the generators work on. Lists are indexed by folded worker or by unit."""

    stages: int
    microbatches: int
    replicas: list[int]  # folded index -> the replica that is simulated
    stands_for: dict[int, int]  # replica -> folded index
    hop: float
    forward: list[float]
    backward: list[float]  # I
    weight: list[float]
    closing: list[float]  # per stage: reduce and update
    room: list[float]  # microbatches that its stash may hold, from F to W
    host: list[int]  # per unit: worker
    key: list[int]  # per unit: smaller is more urgent; key % len(key) is the unit
    have_forward: bytearray  # per unit: done before we start
    have_input: bytearray
    have_weight: bytearray
    moved: dict[Place, int]

    def num_ops(self) -> int:
        return 3 * len(self.host) - sum(self.have_forward) - sum(self.have_input) - sum(self.have_weight)

    def op(self, code: int, replica: int) -> Op:
        """The op behind a code, on behalf of `replica` where the simulated one only stands for it."""
        unit, kind = divmod(code, 3)
        batch, stage = divmod(unit, self.stages)
        folded, number = divmod(batch, self.microbatches)
        home = self.replicas[folded]
        if home != replica and self.stands_for[replica] == folded:
            home = replica
        return Op(KINDS[kind], Microbatch(home, number), stage)


KINDS = (Kind.F, Kind.I, Kind.W)


def compact(instance: Instance, moved: dict[Place, int] | None = None) -> Compact:
    """Choose hosts (unless given), fold clean replicas."""
    moved = choose_hosts(instance) if moved is None else moved
    replicas, stands_for = _fold(instance, moved)
    stages, count = instance.stages, instance.microbatches
    workers = [Worker(k, s) for k in replicas for s in range(stages)]
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
    return Compact(
        stages=stages,
        microbatches=count,
        replicas=replicas,
        stands_for=stands_for,
        hop=instance.hop,
        forward=[instance.forward[k][s] for k, s in workers],
        backward=[instance.input_grad[k][s] for k, s in workers],
        weight=[instance.weight_grad[k][s] for k, s in workers],
        closing=[instance.closing(s) for s in range(stages)],
        room=[stash_limit(instance, worker) for worker in workers],
        host=host,
        key=key,
        have_forward=have[0],
        have_input=have[1],
        have_weight=have[2],
        moved=moved,
    )


def stash_limit(instance: Instance, worker: Worker) -> float:
    """Most microbatches a worker can hold from F to W."""
    return UNLIMITED if instance.stash_cap is None else instance.stash_cap.get(worker, UNLIMITED)


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
    if instance.stash_cap is not None:
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
