"""Which worker takes which place of a new layout, so that the least state moves.

A new shape names places ("replica 0, stage 2"), and any worker can take any of them. What a worker has of a
place's elements need not move to it; the assignment that keeps most in place is the classical one of n
workers to m places, solved exactly by augmenting paths with potentials in O(m^2 n).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from everstep.errors import UserError
from everstep.layout.tensor import ITEM_BYTES
from everstep_lab.layout import Holder, Layout
from everstep_lab.reshard import Sources


def settled(a: Layout, b: Layout, workers: Sequence[Holder]) -> Layout:
    """`b` with its places given to `workers`, so that going there from `a` moves the fewest bytes."""
    places = b.holders
    if len(workers) < len(places):
        raise UserError(f"the new shape has {len(places)} places, and there are {len(workers)} workers.")
    kept = kept_bytes(a, b)
    costs = [[-kept.get((worker, place), 0) for worker in workers] for place in places]
    chosen = dict(zip(places, (workers[w] for w in least_cost(costs)), strict=True))
    return renamed(b, chosen)


def kept_bytes(a: Layout, b: Layout) -> dict[tuple[Holder, Holder], int]:
    """(holder of a, place of b): the bytes the place needs and the holder has."""
    found: dict[tuple[Holder, Holder], int] = {}
    sources = {name: Sources(a, name) for name in {a.tied.get(n, n) for n in b.tensors}}
    for piece in b.pieces:
        item = ITEM_BYTES[b.tensors[piece.tensor].dtype]
        for shared, source in sources[a.tied.get(piece.tensor, piece.tensor)].meeting(piece.box):
            for holder in source.holders:
                for place in piece.holders:
                    key = (holder, place)
                    found[key] = found.get(key, 0) + shared.volume * item
    return found


def renamed(layout: Layout, names: Mapping[Holder, Holder]) -> Layout:
    return replace(
        layout,
        pieces=tuple(replace(p, holders=tuple(names[h] for h in p.holders)) for p in layout.pieces),
        buffers={(names[holder], buffer): size for (holder, buffer), size in layout.buffers.items()},
    )


def least_cost(costs: Sequence[Sequence[int]]) -> list[int]:
    """For every row a column of its own, the sum of their costs least. Not more rows than columns."""
    rows, columns = len(costs), len(costs[0]) if costs else 0
    row_price, column_price = [0] * (rows + 1), [0] * (columns + 1)
    owner = [0] * (columns + 1)  # the row of each column, counted from 1; 0 is no row
    for row in range(1, rows + 1):
        owner[0] = row
        column = 0
        slack: list[int | None] = [None] * (columns + 1)
        came_from, seen = [0] * (columns + 1), [False] * (columns + 1)
        while True:
            seen[column] = True
            step, nearest = None, 0
            for j in range(1, columns + 1):
                if seen[j]:
                    continue
                reduced = costs[owner[column] - 1][j - 1] - row_price[owner[column]] - column_price[j]
                known = slack[j]
                if known is None or reduced < known:
                    slack[j], came_from[j] = reduced, column
                    known = reduced
                if step is None or known < step:
                    step, nearest = known, j
            assert step is not None  # there are enough columns
            for j in range(columns + 1):
                if seen[j]:
                    row_price[owner[j]] += step
                    column_price[j] -= step
                elif (left := slack[j]) is not None:
                    slack[j] = left - step
            column = nearest
            if owner[column] == 0:
                break
        while column:
            owner[column], column = owner[came_from[column]], came_from[column]
    found = [0] * rows
    for j in range(1, columns + 1):
        if owner[j]:
            found[owner[j] - 1] = j - 1
    return found
