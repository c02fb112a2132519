"""The connections between the processes of a virtual cluster: one for each ordered pair, of each shard.

A connection is opened by the sender at its first message. One that breaks loses some of what was under way;
its sender notices, and what it does then is the real `core.worker.mending`. To connect to an address where
no process lives, or across a cut, fails in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.protocol import work
from everstep.protocol.ops import Worker
from everstep.protocol.work import LinkBroke, LinkOpened, PeerAddress
from tests.storms.network import VirtualLink
from tests.storms.scene import Scene
from tests.storms.shard_group import StateArrived, VirtualFollower
from tests.storms.truth import VirtualState
from tests.storms.virtual_worker import VirtualWorker, what_arrives

UNANSWERED_US = 20_000  # bytes unacknowledged for so long: the connection is given up
_OPENED = object()
ShardEnd = VirtualWorker | VirtualFollower


class Connections:
    """`take`: what arrives at a worker goes there. `slowness`: of a node's messages."""

    def __init__(
        self, scene: Scene, *, take: Callable[[VirtualWorker, Any], None], slowness: Callable[[int], int]
    ) -> None:
        self.scene, self.agenda, self.weather, self.network = (
            scene,
            scene.agenda,
            scene.weather,
            scene.network,
        )
        self.take, self._slowness = take, slowness
        self.living: dict[PeerAddress, VirtualWorker] = {}
        self.cuts: dict[tuple[PeerAddress, PeerAddress], int] = {}  # from, to: until when
        self.partitions: list[Callable[[ShardEnd, VirtualWorker, VirtualLink], None]] = []
        self.cut_nodes: set[int] = set()  # their data network is dead
        self.dark: set[PeerAddress] = set()  # of processes whose machines lost power

    def end(self, process: VirtualWorker, *, silently: bool) -> None:
        """It is gone. Its peers notice, at once or, where a whole machine went, when nothing answers."""
        del self.living[process.address]
        if silently:
            self.dark.add(process.address)
        for end in ends(process):
            for link in end.links.values():
                self.network.lose_tail(link)
        if process.group is not None:
            process.group.close()
        for other in [end for one in self.living.values() for end in ends(one)]:
            link_ = other.links.pop(process.address, None)
            if link_ is not None:
                link_.close()
                notice = UNANSWERED_US if silently else self.weather.spread(self.scene.spec.weather.hop_us)
                self.agenda.after(notice, self._broken, other, process.address)

    def end_follower(self, end: VirtualFollower) -> None:
        """One shard dies; what the others make of it is theirs to decide."""
        for link in end.links.values():
            self.network.lose_tail(link)
        end.end()

    # -------------------------------------------------------------- what is sent

    def send(self, process: VirtualWorker, command: work.Send) -> None:
        address = process.control.book.get(Worker(command.replica, command.stage))
        if address is None:
            return
        item = (command.parcel, command.value, process.outgoing(command.parcel))
        link = process.links.get(address) or self._connect(process, address)
        if link is not None:
            self.network.send(link, item, self._hop(process.node, link.node))

    def send_slice(self, end: VirtualFollower, command: work.Send) -> None:
        """A follower's slice: its name and its facts."""
        address = end.control.book.get(Worker(command.replica, command.stage))
        link = None if address is None else end.links.get(address) or self._connect(end, address)
        if link is not None:
            item = (command.parcel, command.value, None)
            self.network.send(link, item, self._hop(end.node, link.node))

    def send_state_slice(self, end: VirtualFollower, task: work.Snapshot) -> None:
        self.send_state(end, task, VirtualState(0, 0))

    def send_state(self, process: ShardEnd, task: work.Snapshot, state: VirtualState) -> None:
        address = process.control.book.get(Worker(task.joiner, process.me.stage))
        link = None if address is None else process.links.get(address) or self._connect(process, address)
        if link is not None:
            takes = self.scene.spec.weather.copy_us or 4 * self.scene.spec.weather.hop_us
            for name, value in state._asdict().items():
                self.network.send(link, (None, None, StateArrived(task.transfer, name, value)), takes)

    # -------------------------------------------------------------- opened, broken

    def _connect(self, process: ShardEnd, address: PeerAddress) -> VirtualLink | None:
        living = self.living.get(address)
        there = None if living is None else same_shard(living, process)
        until = self.cuts.get((process.address, address), 0)
        is_cut = living is not None and self.is_cut(process.node, living.node)
        if living is None or there is None or is_cut or self.agenda.now_us < until:
            silent = is_cut or address in self.dark  # a machine without power refuses nothing
            delay = UNANSWERED_US if silent else self.weather.spread(self.scene.spec.weather.hop_us)
            self.agenda.after(delay, self._broken, process, address)
            return None
        link = VirtualLink(lambda item: self._arrive(there, item), there.node)
        process.links[address] = link
        for hold in self.partitions:
            hold(process, living, link)
        self.network.send(link, (_OPENED, process, address), self._hop(process.node, there.node))
        return link

    def _arrive(self, there: ShardEnd, item: tuple[Any, Any, Any]) -> None:
        parcel, facts, payload = item
        if parcel is _OPENED:
            if facts.alive:
                self._give(facts, LinkOpened(payload))
        else:
            self._give(there, payload if parcel is None else (parcel, facts, what_arrives(payload)))

    def _give(self, end: ShardEnd, item: Any) -> None:
        if isinstance(end, VirtualFollower):
            end.take(item)
        else:
            self.take(end, item)

    def _broken(self, process: ShardEnd, address: PeerAddress) -> None:
        if process.alive:
            self._give(process, LinkBroke(address))

    def break_link(self, process: ShardEnd, address: PeerAddress, span_us: int) -> None:
        """It breaks now, and for a while no other one can be opened."""
        link = process.links.pop(address)
        self.network.lose_tail(link)
        self.cuts[process.address, address] = self.agenda.now_us + span_us
        self.agenda.after(self.weather.spread(self.scene.spec.weather.hop_us), self._broken, process, address)

    def is_cut(self, one: int, other: int) -> bool:
        return one != other and not self.cut_nodes.isdisjoint((one, other))

    def cut_node(self, number: int) -> None:
        """From now on nothing comes to this node or from it, except by its agent's line."""
        self.cut_nodes.add(number)
        for process in [end for one in self.living.values() for end in ends(one)]:
            for address, link in list(process.links.items()):
                if self.is_cut(process.node, link.node):
                    self.swallow(process, address)

    def swallow(self, process: ShardEnd, address: PeerAddress) -> None:
        """Nothing arrives on this connection any more, and nothing comes back that would say so."""
        link = process.links[address]
        link.close()
        if link_gives_up(link):
            self.agenda.after(UNANSWERED_US, self._give_up, process, address, link)

    def _give_up(self, process: ShardEnd, address: PeerAddress, link: VirtualLink) -> None:
        if process.alive and process.links.get(address) is link:
            del process.links[address]
            self._give(process, LinkBroke(address))

    def _hop(self, one: int, other: int) -> int:
        return self.scene.spec.weather.hop_us * max(self._slowness(one), self._slowness(other))


def ends(process: VirtualWorker) -> tuple[ShardEnd, ...]:
    """Whatever of a worker has connections: its shards."""
    return (
        (process,) if process.group is None else (process, *(f for f in process.group.followers if f.is_up))
    )


def same_shard(process: VirtualWorker, end: ShardEnd) -> ShardEnd | None:
    """The shard of this worker that another one's shard talks to."""
    if not isinstance(end, VirtualFollower) or process.group is None:
        return process
    found = process.group.followers[end.index - 1]
    return found if found.is_up else None


def link_gives_up(link: VirtualLink) -> bool:
    """Sockets have TCP_USER_TIMEOUT: a path that swallows everything is noticed, after a while."""
    return True
