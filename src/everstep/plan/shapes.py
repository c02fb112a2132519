"""The throughput of a running task in every shape it may take: measured where it was tried, else modelled.

In the work of one slot: a step's work, in seconds of ops, over the time of the step. A step takes what the
scheduler's bound says for the op times measured now, times what the bound was off by when the task was last
in that shape with so many workers. For one that was never tried the work is spread over its stages, and the
bound is off by as much as in the shape the task has now. Rejected: the seconds measured there; machines were
as busy as they were then, and the difference to now would look like a reason to move.

Another shape is taken to be slower by as much as steps of one shape differ from each other: what is smaller
than the noise of the machine is no reason to move, and no reason to move back. One that the task was never in
is taken to bring the share of its promise that earlier changes of shape on these machines have kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from everstep.plan.holes import MOST_COUNTS, counts
from everstep.plan.measured import TaskMeasurements
from everstep.plan.offers import Offer
from everstep.plan.task_shape import ParallelShape
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.schedule.bounds import balanced_bound, lower_bound
from everstep.schedule.instance import Grid, Instance, uniform

FEW = 16  # numbers of workers that are looked at in a large shape that the task does not have
MOST_SHAPES = 24  # that are bounded exactly; of more, those that are best by work alone
LOOKED_AT = (1.0, 0.98, 0.9, 0.75, 0.5, 0.25, 0.1)  # of the slots, to find those
DIGITS = 2  # significant ones of a measured time: noise must not make another question of the same one


def offered(
    shape: Shape,
    stages: range | None,
    slots: int,
    known: TaskMeasurements,
    slow: Mapping[Worker, float],
    shards: Sequence[int] = (),
    trust: float = 1.0,
    live: int = 0,
) -> tuple[Offer, ...]:
    """`slots`: of all nodes. `live`: workers it has now.
    `stages`: how many it may be cut into, beside as many as it is cut into now; None: no other shape.
    `shards`: how many a worker may have, beside as many as now. Ops take longer as there are fewer, and their
    collectives shorter. `trust`: the share of what was expected of changes of shape that was there
    afterwards; for shapes that this task was never measured in.
    """
    base = _compact(_base(shape, known, slow))
    work = _work(base) * shape.shards
    off = _off_by(shape, known)
    found = [_offer(shape, base, work, off, known.off_by, live, known.mode, MOST_COUNTS)]
    if stages is not None:
        work /= 1.0 + known.spread()
        tried = {(replicas, count) for replicas, count, _ in known.off_by}
        for other in _others(shape, stages, slots // shape.shards, base):
            believed = work if (other.replicas, other.stages) in tried else work * trust
            recut = _recut(base, other, stages)
            room = slots // shape.shards
            found.append(_offer(other, recut, believed, off, known.off_by, room, known.mode))
        for count in (count for count in shards if count != shape.shards):
            cuts = [shape, *_others(shape, stages, slots // count, base)]
            found += [
                _offer(
                    cut.cut(cut.replicas, cut.stages, count),
                    _recut(base, cut, stages, known.longer(shape.shards, count)),
                    work * trust,
                    off,
                    {},
                    slots // count,
                    known.mode,
                )
                for cut in cuts
            ]
    return (found[0], *(_with_slow(offer, slow) for offer in found[1:]))


def _with_slow(offer: Offer, slow: Mapping[Worker, float]) -> Offer:
    """Another shape does not make a slow machine fast: its slow workers are somewhere in it, at worst all in
    one stage, whose peers share the work as they do now.
    """
    if not slow:
        return offer
    worst = sorted(slow.values(), reverse=True)

    def share(workers: int) -> float:
        peers = max(1, workers // offer.shape.stages)
        return (max(0, peers - len(worst)) + sum(1 / factor for factor in worst[:peers])) / peers

    return replace(offer, throughput=tuple(t * share(w) for w, t in enumerate(offer.throughput)))


def throughput_now(
    shape: Shape, dead: frozenset[Worker], known: TaskMeasurements, slow: Mapping[Worker, float]
) -> float:
    """With exactly these places empty; 0: a stage has no worker."""
    if len({w.stage for w in shape.workers() if w not in dead}) < shape.stages:
        return 0.0
    base = _base(shape, known, slow)
    workers = len(shape.workers()) - len(dead)
    off = known.off_by.get((shape.replicas, shape.stages, workers), _off_by(shape, known))
    return shape.shards * _work(base) / (off * _period(replace(base, dead=dead), known.mode))


@lru_cache(maxsize=1 << 12)
def throughput_of(shape: Shape, workers: int) -> float:
    """As the model says, with so many workers of this shape."""
    if workers < shape.stages:
        return 0.0
    base = _base(shape, TaskMeasurements(), {})
    filled = min(workers, shape.replicas * shape.stages)
    return shape.shards * _work(base) / _balanced_period(_compact(base), filled, TaskMeasurements().mode)


def rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS - 1}e}")


def _base(shape: Shape, known: TaskMeasurements, slow: Mapping[Worker, float]) -> Instance:
    """The task with every place filled, in the shape it has, and with these workers slow."""
    if known.instance is not None and (known.instance.replicas, known.instance.stages) == (
        shape.replicas,
        shape.stages,
    ):
        return _smooth(_at_speeds(known.instance, known.slow, slow))
    grid: Grid = uniform(replicas=shape.replicas, stages=shape.stages, value=1.0)
    if slow:
        grid = tuple(
            tuple(slow.get(Worker(k, s), 1.0) * t for s, t in enumerate(row)) for k, row in enumerate(grid)
        )
    return Instance(
        replicas=shape.replicas,
        stages=shape.stages,
        microbatches=shape.microbatches,
        forward=grid,
        input_grad=grid,
        weight_grad=grid,
    )


def _at_speeds(instance: Instance, are: Mapping[Worker, float], were: Mapping[Worker, float]) -> Instance:
    """Times that were measured while some workers `are` slow, as if others `were`."""
    changed = {w: were.get(w, 1.0) / are.get(w, 1.0) for w in {*are, *were} if were.get(w) != are.get(w)}
    if not changed:
        return instance

    def grid(rows: Grid) -> Grid:
        return tuple(
            tuple(t * changed.get(Worker(k, s), 1.0) for s, t in enumerate(row)) for k, row in enumerate(rows)
        )

    return replace(
        instance,
        forward=grid(instance.forward),
        input_grad=grid(instance.input_grad),
        weight_grad=grid(instance.weight_grad),
    )


def _smooth(instance: Instance) -> Instance:
    known: dict[tuple[float, ...], tuple[float, ...]] = {}  # thousands of replicas, most of them alike

    def smooth(row: tuple[float, ...]) -> tuple[float, ...]:
        if row not in known:
            known[row] = tuple(rounded(t) if t else 0.0 for t in row)
        return known[row]

    def grid(rows: Grid) -> Grid:
        return tuple(map(smooth, rows))

    return replace(
        instance,
        forward=grid(instance.forward),
        input_grad=grid(instance.input_grad),
        weight_grad=grid(instance.weight_grad),
        reduce=tuple(rounded(t) if t else 0.0 for t in instance.reduce),
        update=tuple(rounded(t) if t else 0.0 for t in instance.update),
        hop=rounded(instance.hop) if instance.hop else 0.0,
        dead=frozenset(),
    )


def _stage_work(base: Instance) -> tuple[float, float, float]:
    """F, I and W of one microbatch through all stages, on the quickest worker of each."""
    grids = (base.forward, base.input_grad, base.weight_grad)
    f, i, w = (sum(map(min, zip(*set(grid), strict=True))) for grid in grids)
    return f, i, w


def _work(base: Instance) -> float:
    return base.replicas * base.microbatches * sum(_stage_work(base))


def learn(shape: Shape, known: TaskMeasurements, slow: Mapping[Worker, float]) -> None:
    """What the bound is off by where the task is now."""
    if known.instance is None or known.last is None or known.last[:2] != (shape.replicas, shape.stages):
        return
    measured = known.step_s(known.last)
    if measured and known.last[2] >= shape.stages:
        bound = _balanced_period(_compact(_base(shape, known, slow)), known.last[2], known.mode)
        known.off_by[known.last] = rounded(max(1.0, measured / bound))


def _off_by(shape: Shape, known: TaskMeasurements) -> float:
    """Where this shape was measured last with most of its workers; 1: never."""
    for workers in range(shape.replicas * shape.stages, shape.stages - 1, -1):
        if (off := known.off_by.get((shape.replicas, shape.stages, workers))) is not None:
            return off
    return 1.0


def _others(shape: Shape, stages: range, most_workers: int, base: Instance) -> list[Shape]:
    """Every cut with every number of replicas that divides the batch and fits, and the next one above: a
    shape larger than the cluster runs with places empty, and divides the batch more finely.
    """
    total = shape.replicas * shape.microbatches
    divisors = [r for r in range(1, int(total**0.5) + 1) if total % r == 0]
    divisors = sorted({*divisors, *(total // r for r in divisors)})
    found = [
        shape.cut(replicas, count)
        for count in sorted({*stages, shape.stages}, key=lambda s: (abs(s - shape.stages), s))
        if count <= most_workers
        for below, replicas in zip((0, *divisors), divisors, strict=False)
        if below * count < most_workers and (replicas, count) != (shape.replicas, shape.stages)
    ]
    if len(found) <= MOST_SHAPES:
        return found
    rows = []
    for one in found:
        recut = _recut(base, one, stages)
        grids = recut.forward, recut.input_grad, recut.weight_grad
        rows.append((one.replicas, one.stages, sum(grid[0][0] for grid in grids), recut.closing(0)))
    replicas_, stages_, each, closing = (np.array(column) for column in zip(*rows, strict=True))
    best: dict[int, None] = {}
    for share in LOOKED_AT:
        peers = np.minimum(replicas_, int(share * most_workers) // stages_)
        step_s = np.where(peers > 0, -(-total // np.maximum(peers, 1)) * each + closing, np.inf)
        best.update(dict.fromkeys(np.argsort(step_s, kind="stable")[: MOST_SHAPES // 4].tolist()))
    return [found[i] for i in sorted(list(best)[:MOST_SHAPES])]


def _recut(base: Instance, shape: Shape, stages: range, longer: float = 1.0) -> Instance:
    """Layers are not cut: the largest stage has its share rounded up. `longer`: how many times as long
    an op takes with other shards. Workers of a stage are alike, so one replica with all microbatches says as
    much as thousands.
    """
    layers = max(stages.stop - 1, base.stages, shape.stages)
    uneven = _largest(shape.stages, layers) / _largest(base.stages, layers)
    f, i, w = (
        uniform(replicas=1, stages=shape.stages, value=total / shape.stages * uneven * longer)
        for total in _stage_work(base)
    )
    reduce_s, update_s = sum(base.reduce) / shape.stages, sum(base.update) / shape.stages
    return Instance(
        replicas=1,
        stages=shape.stages,
        microbatches=shape.replicas * shape.microbatches,
        forward=f,
        input_grad=i,
        weight_grad=w,
        hop=base.hop,
        reduce=(reduce_s,) * shape.stages if base.reduce else (),
        update=(update_s,) * shape.stages if base.update else (),
    )


def _largest(stages: int, layers: int) -> float:
    """The largest stage over the mean one."""
    return stages * -(-layers // stages) / layers


def _offer(
    shape: Shape,
    base: Instance,
    work: float,
    off: float,
    off_by: Mapping[tuple[int, int, int], float],
    live: int,
    mode: str,
    most_counts: int = FEW,
) -> Offer:
    """`live`: the number of workers that matters most, of `most_counts`."""
    throughput = [0.0] * (shape.replicas * shape.stages + 1)
    for workers in counts(shape.replicas, shape.stages, live, most_counts):
        seconds = _balanced_period(base, workers, mode)
        seconds *= off_by.get((shape.replicas, shape.stages, workers), off)
        throughput[workers] = work / seconds
    parallel = ParallelShape(shape.replicas, shape.stages, shape.shards)
    return Offer(shape=parallel, throughput=tuple(throughput))


def _balanced_period(base: Instance, workers: int, mode: str) -> float:
    """With so many workers, spread evenly over the stages."""
    grids = (base.forward, base.input_grad, base.weight_grad)
    return _balanced_bound(grids, base.microbatches, base.hop, base.reduce, base.update, workers, mode)


@lru_cache(maxsize=8192)
def _balanced_bound(
    grids: tuple[Grid, Grid, Grid],
    microbatches: int,
    hop: float,
    reduce: tuple[float, ...],
    update: tuple[float, ...],
    workers: int,
    mode: str,
) -> float:
    return balanced_bound(_instance(grids, microbatches, hop, reduce, update), mode, workers)


def _compact(base: Instance) -> Instance:
    """Where all replicas are alike, one with all microbatches says as much as thousands of them."""
    grids = (base.forward, base.input_grad, base.weight_grad)
    if base.dead or not all(len(set(grid)) == 1 for grid in grids):
        return base
    return replace(
        base,
        replicas=1,
        microbatches=base.replicas * base.microbatches,
        forward=base.forward[:1],
        input_grad=base.input_grad[:1],
        weight_grad=base.weight_grad[:1],
    )


def _period(instance: Instance, mode: str) -> float:
    grids = (instance.forward, instance.input_grad, instance.weight_grad)
    return _bound(
        grids, instance.microbatches, instance.hop, instance.reduce, instance.update, instance.dead, mode
    )


@lru_cache(maxsize=64)  # with who is dead: sets of up to thousands
def _bound(
    grids: tuple[Grid, Grid, Grid],
    microbatches: int,
    hop: float,
    reduce: tuple[float, ...],
    update: tuple[float, ...],
    dead: frozenset[Worker],
    mode: str,
) -> float:
    return lower_bound(replace(_instance(grids, microbatches, hop, reduce, update), dead=dead), mode)


@lru_cache(maxsize=64)
def _instance(
    grids: tuple[Grid, Grid, Grid],
    microbatches: int,
    hop: float,
    reduce: tuple[float, ...],
    update: tuple[float, ...],
) -> Instance:
    forward, input_grad, weight_grad = grids
    return Instance(
        replicas=len(forward),
        stages=len(forward[0]),
        microbatches=microbatches,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        hop=hop,
        reduce=reduce,
        update=update,
    )
