"""Several data sets in given shares: the shares hold at any moment, and each gives all it has, in order."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.engine.datasets.blend import blend
from everstep.engine.datasets.rows import rows
from everstep.engine.datasets.stream import stream
from everstep.errors import UserError
from everstep.job.job import DataSpec, Job, ModelSpec


def part(name: str):
    return lambda step, microbatch: (name, step, microbatch)


@given(
    st.lists(st.floats(0, 1.0), min_size=2, max_size=5).filter(any),
    st.integers(1, 7),
    st.integers(2, 300),
)
def test_every_share_holds_and_no_microbatch_of_a_part_is_skipped_or_repeated(
    weights: list[float], microbatches: int, steps: int
) -> None:
    names = "abcde"[: len(weights)]
    data = blend(*map(part, names), weights={1: weights, 40: weights[::-1]})
    object.__setattr__(data, "microbatches", microbatches)
    seen: dict[str, list[int]] = {name: [] for name in names}
    exact = [Fraction(repr(weight)) for weight in weights]
    expected = [Fraction(0)] * len(weights)
    for step in range(1, steps):
        now = exact if step < 40 else exact[::-1]
        for m in range(microbatches):
            name, own_step, own_m = data.batch(step, m)
            seen[name].append((own_step - 1) * microbatches + own_m)
            expected = [have + weight / sum(now) for have, weight in zip(expected, now, strict=True)]
            for each, share in zip(names, expected, strict=True):
                assert abs(len(seen[each]) - share) < 1
    for numbers in seen.values():
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("small", [0.0001, 0.00015, Fraction(1, 3)])
def test_a_share_holds_in_a_long_run(small: float | Fraction) -> None:
    """Its order has no period: one of 4,096 gave the first of these nothing, the second 63 % too much."""
    data = blend(part("a"), part("b"), weights=[1 - small, small])
    object.__setattr__(data, "microbatches", 8)
    for step in (1_001, 12_501, 500_001):
        drawn = [data.place(step, m) for m in range(8)]
        before = dict(reversed(drawn))
        for k, number in before.items():
            assert abs(number - (step - 1) * 8 * (small if k else 1 - small)) < 2


def test_parts_learn_of_their_job() -> None:
    sets = [rows([(torch.tensor([k]), torch.tensor([k]))] * 6, rows=2) for k in range(2)]
    job = Job(model=ModelSpec(preset="gpt-1m"), data=DataSpec(kind="synthetic"), replicas=2, microbatches=3)
    data = blend(*sets, weights=[1, 1]).for_job(job)
    assert data.microbatches == 6
    assert [int(data.batch(1, m)[0][0]) for m in range(6)] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: blend(part("a"), weights=[1]), "two or more"),
        (lambda: blend(part("a"), part("b"), weights=[1]), "for 2 data sets"),
        (lambda: blend(part("a"), part("b"), weights=[0, 0]), "at least 0"),
        (lambda: blend(part("a"), part("b"), weights=[1, float("nan")]), "at least 0"),
        (lambda: blend(part("a"), part("b"), weights={5: [1, 1]}), "the first must be 1"),
        (lambda: blend(part("a"), stream(iter(())), weights=[1, 1]), "given a stream"),
        (lambda: blend(part("a"), "b.bin", weights=[1, 1]), "everstep.tokens"),
    ],
)
def test_a_blend_that_cannot_be_made_is_a_sentence(make, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()
