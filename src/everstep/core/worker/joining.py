"""How a worker comes by its state: the joiner's side, and that of the peer that feeds it.

    a member (Feeder)                          a joiner (Joiner)
    Snapshot, the state after step 7   ──────► its state is that after step 7
    FEED of step 8, its sum            ──────► ApplyFeed: after step 8
    FEED of step 9                     ──────► ApplyFeed: after step 9; let in at step 10, it is a member

Training continues meanwhile. A worker that loads a kept state is a member at once.

A joiner is given the state after a step only once the step is sealed. It has the state and not the sum: if it
entered while a peer still lacked the sum, and every holder died, no worker could give that peer the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.step_state import StepState
from everstep.protocol.events import StateCopied
from everstep.protocol.lifecycle import move
from everstep.protocol.messages import AWAITS_STATE
from everstep.protocol.parcels import Parcel, ParcelKind, StateTransfer
from everstep.protocol.work import ApplyFeed, Resume, Send, Snapshot, Wait, WorkItem


class WorkerLife(StrEnum):
    EMPTY = "empty"  # without a state
    FOLLOWING = "following"  # it has a peer's state, and follows every step
    MEMBER = "member"  # it takes part


WORKER: Mapping[WorkerLife, frozenset[WorkerLife]] = {
    WorkerLife.EMPTY: frozenset({WorkerLife.FOLLOWING, WorkerLife.MEMBER}),
    WorkerLife.FOLLOWING: frozenset({WorkerLife.MEMBER, WorkerLife.FOLLOWING}),  # FOLLOWING: a newer state
    WorkerLife.MEMBER: frozenset({WorkerLife.EMPTY, WorkerLife.MEMBER}),  # EMPTY: its restore failed
}


class FrameUse(StrEnum):
    """What the shell does with a frame of a state."""

    DROP = "drop"
    BEGIN = "begin"  # forget the frames of earlier transfers, and keep this one
    ADD = "add"


class Joiner:
    """Where this worker's state is, and when it takes part."""

    def __init__(self, mail: Mailbox) -> None:
        self.mail, self.me = mail, mail.me
        self.life = WorkerLife.EMPTY
        self.newest: StateTransfer | None = None  # the newest transfer of which a frame has arrived
        self.loaded: StateTransfer | None = None
        self.state_step: int | None = None  # while following: the step its state has reached
        self.enter_at: int | None = None

    def _to(self, life: WorkerLife) -> None:
        self.life = move(WORKER, self.life, life, f"worker {self.me}")

    def take_state(self, transfer: StateTransfer) -> FrameUse:
        """A frame of a state is here. Frames of an earlier transfer may come late, between those of the one
        that counts; a state is made of one transfer's frames only.
        """
        if self.life is WorkerLife.MEMBER or transfer.incarnation != self.mail.incarnation:
            return FrameUse.DROP
        if transfer == self.newest:
            return FrameUse.DROP if transfer == self.loaded else FrameUse.ADD
        if self.newest is not None and transfer < self.newest:
            return FrameUse.DROP
        self.newest = transfer
        return FrameUse.BEGIN

    def may_load(self, transfer: StateTransfer) -> bool:
        """Does a state that is whole still count? Its parts may have come long ago, on other shards."""
        is_newest = transfer == self.newest and transfer != self.loaded
        return self.life is not WorkerLife.MEMBER and is_newest

    def state_arrived(self, transfer: StateTransfer) -> None:
        """All of a transfer that counts is here and loaded."""
        self._to(WorkerLife.FOLLOWING)
        self.loaded, self.state_step = transfer, transfer.state_step
        self.mail.commands.append(
            StateCopied(
                worker=self.me,
                incarnation=self.mail.incarnation,
                transfer=transfer.number,
                state_step=transfer.state_step,
            )
        )

    def let_in(self, order: Resume) -> None:
        """The order says from which step on this worker is a member, if it is."""
        first = [m.from_step for m in order.members if self.me.replica in m.live[self.me.stage]]
        self.enter_at = first[0] if first else None

    def next(self) -> WorkItem | None:
        """What a joiner does; None: its state is that of the step before it is let in."""
        if self.state_step is None:
            return Wait(AWAITS_STATE)
        if self.state_step + 1 == self.enter_at:
            return None
        feed = Parcel(ParcelKind.FEED, 0, self.state_step + 1, self.me.stage)
        return ApplyFeed(feed.step, self.mail.box[feed], feed) if feed in self.mail.box else Wait(str(feed))

    def applied(self, task: ApplyFeed) -> None:
        self.state_step = task.step
        self.mail.use(task.feed)

    def enter(self) -> int:
        """Become a member; the step that it enters."""
        assert self.enter_at is not None
        self._to(WorkerLife.MEMBER)
        step = self.enter_at
        for parcel in [p for p in self.mail.box if p.what is ParcelKind.FEED]:
            self.mail.use(parcel)
        self.mail.drop_stale(0)
        self.mail.drop(lambda parcel: parcel.step < step and parcel.what is not ParcelKind.FILL)
        return step

    def restore(self) -> None:
        """The order has this worker load a kept state: it is a member, whatever it was."""
        self._to(WorkerLife.MEMBER)
        self.state_step = self.enter_at = self.loaded = None

    def restore_failed(self) -> None:
        """As new: what the next order says to load may be there."""
        self._to(WorkerLife.EMPTY)


