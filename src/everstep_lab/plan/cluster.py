"""The machines a plan may use, and who sits where today."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.errors import UserError
from everstep_lab.plan.task_shape import ParallelShape
from everstep_lab.plan.transition import Costs

DAY_S = 86_400.0
FAILURES_PER_1000_NODE_DAYS = 6.5  # Meta RSC-1, 24,000 A100 over 11 months


class SlotPlace(NamedTuple):
    """One slot of one node; text: node-3:5."""

    node: str
    slot: int

    def __str__(self) -> str:
        return f"{self.node}:{self.slot}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNode:
    """A machine. A lost one may be under repair; a slot may be bad while the others are good."""

    name: str
    slots: int = 8
    rack: str | None = None
    bad_slots: frozenset[int] = frozenset()
    lost: bool = False
    back_in_s: float | None = None  # of a lost node: when its repair is expected to end; None: unknown
    failures_per_1000_days: float | None = None  # None: as the cluster's

    def usable(self) -> list[int]:
        if self.lost:
            return []
        return [s for s in range(self.slots) if s not in self.bad_slots]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes, how often they fail, and what a change costs on them."""

    nodes: Sequence[PlanNode]
    whole_nodes: bool = False  # give tasks nodes, not slots
    failures_per_1000_node_days: float = FAILURES_PER_1000_NODE_DAYS
    running_s: float | None = None  # the expected time to the next event, if it is known better
    hysteresis: float = 1.0  # a voluntary change must earn this many times its cost
    costs: Costs = field(default_factory=Costs)
    unit: int = field(init=False, repr=False, compare=False)  # slots that are given away together
    capacity: int = field(init=False, repr=False, compare=False)  # slots a plan may use
    sound: frozenset[str] = field(init=False, repr=False, compare=False)  # nodes all of whose slots are good
    _by_name: dict[str, PlanNode] = field(default_factory=dict, init=False, repr=False, compare=False)
    _offering: Counter[int] = field(init=False, repr=False, compare=False)  # nodes by usable slots

    def __post_init__(self) -> None:
        for node in self.nodes:
            if node.name in self._by_name:
                raise UserError(f"node {node.name!r} is named twice; give every node its own name.")
            self._by_name[node.name] = node
        sound = frozenset(node.name for node in self.nodes if not node.lost and not node.bad_slots)
        object.__setattr__(self, "sound", sound)
        unit = max((node.slots for node in self.nodes), default=1) if self.whole_nodes else 1
        object.__setattr__(self, "unit", unit)
        offering = Counter(len(self.offered(node)) for node in self.nodes)
        object.__setattr__(self, "_offering", offering)
        object.__setattr__(self, "capacity", sum(slots * nodes for slots, nodes in offering.items()))

    def node(self, name: str) -> PlanNode:
        if name not in self._by_name:
            known = ", ".join(list(self._by_name)[:6]) + (", ..." if len(self._by_name) > 6 else "")
            raise UserError(f"there is no node {name!r}; the cluster has {known}.")
        return self._by_name[name]

    def offered(self, node: PlanNode) -> list[int]:
        """The slots a plan may use: all that are good, or in whole-node mode all or none."""
        good = node.usable()
        return [] if self.whole_nodes and len(good) < self.unit else good

    def room(self, slots: int) -> int:
        """For how many workers of so many slots, each on one node."""
        return sum(offered // slots * nodes for offered, nodes in self._offering.items())

    def is_usable(self, place: SlotPlace) -> bool:
        node = self._by_name.get(place.node)
        if node is None or node.lost or not 0 <= place.slot < node.slots:
            return False
        return not node.bad_slots if self.whole_nodes else place.slot not in node.bad_slots

    def failures_per_s(self) -> float:
        """How often an event comes: all living nodes, in use or not."""
        per_1000_days = sum(
            self.failures_per_1000_node_days
            if node.failures_per_1000_days is None
            else node.failures_per_1000_days
            for node in self.nodes
            if not node.lost
        )
        return per_1000_days / 1000 / DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Who sits where: per task its places in worker order (replica, stage, shard), None where one is missing.

    A task that re-routes around a dead worker keeps its shape and has a hole. `shapes` may be left out for
    tasks whose curve knows the best shape of as many workers.
    """

    places: Mapping[str, Sequence[SlotPlace | None]] = field(default_factory=dict)
    shapes: Mapping[str, ParallelShape] = field(default_factory=dict)

    def of(self, task: str) -> Sequence[SlotPlace | None]:
        return self.places.get(task, ())

    def workers(self, task: str) -> int:
        return sum(place is not None for place in self.of(task))
