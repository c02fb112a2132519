"""How fast a task runs on with holes in its shape: the answer is the scheduler's, not ours.

The step is built as `everstep.schedule` would be asked for it, with the dead groups of shards as dead
workers, and the ratio of the two step times, whole and broken, scales the task's throughput. Small steps are
scheduled; large ones are bounded (`schedule.bounds`), which is within some per cent of the schedule
(docs/schedules.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from everstep.core.words.ops import Worker
from everstep.plan.pipeline_orders import ORDERS
from everstep.plan.shape import ParallelShape
from everstep.schedule import Instance, plan, uniform
from everstep.schedule.bounds import lower_bound

SCHEDULED_OPS = 2_000  # above this the bound is asked


def dead_groups(shape: ParallelShape, missing: Iterable[int]) -> frozenset[Worker]:
    """Groups of shards that lost a worker; `missing` are indices of workers, in worker order."""
    groups = {index // shape.shards for index in missing}
    return frozenset(Worker(g // shape.stages, g % shape.stages) for g in groups)


def live_per_stage(shape: ParallelShape, dead: frozenset[Worker]) -> list[int]:
    return [shape.replicas - sum(w.stage == s for w in dead) for s in range(shape.stages)]


def throughput_ratio(
    shape: ParallelShape, dead: frozenset[Worker], *, batch: int, schedule: str, per_step: float = 0.0
) -> float:
    """Throughput with these groups dead over throughput with all alive; 0 if a stage has no worker.

    `per_step`: the share of a whole step that is spent once per step (reduction, update). It takes as long
    with some dead: the survivors have more microbatches each, and still one reduction and one update.
    """
    if not dead:
        return 1.0
    per_stage = live_per_stage(shape, dead)
    if min(per_stage) == 0:
        return 0.0
    rows = max(1, shape.microbatch)
    count = batch // (shape.replicas * rows) if batch else 4 * shape.stages
    lost = tuple(shape.replicas - live for live in per_stage)
    order = ORDERS[schedule]
    work = _ratio(shape.replicas, shape.stages, max(1, count), lost, order.broken, order.whole)
    return 1.0 / ((1.0 - per_step) / work + per_step)


@lru_cache(maxsize=4096)
def _ratio(replicas: int, stages: int, count: int, lost: tuple[int, ...], mode: str, base: str) -> float:
    """Replicas of a stage are alike, so only how many of each stage are gone matters."""
    one, two = (uniform(replicas=replicas, stages=stages, value=v) for v in (1.0, 1.0))
    dead = frozenset(Worker(k, s) for s, gone in enumerate(lost) for k in range(gone))
    broken = Instance(
        replicas=replicas,
        stages=stages,
        microbatches=count,
        forward=one,
        input_grad=two,
        weight_grad=two,
        dead=dead,
    )
    whole = broken.fault_free()
    if 3 * replicas * stages * count <= SCHEDULED_OPS:
        return min(1.0, plan(whole, base).value / plan(broken, mode).value)
    return min(1.0, lower_bound(whole, base) / lower_bound(broken, mode))
