"""The processes of a virtual cluster; `connections` has what is between them.

A process works as the engine's loop does: it takes all that is in its inbox, runs one task to its end, and
looks again; a death in between leaves the task undone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from everstep.core.worker.control import KeepLinks, SendReport, ShellAction, WorkerAction
from everstep.core.worker.worker_state import WorkerState
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import shard_messages as sh
from everstep.protocol import work
from everstep.protocol.messages import (
    SAVING,
    NotifyWorker,
    PartWritten,
    ResumeWorker,
    Sender,
    StateFetched,
    TaskEvent,
    TimePassed,
    WorkerReport,
)
from everstep.protocol.ops import Kind, Worker
from everstep.protocol.parcels import Parcel
from everstep.protocol.work import LinkBroke, LinkOpened, StateDirections
from tests.storms.connections import Connections
from tests.storms.scene import Scene
from tests.storms.shard_group import IDLE, FollowerSaid, StateArrived, VirtualGroup
from tests.storms.truth import VirtualState
from tests.storms.virtual_worker import CARRY_OUT, VirtualWorker

_SHARE_OF_AN_OP = {Kind.F: 1.0, Kind.I: 1.1, Kind.W: 0.9}  # what is not listed takes a tenth
_TIME_PASSED = TimePassed()


class Surroundings(Protocol):
    """What processes need of the world around them."""

    def report(self, process: VirtualWorker, report: WorkerReport) -> None: ...

    def left(self, process: VirtualWorker) -> None:
        """It has ended by itself, in good order."""

    def saved(self, process: VirtualWorker, task: work.SaveCheckpoint, state: VirtualState) -> None: ...

    def shelved(
        self, process: VirtualWorker, task: work.StoreCopy, state: VirtualState, directions: StateDirections
    ) -> None: ...

    def slowness(self, node: int) -> int: ...

    def members(self, me: VirtualWorker) -> Iterable[tuple[Worker, WorkerState]]:
        """The other workers that the coordinator believes in."""


class Processes:
    def __init__(self, world: Surroundings, scene: Scene) -> None:
        self.world, self.scene, self.spec = world, scene, scene.spec
        self.agenda, self.weather, self.trace = scene.agenda, scene.weather, scene.trace
        self.checkers, self.network = scene.checkers, scene.network
        self.connections = Connections(scene, take=self.take, slowness=world.slowness)
        self.living = self.connections.living
        self.slow: dict[Worker, int] = {}
        self._ports = 0

    def start(self, sender: Sender, node: int) -> VirtualWorker:
        self._ports += 1
        address = (f"n{node}", self._ports)
        process = self.living[address] = VirtualWorker(
            sender,
            self.spec.rules,
            node=node,
            address=address,
            scene=self.scene,
        )
        if self.spec.shards > 1:
            process.group = VirtualGroup(process, self.spec.rules, self.spec.shards, self.connections)
        process.moved_us = self.agenda.now_us
        return process

    def wake_up(self, process: VirtualWorker) -> None:
        """It was asleep in the kernel."""
        process.asleep = False
        if process.alive and process.task is None:
            self._turn(process)
        elif process.alive:
            self._done(process)

    def drop(self, process: VirtualWorker, *, silently: bool = False) -> None:
        """It is gone. Its peers notice, at once or, where a whole machine went, when nothing answers."""
        process.alive = False
        process.inbox.clear()
        self.connections.end(process, silently=silently)

    # -------------------------------------------------------------- its loop

    def take(self, process: VirtualWorker, item: Any) -> None:
        process.inbox.append(item)
        if process.task is None and process.alive and not process.woken:
            wake_us = self.spec.weather.wake_us
            if wake_us:
                process.woken = True
                self.agenda.after(self.weather.spread(wake_us), self._wake, process)
            else:
                self._turn(process)

    def _wake(self, process: VirtualWorker) -> None:
        process.woken = False
        if process.task is None and process.alive:
            self._turn(process)

    def _turn(self, process: VirtualWorker) -> None:
        """The whole inbox, then one task."""
        if process.hung or process.asleep or process.leaving:
            return
        while process.inbox:
            self._obey(process, process.inbox.popleft())
        control, agenda = process.control, self.agenda
        if process.group is not None:
            process.group.looks_for_work()
        task = control.state.next()
        if process.group is not None:
            process.group.found(task)
        self._carry_out(process, control.take_actions())
        if control.may_leave(task):
            self._leave(process)
            return
        kind = type(task)
        if process.group is not None and kind in IDLE:
            process.group.turned()
        if kind is work.Wait:
            process.show(agenda.now_us, agenda.done, busy=False, doing=task.missing)  # type: ignore[union-attr]
            return
        if kind is work.Paused or kind is work.Finished:
            process.show(agenda.now_us, agenda.done, busy=False, doing=kind.__name__)
            return
        process.task, process.began_us = task, agenda.now_us
        if kind is not work.Snapshot:  # as the engine's beacon: who waits while a peer copies still waits
            process.show(agenda.now_us, agenda.done, busy=True, doing=_shown(task, process.me.stage))
        agenda.after(self._time_of(process, task), self._done, process)

    def _done(self, process: VirtualWorker) -> None:
        task = process.task
        if not process.alive or process.hung or process.asleep or task is None:
            return
        self.scene.mix(4, process.me)
        if self.trace.lines is not None:
            self.trace.tell(self.agenda.now_us, f"{process.me} {short(task)}")
        answer = process.do(task)
        process.task = None
        kind = type(task)
        if kind is not work.Compute:
            if kind is work.Snapshot:
                self.connections.send_state(process, task, answer)  # type: ignore[arg-type]
            elif kind is work.SaveCheckpoint or kind is work.StoreCopy:
                process.writing += 1
                given = (process, task, process.state, process.control.directions)
                if kind is work.StoreCopy or process.node not in self.scene.stuck_disks:
                    self.scene.soon(self.spec.weather.save_us, self._written, *given)
            elif kind is work.Restore and process.failed_reads is not None:
                self.world.report(process, _fetched(process, task.state_step))  # type: ignore[union-attr]
            trigger = _TRIGGER_OF.get(kind)
            if trigger is not None:
                self.scene.trigger(trigger, process.me)
                if not process.alive:
                    return
        if process.group is not None:
            process.group.finished(answer, process.began_us / 1e6)
        process.control.finished(task, answer, began=process.began_us / 1e6)
        self._carry_out(process, process.control.take_actions())
        if process.group is not None:
            process.group.turned()
        self._turn(process)

    def _written(
        self, process: VirtualWorker, task: Any, state: VirtualState, directions: StateDirections
    ) -> None:
        """Beside its loop: it also goes on while the loop hangs."""
        process.writing -= 1
        if not process.alive:
            return
        if type(task) is work.SaveCheckpoint:
            self.world.saved(process, task, state)
        else:
            self.world.shelved(process, task, state, directions)
        if process.leaving and not process.writing:
            self.world.left(process)

    def _leave(self, process: VirtualWorker) -> None:
        """As the engine's process: what its saver has in hand is written first."""
        process.leaving = True
        process.show(self.agenda.now_us, self.agenda.done, busy=True, doing=SAVING)
        if not process.writing:
            self.world.left(process)

    def _obey(self, process: VirtualWorker, item: Any) -> None:
        control, state = process.control, process.worker_state
        if type(item) is tuple:
            if process.group is None:
                parcel, facts, payload = item
                if state.arrived(parcel, facts):
                    process.payloads[parcel] = payload
            elif (whole := process.group.arrived(item)) is not None:
                self._accept(process, *whole)
            return
        self.scene.mix(5, process.me)
        if self.trace.lines is not None:
            self.trace.tell(self.agenda.now_us, f"{process.me} hears {item}")
        if type(item) is StateArrived:
            process.take_state(*item)
        elif type(item) is FollowerSaid:
            self._hear_follower(process, item)
        else:
            if process.group is not None:
                process.group.takes(item, self.agenda.now_us / 1e6)
            if type(item) is LinkOpened:
                process.answered.add(item.address)
            elif type(item) is LinkBroke:
                process.answered.discard(item.address)
            actions = control.handle(item, self.agenda.now_us / 1e6)
            if type(item) in (NotifyWorker, ResumeWorker):
                self._notified(process, item)
            self._carry_out(process, actions)
            self._set_alarm(process)
        self._carry_out(process, control.take_actions())

    def _accept(self, process: VirtualWorker, parcel: Parcel, facts: Any, payload: Any) -> None:
        """A parcel is here, on every shard."""
        wanted = process.worker_state.arrived(parcel, facts)
        if wanted:
            process.payloads[parcel] = payload
        assert process.group is not None
        process.group.decided(parcel, facts, wanted=wanted)

    def _hear_follower(self, process: VirtualWorker, item: FollowerSaid) -> None:
        assert process.group is not None
        slices = process.group.slices
        match item.message:
            case sh.ParcelIsHere(parcel=parcel):
                if slices.others(item.shard, parcel):
                    self._accept(process, *slices.take(parcel))
            case sh.StateIsHere(transfer=transfer):
                if slices.others_state(item.shard, transfer) and process.worker_state.joiner.may_load(
                    transfer
                ):
                    process.load_state(transfer, slices.take_state(transfer))
            case sh.ShardLink(event=event):
                self._obey(process, event)

    def _notified(self, process: VirtualWorker, order: NotifyWorker | ResumeWorker) -> None:
        match order:
            case NotifyWorker(words=act.InterruptWorkers()):
                self.scene.trigger("interrupt", process.me)
            case ResumeWorker(own=own):
                assert process.control.facts is not None
                resume = work.resume(process.control.facts, own)
                self.checkers.ordered(process.me, resume)
                if process.worker_state.epoch == resume.epoch and not process.worker_state.joining:
                    self.checkers.resumed(process.me, resume, self.world.members(process))
                self.scene.trigger("resume", process.me)

    def _set_alarm(self, process: VirtualWorker) -> None:
        due = process.control.due_at()
        if due is not None:
            at_us = max(self.agenda.now_us + 1, int(due * 1e6) + 1)
            if process.alarm_us is None or at_us < process.alarm_us:
                process.alarm_us = at_us
                self.agenda.at(at_us, self._alarm, process, at_us)

    def _alarm(self, process: VirtualWorker, at_us: int) -> None:
        if process.alive and process.alarm_us == at_us:
            process.alarm_us = None
            self.take(process, _TIME_PASSED)

    # -------------------------------------------------------------- what it does besides

    def _carry_out(self, process: VirtualWorker, actions: Iterable[ShellAction | WorkerAction]) -> None:
        for action in actions:
            kind = type(action)
            if kind is work.Send:
                self.connections.send(process, action)  # type: ignore[arg-type]
            elif kind is SendReport:
                report = action.report  # type: ignore[union-attr]
                self.world.report(process, report)
                if type(report) is TaskEvent:
                    trigger = _TRIGGER_OF.get(type(report.event))
                    if trigger is not None:
                        self.scene.trigger(trigger, process.me)
            elif kind is KeepLinks:
                for address in [a for a in process.links if a not in action.addresses]:  # type: ignore[union-attr]
                    process.links.pop(address).close()
            else:
                CARRY_OUT[kind](process, action)

    # -------------------------------------------------------------- how long things take

    def _time_of(self, process: VirtualWorker, task: work.WorkItem) -> int:
        measured = self.spec.weather.op_times_us
        if measured is not None:
            kind = task.op.kind if type(task) is work.Compute else _KIND_OF.get(type(task))
            return measured.get(kind, 1) * self.slow.get(process.me, 1) if kind is not None else 1
        share = _SHARE_OF_AN_OP[task.op.kind] if type(task) is work.Compute else 0.1
        typical = int(self.spec.weather.op_us * share) * self.slow.get(process.me, 1)
        return self.weather.spread(typical)


