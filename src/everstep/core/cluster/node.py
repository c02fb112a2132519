"""A node as the coordinator knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.core.cluster.node_states import ADMIN, LIVENESS, NodeAdmin, NodeLiveness, NodeState, shown
from everstep.core.faults.fitness import CheckRun
from everstep.core.faults.gray import ISOLATION, GrayRecord
from everstep.protocol.lifecycle import move
from everstep.protocol.messages import Dispatch, MemoryAddress, PairMeasured


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePair:
    """The network between a node and a peer; both keep it until they are judged."""

    peer: str
    key: str
    asked_at: float
    measures: bool  # this one, else the peer
    beside_workers: bool  # one of them has workers
    found: PairMeasured | None = None


@dataclass(slots=True, kw_only=True)
class Node:
    """`Nodes` changes its states, `Orders` its numbers, `Training` and `MemoryCopies` the tasks it knows."""

    name: str
    boot: str
    slots: int
    host: str
    admin: NodeAdmin = NodeAdmin.UP
    admin_because: str = "it joined"
    admin_since: float = 0.0
    drained_by: str = ""  # the person whose word it is; empty: nobody's, or it is not drained
    measured_because: str = ""  # why its network is checked before it gets workers
    liveness: NodeLiveness = NodeLiveness.HEARD
    liveness_because: str = "it joined"
    liveness_since: float = 0.0
    last_heard_at: float | None = None  # before it last fell silent
    heard: int = 0  # the last report of this boot
    sent: int = 0  # the last order to this boot
    pending: list[Dispatch] = field(default_factory=list)  # orders it may not have carried out
    opened: set[str] = field(default_factory=set)  # tasks it knows of
    memory_open: set[str] = field(default_factory=set)  # tasks whose copies it may keep
    gray: GrayRecord = field(default_factory=lambda: GrayRecord(since=0.0))  # over weeks, bounded
    checked: list[CheckRun] = field(default_factory=list)  # the last one of each week
    check_asked_at: float | None = None  # before it is readmitted
    slots_asked_at: float | None = None  # the same, of its isolated slots
    pair_port: int = 0  # where peers measure the network to it
    pairs: list[NodePair] = field(default_factory=list)  # since its network is checked; bounded
    pairs_at: float | None = None  # when they are looked at next
    rates: dict[str, float] = field(default_factory=dict)  # MB per second to those peers, as last measured
    lost_slots: set[int] = field(default_factory=set)  # held by processes that outlive SIGKILL
    isolated_slots: dict[int, float] = field(default_factory=dict)  # evidence named them; since when
    slot_isolations: dict[int, list[float]] = field(default_factory=dict)  # when, of each slot
    accused: dict[str, float] = field(default_factory=dict)  # by task: when its program last blamed hardware
    memory_port: int = 0
    unknown: dict[str, int] = field(default_factory=dict)  # by kind: reports of kinds that are not known
    alone_s: float = 0.0  # so long its workers outlive its agent
    rack: str = ""  # empty: not known
    cannot_compile: str = ""  # why; empty: it can, or not known
    agent_gone: bool = False  # since it is silent: its system has closed the agent's connection
    leaves_at: float | None = None  # announced: a spot notice
    drain_at: float | None = None  # until then its workers train on

    @property
    def state(self) -> NodeState:
        """The one word that is shown."""
        return shown(self.admin, self.liveness)

    @property
    def because(self) -> str:
        return self.liveness_because if self._shows_liveness else self.admin_because

    @property
    def since(self) -> float:
        return self.liveness_since if self._shows_liveness else self.admin_since

    @property
    def _shows_liveness(self) -> bool:
        """Of a node that is up the last change is shown."""
        if self.state is NodeState.UP:
            return self.liveness_since >= self.admin_since
        return self.liveness is not NodeLiveness.HEARD

    @property
    def isolations(self) -> list[float]:
        """When it was isolated, in the last weeks."""
        return self.gray.events.get(ISOLATION, [])

    @property
    def unusable(self) -> set[int]:
        """The slots that get no workers."""
        return self.lost_slots | self.isolated_slots.keys()

    @property
    def reachable(self) -> bool:
        """Not given up: its workers count."""
        return self.liveness in (NodeLiveness.HEARD, NodeLiveness.SILENT)

    @property
    def memory(self) -> MemoryAddress:
        return MemoryAddress(self.name, self.host, self.memory_port)

    def set_admin(self, new: NodeAdmin, because: str, now: float) -> None:
        self.admin = move(ADMIN, self.admin, new, f"node {self.name}")
        self.admin_because, self.admin_since, self.drained_by = because, now, ""

    def set_liveness(self, new: NodeLiveness, because: str, now: float) -> None:
        self.liveness = move(LIVENESS, self.liveness, new, f"node {self.name}")
        self.liveness_because, self.liveness_since = because, now
