"""The places of a new shape go to the workers that have most of them already."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import UserError
from everstep.layout import Tensor
from everstep_lab import layout_builders as build
from everstep_lab.layout import Layout, merged
from everstep_lab.reshard import reshard
from harness.assignment import least_cost, renamed, settled
from tests.layout.drawn import layouts, tensors


@given(st.integers(1, 4), st.integers(0, 2), st.data())
def test_no_assignment_costs_less(rows: int, more: int, data: st.DataObject) -> None:
    columns = rows + more
    costs = [[data.draw(st.integers(-9, 9)) for _ in range(columns)] for _ in range(rows)]
    chosen = least_cost(costs)
    assert len(set(chosen)) == rows
    best = min(sum(costs[r][c] for r, c in enumerate(p)) for p in permutations(range(columns), rows))
    assert sum(costs[r][c] for r, c in enumerate(chosen)) == best


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_nobody_could_move_less_by_changing_places(data: st.DataObject) -> None:
    over = data.draw(tensors(count=2))
    a, b = data.draw(layouts(over)), data.draw(layouts(over))
    workers = [10, 11, 12]
    a = renamed(a, dict(zip(range(5), (10, 11, 12, 13, 14), strict=True)))
    if len(b.holders) > len(workers):
        with pytest.raises(UserError, match="places"):
            settled(a, b, workers)
        return
    best = min(
        reshard(a, renamed(b, dict(zip(b.holders, order, strict=True)))).moved_bytes
        for order in permutations(workers, len(b.holders))
    )
    assert reshard(a, settled(a, b, workers)).moved_bytes == best


def shape(replicas: int, stages: int) -> Layout:
    weights = [Tensor(name=f"l{i}", shape=(32, 32)) for i in range(4)]
    per = len(weights) // stages
    return merged(
        [build.replicated(w, [(k, i // per) for k in range(replicas)]) for i, w in enumerate(weights)]
    )


def test_two_by_two_becomes_one_by_four_without_moving_anything() -> None:
    """Each of the four workers has the layer it needs; by their old names three quarters would move."""
    a, b = shape(2, 2), shape(1, 4)
    assert reshard(a, b).moved_bytes == 3 * 32 * 32 * 4
    assert reshard(a, settled(a, b, a.holders)).moved_bytes == 0
