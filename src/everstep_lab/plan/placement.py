"""Which workers, not just how many.

    shards      of one (replica, stage) sit in one node
    replicas    of one stage: no node holds more than half of them, nor a rack where racks are named; so one
                node's loss never takes a stage's last copy
    moves       as few as possible: workers that stay keep their slot and their stage
    fullness    new groups go to the fullest node that has room, so that whole nodes stay free for wide shards

The second rule bends, with a warning, where the cluster is too small for it. Shards never bend: a shape that
finds no node with room for a whole group is reported, and the allocation chooses again without it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from everstep_lab.plan.cluster import Assignment, Cluster, SlotPlace
from everstep_lab.plan.holes import per_stage
from everstep_lab.plan.option import OptionKind, TaskOption
from everstep_lab.plan.task_shape import ParallelShape

Groups = dict[tuple[int, int], tuple[SlotPlace, ...]]  # (replica, stage) -> places


class Unplaceable(Exception):
    """A task's shape finds no room, though there are slots enough."""

    def __init__(self, task: str) -> None:
        super().__init__(task)
        self.task = task


@dataclass(frozen=True, slots=True)
class Placement:
    assignment: Assignment
    moves: Mapping[str, int]  # per task: workers on a slot the task did not have
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Seat:
    """One task on its way to its places."""

    name: str
    choice: TaskOption
    shape: ParallelShape
    groups: Groups  # that stay
    had: frozenset[SlotPlace]
    own: list[SlotPlace] = field(default_factory=list)  # slots it may keep for other parts of the model
    on_node: Counter[tuple[int, str]] = field(default_factory=Counter)  # (stage, node) -> replicas
    in_rack: Counter[tuple[int, str]] = field(default_factory=Counter)


def place(cluster: Cluster, now: Assignment, choices: Mapping[str, TaskOption]) -> Placement:
    """Seat everybody; `choices` in the order of the tasks."""
    room = _Room(cluster)
    seats: list[_Seat] = []
    places: dict[str, Sequence[SlotPlace | None]] = {}
    shapes: dict[str, ParallelShape] = {}
    for name, choice in choices.items():
        if choice.shape is not None and choice.workers:
            shapes[name] = choice.shape
        if choice.kind is OptionKind.KEEP:
            places[name] = now.of(name)
            room.take(name, (spot for spot in now.of(name) if spot is not None))
            continue
        seat = _keep_what_stays(cluster, now, name, choice)
        if choice.kind is OptionKind.REROUTE:
            places[name] = _with_holes(seat, len(now.of(name)))
        elif choice.kind is not OptionKind.STOP:
            seats.append(seat)
        room.take(name, (spot for group in seat.groups.values() for spot in group))
    for seat in seats:
        if not seat.groups and seat.own:
            room.reserve(seat)
    warnings: list[str] = []
    for seat in sorted(seats, key=lambda seat: (-seat.shape.shards, not seat.had, -seat.shape.workers)):
        _fill(room, seat, warnings)
    for seat in seats:
        places[seat.name] = _with_holes(seat, seat.shape.workers)
    ordered = {name: places[name] for name in choices if name in places}
    moves = {name: _num_new(now.of(name), seated) for name, seated in ordered.items()}
    return Placement(Assignment(places=ordered, shapes=shapes), moves, tuple(warnings))


def _num_new(old: Sequence[SlotPlace | None], new: Sequence[SlotPlace | None]) -> int:
    had = set(old)
    return sum(spot is not None and spot not in had for spot in new)


def _keep_what_stays(cluster: Cluster, now: Assignment, name: str, choice: TaskOption) -> _Seat:
    """Groups that continue in the same role; for another cut, the slots it may use again."""
    old = now.of(name)
    live = [p if p is not None and cluster.is_usable(p) else None for p in old]
    shape = choice.shape or ParallelShape(choice.workers)
    had = frozenset(p for p in old if p is not None)
    seat = _Seat(name, choice, shape, {}, had)
    was = now.shapes.get(name)
    if choice.kind is OptionKind.STOP or not choice.workers:
        return seat
    cut = was if was is not None and was.workers == len(old) else None
    if cut is None and choice.kind is OptionKind.REROUTE:
        cut = shape
    if cut is not None and (cut.stages, cut.shards) == (shape.stages, shape.shards):
        groups = _live_groups(cut, live)
        seat.groups = groups if choice.kind is OptionKind.REROUTE else _chosen(groups, shape, choice.workers)
    elif cut is None and choice.shape is None:
        alone: Groups = {(i, 0): (p,) for i, p in enumerate(live) if p is not None}
        seat.groups = _chosen(alone, shape, choice.workers)
    else:
        seat.own = [p for p in live if p is not None]
    for (_, stage), group in seat.groups.items():
        _count(cluster, seat, stage, group[0].node)
    return seat


