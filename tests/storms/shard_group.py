"""The shards of a virtual worker: followers in lockstep with it, each with its own connections.

The first shard is the `VirtualWorker` itself. The others have the real worker state too: they are given what
the leader tells them (`protocol.shard_messages`), find their work items by themselves, and send their slice
of every parcel to the same shard of the other workers. Checked here: every shard finds the work item that the
leader found, and has its slice of whatever counts. Payloads are the leader's; a slice is its name and facts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from everstep.core.worker.control import KeepLinks, WorkerControl
from everstep.core.worker.joining import FrameUse
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.slices import SMALL, SliceCount, SlicesInHand
from everstep.core.worker.worker_state import WorkerState
from everstep.protocol import shard_messages as sh
from everstep.protocol import work
from everstep.protocol.messages import Sender
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import Parcel, StateTransfer
from everstep.protocol.work import LinkBroke, LinkOpened, PeerAddress
from tests.storms.checkers import Checkers, Violation
from tests.storms.network import MENDING, Network, VirtualLink
from tests.storms.truth import VirtualState

LOCAL_US = 20  # between two shards of a worker
IDLE = (work.Wait, work.Paused, work.Finished)


class StateArrived(NamedTuple):
    """One frame of a peer's state."""

    transfer: StateTransfer
    name: str
    value: int


class FollowerSaid(NamedTuple):
    shard: int
    message: sh.FromShard


class Leading(Protocol):
    """The worker, which is its first shard."""

    sender: Sender
    me: Worker
    incarnation: int
    node: int
    address: PeerAddress
    alive: bool
    worker_state: WorkerState
    checkers: Checkers


class SliceSender(Protocol):
    """What a follower needs of the processes around it."""

    network: Network

    def take(self, process: Any, item: Any) -> None: ...

    def send_slice(self, end: VirtualFollower, command: work.Send) -> None: ...

    def send_state_slice(self, end: VirtualFollower, task: work.Snapshot) -> None: ...


@dataclass(slots=True)
class FoundItem:
    """One work item, as the leader found it. `answer` once it is done."""

    task: Any
    done: bool = False
    answer: Any = None
    began: float = 0.0


class VirtualGroup:
    """As the leader sees it."""

    def __init__(self, leader: Leading, rules: TaskRules, count: int, around: SliceSender) -> None:
        self.leader, self.network, self.around = leader, around.network, around
        self.slices = SliceCount(count)
        self.followers = [VirtualFollower(self, rules, index) for index in range(1, count)]
        self.looks: dict[int, FoundItem] = {}
        self.num_looks = 0

    def _tell(self, message: sh.ToShard) -> None:
        for follower in self.followers:
            self.network.send(follower.down, message, LOCAL_US)

    # -------------------------------------------------------------- what the leader does

    def looks_for_work(self) -> None:
        self._tell(sh.ShardLooks())

    def arrived(self, item: tuple[Parcel, Any, Any]) -> tuple[Parcel, Any, Any] | None:
        """Its own slice of a parcel, which is returned if the parcel is whole."""
        parcel = item[0]
        if parcel.what in SMALL:
            return item
        return self.slices.take(parcel) if self.slices.own(parcel, item) else None

    def turned(self) -> None:
        """Its look, and the work item if there was one, are over."""
        state, most = self.leader.worker_state, self.leader.checkers.most_payloads
        self.slices.forget_before(state.now.step - 1, state.mail.order.attempt)
        if len(self.slices) > most or any(len(follower.slices) > most for follower in self.followers):
            raise Violation(
                f"no leak: the shards of {self.leader.me} keep {len(self.slices)} slices of parcels"
            )

    def found(self, task: work.WorkItem) -> None:
        """By the leader, in the look it has just announced."""
        self.num_looks += 1
        self.looks[self.num_looks] = FoundItem(task, done=isinstance(task, IDLE))
        for number in [n for n in self.looks if all(f.looked >= n for f in self.followers)]:
            del self.looks[number]

    def finished(self, answer: Any, began: float) -> None:
        """The work item of its last look."""
        look = self.looks[self.num_looks]
        look.done, look.answer, look.began = True, answer, began
        for follower in self.followers:
            follower.go_on()

    def takes(self, event: Any, now: float) -> None:
        self._tell(sh.ShardTakes(event=event, now=now))

    def decided(self, parcel: Parcel, facts: Any, *, wanted: bool) -> None:
        """What the leader made of a parcel that is whole."""
        value = facts if parcel.what in SMALL else None
        self._tell(sh.ShardReceives(parcel=parcel, value=value) if wanted else sh.ShardDrops(parcel=parcel))

    def loaded(self, transfer: StateTransfer) -> None:
        self._tell(sh.ShardLoads(transfer=transfer))

    def close(self) -> None:
        """Its processes are gone: the kernel ends the followers with the leader."""
        for follower in self.followers:
            follower.end()


