"""The circles of a graph that no arrow leaves: where every walk ends."""

from __future__ import annotations

from collections.abc import Mapping, Set


def last_circles(after: Mapping[int, Set[int]]) -> list[list[int]]:
    """Strongly connected components without a way out, each sorted. Tarjan's walk, with its own stack."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    component: dict[int, int] = {}
    open_: list[int] = []
    circles: list[list[int]] = []
    for root in after:
        if root in index:
            continue
        walk = [(root, iter(after[root]))]
        index[root] = low[root] = len(index)
        open_.append(root)
        while walk:
            node, rest = walk[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    open_.append(other)
                    walk.append((other, iter(after.get(other, ()))))
                    break
                if other not in component:
                    low[node] = min(low[node], index[other])
            else:
                walk.pop()
                if walk:
                    low[walk[-1][0]] = min(low[walk[-1][0]], low[node])
                if low[node] == index[node]:
                    circle = []
                    while True:
                        one = open_.pop()
                        component[one] = len(circles)
                        circle.append(one)
                        if one == node:
                            break
                    circles.append(sorted(circle))
    leaves = {
        component[node] for node in after for other in after[node] if component[other] != component[node]
    }
    return [circle for at, circle in enumerate(circles) if at not in leaves]
