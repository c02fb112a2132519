"""Plans kept ready: an answer that was thought of before costs microseconds.

Within a stage, replicas with the same times and memory are interchangeable. So the key is the *normalized
survivor set*: for every sort of replica, the dead stages of each broken replica, sorted. One plan serves
every set of survivors that differs only in which replicas they are; its workers are renamed on the way out,
when read.

    dead {3:1, 5:2}  and  dead {0:2, 7:1}   ->   key ((0, ((1,), (2,))),)   ->   one plan

The cache holds for one healthy instance: when the profile of op times drifts, make a new one. `likely_next`
lists the survivor sets one more death away, most probable first; callers with idle time call `prepare`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from everstep.protocol.ops import Microbatch, Op, Worker
from everstep.schedule.compact import stash_limit
from everstep.schedule.instance import Instance
from everstep.schedule.planner import plan
from everstep.schedule.schedule import LazyByWorker, Planned, Schedule

Key = tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]


class PlanCache:
    """Plans of one task shape, by who is dead."""

    def __init__(self, healthy: Instance, *, capacity: int = 256) -> None:
        self.healthy = healthy.fault_free()
        self._capacity = capacity
        self._by_dead: OrderedDict[tuple[str, frozenset[Worker]], Planned] = OrderedDict()
        self._by_key: OrderedDict[tuple[str, Key], tuple[list[int], Planned]] = OrderedDict()
        self._sort_of = _sorts(self.healthy)
        self._members: dict[int, list[int]] = {}
        for replica, sort in enumerate(self._sort_of):
            self._members.setdefault(sort, []).append(replica)

    def get(self, dead: Iterable[Worker], mode: str) -> Planned:
        """The plan for these survivors; computed unless a similar set was asked for before."""
        exact = (mode, frozenset(dead))
        if exact in self._by_dead:
            return self._by_dead[exact]
        key, broken = self._normalize(exact[1])
        kept = self._by_key.get((mode, key))
        if kept is None:
            planned = plan(replace(self.healthy, dead=exact[1]), mode)
            self._by_key[mode, key] = broken, planned
        else:
            planned = self._renamed(kept[1], kept[0], broken, exact[1])
        self._by_dead[exact] = planned
        for kept_plans in (self._by_dead, self._by_key):
            while len(kept_plans) > self._capacity:
                kept_plans.popitem(last=False)
        return planned

    def is_ready(self, dead: Iterable[Worker], mode: str) -> bool:
        return (mode, self._normalize(frozenset(dead))[0]) in self._by_key

    def likely_next(self, dead: Iterable[Worker]) -> list[frozenset[Worker]]:
        """Survivor sets one death away, one of each kind, most probable first."""
        gone = frozenset(dead)
        weight: dict[Key, int] = {}
        example: dict[Key, frozenset[Worker]] = {}
        for worker in self.healthy.workers():
            after = gone | {worker}
            if worker in gone:
                continue
            if sum(w.stage == worker.stage for w in after) == self.healthy.replicas:
                continue  # no worker left at this stage: no schedule, a checkpoint
            key = self._normalize(after)[0]
            weight[key] = weight.get(key, 0) + 1
            example.setdefault(key, after)
        return [example[key] for key in sorted(weight, key=lambda key: (-weight[key], key))]

    def prepare(self, dead: Iterable[Worker], mode: str, *, most: int) -> int:
        """Plan for up to `most` likely next failures that are not ready; how many were planned."""
        planned = 0
        for after in self.likely_next(dead):
            if planned == most:
                break
            if not self.is_ready(after, mode):
                self.get(after, mode)
                planned += 1
        return planned

    def _normalize(self, dead: frozenset[Worker]) -> tuple[Key, list[int]]:
        """The key, and the broken replicas in the order the key lists them."""
        stages_of: dict[int, list[int]] = {}
        for replica, stage in dead:
            stages_of.setdefault(replica, []).append(stage)
        listed = sorted((self._sort_of[k], tuple(sorted(stages)), k) for k, stages in stages_of.items())
        key: dict[int, list[tuple[int, ...]]] = {}
        for sort, stages, _ in listed:
            key.setdefault(sort, []).append(stages)
        return tuple((sort, tuple(stages)) for sort, stages in key.items()), [k for _, _, k in listed]

    def _renamed(self, planned: Planned, was: list[int], now: list[int], dead: frozenset[Worker]) -> Planned:
        """The same plan for other replicas: broken ones map in key order, the rest of each sort in order."""
        to_old: dict[int, int] = dict(zip(now, was, strict=True))
        left = set(was)
        for members in self._members.values():
            old_rest = [k for k in members if k not in left]
            new_rest = [k for k in members if k not in to_old]
            to_old.update(zip(new_rest, old_rest, strict=True))
        to_new = {old: new for new, old in to_old.items()}

        def workers() -> list[Worker]:
            return [worker for worker in self.healthy.workers() if worker not in dead]

        def old(worker: Worker) -> Worker:
            return Worker(to_old[worker.replica], worker.stage)

        def rename(op: Op) -> Op:
            if op.microbatch is None:
                return op
            return Op(op.kind, Microbatch(to_new[op.microbatch.home], op.microbatch.number), op.stage)

        ops = LazyByWorker(workers, lambda w: tuple(map(rename, planned.schedule.ops[old(w)])))
        return replace(
            planned,
            schedule=Schedule(ops),
            starts=LazyByWorker(workers, lambda w: planned.starts[old(w)]),
            peak_stash=LazyByWorker(workers, lambda w: planned.peak_stash[old(w)]),
        )


def _sorts(instance: Instance) -> list[int]:
    """Per replica: which sort it is."""
    limited = instance.stash_cap is not None
    seen: dict[object, int] = {}
    found = []
    for k in range(instance.replicas):
        limits = tuple(stash_limit(instance, Worker(k, s)) for s in range(instance.stages)) if limited else ()
        look = instance.forward[k], instance.input_grad[k], instance.weight_grad[k], limits
        found.append(seen.setdefault(look, len(seen)))
    return found