def _shown(task: work.WorkItem, stage: int) -> str:
    """By its beacon, as the engine's: ops by name, the reduce as R, the rest with the update."""
    if isinstance(task, work.Compute):
        return str(task.op)
    return f"{stage}{'R' if type(task) in _REDUCE else 'U'}"


def short(task: Any) -> str:
    if isinstance(task, work.Compute):
        return f"step {task.step} {task.op}{' (ghost)' if task.ghost else ''}"
    return "nothing" if task is None else str(task)


_REDUCE = (work.Contribute, work.GatherParts, work.SumChunk, work.AssembleSum, work.CombineTied)
_KIND_OF: dict[type, Kind] = {work.SumChunk: Kind.R, work.Update: Kind.U}
_TRIGGER_OF: dict[type, str] = {
    ev.StateCopied: "enter",
    ev.ChunksFilled: "fill",
    work.GatherParts: "sum",
    work.SumChunk: "sum",
    work.AssembleSum: "hold",
    work.Update: "update",
    work.Snapshot: "copy",
    work.ApplyFeed: "feed",
    work.SaveCheckpoint: "save",
    work.StoreCopy: "save",
}


def part_written(
    process: VirtualWorker,
    task: work.SaveCheckpoint | work.StoreCopy,
    *,
    memory_of: str | None = None,
    share: tuple[int, int] = (0, 1),
) -> PartWritten:
    stage = process.me.stage
    return PartWritten(
        task=process.sender.task,
        step=task.state_step,
        stage=stage,
        attempt=task.attempt,
        part=stage,
        memory_of=memory_of,
        share=share,
    )


def _fetched(process: VirtualWorker, step: int) -> StateFetched:
    failed, process.failed_reads = process.failed_reads or (), None
    return StateFetched(
        task=process.sender.task,
        worker=process.me,
        step=step,
        bytes_here=0,
        bytes_elsewhere=0,
        seconds=0.0,
        failed=failed,
    )
