"""How fast a task runs on with holes in its shape: the answer is the scheduler's, not ours.

The step is built as `everstep.schedule` would be asked for it, with the dead groups of shards as dead
workers, and the ratio of the two step times, whole and broken, scales the task's throughput. Small steps are
scheduled; large ones are bounded (`schedule.bounds`), which is within some per cent of the schedule
(docs/schedules.md).

    whole     | work                 | bubble | reduce, update |       as the throughput model has it
    broken    | work and bubble, as scheduled  | reduce, update |      bubbles are filled, or are not

A bubble is charged once. Where a whole step has another order than a broken one (`rescheduled`), the broken
step is compared with the whole step's work alone: what is left of the bubble is in its schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from everstep.protocol.ops import Worker
from everstep.schedule import Instance, plan, uniform
from everstep.schedule.bounds import lower_bound
from everstep_lab.plan.pipeline_orders import ORDERS, PipelineOrder
from everstep_lab.plan.task_shape import ParallelShape, StepShares

SCHEDULED_OPS = 2_000  # above this the bound is asked
NO_MORE = StepShares()  # than work


def dead_groups(shape: ParallelShape, missing: Iterable[int]) -> frozenset[Worker]:
    """Groups of shards that lost a worker; `missing` are indices of workers, in worker order."""
    groups = {index // shape.shards for index in missing}
    return frozenset(Worker(g // shape.stages, g % shape.stages) for g in groups)


def live_per_stage(shape: ParallelShape, dead: frozenset[Worker]) -> list[int]:
    return [shape.replicas - sum(w.stage == s for w in dead) for s in range(shape.stages)]


def throughput_ratio(
    shape: ParallelShape,
    dead: frozenset[Worker],
    *,
    batch: int,
    schedule: str,
    shares: StepShares = NO_MORE,
) -> float:
    """Throughput with these groups dead over throughput with all alive; 0 if a stage has no worker.

    What a whole step spends on reduction and update takes as long with some dead: the survivors have more
    microbatches each, and still one reduction and one update.
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
    longer = _longer(shape.replicas, shape.stages, max(1, count), lost, order)
    filled = 0.0 if order.whole else shares.bubble
    return min(1.0, 1.0 / ((1.0 - shares.per_step - filled) * longer + shares.per_step))


@lru_cache(maxsize=4096)
def _longer(replicas: int, stages: int, count: int, lost: tuple[int, ...], order: PipelineOrder) -> float:
    """The broken step over the whole one, or over its work where that has another order. Replicas of a stage
    are alike, so only how many of each stage are gone matters.
    """
    op = uniform(replicas=replicas, stages=stages, value=1.0)
    dead = frozenset(Worker(k, s) for s, gone in enumerate(lost) for k in range(gone))
    broken = Instance(
        replicas=replicas,
        stages=stages,
        microbatches=count,
        forward=op,
        input_grad=op,
        weight_grad=op,
        dead=dead,
        stash_cap=_as_many_as_whole(replicas, stages, order) if not order.whole else None,
    )
    small = 3 * replicas * stages * count <= SCHEDULED_OPS
    value = plan(broken, order.broken).value if small else lower_bound(broken, order.broken)
    if not order.whole:
        return value / (3.0 * count)
    whole = broken.fault_free()
    return max(1.0, value / (plan(whole, order.whole).value if small else lower_bound(whole, order.whole)))


def _as_many_as_whole(replicas: int, stages: int, order: PipelineOrder) -> dict[Worker, int]:
    """Memory is what it was: a worker holds no more microbatches than the fullest of the whole step."""
    most = int(order.in_flight(stages, 1))
    return {Worker(k, s): most for k in range(replicas) for s in range(stages)}