@dataclass(frozen=True, slots=True)
class FedJoiner:
    incarnation: int
    transfer: int  # the number of the copy that was ordered


class Feeder:
    """The joiners of its stage that this member feeds, by their replica."""

    def __init__(self, mail: Mailbox) -> None:
        self.mail, self.me = mail, mail.me
        self.joiners: dict[int, FedJoiner] = {}  # those it was ever ordered to feed
        self.feeds: dict[int, int | None] = {}  # -> the last step it needs, where that is known
        self.snapshots_due: list[int] = []

    def copy_to(self, joiner: int, incarnation: int, transfer: int) -> None:
        """Start feeding a joining peer of this stage: a snapshot first, then every further step."""
        self.joiners[joiner] = FedJoiner(incarnation, transfer)
        self.copy_again(joiner)

    def copy_again(self, joiner: int) -> None:
        """Feeds may be lost: again from a snapshot."""
        self.feeds.pop(joiner, None)
        if joiner not in self.snapshots_due:
            self.snapshots_due.append(joiner)

    def stop(self, joiner: int) -> None:
        """The joiner is gone."""
        self.feeds.pop(joiner, None)
        self.snapshots_due = [replica for replica in self.snapshots_due if replica != joiner]

    def stop_all(self) -> None:
        self.snapshots_due.clear()

    def obey(self, order: Resume) -> None:
        """Whom to feed from now on, and up to which step."""
        self.snapshots_due = [replica for replica in self.snapshots_due if replica in order.feeds]
        known = self.joiners.keys() - set(self.snapshots_due)  # without a snapshot, a feed is of no use
        self.feeds = {replica: last for replica, last in order.feeds.items() if replica in known}

    def next(self, state_step: int) -> Snapshot | None:
        if not self.snapshots_due:
            return None
        joiner = self.snapshots_due[0]
        fed = self.joiners[joiner]
        return Snapshot(joiner, StateTransfer(fed.transfer, state_step, self.me.replica, fed.incarnation))

    def snapshot_sent(self, joiner: int, before: StepState | None) -> None:
        self.snapshots_due.remove(joiner)
        self.feeds[joiner] = None
        if before is not None:
            before.fed.add(joiner)  # the snapshot has it

    def feed(self, state: StepState, *, is_over: bool) -> None:
        """Send a final step to every joiner that follows. `is_over`: what a feed holds is gone."""
        for joiner, last in list(self.feeds.items()):
            if joiner not in state.fed and (last is None or state.step <= last):
                if is_over:  # again from a snapshot
                    self.copy_again(joiner)
                    continue
                state.fed.add(joiner)
                feed = Parcel(ParcelKind.FEED, 0, state.step, self.me.stage)
                self.mail.commands.append(Send(feed, joiner, self.me.stage, state.scale))
