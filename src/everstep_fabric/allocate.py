"""Flows onto paths, so that the worst link is as little loaded as can be.

Three steps, each for what the one before cannot do:

    colour   equal flows on equal spines: exactly even, by edge colouring (`colour`)
    place    what is left (new flows, flows off dead links, unequal fabrics): largest first, each on the path
             whose worst link ends up best
    polish   take the worst link; move one flow off it to where it makes nothing as bad; if every other way
             is blocked by one link, move one flow off that link first

`reallocate` starts from the routing that is there: flows whose paths still work stay, and `max_moves`
bounds how many of them polishing may touch. A move costs a flow its connection, so few moves are worth a
slightly worse balance. Rejected: an integer program (a task's start would wait for a
solver), and greedy alone (twice the bound on a full fabric with random pairs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from everstep.errors import UserError
from everstep_fabric.bound import lower_bound_s
from everstep_fabric.colour import spread
from everstep_fabric.flows import Endpoint, Flow
from everstep_fabric.loads import Loads
from everstep_fabric.routing import Routing
from everstep_fabric.topology import WIDTH, Ints, Port, Topology, port_name

_CLOSE = 1e-9
_PATIENCE = 60  # worst links in a row that nothing improves
_TRIED_FLOWS = 48  # of one link


def allocate(topology: Topology, flows: Sequence[Flow], *, start: str = "best") -> Routing:
    """The whole routing, from nothing. `start`: colour, greedy, or the better of the two."""
    flows = tuple(flows)
    bound = lower_bound_s(topology, flows)
    best: _Placing | None = None
    for way in ("colour", "greedy") if start == "best" else (start,):
        placing = _Placing(topology, flows)
        if way == "colour" and not placing.colour():
            continue
        placing.place()
        placing.polish(stop_at=bound)
        if best is None or placing.worst() < best.worst() * (1 - _CLOSE):
            best = placing
        if best.worst() <= bound * (1 + 1e-6):
            break
    if best is None:
        raise UserError(f"allocation cannot start by {start!r} here; use start='best'.")
    return best.routing(because=_because(len(flows), best.worst(), bound), moved=())


def reallocate(
    topology: Topology, before: Routing, flows: Sequence[Flow], *, max_moves: int | None = None
) -> Routing:
    """The routing after a change of the fabric or of the flows. Flows are the same if their names are."""
    flows = tuple(flows)
    placing = _Placing(topology, flows)
    known = before.by_name
    old = [n for n, flow in enumerate(flows) if flow.name in known]
    rows = np.array([(*known[flows[n].name], -1, -1, -1, -1)[:WIDTH] for n in old], dtype=np.int64)
    if old:
        alive = topology.alive(rows)
        placing.put_many([n for n, lives in zip(old, alive, strict=True) if lives], rows[alive])
    broken = {f.name for n, f in enumerate(flows) if f.name in known and placing.paths[n][0] < 0}
    placing.place()
    placing.polish(
        stop_at=lower_bound_s(topology, flows),
        max_moves=max_moves,
        free=frozenset(n for n, f in enumerate(flows) if f.name not in known or f.name in broken),
    )
    moved = tuple(
        flow.name
        for number, flow in enumerate(flows)
        if flow.name in known
        and known[flow.name] != tuple(x for x in placing.paths[number].tolist() if x >= 0)
    )
    because = (
        f"{len(moved)} of {len(flows)} flows moved: {len(broken)} had a dead path, "
        f"{len(moved) - len(broken & set(moved))} to even the load; worst link {placing.worst():.4g} s."
    )
    return placing.routing(because=because, moved=moved)


def _because(count: int, worst: float, bound: float) -> str:
    gap = worst / bound - 1 if bound > 0 else 0.0
    near = "which is the bound" if gap < 1e-6 else f"{gap:.1%} above the bound"
    return f"{count} flows: the worst link takes {worst:.4g} s, {near}."


class _Placing:
    """Paths so far, and who is on which link."""

    def __init__(self, topology: Topology, flows: tuple[Flow, ...]) -> None:
        self.topology, self.flows = topology, flows
        self.loads = Loads(topology, flows)
        self.paths: list[Ints] = [np.full(WIDTH, -1, dtype=np.int64)] * len(flows)
        self.on_link: list[set[int]] = [set() for _ in topology.links]
        self._choices: dict[tuple[Endpoint, Endpoint, int | None], Ints] = {}

    def routing(self, *, because: str, moved: tuple[str, ...]) -> Routing:
        paths = np.array(self.paths, dtype=np.int64).reshape(-1, WIDTH)
        return Routing(topology=self.topology, flows=self.flows, paths=paths, because=because, moved=moved)

    def worst(self) -> float:
        return float(self.loads.cost().max(initial=0.0))

    def choices(self, number: int) -> Ints:
        """The live paths of a flow, one a row."""
        flow = self.flows[number]
        key = flow.source, flow.target, flow.plane
        known = self._choices.get(key)
        if known is None:
            known = self._choices[key] = self._find_choices(flow)
        return known

    def _find_choices(self, flow: Flow) -> Ints:
        for end in (flow.source, flow.target):
            if end[0] not in self.topology.by_node:
                raise UserError(f"flow {flow.name}: node {end[0]!r} is not in fabric {self.topology.name}.")
        rows = self.topology.paths(flow.source, flow.target)
        if flow.plane is not None:
            rows = rows[self.topology.plane_of[rows[:, 0]] == flow.plane]
        rows = rows[self.topology.alive(rows)] if len(rows) else rows
        if not len(rows):
            raise UserError(
                f"flow {flow.name}: no live path from {flow.source[0]} NIC {flow.source[1]} "
                f"to {flow.target[0]} NIC {flow.target[1]}."
            )
        return rows

    # ------------------------------------------------------------------ putting and taking

    def put(self, number: int, path: Ints) -> None:
        self.paths[number] = path
        real = path[path >= 0]
        self.loads.put(number, real)
        for link in real.tolist():
            self.on_link[link].add(number)

    def put_many(self, numbers: list[int], paths: Ints) -> None:
        if not numbers:
            return
        self.loads.put_many(numbers, paths)
        for number, path, row in zip(numbers, paths, paths.tolist(), strict=True):
            self.paths[number] = path
            for link in row:
                if link >= 0:
                    self.on_link[link].add(number)

    def take(self, number: int) -> Ints:
        path = self.paths[number]
        real = path[path >= 0]
        self.loads.take(number, real)
        for link in real.tolist():
            self.on_link[link].discard(number)
        return path

    # ------------------------------------------------------------------ colour

    def colour(self) -> bool:
        """Even start for equal flows; False where spines or planes differ, so that colours mean nothing."""
        groups = self._colour_classes()
        if groups is None:
            return False
        for members in groups:
            self._colour_one(members)
        return True

    def _colour_classes(self) -> list[list[tuple[int, Port, Port]]] | None:
        """Flows of one phase, size and plane, largest first; each with its ports. None if not regular."""
        uplinks: dict[str, set[float]] = {}
        spines: dict[str, set[str]] = {}
        leaves = {leaf.name for leaf in self.topology.leaves}
        for link in self.topology.fabric_links:
            leaf, spine = (
                (link.sender, link.receiver) if link.sender in leaves else (link.receiver, link.sender)
            )
            uplinks.setdefault(leaf, set()).add(link.gbps)
            spines.setdefault(leaf, set()).add(spine)
        if any(len(rates) > 1 for rates in uplinks.values()):
            return None
        ports = _EvenPorts(self.topology)
        local: list[tuple[int, Ints]] = []
        classes: dict[tuple[float, str, tuple[str, ...]], list[tuple[int, Port, Port]]] = {}
        for number, flow in enumerate(self.flows):
            pair = ports.choose(flow)
            if pair is None:
                return None
            one, other = pair
            if one.leaf != other.leaf:
                if spines.get(one.leaf) != spines.get(other.leaf):
                    return None
                key = (-flow.bytes, flow.phase, tuple(sorted(spines[one.leaf])))
                classes.setdefault(key, []).append((number, one, other))
            else:
                local.append((number, _pad(_path(self.topology, flow, one, other, 0))))
        if local:
            self.put_many([number for number, _ in local], np.array([path for _, path in local]))
        return [classes[key] for key in sorted(classes)]

    def _colour_one(self, members: list[tuple[int, Port, Port]]) -> None:
        ways = len(self.topology.between(members[0][1].leaf, members[0][2].leaf))
        colours = spread([(one.leaf, other.leaf) for _, one, other in members], ways)
        turn = self._best_turn(members, colours, ways) if self.loads.total.any() else 0
        rows = np.array(
            [
                _path(self.topology, self.flows[number], one, other, (colour + turn) % ways)
                for (number, one, other), colour in zip(members, colours, strict=True)
            ]
        )
        alive = self.topology.alive(rows)
        self.put_many([n for (n, _, _), lives in zip(members, alive, strict=True) if lives], rows[alive])

    def _best_turn(self, members: list[tuple[int, Port, Port]], colours: list[int], ways: int) -> int:
        """Colours are only names: turn them so that this class fills what earlier ones left."""
        middles = np.array([self.topology.between(one.leaf, other.leaf) for _, one, other in members])
        gbit = np.array([self.loads.gbit[n] for n, _, _ in members])
        rows, hues = np.arange(len(members)), np.array(colours)
        worst = []
        for turn in range(ways):
            links = middles[rows, (hues + turn) % ways]
            more = np.bincount(links.ravel(), np.repeat(gbit, 2), minlength=self.loads.num_links)
            worst.append(float(((self.loads.total[:-1] + more) * self.loads.slowness)[links].max()))
        return int(np.argmin(worst))

    # ------------------------------------------------------------------ place

    def place(self) -> None:
        """The largest first."""
        waiting = [n for n, path in enumerate(self.paths) if path[0] < 0]
        waiting.sort(key=lambda n: -self.flows[n].bytes * self.flows[n].weight)
        for number in waiting:
            self.put(number, self._best_path(number))

    def _best_path(self, number: int) -> Ints:
        rows = self.choices(number)
        cost = self.loads.cost_with(number, rows)
        worst = cost.max(axis=1)
        near = np.flatnonzero(worst <= worst.min() * (1 + _CLOSE))
        if len(near) > 1:
            total = cost[near].sum(axis=1) + self.loads.phase_with(number, rows[near]).sum(axis=1)
            near = near[np.argsort(total, kind="stable")]
        return np.asarray(rows[near[0]])

    # ------------------------------------------------------------------ polish

    def polish(
        self, *, stop_at: float, max_moves: int | None = None, free: frozenset[int] = frozenset()
    ) -> None:
        """Lower the worst links one by one. `free` flows may move without being counted."""
        left = len(self.flows) * 4 if max_moves is None else max_moves
        hopeless: set[int] = set()
        stuck_in_a_row = 0
        touched: frozenset[int] = frozenset()
        while stuck_in_a_row < _PATIENCE:
            cost = self.loads.cost()
            if hopeless:
                cost[list(hopeless)] = 0.0
            worst = int(np.argmax(cost))
            if cost[worst] <= stop_at * (1 + 1e-6) or cost[worst] == 0.0:
                return
            spent = self._relieve(worst, float(cost[worst]), left, free | touched)
            if spent is None:
                hopeless.add(worst)
                stuck_in_a_row += 1
                continue
            stuck_in_a_row = 0
            touched |= spent
            left -= len(spent - free)

    def _relieve(self, link: int, limit: float, left: int, free: frozenset[int]) -> set[int] | None:
        """Move one flow off this link, all costs it touches staying under `limit`. The flows moved."""
        crowd = sorted(self.on_link[link], key=lambda n: (n not in free, -self.flows[n].bytes))[:_TRIED_FLOWS]
        for number in crowd:
            if left < 1 and number not in free:
                continue
            rows = self.choices(number)
            rows = rows[~(rows == link).any(axis=1)]
            if not len(rows):
                continue
            old = self.take(number)
            cost = self.loads.cost_with(number, rows)
            worst = cost.max(axis=1)
            best = int(np.argmin(worst))
            if worst[best] < limit * (1 - 1e-6):
                self.put(number, rows[best])
                return {number}
            chain = self._by_ejection(number, rows, cost, limit) if left >= 2 else None
            if chain is not None:
                return chain
            self.put(number, old)
        return None

    def _by_ejection(self, number: int, rows: Ints, cost: np.ndarray, limit: float) -> set[int] | None:
        """`number` is off; put it where exactly one link is too full, after moving one flow off that link."""
        too_full = cost >= limit * (1 - 1e-6)
        for row in np.flatnonzero(too_full.sum(axis=1) == 1)[:8].tolist():
            blocked = int(rows[row][too_full[row]][0])
            self.put(number, rows[row])
            for other in sorted(self.on_link[blocked] - {number})[:8]:
                ways = self.choices(other)
                ways = ways[~(ways == blocked).any(axis=1)]
                if not len(ways):
                    continue
                old = self.take(other)
                worst = self.loads.cost_with(other, ways).max(axis=1)
                best = int(np.argmin(worst))
                if worst[best] < limit * (1 - 1e-6) and float(
                    self.loads.cost_at(rows[row][rows[row] >= 0]).max()
                ) < limit * (1 - 1e-6):
                    self.put(other, ways[best])
                    return {number, other}
                self.put(other, old)
            self.take(number)
        return None


class _EvenPorts:
    """Planes in turn, at the sender's NIC and at the receiver's: each port carries half of its NIC."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._used: dict[tuple[Endpoint, int, bool], float] = {}
        self._pairs: dict[tuple[Endpoint, Endpoint], Mapping[int, tuple[Port, Port]]] = {}

    def choose(self, flow: Flow) -> tuple[Port, Port] | None:
        pairs = self._pairs.get((flow.source, flow.target))
        if pairs is None:
            found = self._topology.port_pairs(flow.source, flow.target)
            pairs = {one.plane: (one, other) for one, other in found if one.plane == other.plane}
            self._pairs[flow.source, flow.target] = pairs
        planes = [p for p in pairs if flow.plane in (None, p)]
        if not planes:
            return None
        used = self._used
        ends = (flow.source, True), (flow.target, False)
        plane = min(planes, key=lambda p: (max(used.get((e, p, d), 0.0) for e, d in ends), p))
        for end, direction in ends:
            used[end, plane, direction] = used.get((end, plane, direction), 0.0) + flow.bytes
        return pairs[plane]


def _path(topology: Topology, flow: Flow, one: Port, other: Port, way: int) -> Ints:
    up = topology.index[f"{port_name(flow.source[0], one)}>{one.leaf}"]
    down = topology.index[f"{other.leaf}>{port_name(flow.target[0], other)}"]
    return np.array([up, *topology.between(one.leaf, other.leaf)[way], down], dtype=np.int64)


def _pad(path: Ints) -> Ints:
    row = np.full(WIDTH, -1, dtype=np.int64)
    row[: len(path)] = path
    return row
