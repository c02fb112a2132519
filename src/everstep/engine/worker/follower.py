"""A shard that follows: it runs the worker's loop, with the leader's events instead of its own.

Its parcels and states arrive on its own links, from the same shard of the other workers. It says what is here
and waits until the leader says that it counts.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from everstep.core.worker.slices import SMALL, SlicesInHand
from everstep.engine.worker.leader import Contents
from everstep.engine.worker.worker_loop import WorkerLoop
from everstep.errors import InternalError
from everstep.net import frames
from everstep.net.envelope import FrameKind
from everstep.net.transfers import ArrivingState
from everstep.protocol import shard_messages as sh
from everstep.protocol import work
from everstep.protocol.parcels import Parcel
from everstep.protocol.work import LinkBroke, LinkOpened

FollowerItem = frames.Incoming | LinkBroke | LinkOpened | BaseException | sh.ToShard


class Follower:
    def __init__(
        self,
        loop: WorkerLoop,
        inbox: queue.SimpleQueue[FollowerItem],
        say: Callable[[sh.FromShard], None],
    ) -> None:
        self.loop, self.inbox, self._say = loop, inbox, say
        self.slices = SlicesInHand()
        self._arriving = ArrivingState(self.slices.use)

    def run(self) -> None:
        """Until the leader leaves."""
        while True:
            item = self.inbox.get()
            match item:
                case frames.Incoming():
                    self._arrived(item)
                case LinkBroke(address=(host, port)) | LinkOpened(address=(host, port)):
                    self._say(sh.ShardLink(event=type(item)((host, port - self.loop.shard))))
                case sh.ShardTakes(event=event, now=now):
                    self.loop.hear(event, now)
                case sh.ShardReceives(parcel=parcel, value=value):
                    self._receive(parcel, value)
                case sh.ShardDrops(parcel=parcel):
                    self.slices.take(parcel)
                case sh.ShardLoads(transfer=transfer):
                    self.loop.load_state(transfer, self.slices.take_state(transfer))
                case sh.ShardLooks():
                    if self.loop.control.may_leave(self._look()):
                        return
                case BaseException():
                    raise item

    def _look(self) -> work.WorkItem:
        state, before = self.loop.state, self.loop.state.now.step
        item = self.loop.turn()
        if state.now.step != before:
            self.slices.forget_before(state.now.step - 1, state.mail.order.attempt)
        return item

    def _arrived(self, frame: frames.Incoming) -> None:
        if frame.kind is FrameKind.STATE:
            if (found := self._arriving.take(frame)) is not None:
                transfer, state = found
                self._say(self.slices.state_arrived(transfer, state))
            return
        contents = self.loop.opened(frame)
        if contents is not None:
            assert frame.parcel is not None
            self._say(self.slices.arrived(frame.parcel, contents))

    def _receive(self, parcel: Parcel, value: object) -> None:
        contents = self.slices.take(parcel)
        if contents is None:
            if parcel.what not in SMALL:
                raise InternalError(f"{parcel} counts for the leader, and its slice is not here")
            contents = Contents(value)
        if not self.loop.accept(parcel, contents):
            raise InternalError(f"{parcel} counts for the leader of this worker and not for its shard")
