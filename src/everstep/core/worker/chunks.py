"""Sharded states: the chunks that this worker holds, who else holds them, and what travels between holders.

    update of step 7    every holder of a chunk updates it; WEIGHTS from its owner to those who do not hold it
    a new holder        FILL from the owner, the state of the chunk after step 6 or 7; it must be there before
                        the new holder's next update

A chunk's state is that after the last step that this worker has updated. A new holder may be given one that
is a step ahead: then it has no update to make in the step it is in.
"""

from __future__ import annotations

from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import StepState, UpdateState
from everstep.protocol.events import ChunksFilled
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.work import AdoptWeights, LoadFill, ReleaseChunks, Resume, Send, Update, Wait, WorkItem


class Chunks:
    def __init__(self, mail: Mailbox, rules: TaskRules) -> None:
        self.mail, self.rules, self.me = mail, rules, mail.me
        self.kept: dict[int, int] = {}  # chunk -> the step after which its state is
        self._ordered: tuple[tuple[int, int, int], ...] = ()  # chunk, replica, its first step as a holder
        self._fills: list[tuple[int, int, int]] = []  # of these, those still to be sent

    # -------------------------------------------------------------- the map

    def holders(self, step: int) -> tuple[tuple[int, ...], ...]:
        """By chunk, the owner first."""
        return self.mail.order.members_at(step).holders[self.me.stage]

    def held(self, step: int) -> list[int]:
        return [chunk for chunk, row in enumerate(self.holders(step)) if self.me.replica in row]

    def owned(self, step: int) -> tuple[int, ...]:
        return tuple(c for c, row in enumerate(self.holders(step)) if row and row[0] == self.me.replica)

    def missing(self, step: int) -> list[int]:
        """The chunks of which it should have the state, and has not."""
        return [chunk for chunk in self.held(step) if chunk not in self.kept]

    # -------------------------------------------------------------- orders and states

    def obey(self, order: Resume) -> None:
        self._ordered, self._fills = order.fills, list(order.fills)

    def loaded(self, state_step: int) -> None:
        """A kept state was loaded: every chunk of this worker is here."""
        self.kept = dict.fromkeys(self.held(state_step + 1), state_step)

    def forget_all(self) -> None:
        self.kept, self._ordered, self._fills = {}, (), []

    def entered(self, step: int) -> None:
        """What others hold from this step on is let go."""
        held = set(self.held(step))
        if gone := tuple(sorted(self.kept.keys() - held)):
            self.kept = {chunk: at for chunk, at in self.kept.items() if chunk in held}
            self.mail.commands.append(ReleaseChunks(gone))

    # -------------------------------------------------------------- states for new holders

    def send_fills(self) -> None:
        """As soon as the state is that of the step before the new holder's first."""
        for fill in list(self._fills):
            chunk, replica, first = fill
            if (at := self.kept.get(chunk)) is not None and at >= first - 1:
                self._fills.remove(fill)
                self._send_fill(chunk, at, replica)

    def _send_fill(self, chunk: int, at: int, replica: int) -> None:
        """It may be for a worker that is a member from the next step on."""
        parcel = self.mail.name(ParcelKind.FILL, at, self.me.stage, owner=chunk)
        self.mail.commands.append(Send(parcel, replica, self.me.stage))

    def wants(self, fill: Parcel, step: int) -> bool:
        return fill.owner not in self.kept and fill.step >= step - 1

    def next_fill(self, step: int) -> LoadFill | None:
        """A state that is here and can be taken over in this step."""
        found = [p for p in self.mail.box if p.what is ParcelKind.FILL and step - 1 <= p.step <= step]
        held = set(self.held(step)) if found else set()
        return next((LoadFill(p) for p in found if p.owner in held and p.owner not in self.kept), None)

    def filled(self, item: LoadFill, now: StepState) -> None:
        self.kept[item.fill.owner] = item.fill.step
        for parcel in [p for p in self.mail.box if p.what is ParcelKind.FILL and p.owner == item.fill.owner]:
            self.mail.use(parcel)
        if not self.missing(now.step):
            self.mail.commands.append(
                ChunksFilled(worker=self.me, incarnation=self.mail.incarnation, step=now.step)
            )

    # -------------------------------------------------------------- the update

    def next(self, now: StepState, scale: float | None) -> WorkItem:
        """Of a step that is sealed, and whose norm is known."""
        if now.update is not UpdateState.SHARED:
            if lacking := self.missing(now.step):
                return Wait(f"the state of chunk {lacking[0]} after step {now.step - 1}")
            due = tuple(c for c in self.held(now.step) if self.kept[c] == now.step - 1)
            return Update(now.step, scale, keep=False, chunks=due)
        held = set(self.held(now.step))
        wanted = [self._weights(now.step, c) for c in range(self.rules.chunks) if c not in held]
        if lacking_weights := [parcel for parcel in wanted if parcel not in self.mail.box]:
            return Wait(str(lacking_weights[0]))
        return AdoptWeights(now.step, tuple(wanted))

    def updated(self, task: Update) -> None:
        for chunk in task.chunks:
            self.kept[chunk] = task.step
        for peer in self.mail.other_peers(task.step):
            self.give(task.step, peer)

    def give(self, step: int, peer: Worker) -> None:
        """The weights of the chunks that this worker owns, to a peer that does not hold them."""
        holders = self.holders(step)
        for chunk in self.owned(step):
            if peer.replica not in holders[chunk]:
                self.mail.send(self._weights(step, chunk), peer)

    def resend(self, now: StepState, before: StepState | None, peer: Worker) -> None:
        """The connection to this peer was lost for a while."""
        shared = [
            s for s in (before, now) if s is not None and (s.is_final or s.update is UpdateState.SHARED)
        ]
        if shared:  # a newer update was sealed, so every peer has computed with the weights of the older one
            self.give(shared[-1].step, peer)
        for fill in self._ordered:
            if fill[1] == peer.replica and fill not in self._fills:
                self._fills.append(fill)

    def _weights(self, step: int, chunk: int) -> Parcel:
        return self.mail.name(ParcelKind.WEIGHTS, step, self.me.stage, owner=chunk)
