"""Equal flows spread evenly over the spines, at every leaf at once: edge colouring of a bipartite graph.

Leaves that send are on one side, leaves that receive on the other, a flow is an edge, a spine is a colour.
König: a bipartite graph whose vertices have at most K edges can be coloured with K colours so that no
vertex has a colour twice. A leaf with more than K flows is cut into copies of K flows each; so no uplink
and no downlink ever carries more than ⌈flows of its leaf / K⌉. No routing of equal flows over K equal
spines can do better; greedy placement can be forced into almost twice that.

An edge that finds no colour free at both ends frees one by swapping two colours along an alternating path.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def spread(edges: Sequence[tuple[Hashable, Hashable]], num_colours: int) -> list[int]:
    """A colour for each edge; at each end, no colour more often than ⌈degree / num_colours⌉."""
    painter = _Painter(num_colours)
    for number, (left, right) in enumerate(edges):
        painter.add(number, painter.copy_of((0, left)), painter.copy_of((1, right)))
    return painter.colour


class _Painter:
    def __init__(self, num_colours: int) -> None:
        self.num_colours = num_colours
        self.colour: list[int] = []
        self._ends: list[tuple[int, int]] = []
        self._edge_at: list[list[int]] = []  # vertex, colour -> edge, or -1
        self._free: list[int] = []  # vertex -> bit mask of colours
        self._current: dict[Hashable, tuple[int, int]] = {}  # vertex as given -> its open copy, edges in it

    def copy_of(self, vertex: Hashable) -> int:
        copy, used = self._current.get(vertex, (-1, self.num_colours))
        if used == self.num_colours:
            copy, used = len(self._edge_at), 0
            self._edge_at.append([-1] * self.num_colours)
            self._free.append((1 << self.num_colours) - 1)
        self._current[vertex] = copy, used + 1
        return copy

    def add(self, number: int, left: int, right: int) -> None:
        self._ends.append((left, right))
        self.colour.append(-1)
        both = self._free[left] & self._free[right]
        if both:
            self._paint(number, self._pick(both, number % self.num_colours))
            return
        mine, theirs = _lowest(self._free[left]), _lowest(self._free[right])
        self._swap_from(right, mine, theirs)
        self._paint(number, mine)

    def _pick(self, mask: int, first: int) -> int:
        """The next free colour from `first` on, so that few flows do not all crowd onto the first spines."""
        later = mask >> first
        return first + _lowest(later) if later else _lowest(mask)

    def _swap_from(self, vertex: int, colour: int, other: int) -> None:
        """Swap two colours along the path from `vertex`, which has `colour` and lacks `other`."""
        path = []
        while (edge := self._edge_at[vertex][colour]) >= 0:
            path.append(edge)
            left, right = self._ends[edge]
            vertex = left if vertex == right else right
            colour, other = other, colour
        was = [self.colour[edge] for edge in path]
        pair = {colour, other}
        for edge in path:
            self._unpaint(edge)
        for edge, before in zip(path, was, strict=True):
            self._paint(edge, (pair - {before}).pop())

    def _paint(self, edge: int, colour: int) -> None:
        self.colour[edge] = colour
        for vertex in self._ends[edge]:
            self._edge_at[vertex][colour] = edge
            self._free[vertex] &= ~(1 << colour)

    def _unpaint(self, edge: int) -> None:
        colour = self.colour[edge]
        for vertex in self._ends[edge]:
            self._edge_at[vertex][colour] = -1
            self._free[vertex] |= 1 << colour


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1
