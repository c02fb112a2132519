"""The throughput of a task in every shape: bounds of the scheduler, with failures where they cost least."""

from __future__ import annotations

import itertools
import random
from collections import deque

import numpy as np
import pytest

from everstep.core.cluster.stages import load, moved
from everstep.plan.change_times import AGREE_S, START_S, TRANSITION_S, Changes
from everstep.plan.measured import ENOUGH_STEPS, LEAST_STEPS, Measurements, TaskMeasurements
from everstep.plan.throughput import MOST_SHAPES, TaskSpeed, Way, periods_of
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.schedule.bounds import lower_bound
from everstep.schedule.instance import Instance
from everstep.schedule.modes import DECOUPLED, STAGGERED
from everstep.schedule.profile import Profile, StageTimes
from tests.support.fake_cluster import FakeCluster

HERE, THERE = Shape(2, 2, 4), Shape(4, 1, 2)


def drawn(draw: random.Random) -> tuple[StageTimes, int, int]:
    stages, replicas = draw.randint(1, 4), draw.randint(1, 5)
    rows = [tuple(draw.choice((0.7, 1.0, 2.3)) for _ in range(stages)) for _ in range(3)]
    closing = tuple(draw.choice((0.0, 0.3)) for _ in range(stages))
    return StageTimes(*rows, closing, draw.choice((0.0, 0.1))), stages, replicas


def test_a_period_is_what_the_schedulers_bound_says_for_the_same_workers() -> None:
    draw = random.Random(3)
    for _ in range(150):
        times, stages, replicas = drawn(draw)
        each = draw.randint(1, 6)
        mode = draw.choice((STAGGERED, DECOUPLED))
        slow = {
            Worker(k, s): draw.choice((1.5, 3.0))
            for k in range(replicas)
            for s in range(stages)
            if draw.random() < 0.15
        }
        grids = [
            tuple(tuple(row[s] * slow.get(Worker(k, s), 1.0) for s in range(stages)) for k in range(replicas))
            for row in times[:3]
        ]
        dead = frozenset(
            Worker(k, s) for k in range(1, replicas) for s in range(stages) if draw.random() < 0.3
        )
        instance = Instance(
            replicas=replicas,
            stages=stages,
            microbatches=each,
            forward=grids[0],
            input_grad=grids[1],
            weight_grad=grids[2],
            hop=times.hop,
            reduce=times.closing,
            dead=dead,
        )
        known = TaskMeasurements(times=times, is_staggered=mode == STAGGERED)
        speed = TaskSpeed(Shape(replicas, stages, each), known, slow)
        live = [replicas - sum(w.stage == s for w in dead) for s in range(stages)]
        slow_there = {w: f for w, f in slow.items() if w not in dead}
        work = replicas * each * sum(speed.costs)
        found = work / speed.now(live, slow_there)
        bound = lower_bound(instance, mode)
        if slow_there:  # by work alone it says how many microbatches the busiest has
            assert found == pytest.approx(bound, rel=0.35)
        else:
            assert found == pytest.approx(bound, rel=1e-9)


def test_empty_places_are_where_they_cost_least() -> None:
    """8 x 3 with a last stage 1.4 times as heavy: numbers were evened, whatever stages cost, and 21, 22 and
    23 workers were offered as equal.
    """
    times = StageTimes((1.0, 1.0, 1.4), (1.0, 1.0, 1.4), (1.0, 1.0, 1.4), (0.0,) * 3, 0.0)
    periods = periods_of(times, 8, 24, True)
    costs = [3.0, 3.0, 4.2]
    for workers in range(3, 25):
        best = min(
            max(load(n, cost, 24) for n, cost in zip(live, costs, strict=True))
            for live in itertools.product(range(1, 9), repeat=3)
            if sum(live) == workers
        )
        # beside the work of the busiest stage, a step has one trip through the pipeline at most
        assert best * (1 - 1e-9) <= periods[workers] <= best + sum(costs)
    assert periods[21] < periods_of(times, 8, 24, True, (7, 7, 7))[21] == pytest.approx(4 * 4.2)


