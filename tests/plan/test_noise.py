"""Steps that differ from each other are no reason to change a task's shape."""

import pytest

from everstep.core.words.shape import Shape
from everstep.plan.measured import LEAST_STEPS, Measurements
from everstep.plan.shapes import learn, offered

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