class VirtualFollower:
    """A shard that follows."""

    def __init__(self, group: VirtualGroup, rules: TaskRules, index: int) -> None:
        leader = group.leader
        state = WorkerState(leader.me, rules, incarnation=leader.incarnation)
        self.control = WorkerControl(leader.sender, state, MENDING)
        self.group, self.leader, self.index = group, leader, index
        self.me, self.node, self.address = leader.me, leader.node, leader.address
        self.slices = SlicesInHand()
        self.links: dict[PeerAddress, VirtualLink] = {}
        self.inbox: deque[Any] = deque()
        self.looked = 0
        self.running: FoundItem | None = None
        self.is_up = True
        self._before = 0  # the step it was in when it last looked for work
        self._frames: set[str] = set()
        self.down = VirtualLink(self.take)
        self.up = VirtualLink(self._heard)

    @property
    def alive(self) -> bool:
        return self.is_up and self.leader.alive

    def end(self) -> None:
        self.is_up = False
        for link in (self.down, self.up):
            link.close()

    def take(self, item: Any) -> None:
        """From the leader, or from the same shard of another worker."""
        if self.alive:
            self.inbox.append(item)
            self.go_on()

    def go_on(self) -> None:
        """In the order in which things came; a work item that the leader has not done yet is waited for."""
        while self.alive:
            if self.running is not None:
                if not self.running.done:
                    return
                self._done(self.running)
            elif self.inbox:
                self._hear(self.inbox.popleft())
            else:
                return

    def _hear(self, item: Any) -> None:
        match item:
            case sh.ShardTakes(event=event, now=now):
                self._carry_out(self.control.handle(event, now))
                self._carry_out(self.control.take_actions())
            case sh.ShardReceives(parcel=parcel, value=value):
                self._receive(parcel, value)
            case sh.ShardDrops(parcel=parcel):
                self.slices.take(parcel)
            case sh.ShardLoads(transfer=transfer):
                self.slices.take_state(transfer)
                self.control.state.joiner.state_arrived(transfer)
                self._carry_out(self.control.take_actions())
            case sh.ShardLooks():
                self._look()
            case LinkBroke() | LinkOpened():
                self._say(sh.ShardLink(event=item))
            case StateArrived(transfer=transfer, name=name):
                self._state_arrived(transfer, name)
            case (parcel, facts, _):
                self._say(self.slices.arrived(parcel, (facts,)))

    def _look(self) -> None:
        self.looked += 1
        look = self.group.looks[self.looked]
        self._before = self.control.state.now.step
        task = self.control.state.next()
        self._carry_out(self.control.take_actions())
        if task != look.task:
            raise Violation(
                f"lockstep: shard {self.index} of {self.leader.me} finds {task}, its leader {look.task}"
            )
        if not isinstance(task, IDLE) and not self.control.may_leave(task):
            self.running = look
        else:
            self._turned()

    def _turned(self) -> None:
        if self.control.state.now.step != self._before:
            state = self.control.state
            self.slices.forget_before(state.now.step - 1, state.mail.order.attempt)

    def _done(self, look: FoundItem) -> None:
        self.running = None
        if isinstance(look.task, work.Snapshot):
            self.group.around.send_state_slice(self, look.task)
        self.control.finished(look.task, look.answer, began=look.began)
        self._carry_out(self.control.take_actions())
        self._turned()

    def _receive(self, parcel: Parcel, value: Any) -> None:
        found = self.slices.take(parcel)
        if found is None and parcel.what not in SMALL:
            raise Violation(f"lockstep: shard {self.index} of {self.leader.me} has no slice of {parcel}")
        facts = value if found is None else found[0]
        if not self.control.state.arrived(parcel, facts):
            raise Violation(
                f"lockstep: {parcel} counts for {self.leader.me} and not for its shard {self.index}"
            )
        self._carry_out(self.control.take_actions())

    def _state_arrived(self, transfer: StateTransfer, name: str) -> None:
        use = self.slices.use(transfer)
        if use is FrameUse.DROP:
            return
        self._frames = {name} if use is FrameUse.BEGIN else self._frames | {name}
        if len(self._frames) == len(VirtualState._fields):
            self._say(self.slices.state_arrived(transfer, name))

    # -------------------------------------------------------------- what it says and sends

    def _say(self, message: sh.FromShard) -> None:
        self.group.network.send(self.up, message, LOCAL_US)

    def _heard(self, message: sh.FromShard) -> None:
        self.group.around.take(self.leader, FollowerSaid(self.index, message))

    def _carry_out(self, actions: Any) -> None:
        for action in actions:
            if type(action) is work.Send and action.parcel.what not in SMALL:
                self.group.around.send_slice(self, action)
            elif type(action) is KeepLinks:
                for address in [a for a in self.links if a not in action.addresses]:
                    self.links.pop(address).close()