def _live_groups(shape: ParallelShape, live: Sequence[SlotPlace | None]) -> Groups:
    found = {}
    for index in range(shape.groups):
        members = live[index * shape.shards : (index + 1) * shape.shards]
        if all(p is not None for p in members):
            whole = tuple(p for p in members if p is not None)
            found[index // shape.stages, index % shape.stages] = whole
    return found


def _chosen(groups: Groups, shape: ParallelShape, workers: int) -> Groups:
    """Of each stage as many groups as it will have, renumbered. Who sits where most of the task
    sits stays, so that whole nodes come free, but never all on one node if it can be helped."""
    weight = Counter(group[0].node for group in groups.values())
    by_stage: dict[int, list[tuple[int, tuple[SlotPlace, ...]]]] = defaultdict(list)
    for (replica, stage), group in groups.items():
        by_stage[stage].append((replica, group))
    chosen = {}
    for stage, count in enumerate(per_stage(workers // shape.shards, shape.stages)):
        mine = by_stage[stage]
        mine.sort(key=lambda item: (-weight[item[1][0].node], item[0]))
        kept, rest = mine[:count], mine[count:]
        nodes = {group[0].node for _, group in kept}
        elsewhere = [item for item in rest if item[1][0].node not in nodes]
        if len(kept) > 1 and len(nodes) == 1 and elsewhere:
            kept[-1] = elsewhere[0]
        numbers = {r for r, _ in kept}
        free = [r for r in range(shape.replicas) if r not in numbers]
        for replica, group in sorted(kept):
            number = replica if replica < shape.replicas else free.pop()
            chosen[number, stage] = group
    return chosen


def _count(cluster: Cluster, seat: _Seat, stage: int, node: str) -> None:
    seat.on_node[stage, node] += 1
    rack = cluster.node(node).rack
    if rack is not None:
        seat.in_rack[stage, rack] += 1


class _Room:
    """Free slots, by node, nodes kept by how many they have left."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.free = {node.name: cluster.offered(node) for node in cluster.nodes}
        self.size = {name: len(slots) for name, slots in self.free.items()}
        self.racks = {node.rack for node in cluster.nodes if node.rack is not None and not node.lost}
        self.owner: dict[str, str] = {}
        self.held: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.by_count: dict[int, dict[str, None]] = defaultdict(dict)
        for name, slots in self.free.items():
            self.by_count[len(slots)][name] = None

    def take(self, task: str, places: Iterable[SlotPlace]) -> None:
        by_node: dict[str, list[int]] = {}
        for node, slot in places:
            by_node.setdefault(node, []).append(slot)
        for node, slots in by_node.items():
            self.take_from(task, node, slots)

    def take_from(self, task: str, node: str, slots: list[int]) -> None:
        free = self.free[node]
        del self.by_count[len(free)][node]
        left = [slot for slot in free if slot not in slots]
        assert len(left) + len(slots) == len(free), f"{node} does not have slots {slots} free"
        self.free[node] = left
        self.by_count[len(left)][node] = None
        self.owner.setdefault(node, task)

    def reserve(self, seat: _Seat) -> None:
        """A task that changes its cut has the first claim on its own slots."""
        for node, slot in seat.own:
            self.held[node][seat.name].add(slot)
            self.owner.setdefault(node, seat.name)

    def slots(self, task: str, node: str) -> list[int]:
        """What this task may take there: its own old slots first, no slot that is reserved for another."""
        if self.cluster.whole_nodes and self.owner.get(node, task) != task:
            return []
        if node not in self.held:
            return self.free[node]
        mine: set[int] = set()
        others: set[int] = set()
        for name, slots in self.held.get(node, {}).items():
            (mine if name == task else others).update(slots)
        free = [slot for slot in self.free[node] if slot not in others or slot in mine]
        return sorted(free, key=lambda slot: (slot not in mine, slot))

    def nodes(self, seat: _Seat, near: dict[str, None]) -> Iterator[str]:
        """Where to look: nodes the task is on or was on and that have room, then the fullest with room."""
        for node in list(near):
            if len(self.slots(seat.name, node)) < seat.shape.shards:
                del near[node]
            else:
                yield node
        for count in range(seat.shape.shards, max(self.by_count, default=0) + 1):
            for node in list(self.by_count.get(count, ())):
                if node not in near and len(self.slots(seat.name, node)) >= seat.shape.shards:
                    yield node


def _fill(room: _Room, seat: _Seat, warnings: list[str]) -> None:
    """Find a place for every group that has none."""
    if not room.racks and seat.choice.workers == seat.shape.workers:
        _fill_node_by_node(room, seat)
    missing = Counter(dict(enumerate(per_stage(seat.choice.workers // seat.shape.shards, seat.shape.stages))))
    missing.subtract(stage for _, stage in seat.groups)
    used = {group[0].node for group in seat.groups.values()}
    near = dict.fromkeys([*(place.node for place in seat.own), *sorted(used)])
    for replica in range(seat.shape.replicas):
        for stage in range(seat.shape.stages):
            if (replica, stage) in seat.groups or missing[stage] <= 0:
                continue
            missing[stage] -= 1
            node = _best_node(room, seat, stage, used, near)
            if node is None:
                raise Unplaceable(seat.name)
            group = tuple(SlotPlace(node, slot) for slot in room.slots(seat.name, node)[: seat.shape.shards])
            room.take(seat.name, group)
            used.add(node)
            near[node] = None
            seat.groups[replica, stage] = group
            _count(room.cluster, seat, stage, node)
    _warn(seat, warnings)


def _fill_node_by_node(room: _Room, seat: _Seat) -> None:
    """Seat whole replicas on nodes the task is not on, a node at a time: consecutive groups are consecutive
    stages, so of `most` groups on a node no more than half a stage's replicas. The rest is searched for."""
    shape, half = seat.shape, max(1, seat.shape.replicas // 2)
    most = shape.groups if shape.replicas == 1 else shape.stages * half
    if room.cluster.whole_nodes and most * shape.shards < room.cluster.unit:
        return  # would take more nodes than it was given
    begun = {replica for replica, _ in seat.groups}
    used = {group[0].node for group in seat.groups.values()}
    numbers = [(r, s) for r in range(shape.replicas) if r not in begun for s in range(shape.stages)]
    nodes = seat.choice.units - len(used) if room.cluster.whole_nodes else len(room.free)
    done = 0
    for node in room.nodes(seat, dict.fromkeys(place.node for place in seat.own)):
        if done == len(numbers) or nodes <= 0:
            break
        if node in used:
            continue
        slots = room.slots(seat.name, node)
        count = min(len(slots) // shape.shards, most, len(numbers) - done)
        taken = slots[: count * shape.shards]
        room.take_from(seat.name, node, taken)
        spots = [SlotPlace(node, slot) for slot in taken]
        for i, (replica, stage) in enumerate(numbers[done : done + count]):
            seat.groups[replica, stage] = tuple(spots[i * shape.shards : (i + 1) * shape.shards])
            seat.on_node[stage, node] += 1
        done += count
        nodes -= 1


def _best_node(room: _Room, seat: _Seat, stage: int, used: set[str], near: dict[str, None]) -> str | None:
    half = max(1, seat.shape.replicas // 2)
    budget = seat.choice.units if room.cluster.whole_nodes else None
    spread_only: str | None = None
    anywhere: str | None = None
    for node in room.nodes(seat, near):
        if budget is not None and node not in used and len(used) >= budget:
            continue
        if seat.shape.replicas == 1:
            return node
        anywhere = anywhere or node
        if seat.on_node[stage, node] >= half:
            continue
        spread_only = spread_only or node
        rack = room.cluster.node(node).rack
        if len(room.racks) < 2 or rack is None or seat.in_rack[stage, rack] < half:
            return node
    return spread_only or anywhere


def _warn(seat: _Seat, warnings: list[str]) -> None:
    if seat.shape.replicas < 2:
        return
    for (stage, node), count in seat.on_node.items():
        if count == seat.shape.replicas:
            warnings.append(
                f"all {count} replicas of stage {stage} of {seat.name} are on {node}: its loss would take "
                "the last copy."
            )
            return


def _with_holes(seat: _Seat, count: int) -> tuple[SlotPlace | None, ...]:
    places: list[SlotPlace | None] = [None] * count
    for (replica, stage), group in seat.groups.items():
        first = (replica * seat.shape.stages + stage) * seat.shape.shards
        places[first : first + len(group)] = group
    return tuple(places)
