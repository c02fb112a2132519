"""A worker's loop: runs its tasks with torch, keeps its tensors, sends its parcels.

`WorkerControl` decides, in names; here the names get tensors. One thread computes and asks for decisions;
parcels and orders reach it through one queue, so nothing here needs a lock.

    links' I/O thread ──┐
                        ├──► inbox ──► run(): control.next() ──► task ──► torch ──► control.finished()
    agent's thread  ────┘                                   └──► actions ──► links, agent
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from everstep.core.words import shard_messages as sh
from everstep.core.words import worker_messages as msg
from everstep.core.words.actions import InterruptWorkers
from everstep.core.words.agent_messages import SAVING, PlantFaults, WorkerOrder
from everstep.core.words.cluster_messages import NotifyWorker, TimePassed, TimesReported
from everstep.core.words.ops import Kind, Microbatch, Worker
from everstep.core.words.worker_messages import ParcelKind
from everstep.core.worker.control import (
    KeepLinks,
    LinkBroke,
    LinkOpened,
    SendReport,
    ShellAction,
    WorkerAction,
    WorkerControl,
)
from everstep.engine import device as devices
from everstep.engine import frames, gpu_faults, step_tensors
from everstep.engine.beacon import Beacon
from everstep.engine.boundary import Boundary, Gradients
from everstep.engine.courier import Courier
from everstep.engine.faults import OF_GPU, PlantedFault, parse_fault
from everstep.engine.links import Address
from everstep.engine.loading import Loader
from everstep.engine.op_times import Began, OpTimes
from everstep.engine.optimizer import Updater
from everstep.engine.ports import Ports
from everstep.engine.recorder import WorkerRecorder
from everstep.engine.sharded import ShardedUpdater
from everstep.engine.sharded_steps import ShardedSteps
from everstep.engine.shards.collectives import summed
from everstep.engine.shards.leader import SMALL, Contents, FollowerSays, ShardLeader
from everstep.engine.shards.slices import sliced, together
from everstep.engine.stage import Stage
from everstep.engine.step_tensors import StepTensors
from everstep.engine.transfers import ArrivingState, send_state
from everstep.errors import PeerError
from everstep.schedule.profile import HELD_FORWARD, HELD_WEIGHT, ROOM

# the last: the links failed
InboxItem = frames.Incoming | WorkerOrder | LinkBroke | LinkOpened | FollowerSays | BaseException


_OF_CHUNKS = (msg.AdoptWeights, msg.LoadFill, msg.ApplyFeed, msg.SaveCheckpoint, msg.StoreCopy)


class WorkerLoop:
    def __init__(
        self,
        control: WorkerControl,
        build: Callable[[], tuple[Stage, Updater | ShardedUpdater]],
        *,
        ports: Ports,
        courier: Courier,
        inbox: queue.SimpleQueue[InboxItem],
        beacon: Beacon | None = None,
        recorder: WorkerRecorder | None = None,
        loader: Loader | None = None,
        faults: tuple[PlantedFault, ...] = (),
        shard: int = 0,
        leader: ShardLeader | None = None,
    ) -> None:
        """`leader`: if this worker has shards and this is the first of them; the others are `Follower`s."""
        self.shard, self.leader = shard, leader
        self.control, self.ports, self.courier, self.inbox = control, ports, courier, inbox
        self.links = courier.links
        self.state, self.me, self.rules = control.state, control.sender.worker, control.state.rules
        self.beacon = beacon
        self.recorder = recorder
        self.loader = loader
        self._data_waited_s = 0.0
        self.faults = [fault for fault in faults if fault.shard == shard]
        self._op = (0, "")  # what it is in, for faults inside a collective
        self._build = build
        self.stage, made = build()
        self.tensors = StepTensors(
            self.me,
            self.stage,
            made,
            replicas=self.rules.replicas,
            borrowed=courier.borrows,
            shared=courier,
            holders=self.state.chunks.holders if self.rules.chunks else None,
        )
        self._use(made)
        self._arriving = ArrivingState(self.state.take_state)
        self._touched = False  # has the initial state been changed?
        self.times = OpTimes(clock_ns=ports.clock_ns, completions=courier.completions, recorder=recorder)
        self.times.shows = lambda doing: self._show(busy=True, doing=doing)

    def _use(self, made: Updater | ShardedUpdater) -> None:
        self.updater: Any = made  # where states are sharded, `sharded` uses it
        self.sharded: ShardedSteps | None = None
        if isinstance(made, ShardedUpdater):
            self.sharded = ShardedSteps(made, self.tensors, self.state.chunks)

    # -------------------------------------------------------------- the loop

    def run(self) -> None:
        """Until told to leave."""
        while True:
            while not self.inbox.empty():
                self._take(self.inbox.get())
            self._let_time_pass()
            if self.leader is not None:
                self.leader.tell(sh.ShardLooks())
            task = self.turn()
            if self.control.may_leave(task):
                self.show_saving()  # what its saver has in hand is written after this
                return
            if isinstance(task, msg.Wait | msg.Paused | msg.Finished):
                self._wait()

    def turn(self) -> msg.WorkItem:
        """Look for the next work item, and run it if there is one to run."""
        task = self.control.next()
        self._carry_out(self.control.take_actions())
        if self.control.may_leave(task):
            return task
        if isinstance(task, msg.Wait | msg.Paused | msg.Finished):
            self._show(busy=False, doing=task.missing if isinstance(task, msg.Wait) else type(task).__name__)
            return task
        began = self.ports.clock_ns() / 1e9
        answer = self._do(task)
        self.control.finished(task, answer, began=began)
        self._carry_out(self.control.take_actions())
        return task

    def _wait(self) -> None:
        """For something to arrive, or for a moment that was put off to come."""
        due = self.control.due_at()
        within = None if due is None else max(0.0, due - self.ports.clock_ns() / 1e9)
        try:
            self._take(self.inbox.get(timeout=within))
        except queue.Empty:
            self._let_time_pass()

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
            self.faults = [fault for fault in map(parse_fault, event.faults) if fault.shard == self.shard]
            return
        if isinstance(event, NotifyWorker) and isinstance(event.words, InterruptWorkers):
            self.courier.waits = False  # for lanes: from now on tcp bridges the time
            self.courier.drain()  # a ledger tells what is done, not what is launched
        self._carry_out(self.control.handle(event, now))
        self._carry_out(self.control.take_actions())

    def _hear_follower(self, shard: int, message: sh.FromShard) -> None:
        assert self.leader is not None
        match message:
            case sh.ParcelIsHere(parcel=parcel):
                if self.leader.others(shard, parcel):
                    self.accept(parcel, self.leader.take(parcel))
            case sh.StateIsHere(transfer=transfer):
                if self.leader.others_state(shard, transfer):
                    self.load_state(transfer, self.leader.take_state(transfer))
            case sh.ShardLink(event=event):
                self._hear(event, self.ports.clock_ns() / 1e9)
            case sh.ShardReports() | sh.ShardRaised():
                pass  # for whoever watches the processes

    def _arrived(self, frame: frames.Incoming) -> None:
        if frame.kind == frames.STATE:
            self._state_arrived(frame)
            return
        contents = self.opened(frame)
        parcel = frame.parcel
        if contents is None or parcel is None:
            return
        if self.leader is None or parcel.what in SMALL:
            self.accept(parcel, contents)
        elif self.leader.own(parcel, contents):
            self.accept(parcel, self.leader.take(parcel))

    def opened(self, frame: frames.Incoming) -> Contents | None:
        try:
            facts, tensors = self.courier.opened(frame)
            facts, beside = step_tensors.parted(facts)
            if frame.parcel is not None:
                frames.checked_value(frame.parcel.what, facts)
        except PeerError as error:  # its owner died before it was opened, or it is broken: it did not come
            print(f"{frame.parcel} was lost: {error}", file=sys.stderr, flush=True)
            return None
        return Contents(facts, tensors, beside)

    def accept(self, parcel: msg.Parcel, contents: Contents) -> bool:
        """A parcel is here, on every shard. False: it is of no use."""
        wanted = self.state.arrived(parcel, frames.value_of(parcel.what, contents.facts))
        if wanted:
            self.tensors.received(parcel, contents.facts, contents.tensors, contents.beside)
        if self.leader is not None:
            value = contents.facts if parcel.what in SMALL else None
            self.leader.tell(
                sh.ShardReceives(parcel=parcel, value=value) if wanted else sh.ShardDrops(parcel=parcel)
            )
        return wanted

    # -------------------------------------------------------------- tasks

    def _do(self, task: msg.WorkItem) -> Any:
        if self.sharded is not None and isinstance(task, _OF_CHUNKS):
            return self._do_sharded(task, self.sharded)
        match task:
            case msg.Compute():
                return self._compute(task)
            case msg.Contribute():
                self._maybe_die(task.step, "R", "before")
                return self._losses(task.step), self._weights(task.step), self._scores(task.step)
            case msg.SumChunk():
                return self._sum_chunk(task)
            case msg.AssembleSum():
                return self._assemble(task)
            case msg.CombineTied():
                return self.tensors.combine(task)
            case msg.Update():
                return self._update(task)
            case msg.Commit():
                self._show(busy=True, doing=f"{self.me.stage}U")
                return self.updater.commit(task.step, self.tensors.sum_of(task.step))
            case msg.Undo():
                return self.updater.undo()
            case msg.Snapshot():
                return self._snapshot(task)
            case msg.ApplyFeed():
                self._apply(task.step, self.tensors.fed(task.step, task.feed), task.scale)
                return self.tensors.updated(task.step)
            case msg.Restore():
                return self._all_have(self._restore(task.state_step))
            case msg.SaveCheckpoint():
                self._show(busy=True, doing=SAVING)  # it may wait for the disk: no op's time is billed
                share = task.index, task.count
                groups = self.updater.groups(task.state_step)
                state = self.updater.state(task.state_step)
                return self.ports.save(task.state_step, task.attempt, share, state, groups)
            case msg.StoreCopy():
                self._show(busy=True, doing=SAVING)
                directions, state = self.control.directions, self.updater.state(task.state_step)
                return self.ports.copy_to_memory(
                    task.state_step, task.attempt, task.leaving, state, directions
                )

    def _do_sharded(self, task: msg.WorkItem, sharded: ShardedSteps) -> None:
        match task:
            case msg.AdoptWeights():
                sharded.adopt(task)
            case msg.LoadFill():
                self._maybe_die(self.state.now.step, "U", "during")
                sharded.load_fill(task)
            case msg.ApplyFeed():
                sharded.apply_feed(task)
            case msg.SaveCheckpoint():
                self._show(busy=True, doing=SAVING)
                sharded.save(task, self.ports)
            case msg.StoreCopy():
                self._show(busy=True, doing=SAVING)
                sharded.store(task, self.ports, self.control.directions)

    def _compute(self, task: msg.Compute) -> None:
        op = task.op
        microbatch = op.microbatch
        assert microbatch is not None
        self._show(busy=True, doing=str(op))
        self._op = task.step, f"{op.kind}{microbatch.home}.{microbatch.number}"
        self._maybe_die(task.step, f"{op.kind}{microbatch.home}.{microbatch.number}", "before")
        number = self._number(microbatch)
        given: Any = None
        if task.input is not None:
            given = together(self.tensors.boundaries[task.input], self.stage.shards, self.stage.device)
        if op.kind is Kind.F:
            self._load_data(task.step, number, str(op))
            if self.stage.evaluates(task.step):
                self._show(busy=True, doing=f"evaluating beside {op}")
                self.stage.evaluate(task.step, number, given)
                self._show(busy=True, doing=str(op))
        began = self.times.begin()
        output: Boundary | Gradients | None = None
        if op.kind is Kind.F:
            output = self.stage.forward(task.step, number, given)
        elif op.kind is Kind.W:
            self.stage.weight_grad(task.step, number)
        else:
            output = self.stage.input_grad(task.step, number, given)
            if op.kind is Kind.B:
                self.stage.weight_grad(task.step, number)
        if task.output is not None:
            assert output is not None
            self.tensors.boundaries[task.output] = sliced(output, self.stage.shards).moved(self.courier.kept)
        self._time(op.kind, began, str(op))
        self._maybe_die(task.step, f"{op.kind}{microbatch.home}.{microbatch.number}", "after")

    def _load_data(self, step: int, number: int, op: str) -> None:
        """Data first, and under its own name: a slow loader is not a slow op."""
        if self.loader is not None:
            self.loader.shows = lambda: self._show(busy=True, doing=f"loading data for {op}")
            coming = islice(self._coming(step), self.loader.ahead + 1)
            self.loader.expect([(at, self._number(microbatch)) for at, microbatch in coming])
        self.stage.load(step, number)
        self._show(busy=True, doing=op)

    def _coming(self, step: int) -> Iterator[tuple[int, Microbatch]]:
        """The microbatches whose forward is next here, in order."""
        for op in reversed(self.state.now.todo):
            if op.kind is Kind.F and op.microbatch is not None:
                yield step, op.microbatch
        if step < self.state.steps.last_step:
            for op in self.state.mail.order.ops(step + 1):
                if op.kind is Kind.F and op.microbatch is not None:
                    yield step + 1, op.microbatch

    def _losses(self, step: int) -> list[tuple[Microbatch, float]]:
        if not self.stage.is_last:
            return []
        done = [
            op.microbatch for op in self.state.now.done if op.kind is Kind.F and op.microbatch is not None
        ]
        losses = [self.stage.loss(step, self._number(microbatch)) for microbatch in done]
        found = torch.stack(losses).tolist() if losses else []  # the host waits once, not for each
        return list(zip(done, found, strict=True))

    def _scores(self, step: int) -> msg.Scores:
        if not (self.stage.is_last and self.stage.evaluates(step)):
            return ()
        done = self.state.now.accumulated()
        return tuple((microbatch, self.stage.scores(step, self._number(microbatch))) for microbatch in done)

    def _weights(self, step: int) -> dict[Microbatch, float]:
        done = self.state.now.accumulated()
        return {microbatch: self.stage.weight(step, self._number(microbatch)) for microbatch in done}

    def _sum_chunk(self, task: msg.SumChunk) -> tuple[float, ...]:
        began = self.times.begin()
        self._op = task.step, "R"
        self._maybe_die(task.step, "R", "during")
        squares = self.tensors.sum_chunk(task)
        self._time(Kind.R, began)
        return squares

    def _assemble(self, task: msg.AssembleSum) -> float | None:
        squares = self.tensors.assemble(task)
        self._maybe_die(task.step, "R", "after")
        return squares

    def _update(self, task: msg.Update) -> None:
        began = self.times.begin()
        self._show(busy=True, doing=f"{self.me.stage}U")
        self._maybe_die(task.step, "U", "before")
        if self.sharded is not None:
            self.sharded.update(task)
        elif task.keep:
            self._touched = True
            self.updater.preview(task.step, self.tensors.sum_of(task.step))
        else:
            self._apply(task.step, self.tensors.sum_of(task.step), task.scale)
        self.tensors.updated(task.step)
        self._time(Kind.U, began)
        if self.loader is not None:
            waited_s, self._data_waited_s = self.loader.waited_s - self._data_waited_s, self.loader.waited_s
            self.times.stopwatch.waited_for_data(waited_s)
        if (told := self.times.stopwatch.step(task.step)) is not None:
            told["times"] |= self._memory()
            name, worker, incarnation = self.control.sender
            carriers = self._carriers()
            times = TimesReported(
                task=name, worker=worker, incarnation=incarnation, carriers=carriers, **told
            )
            self.ports.report(times)
        self._maybe_die(task.step, "U", "after")

    def _apply(self, step: int, mean: Tensor, scale: float | None) -> None:
        self._touched = True
        if scale is not None:
            self.updater.apply(step, devices.to_device(mean, self.stage.device), scale)

    # -------------------------------------------------------------- states

    def _snapshot(self, task: msg.Snapshot) -> None:
        address = self.control.book.get(Worker(task.joiner, self.me.stage))
        if address is None:
            return
        target = self._address(address)
        step = task.transfer.state_step
        state = self.updater.weights(step) if self.sharded is not None else self.updater.state(step)
        state = {n: devices.to_host(t) if t.is_cuda else t.detach().clone() for n, t in state.items()}
        send_state(self.links, target, task.transfer, state)

    def _state_arrived(self, frame: frames.Incoming) -> None:
        if (found := self._arriving.take(frame)) is not None:
            transfer, state = found
            if self.leader is None:
                self.load_state(transfer, state)
            elif self.leader.own_state(transfer, state):
                self.load_state(transfer, self.leader.take_state(transfer))

    def load_state(self, transfer: msg.StateTransfer, state: Mapping[str, Tensor]) -> None:
        """All frames of a transfer are here, on every shard."""
        if self.sharded is not None:
            self._touched = True
            self.updater.follow(state, transfer.state_step)
            self.tensors.loaded(transfer.state_step)
        else:
            self._load(transfer.state_step, state)
        self.state.state_arrived(transfer)
        if self.leader is not None:
            self.leader.tell(sh.ShardLoads(transfer=transfer))

    def _restore(self, state_step: int) -> bool:
        """False: the state is gone."""
        self.stage.discard()
        if state_step == 0:
            if self._touched:
                self.stage, made = self._build()
                self.tensors.rebuilt(self.stage, made)
                self._use(made)
                self._touched = False
            if self.sharded is not None:
                self.sharded.begin()
                self._touched = True
            return True
        state = self.ports.load(state_step, list(self.stage.slots), self.control.directions)
        if state is not None:
            self._load(state_step, state)
        return state is not None

    def _all_have(self, mine: bool) -> bool:
        """A state that one shard could not load is gone for all."""
        shards = self.stage.shards
        if shards is None:
            return mine
        return not summed(shards, [0.0 if mine else 1.0], self.stage.device)[0]

    def _load(self, state_step: int, state: Mapping[str, Tensor]) -> None:
        self._touched = True
        if self.sharded is not None:
            self.sharded.load(state_step, state)
        else:
            self.updater.load(state, state_step)
        self.tensors.loaded(state_step)

    # -------------------------------------------------------------- commands

    def _carry_out(self, actions: Sequence[ShellAction | WorkerAction]) -> None:
        for command in actions:
            match command:
                case SendReport():
                    self.ports.report(command.report)
                case KeepLinks():
                    self.courier.forget({self._address(address) for address in command.addresses})
                    self.courier.prepare(self._neighbours())
                case msg.Send():
                    self._send(command)
                case msg.Forget():
                    self.tensors.forget(command.parcels)
                case msg.ReleaseGradients():
                    pass  # the next step's sums begin with the update
                case msg.DropStashes():
                    for microbatch in command.microbatches:
                        self.stage.drop(command.step, self._number(microbatch))
                case msg.ReleaseChunks():
                    self.updater.release(command.chunks)
                case msg.ReleaseSum():
                    self.tensors.release_sum(command.step)
                case msg.DiscardWork():
                    self.tensors.discard(command.from_step, self.state.mail.box)

    def _send(self, command: msg.Send) -> None:
        address = self.control.book.get(Worker(command.replica, command.stage))
        if address is not None and (self.shard == 0 or command.parcel.what not in SMALL):
            parcel = command.parcel
            facts, tensors = self.tensors.contents(command, self.state.mail.peers(parcel.step))
            self._post(self._address(address), command, facts, tensors)
            if self.recorder is not None and tensors:
                sent = sum(tensor.nbytes for tensor in tensors)
                self.recorder.sent(parcel, command.replica, command.stage, sent)
            if parcel.what is ParcelKind.PART:
                self._maybe_die(parcel.step, "R", "sending")
            elif parcel.what is ParcelKind.WEIGHTS:
                self._maybe_die(parcel.step, "U", "sending")

    def _post(self, address: Address, command: msg.Send, facts: Any, tensors: tuple[Tensor, ...]) -> None:
        parcel = command.parcel
        lag_s = sum(fault.lag_s(parcel.step, command.stage) for fault in self.faults)
        if lag_s:  # the timer's own copy: nobody has borrowed it yet
            copies = tuple(devices.to_host(tensor).clone() for tensor in tensors)
            late = threading.Timer(lag_s, self.links.send, (address, parcel.what, parcel, facts, *copies))
            late.daemon = True
            late.start()
        else:
            self.courier.post(address, parcel.what, parcel, facts, tensors)

    # -------------------------------------------------------------- small things

    def _carriers(self) -> dict[str, str]:
        """By peer: what carries tensors to it now."""
        book = {self._address(at): worker for worker, at in self.control.book.items()}
        return {str(book[to]): kind for to, kind in self.courier.carriers.items() if to in book}

    def _neighbours(self) -> set[Address]:
        """Workers that this one exchanges tensors with, or may after a death: its stage and those beside."""
        book = self.control.book.items()
        return {self._address(at) for worker, at in book if abs(worker.stage - self.me.stage) <= 1}

    def _address(self, address: tuple[str, int]) -> Address:
        """Of the same shard of that worker: shards listen on neighbouring ports."""
        host, port = address
        return Address(host, port + self.shard)

    def entering(self) -> None:
        """This shard enters a collective."""
        step, op = self._op
        self._maybe_die(step, op, "inside")

    def _number(self, microbatch: Microbatch) -> int:
        """Its number in the whole step, whoever runs it."""
        return microbatch.home * self.rules.microbatches + microbatch.number

    def _time(self, kind: Kind, began: Began, doing: str = "") -> None:
        step = self.state.now.step
        slower = [fault.factor for fault in self.faults if fault.slows(step)]
        self.times.end(kind, began, step, doing=doing or f"{self.me.stage}{kind}", slower=slower)

    def _memory(self) -> dict[str, float]:
        """What a stash takes and how much there is for stashes, in bytes, for the scheduler."""
        forward, weight = self.stage.held_bytes
        told = {HELD_FORWARD: float(forward), HELD_WEIGHT: float(weight)}
        room = self.ports.room(self.stage)
        return told if room is None else told | {ROOM: room}

    def show_saving(self) -> None:
        """It has left its loop, and its last states are being written."""
        self._show(busy=True, doing=SAVING)

    def _show(self, *, busy: bool, doing: str) -> None:
        now = self.state.now
        if self.control.shows(busy=busy, doing=doing) and self.beacon is not None:
            self.beacon.write(
                at_ns=self.ports.clock_ns(),
                epoch=self.state.epoch,
                step=now.step,
                done=now.executed,
                num_ops=len(now.todo),
                busy=busy,
                doing=doing,
            )

    def _maybe_die(self, step: int, op: str, when: str) -> None:
        for fault in self.faults:
            if fault.strikes(step, op, when):
                self.faults.remove(fault)
                if fault.how == "raise":
                    self._show(busy=True, doing=f"raises at {op}")
                    raise RuntimeError(f"planted fault at step {step} {op}")
                if fault.how in OF_GPU:
                    gpu_faults.strike(fault.how, self.stage.device)
                    return
                self._show(busy=True, doing=f"dies at {op}")
                os.kill(os.getpid(), signal.SIGKILL)
