"""The same survivors under other systems' policies, on the same op times: what re-routing is worth.

    1F1B, zero bubble   no worker dead. Both, because re-routing uses bubbles: against a baseline that has
                        none, no schedule can hide a death
    shrink              Oobleck-like: replicas with a dead worker are dropped, the rest share the batch
    redundancy          Bamboo-like: each worker also runs its successor's forward (the price of standing by,
                        deaths or not); the predecessor of a dead worker runs both stages; two deaths in a row
                        lose the pipeline, whose microbatches the others take

Each policy is a step time for the same global batch, so throughput relative to fault-free 1F1B is its
inverse. These are policies on one throughput model, not the systems themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from everstep.protocol.ops import Worker
from everstep.schedule.instance import Grid, Instance
from everstep.schedule.modes import MODES, REFERENCES
from everstep.schedule.planner import plan


@dataclass(frozen=True, slots=True)
class ComparedPolicy:
    policy: str
    step: float | None  # None: nothing left to train with
    lower_bound: float | None = None

    def relative(self, reference: float) -> float:
        """Throughput, where `reference` is the step time that counts as 1."""
        return reference / self.step if self.step else 0.0


def compare(instance: Instance) -> list[ComparedPolicy]:
    """Fault-free references first, then what each policy makes of the dead."""
    healthy = instance.fault_free()
    rows = []
    for name, mode in MODES.items():
        planned = plan(healthy if mode.reference else instance, name)
        policy = f"fault-free {mode.label}" if mode.reference else f"re-route, {mode.label}"
        rows.append(ComparedPolicy(policy, planned.value, planned.lower_bound))
    rows += [ComparedPolicy(f"shrink, {MODES[name].label}", shrink(instance, name)) for name in REFERENCES]
    rows.append(ComparedPolicy("redundancy, no failures", redundancy(healthy)))
    rows.append(ComparedPolicy("redundancy", redundancy(instance)))
    return rows


def shrink(instance: Instance, mode: str) -> float | None:
    """Drop broken replicas; the others run ceil(N / whole) microbatches each."""
    broken = {w.replica for w in instance.dead}
    whole = [k for k in range(instance.replicas) if k not in broken]
    if not whole:
        return None
    return plan(_pipelines(instance, whole), mode).value


def redundancy(instance: Instance) -> float | None:
    """The slowest pipeline, each with a stand-in next to every dead worker."""
    last = instance.stages - 1
    lost, broken = [], {}
    for k in range(instance.replicas):
        dead = sorted(w.stage for w in instance.dead if w.replica == k)
        # The first stage's stand-in is the last worker, as in Bamboo's ring.
        if any((s - 1) % instance.stages in dead for s in dead) and instance.stages > 1 and dead:
            lost.append(k)
        elif dead:
            broken[k] = dead
    alive = [k for k in range(instance.replicas) if k not in lost]
    if not alive:
        return None
    shadowed = replace(
        instance,
        dead=frozenset(),
        done={},
        forward=tuple(
            tuple(row[s] + (row[s + 1] if s < last else 0.0) for s in range(instance.stages))
            for row in instance.forward
        ),
    )
    whole = [k for k in alive if k not in broken]
    share = -(-instance.replicas * instance.microbatches // len(alive))
    times = [plan(_pipelines(shadowed, whole, share), "1f1b").value] if whole else []
    for k, dead in broken.items():
        times.append(plan(_merged(instance.fault_free(), k, dead, share), "1f1b").value)
    return max(times)


def _pipelines(instance: Instance, replicas: list[int], microbatches: int | None = None) -> Instance:
    """An instance of these replicas alone, with the whole batch or a given share."""
    total = instance.replicas * instance.microbatches
    caps = None
    if instance.stash_cap is not None:
        caps = {
            Worker(i, s): instance.stash_cap[Worker(k, s)]
            for i, k in enumerate(replicas)
            for s in range(instance.stages)
            if Worker(k, s) in instance.stash_cap
        }
    return replace(
        instance,
        replicas=len(replicas),
        microbatches=microbatches or -(-total // len(replicas)),
        forward=_pick(instance.forward, replicas),
        input_grad=_pick(instance.input_grad, replicas),
        weight_grad=_pick(instance.weight_grad, replicas),
        stash_cap=caps,
        memory=None,
        dead=frozenset(),
        done={},
    )


def _merged(instance: Instance, replica: int, dead: list[int], microbatches: int) -> Instance:
    """One pipeline in which each dead stage's work is added to its predecessor's."""
    one = _pipelines(instance, [replica], microbatches)
    keep = [s for s in range(instance.stages) if s not in dead]

    def merge(row: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(row[s] + sum(row[d] for d in dead if (d - 1) % instance.stages == s) for s in keep)

    return replace(
        one,
        stages=len(keep),
        stash_cap=None,
        held_forward=(),
        held_weight=(),
        boundary=(),
        forward=(merge(one.forward[0]),),
        input_grad=(merge(one.input_grad[0]),),
        weight_grad=(merge(one.weight_grad[0]),),
        reduce=tuple(one.reduce[s] for s in keep if one.reduce),
        update=tuple(one.update[s] for s in keep if one.update),
    )


def _pick(grid: Grid, replicas: list[int]) -> Grid:
    return tuple(grid[k] for k in replicas)
