"""What a worker has received and not used, what it has sent and may have to send again, and its commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from everstep.protocol.events import Event
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.routes import Routes
from everstep.protocol.work import Command, Facts, Forget, Resume, Send


class Mailbox:
    """Names only. The shell keeps the payloads, and frees them on the command `Forget`."""

    def __init__(self, me: Worker, *, incarnation: int) -> None:
        self.me, self.incarnation = me, incarnation
        self.order = Resume(epoch=0, attempts=((0, 0),), step=1)  # the last one this worker was given
        self.box: dict[Parcel, Facts] = {}  # parcels here and not yet used, with their small facts
        self.outbox: dict[Parcel, int] = {}  # boundary parcels of open steps -> replica they went to
        self.commands: list[Command | Event] = []  # an event is reported
        self._routes: tuple[Resume, dict[int, Routes]] = (self.order, {})  # of an order, by row of members

    def name(
        self,
        what: ParcelKind,
        step: int,
        stage: int,
        microbatch: Microbatch | None = None,
        *,
        round: int = 0,
        sender: int = -1,
        owner: int = -1,
    ) -> Parcel:
        """A parcel of the step's current attempt."""
        return Parcel(what, self.order.attempt(step), step, stage, microbatch, round, sender, owner)

    def send(self, parcel: Parcel, to: Worker, value: Facts = None) -> None:
        """Only members get parcels."""
        if to.replica in self.order.members_at(parcel.step).live[to.stage]:
            self.commands.append(Send(parcel, to.replica, to.stage, value))

    def post(self, parcel: Parcel) -> None:
        """Send a boundary parcel to its host and keep it: the host may die."""
        assert parcel.microbatch is not None
        host = self.order.host(parcel.step, parcel.microbatch, parcel.stage)
        self.outbox[parcel] = host
        self.send(parcel, Worker(host, parcel.stage))

    def redirect(self) -> None:
        """Hosts have changed: what went to another one goes to the new one, too. If the update of a step is
        undone, all of that step goes again: a host that was a step ahead has refused what it needs now.
        """
        for parcel, sent_to in list(self.outbox.items()):
            assert parcel.microbatch is not None
            is_other = self.order.host(parcel.step, parcel.microbatch, parcel.stage) != sent_to
            if is_other or parcel.step == self.order.rewind:
                self.post(parcel)

    def repost(self, peer: Worker) -> None:
        """The connection to this peer was lost for a while."""
        for parcel, replica in list(self.outbox.items()):
            if Worker(replica, parcel.stage) == peer:
                self.send(parcel, peer)

    def use(self, parcel: Parcel) -> None:
        """A received parcel is not needed again."""
        if parcel in self.box:
            del self.box[parcel]
            self._forget((parcel,))

    def drop(self, is_over: Callable[[Parcel], bool]) -> None:
        """Forget parcels, received or sent. A feed is final whatever the attempt; it is only ever used."""
        received = [p for p in self.box if is_over(p) and p.what is not ParcelKind.FEED]
        sent = [p for p in self.outbox if is_over(p)]
        for parcel in received:
            del self.box[parcel]
        for parcel in sent:
            del self.outbox[parcel]
        self._forget((*received, *sent))

    def drop_sent(self, step: int) -> None:
        over = tuple(parcel for parcel in self.outbox if parcel.step == step)
        for parcel in over:
            del self.outbox[parcel]
        self._forget(over)

    def _forget(self, parcels: tuple[Parcel, ...]) -> None:
        if parcels:
            self.commands.append(Forget(parcels))

    def drop_stale(self, from_step: int) -> None:
        """Forget every parcel of these steps that belongs to an attempt before this one."""
        self.drop(lambda p: p.step >= from_step and p.attempt < self.order.attempt(p.step))

    def known_shares(self) -> list[tuple[int, int, float]]:
        """Step, stage, share of the norm: what other stages have announced, of the newest attempt known."""
        news = sorted((p for p in self.box if p.what is ParcelKind.NEWS), key=lambda p: p.attempt)
        found = {
            (p.step, p.stage): float(self.box[p]) for p in news if p.attempt >= self.order.attempt(p.step)
        }
        return [(step, stage, share) for (step, stage), share in sorted(found.items())]

    # -------------------------------------------------------------- peers

    def peers(self, step: int) -> tuple[int, ...]:
        """The replicas of this worker's stage in a step, itself among them."""
        return self.order.members_at(step).live[self.me.stage]

    def routes(self, step: int) -> Routes:
        """Which way the reduce of a step goes. All peers in a round find the same: where a worker is does not
        change.
        """
        order, row = self.order, self.order.members_at(step)
        if self._routes[0] is not order:
            self._routes = (order, {})
        found = self._routes[1]
        if row.from_step not in found:
            found[row.from_step] = Routes.of(self.me, row.live[self.me.stage], order.book)
        return found[row.from_step]

    def other_peers(self, step: int) -> list[Worker]:
        return [Worker(k, self.me.stage) for k in self.peers(step) if k != self.me.replica]

    def is_first_peer(self, step: int) -> bool:
        """The first peer reports for the whole stage."""
        return self.peers(step)[0] == self.me.replica

    def round(self, step: int) -> int:
        return self.order.members_at(step).rounds[self.me.stage]

    def listeners(self, step: int) -> Iterator[Worker]:
        """The workers of other stages that this one sends news to: those of its own replica, and a share of
        those whose replica has no worker in this stage.
        """
        live = self.order.members_at(step).live
        mine = live[self.me.stage]
        for stage, replicas in enumerate(live):
            for replica in replicas if stage != self.me.stage else ():
                sender = replica if replica in mine else mine[replica % len(mine)]
                if sender == self.me.replica:
                    yield Worker(replica, stage)