def test_workers_change_their_stage_until_the_busiest_is_as_quick_as_can_be() -> None:
    draw = random.Random(5)
    for _ in range(400):
        stages, replicas, jobs = draw.randint(1, 4), draw.randint(1, 5), draw.randint(1, 30)
        costs = [draw.choice((1.0, 1.4, 2.0, 3.1)) for _ in range(stages)]
        live = [draw.randint(1, replicas) for _ in range(stages)]
        after = list(live)
        found = moved(live, replicas, costs, jobs)
        for leaves, comes in found:
            after[leaves] -= 1
            after[comes] += 1
        best = min(
            max(load(n, cost, jobs) for n, cost in zip(other, costs, strict=True))
            for other in itertools.product(range(1, replicas + 1), repeat=stages)
            if sum(other) == sum(live)
        )
        got = max(load(n, cost, jobs) for n, cost in zip(after, costs, strict=True))
        assert got == pytest.approx(best)
        assert all(1 <= n <= replicas for n in after)
        before = max(load(n, cost, jobs) for n, cost in zip(live, costs, strict=True))
        assert (got < before) == bool(found)


def test_seats_are_given_to_and_taken_from_the_stage_where_that_does_most() -> None:
    """8 x 3 with stages of 1 : 1 : 1.4: with 21 workers, seven of each were seated."""
    cluster = FakeCluster(nodes={"a": 21})
    cluster.submit(shape=Shape(8, 3, 3))
    task = cluster.coordinator.tasks["t"]
    assert [sum(w.stage == s for w in task.seats) for s in range(3)] == [7, 7, 7]
    other = FakeCluster(nodes={"a": 21})
    other.coordinator.roster.seat_workers, seat = lambda task: [], other.coordinator.roster.seat_workers  # type: ignore[method-assign]
    other.submit(shape=Shape(8, 3, 3))
    task = other.coordinator.tasks["t"]
    task.stage_costs = (1 / 1.4, 1 / 1.4, 1.0)
    seat(task)
    assert [sum(w.stage == s for w in task.seats) for s in range(3)] in ([6, 7, 8], [7, 6, 8])


# ------------------------------------------------------------------ other shapes


def best(shape: Shape, stages: range, slots: int) -> tuple[float, str]:
    ways = TaskSpeed(shape, TaskMeasurements(), {}).others(stages, (), slots)
    assert len(ways) <= MOST_SHAPES
    return max((at(way, slots), str(way.shape)) for way in ways)


def at(way: Way, workers: int) -> float:
    return float(way.throughput[: workers + 1].max())


def test_a_shape_larger_than_the_cluster_runs_with_places_empty() -> None:
    """2,048 microbatches on 400 workers: 256 replicas left 144 idle, 512 leave 112 places empty and bring
    six rounds instead of eight.
    """
    value, name = best(Shape(256, 1, 8), range(1, 2), 400)
    assert name == "512x1"
    assert value == pytest.approx(2048 / 6)


def test_no_shape_is_too_large_to_be_offered() -> None:
    value, name = best(Shape(32, 4, 32), range(1, 9), 256)
    assert value >= 0.98 * 256
    assert name != "32x4"


def test_of_many_shapes_those_that_are_best_by_work_are_looked_at() -> None:
    value, _ = best(Shape(8, 2, 48), range(1, 49), 96)
    assert value >= 0.95 * 96


def test_longer_pipelines_cost_more_where_tensors_take_time_or_steps_begin_together() -> None:
    found = {}
    for hop, is_staggered in ((0.0, True), (20.0, True), (0.0, False)):
        times = StageTimes((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0), hop)
        speed = TaskSpeed(HERE, TaskMeasurements(times=times, is_staggered=is_staggered), {})
        ways = speed.others(range(1, 5), (), 4)
        found[hop, is_staggered] = {way.shape.stages: at(way, 4) for way in ways}
    free, slow, barrier = found.values()
    assert slow[1] == barrier[1] == free[1]
    assert slow[4] < free[4]
    assert barrier[4] < free[4]


def test_collectives_of_shards_are_measured_and_grow_with_their_number() -> None:
    """Half of the time of two shards is their collective: with four, products take half as long and the
    collective half as long again.
    """
    known = TaskMeasurements()
    assert known.longer(2, 4) == pytest.approx(0.5)
    known.learn_collectives((0.5, 0.8), 1.0)
    assert known.longer(2, 4) == pytest.approx(0.5 * 0.5 + 0.5 * 1.5)
    assert known.longer(2, 1) == pytest.approx(0.5 * 2.0)
    assert known.longer(2, 2) == pytest.approx(1.0)


# ------------------------------------------------------------------ what was measured


