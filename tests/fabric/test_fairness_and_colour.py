"""Rates are max-min fair, and equal flows are spread as evenly as arithmetic allows."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from everstep_fabric.colour import spread
from everstep_fabric.fairness import max_min


def rates(paths: list[list[int]], capacity: list[float]) -> np.ndarray:
    width = max(len(p) for p in paths)
    return max_min(np.array([p + [-1] * (width - len(p)) for p in paths]), np.array(capacity))


def test_the_textbook_example() -> None:
    """Three flows, two links: the one on both is held by the fuller; the others take what is left."""
    assert rates([[0], [0, 1], [1]], [1.0, 2.0]).tolist() == [0.5, 0.5, 1.5]


def test_a_flow_on_a_dead_link_gets_nothing_and_costs_nobody_anything() -> None:
    assert rates([[0, 1], [1]], [0.0, 1.0]).tolist() == [0.0, 1.0]


@given(
    paths=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), min_size=1, max_size=12),
    capacity=st.lists(st.floats(0.5, 8.0), min_size=6, max_size=6),
)
def test_no_link_is_overfull_and_every_flow_is_held_by_a_full_link_where_nobody_gets_more(
    paths, capacity
) -> None:
    """Bertsekas and Gallager's test for max-min fairness."""
    found = rates(paths, capacity)
    load = [sum(found[i] for i, path in enumerate(paths) if link in path) for link in range(6)]
    assert all(used <= room * (1 + 1e-6) for used, room in zip(load, capacity, strict=True))
    for number, path in enumerate(paths):
        assert any(
            load[link] >= capacity[link] * (1 - 1e-6)
            and found[number] >= max(found[i] for i, p in enumerate(paths) if link in p) * (1 - 1e-6)
            for link in path
        )


@given(
    edges=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=120),
    num_colours=st.integers(1, 7),
)
def test_no_uplink_and_no_downlink_carries_more_than_its_share_rounded_up(edges, num_colours) -> None:
    colours = spread(edges, num_colours)
    for end in (0, 1):
        degree = Counter(edge[end] for edge in edges)
        used = Counter((edge[end], colour) for edge, colour in zip(edges, colours, strict=True))
        assert all(count <= -(-degree[leaf] // num_colours) for (leaf, _), count in used.items())
