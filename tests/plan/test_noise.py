"""Steps that differ from each other are no reason to change a task's shape."""

import pytest

from everstep.plan.measured import ENOUGH_STEPS, LEAST_STEPS, PROMISE_S, Measurements
from everstep.plan.shapes import learn, offered
from everstep.protocol.shape import Shape

HERE, THERE = Shape(2, 2, 4), Shape(4, 1, 2)


def measured(here: list[float], there: list[float]) -> Measurements:
    """A task that was in both shapes, and is in the first again."""
    found, at = Measurements(), 0.0
    for shape, steps in ((THERE, there), (HERE, here)):
        found.reshaped("gpt")
        found.stepped("gpt", shape, 4, at)
        for seconds in steps:
            at += seconds
            found.stepped("gpt", shape, 4, at)
    return found


@pytest.mark.parametrize(
    ("steps", "spread"),
    [([1.0] * 5, 0.0), ([1.0, 1.01, 0.99, 1.0, 1.02], 0.05), ([1.0, 1.6, 0.7, 1.3, 0.9], 0.3)],
)
def test_the_spread_of_steps_is_measured(steps: list[float], spread: float) -> None:
    assert measured(steps, []).of("gpt").spread() == pytest.approx(spread)


def test_few_steps_say_nothing_of_noise() -> None:
    assert measured([1.0, 9.0][: LEAST_STEPS - 1], []).of("gpt").spread() == 0.0


def test_another_shape_must_be_better_by_more_than_the_noise() -> None:
    quiet = measured([1.0] * 5, [1.0] * 5).of("gpt")
    noisy = measured([1.0, 1.6, 0.7, 1.3, 0.9], [1.0] * 5).of("gpt")
    for known in (quiet, noisy):
        learn(HERE, known, {})
    here, *others = offered(HERE, range(1, 5), 4, quiet, {})
    here_noisy, *others_noisy = offered(HERE, range(1, 5), 4, noisy, {})
    assert here_noisy.throughput == here.throughput
    for other, doubted in zip(others, others_noisy, strict=True):
        assert doubted.throughput == pytest.approx([t / 1.3 for t in other.throughput])


def moved(gain: float, before_s: float, after_s: float) -> Measurements:
    """A task that was promised to be so many times as fast in another shape, and what became of it."""
    found, at = Measurements(), 0.0
    for shape, seconds in ((HERE, before_s), (THERE, after_s)):
        found.stepped("gpt", shape, 4, at)
        for _ in range(ENOUGH_STEPS):
            at += seconds
            found.stepped("gpt", shape, 4, at)
        if shape == HERE:
            found.promised("gpt", gain)
            found.reshaped("gpt")
    return found


@pytest.mark.parametrize(
    ("gain", "after_s", "trust"), [(1.5, 1.0, 0.7), (1.5, 1.0 / 1.5, 1.0), (1.5, 0.5, 1.0), (2.0, 2.0, 0.25)]
)
def test_what_a_change_of_shape_brought_is_compared_with_what_was_expected(
    gain: float, after_s: float, trust: float
) -> None:
    assert moved(gain, 1.0, after_s).trust(10.0) == pytest.approx(trust)


def test_a_promise_is_forgotten_after_a_while_and_one_that_was_not_measured_counts_for_nothing() -> None:
    broken = moved(1.5, 1.0, 1.0)
    assert broken.trust(10.0) < 1.0
    assert broken.trust(10.0 + 2 * PROMISE_S) == 1.0
    young = Measurements()
    young.promised("gpt", 1.5)
    young.reshaped("gpt")
    young.stepped("gpt", THERE, 4, 1.0)
    assert young.trust(1.0) == 1.0


def test_another_task_believes_a_shape_it_never_had_only_as_far_as_such_promises_were_kept() -> None:
    known = measured([1.0] * 5, [1.0] * 5).of("gpt")
    known.off_by[(THERE.replicas, THERE.stages, 4)] = 1.0
    believed = offered(HERE, range(1, 5), 6, known, {})
    doubted = offered(HERE, range(1, 5), 6, known, {}, trust=0.5)
    for one, other in zip(believed, doubted, strict=True):
        tried = (one.shape.replicas, one.shape.stages) in {(2, 2), (4, 1)}
        assert other.throughput == pytest.approx([t * (1.0 if tried else 0.5) for t in one.throughput])