def measured(here: list[float], there: list[float]) -> Measurements:
    """A task that was in both shapes, and is in the first again."""
    found, moment = Measurements(), 0.0
    for shape, steps in ((THERE, there), (HERE, here)):
        found.reshaped("gpt")
        found.stepped("gpt", shape, 4, moment)
        for seconds in steps:
            moment += seconds
            found.stepped("gpt", shape, 4, moment)
    return found


@pytest.mark.parametrize(
    ("steps", "spread"), [([1.0] * 5, 0.0), ([1.0, 1.6, 0.7, 1.3, 0.9], 0.3), ([1.0, 9.0], 0.0)]
)
def test_the_spread_of_steps_is_measured(steps: list[float], spread: float) -> None:
    assert len(steps) >= LEAST_STEPS or not spread
    assert measured(steps, []).of("gpt").spread() == pytest.approx(spread)


def test_another_shape_must_be_better_by_more_than_the_noise() -> None:
    quiet = measured([1.0] * 5, []).of("gpt")
    noisy = measured([1.0, 1.6, 0.7, 1.3, 0.9], []).of("gpt")
    sure, unsure = (TaskSpeed(HERE, known, {}) for known in (quiet, noisy))
    assert list(sure.own((2, 2)).throughput) == list(unsure.own((2, 2)).throughput)
    ways = zip(sure.others(range(1, 5), (), 4), unsure.others(range(1, 5), (), 4), strict=True)
    assert all(np.allclose(one.throughput / 1.3, other.throughput) for one, other in ways)


def test_a_shape_is_as_far_off_its_bound_as_when_it_was_measured_and_one_never_tried_as_the_worst() -> None:
    """Where cores are fewer than slots, more workers are not faster, whatever the times of ops say."""
    unit = StageTimes((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0), 0.0)
    known = TaskMeasurements(times=unit, last=(2, 2, 4), off_by={(4, 1, 4): 3.0})
    known.steps[2, 2, 4] = deque([36.0] * LEAST_STEPS)
    speed = TaskSpeed(HERE, known, {})
    bound = 8 * speed.costs[0] / 2
    speed.learn((2, 2))
    assert known.off_by[2, 2, 4] == pytest.approx(36.0 / bound)
    assert speed.now((2, 2)) == pytest.approx(8 * 6.0 / 36.0)
    rates = {str(way.shape): at(way, 4) for way in speed.others(range(1, 5), (), 4)}
    plain = {
        str(way.shape): at(way, 4)
        for way in TaskSpeed(HERE, TaskMeasurements(times=unit), {}).others(range(1, 5), (), 4)
    }
    assert rates["4x1"] == pytest.approx(plain["4x1"] / 3.0)
    assert rates["1x4"] == pytest.approx(plain["1x4"] / 3.0)


def test_times_of_stages_are_those_of_workers_that_are_not_slow() -> None:
    """The measured times had the slow worker in them, whoever the planner took for slow: it saw no gain."""
    profile, slow = Profile(HERE), Worker(1, 1)
    for worker in HERE.workers():
        seconds = 3.0 if worker == slow else 1.0
        profile.learn(worker, {"F": seconds, "I": seconds, "W": seconds})
    found = profile.stages({slow: 3.0})
    assert found is not None
    assert found.forward == (1.0, 1.0)
    speed = TaskSpeed(HERE, TaskMeasurements(times=found), {slow: 3.0})
    assert speed.now((2, 2), {}) > 1.3 * speed.now((2, 2))


# ------------------------------------------------------------------ what changes take


def test_a_change_of_shape_takes_what_its_last_one_took_else_what_the_last_of_any_task_took() -> None:
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 1), planned=True, memory_port=7)
    cluster.submit(shape=HERE, steps=400, least_stages=1, most_stages=8)
    task, log = cluster.coordinator.tasks["t"], cluster.coordinator.log

    def reshape_s(known: Measurements) -> float:
        return Changes([task], log, known).of(task).reshape_s

    assert reshape_s(Measurements()) == pytest.approx(START_S + TRANSITION_S)
    known = measured([1.0] * ENOUGH_STEPS, [])
    known.reshaped("gpt")
    known.stepped("gpt", THERE, 4, ENOUGH_STEPS + 0.3)
    assert reshape_s(known) == pytest.approx(0.3)
    known.ended("gpt")
    assert reshape_s(known) == pytest.approx(0.3), "a task that is over has not measured in vain"
    known.of("t").reshape_s = 4.0
    assert reshape_s(known) == 4.0
    known.of("t").reshape_s = 0.0
    assert reshape_s(known) == AGREE_S
