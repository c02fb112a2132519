"""The order of parts in given shares: none is ever a microbatch from its share; places are found at once."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.engine.datasets.turns import Turns

Weights = list[Fraction]
_scales = st.sampled_from([Fraction(1), Fraction(1, 100), Fraction(1, 10_000), Fraction(10) ** -9])


def _weights(parts: int) -> st.SearchStrategy[Weights]:
    tenths = st.integers(0, 10).map(Fraction)
    uneven = st.floats(0, 1).map(lambda weight: Fraction(repr(weight)))
    tiny = st.builds(lambda weight, scale: weight * scale, uneven, _scales)
    halves = st.integers(0, 14).map(lambda power: Fraction(1, 2**power))
    kinds = st.one_of(
        [st.lists(kind, min_size=parts, max_size=parts) for kind in (tenths, uneven, tiny, halves)]
    )
    return kinds.filter(any)


def _drift(turns: Turns, phases: Sequence[tuple[int, Weights]], length: int) -> Fraction:
    """How far any part is from its share at most, counted one by one."""
    now, parts = dict(phases), len(phases[0][1])
    owed, had, worst = [Fraction(0)] * parts, [0] * parts, Fraction(0)
    shares: Weights = []
    for place in range(length):
        if place in now:
            shares = [weight / sum(now[place]) for weight in now[place]]
        part, before = turns.turn(place)
        assert before == had[part]
        assert shares[part], "a part of weight 0 had a turn"
        had[part] += 1
        owed = [have + share for have, share in zip(owed, shares, strict=True)]
        worst = max(worst, *(abs(have - share) for have, share in zip(had, owed, strict=True)))
    return worst


@given(st.data(), st.sampled_from([2, 3, 5, 9, 30]), st.sampled_from([50, 300]))
@settings(deadline=None, max_examples=100)
def test_no_part_is_ever_a_microbatch_from_its_share(data: st.DataObject, parts: int, length: int) -> None:
    weights = data.draw(_weights(parts))
    assert _drift(Turns([(0, weights)]), [(0, weights)], length) < 1


@given(st.data(), st.sampled_from([2, 3, 8]), st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_shares_hold_over_changes_of_weights(data: st.DataObject, parts: int, changes: int) -> None:
    """A jump of all weights at once can ask for more than one microbatch in a place: two, then, not more."""
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, 120), min_size=changes, max_size=changes)))]
    phases = [(start, data.draw(_weights(parts))) for start in starts]
    assert _drift(Turns(phases), phases, 200) < 2


@given(st.data(), st.sampled_from([2, 4, 17]), st.integers(0, 10**12))
@settings(deadline=None, max_examples=100)
def test_shares_hold_at_any_place_however_far(data: st.DataObject, parts: int, place: int) -> None:
    weights = data.draw(_weights(parts))
    turns, total = Turns([(0, weights)]), sum(weights)
    states = [turns.counts(place + beyond) for beyond in range(12)]
    for beyond, counts in enumerate(states):
        assert sum(counts) == place + beyond
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - (place + beyond) * weight / total) < 1
    for before, after in pairwise(states):
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0] * (parts - 1) + [1]


@pytest.mark.parametrize("weight", ["0.0001", "0.00015", "0.3333333333333333", "1e-9"])
def test_a_small_share_is_neither_lost_nor_rounded(weight: str) -> None:
    share = Fraction(weight)
    turns = Turns([(0, [1 - share, share])])
    for place in (4_096, 100_000, 4_100_000, 10**10):
        assert abs(turns.counts(place)[1] - place * share) < 1


def test_equal_shares_of_many_parts_come_in_rounds() -> None:
    turns = Turns([(0, [Fraction(1)] * 100)])
    for start in (0, 700, 123_400):
        assert sorted(turns.turn(start + k)[0] for k in range(100)) == list(range(100))


def test_a_debt_outlives_a_change_of_weights() -> None:
    """A hundred changes, each after less than one microbatch of the small part: it still has its share."""
    phases = [(7 * k, [Fraction(9 + k % 2), Fraction(1)]) for k in range(100)]
    assert _drift(Turns(phases), phases, 700) < 1


def test_every_reader_sees_one_order() -> None:
    """A worker that asks for some places only, in any order, has those that one that asks for all has."""
    weights = [(0, [Fraction(7), Fraction(2), Fraction(1)]), (40, [Fraction(1), Fraction(1), Fraction(5)])]
    order = [Turns(weights).turn(place) for place in range(200)]
    assert Counter(part for part, _ in order[:40]) == {0: 28, 1: 8, 2: 4}
    backwards = Turns(weights)
    assert [backwards.turn(place) for place in reversed(range(200))][::-1] == order
    assert [Turns(weights).turn(place) for place in range(0, 200, 13)] == order[::13]
