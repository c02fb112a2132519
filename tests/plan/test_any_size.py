"""A running task is offered shapes of any size, also larger than the cluster, best by work first."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from everstep.plan import shapes
from everstep.plan.measured import TaskMeasurements
from everstep.plan.shapes import MOST_SHAPES, offered
from everstep.protocol.shape import Shape
from everstep.schedule.bounds import balanced_bound
from everstep.schedule.instance import Instance, uniform
from everstep.schedule.modes import STAGGERED


def best(shape: Shape, stages: range, slots: int) -> tuple[float, str]:
    offers = offered(shape, stages, slots, TaskMeasurements(), {}, live=slots)
    assert len(offers) <= MOST_SHAPES + 1
    return max((offer.at(min(slots, len(offer.throughput) - 1)), str(offer.shape)) for offer in offers)


def test_a_shape_larger_than_the_cluster_runs_with_places_empty() -> None:
    """2,048 microbatches on 400 workers: 256 replicas left 144 idle, 512 leave 112 places empty and bring
    six rounds instead of eight. It was not offered: 512 is more than one worker above 400.
    """
    value, name = best(Shape(256, 1, 8), range(1, 2), 400)
    assert name == "512 x 1"
    assert value == pytest.approx(2048 / 6)


def test_no_shape_is_too_large_to_be_offered() -> None:
    """Other shapes of more than 64 workers were not offered: half of the slots stayed idle."""
    value, name = best(Shape(32, 4, 32), range(1, 9), 256)
    assert value >= 0.98 * 256
    assert name != "32 x 4"


def test_of_many_shapes_those_that_are_best_by_work_are_bounded() -> None:
    """They were those with about as many stages as now."""
    value, _ = best(Shape(8, 2, 48), range(1, 49), 96)
    assert value >= 0.95 * 96


def test_one_replica_with_all_microbatches_says_what_thousands_that_are_alike_say() -> None:
    """The planner's bounds are made from it: of thousands of replicas they cost 60 ms on the coordinator's
    loop.
    """
    draw = random.Random(3)
    for _ in range(60):
        replicas, stages = draw.randint(1, 7), draw.randint(1, 5)
        rows = [tuple(draw.choice((0.7, 1.0, 2.3)) for _ in range(stages)) for _ in range(3)]
        forward, input_grad, weight_grad = ((row,) * replicas for row in rows)
        instance = Instance(
            replicas=replicas,
            stages=stages,
            microbatches=draw.randint(1, 6),
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            hop=draw.choice((0.0, 0.1)),
            reduce=(0.2,) * stages,
            update=(0.1,) * stages,
        )
        compact = shapes._compact(instance)
        assert compact.replicas == 1
        for workers in range(stages, replicas * stages + 1):
            assert balanced_bound(compact, STAGGERED, workers) == balanced_bound(instance, STAGGERED, workers)


def test_offers_know_hops_and_whether_updates_wait_for_all_stages() -> None:
    """Longer pipelines cost more where tensors take time between stages, or where steps begin together."""
    grid = uniform(replicas=2, stages=2, value=1.0)
    now = Instance(replicas=2, stages=2, microbatches=4, forward=grid, input_grad=grid, weight_grad=grid)
    shape, found = Shape(2, 2, 4), {}
    for hop, mode in ((0.0, "staggered"), (20.0, "staggered"), (0.0, "decoupled")):
        known = TaskMeasurements(instance=replace(now, hop=hop), mode=mode)
        offers = offered(shape, range(1, 5), 4, known, {})
        found[hop, mode] = {offer.shape.stages: max(offer.throughput) for offer in offers}
    free, slow, barrier = found.values()
    assert slow[1] == barrier[1] == free[1]
    assert slow[2] < free[2]
    assert slow[4] < free[4]
    assert barrier[4] < free[4]


def test_collectives_of_shards_are_measured_and_grow_with_their_number() -> None:
    """Half of the time of two shards is their collective: with four, products take half as long and the
    collective half as long again. It was taken to cost nothing, and four shards to be twice as fast.
    """
    known = TaskMeasurements()
    assert known.longer(2, 4) == pytest.approx(0.5)
    known.learn_collectives((0.5, 0.8), 1.0)
    assert known.longer(2, 4) == pytest.approx(0.5 * 0.5 + 0.5 * 1.5)
    assert known.longer(2, 1) == pytest.approx(0.5 * 2.0)
    assert known.longer(2, 2) == pytest.approx(1.0)


def test_more_shards_are_not_offered_as_faster_where_their_collectives_cost_as_much() -> None:
    shape = Shape(2, 1, 8, shards=2)
    quick, slow = TaskMeasurements(), TaskMeasurements()
    slow.learn_collectives((0.5, 0.5), 1.0)

    def of_four(known: TaskMeasurements) -> float:
        offers = offered(shape, range(1, 2), 8, known, {}, shards=(4,), live=2)
        return next(o.at(2) for o in offers if o.shape.shards == 4) / offers[0].at(2)

    assert of_four(quick) == pytest.approx(2.0)
    assert of_four(slow) == pytest.approx(1.0)
