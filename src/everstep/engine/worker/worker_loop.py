"""A worker's loop: runs its tasks with torch, keeps its tensors, sends its parcels.

`WorkerControl` decides, in names; here the names get tensors. One thread computes and asks for decisions;
parcels and orders reach it through one queue, so nothing here needs a lock.

    links' I/O thread ──┐
                        ├──► inbox ──► run(): state.next() ────► task ──► torch ──► control.finished()
    agent's thread  ────┘                                   └──► actions ──► links, agent
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from everstep.core.worker.control import KeepLinks, SendReport, ShellAction, WorkerAction, WorkerControl
from everstep.core.worker.slices import SMALL
from everstep.engine import device as devices
from everstep.engine.datasets.loading import Loader
from everstep.engine.stage.stage import Stage
from everstep.engine.state.optimizer import Updater
from everstep.engine.state.sharded import ShardedUpdater
from everstep.engine.telemetry.faults import parse_fault
from everstep.engine.telemetry.op_times import OpTimes
from everstep.engine.telemetry.recorder import WorkerRecorder
from everstep.engine.telemetry.signs import WorkerSigns
from everstep.engine.worker.leader import Contents, FollowerSays, ShardLeader
from everstep.engine.worker.ports import Ports
from everstep.engine.worker.work_items import WorkItems
from everstep.errors import PeerError, UserError
from everstep.log import warn
from everstep.net import frames, host_memory
from everstep.net.envelope import Envelope, FrameKind
from everstep.net.links import Address
from everstep.net.plane import MOST_LANES_AHEAD, DataPlane
from everstep.net.transfers import ArrivingState
from everstep.protocol import shard_messages as sh
from everstep.protocol import work
from everstep.protocol.actions import InterruptWorkers
from everstep.protocol.messages import SAVING, NotifyWorker, PlantFaults, TimePassed, WorkerOrder
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import Parcel, ParcelKind, StateTransfer
from everstep.protocol.work import LinkBroke, LinkOpened

# the last: the links failed
InboxItem = frames.Incoming | WorkerOrder | LinkBroke | LinkOpened | FollowerSays | BaseException


class WorkerLoop:
    def __init__(
        self,
        control: WorkerControl,
        build: Callable[[], tuple[Stage, Updater | ShardedUpdater]],
        *,
        ports: Ports,
        plane: DataPlane,
        signs: WorkerSigns,
        recorder: WorkerRecorder | None = None,
        loader: Loader | None = None,
        leader: ShardLeader | None = None,
    ) -> None:
        """`leader`: if this worker has shards and this is the first of them; the others are `Follower`s."""
        self.shard, self.leader = signs.shard, leader
        self.control, self.ports, self.plane, self.inbox = control, ports, plane, plane.inbox
        self.state, self.me = control.state, control.sender.worker
        self.recorder, self.signs = recorder, signs
        times = OpTimes(clock_ns=ports.clock_ns, completions=plane.completions, recorder=recorder)
        times.shows = lambda doing: signs.show(busy=True, doing=doing)
        self.work = WorkItems(
            control, build, ports=ports, plane=plane, signs=signs, times=times, loader=loader
        )
        self.tensors = self.work.tensors
        self._arriving = ArrivingState(self.state.joiner.take_state, self.work.place)

    # -------------------------------------------------------------- the loop

    def run(self) -> None:
        """Until it is asked to leave."""
        while True:
            while not self.inbox.empty():
                self._take(self.inbox.get())
            self._let_time_pass()
            if self.leader is not None:
                self.leader.tell(sh.ShardLooks())
            task = self.turn()
            if self.leader is not None:
                self.leader.slices.forget_before(self.state.now.step - 1, self.state.mail.order.attempt)
            if self.control.may_leave(task):
                self.show_saving()  # what its saver has in hand is written after this
                return
            if isinstance(task, work.Wait | work.Paused | work.Finished):
                self._wait()

    def turn(self) -> work.WorkItem:
        """Look for the next work item, and run it if there is one to run."""
        task = self.state.next()
        self._carry_out(self.control.take_actions())
        if self.control.may_leave(task):
            return task
        if isinstance(task, work.Wait | work.Paused | work.Finished):
            self.signs.show(
                busy=False, doing=task.missing if isinstance(task, work.Wait) else type(task).__name__
            )
            return task
        began = self.ports.clock_ns() / 1e9
        try:
            answer = self.work.do(task)
        except RuntimeError as error:
            if (sentence := devices.without_exact_kernel(error)) is None:
                raise
            raise UserError(sentence) from error
        self.control.finished(task, answer, began=began)
        self._carry_out(self.control.take_actions())
        return task

    def _wait(self) -> None:
        """For something to arrive, or for a moment that was put off to come."""
        due = self.control.due_at()
        within = None if due is None else max(0.0, due - self.ports.clock_ns() / 1e9)
        self.ports.states.bubble(begins=True)
        try:
            item = self.inbox.get(timeout=within)
        except queue.Empty:
            self._let_time_pass()
            return
        finally:
            self.ports.states.bubble(begins=False)
        self._take(item)

    def _let_time_pass(self) -> None:
        due, now = self.control.due_at(), self.ports.clock_ns() / 1e9
        if due is not None and due <= now:
            self._hear(TimePassed(), now)

    def _take(self, item: InboxItem) -> None:
        """One thing from the inbox."""
        if isinstance(item, frames.Incoming):
            self._arrived(item)
        elif isinstance(item, FollowerSays):
            self._hear_follower(item.shard, item.message)
        elif isinstance(item, BaseException):
            raise item
        else:
            self._hear(item, self.ports.clock_ns() / 1e9)
        self._carry_out(self.control.take_actions())

    def _hear(self, event: WorkerOrder | LinkBroke | LinkOpened | TimePassed, now: float) -> None:
        if self.leader is not None:
            self.leader.tell(sh.ShardTakes(event=event, now=now))
        self.hear(event, now)

    def hear(self, event: WorkerOrder | LinkBroke | LinkOpened | TimePassed, now: float) -> None:
        """An order, a broken link, or the time."""
        if isinstance(event, PlantFaults):
            self.signs.plant(list(map(parse_fault, event.faults)))
            return
        if isinstance(event, NotifyWorker) and isinstance(event.words, InterruptWorkers):
            self.plane.waits = False  # for lanes: from now on tcp bridges the time
            self.plane.drain()  # a ledger tells what is done, not what is launched
        self._carry_out(self.control.handle(event, now))
        self._carry_out(self.control.take_actions())

    def _hear_follower(self, shard: int, message: sh.FromShard) -> None:
        assert self.leader is not None
        match message:
            case sh.ParcelIsHere(parcel=parcel):
                if self.leader.slices.others(shard, parcel):
                    self.accept(parcel, self.leader.slices.take(parcel))
            case sh.StateIsHere(transfer=transfer):
                if self.leader.slices.others_state(shard, transfer) and self.state.joiner.may_load(transfer):
                    self.load_state(transfer, self.leader.slices.take_state(transfer))
            case sh.ShardLink(event=event):
                self._hear(event, self.ports.clock_ns() / 1e9)
            case sh.ShardReports() | sh.ShardRaised():
                pass  # for those that watch the processes

    def _arrived(self, frame: frames.Incoming) -> None:
        if frame.kind is FrameKind.STATE:
            self._state_arrived(frame)
            return
        contents = self.opened(frame)
        parcel = frame.parcel
        if contents is None or parcel is None:
            return
        if self.leader is None or parcel.what in SMALL:
            self.accept(parcel, contents)
        elif self.leader.slices.own(parcel, contents):
            self.accept(parcel, self.leader.slices.take(parcel))

    def opened(self, frame: frames.Incoming) -> Contents | None:
        try:
            tensors = self.plane.opened(frame)
        except PeerError as error:  # its owner died before it was opened, or it is broken: it did not come
            warn(f"{frame.parcel} was lost: {error}")
            return None
        return Contents(frame.envelope.value, tensors, frame.envelope.beside)

    def accept(self, parcel: Parcel, contents: Contents) -> bool:
        """A parcel is here, on every shard. False: it is of no use."""
        wanted = self.state.arrived(parcel, contents.value)
        if wanted:
            self.tensors.received(parcel, contents.tensors, contents.beside)
        if self.leader is not None:
            value = contents.value if parcel.what in SMALL else None
            self.leader.tell(
                sh.ShardReceives(parcel=parcel, value=value) if wanted else sh.ShardDrops(parcel=parcel)
            )
        return wanted

    # -------------------------------------------------------------- states

    def _state_arrived(self, frame: frames.Incoming) -> None:
        if (found := self._arriving.take(frame)) is not None:
            transfer, state = found
            if self.leader is None:
                self.load_state(transfer, state)
            elif self.leader.slices.own_state(transfer, state):
                self.load_state(transfer, self.leader.slices.take_state(transfer))

    def load_state(self, transfer: StateTransfer, state: Mapping[str, Tensor]) -> None:
        """All frames of a transfer are here, on every shard."""
        self.work.load_arrived(transfer.state_step, state)
        self.state.joiner.state_arrived(transfer)
        if self.leader is not None:
            self.leader.tell(sh.ShardLoads(transfer=transfer))

    # -------------------------------------------------------------- commands

    def _carry_out(self, actions: Sequence[ShellAction | WorkerAction]) -> None:
        for command in actions:
            match command:
                case SendReport():
                    self.ports.report(command.report)
                case KeepLinks():
                    self.plane.forget({self.work.address(address) for address in command.addresses})
                    self.plane.prepare(self._neighbours())
                case work.Send():
                    self._send(command)
                case work.Forget():
                    self.tensors.forget(command.parcels)
                case work.ReleaseGradients():
                    pass  # the next step's sums begin with the update
                case work.DropStashes():
                    for microbatch, _ in command.places:
                        self.work.stage.drop(command.step, self.work.number(microbatch))
                case work.ReleaseChunks():
                    self.work.updater.release(command.chunks)
                case work.ReleaseSum():
                    self.tensors.release_sum(command.step)
                case work.DiscardWork():
                    self.tensors.discard(command.from_step, self.state.mail.box)

    def _send(self, command: work.Send) -> None:
        address = self.control.book.get(Worker(command.replica, command.stage))
        if address is not None and (self.shard == 0 or command.parcel.what not in SMALL):
            parcel = command.parcel
            to = self.work.address(address)
            envelope, tensors = self.tensors.contents(command, self.state.mail.routes(parcel.step))
            self._post(to, command, envelope, tensors)
            if tensors:
                sent = sum(tensor.nbytes for tensor in tensors)
                if parcel.what in (ParcelKind.ACTIVATION, ParcelKind.GRADIENT):
                    self.work.times.stopwatch.sent_boundary(sent)
                if self.recorder is not None:
                    self.recorder.sent(parcel, command.replica, command.stage, sent)
            if parcel.what is ParcelKind.PART:
                self.signs.maybe_die(parcel.step, "R", "sending")
            elif parcel.what is ParcelKind.WEIGHTS:
                self.signs.maybe_die(parcel.step, "U", "sending")

    def _post(
        self, address: Address, command: work.Send, envelope: Envelope, tensors: tuple[Tensor, ...]
    ) -> None:
        parcel = command.parcel
        if parcel.what is ParcelKind.FILL:
            self.work.sender.begin_fill(address, parcel, envelope, tensors)
            return
        lag_s = self.signs.lag_s(parcel.step, command.stage)
        if lag_s:  # the timer's own copy: not borrowed yet
            copies = tuple(host_memory.to_host(tensor).clone() for tensor in tensors)
            late = threading.Timer(lag_s, self.plane.links.send, (address, parcel, envelope, *copies))
            late.daemon = True
            late.start()
        else:
            self.plane.post(address, parcel, envelope, tensors)

    # -------------------------------------------------------------- peers

    def _neighbours(self) -> set[Address]:
        """Workers that this one exchanges tensors with, or if these are few may after a death: its stage and
        those beside.
        """
        book, mail, here = self.control.book, self.state.mail, self.me.stage
        found = {w: self.work.address(at) for w, at in book.items() if abs(w.stage - here) <= 1}
        if len(found) > MOST_LANES_AHEAD:
            partners = mail.routes(mail.order.step).partners
            found = {w: at for w, at in found.items() if w.stage != here or w.replica in partners}
        return set(found.values())

    def show_saving(self) -> None:
        """It has left its loop, and its last states are being written."""
        self.signs.show(busy=True, doing=SAVING)
