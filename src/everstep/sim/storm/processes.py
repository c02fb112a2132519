"""The processes of a virtual cluster; `connections` has what is between them.

A process works as the engine's loop does: it takes all that is in its inbox, runs one task to its end, and
looks again; a death in between leaves the task undone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from everstep.core.words import actions as act
from everstep.core.words import events as ev
from everstep.core.words import shard_messages as sh
from everstep.core.words import worker_messages as msg
from everstep.core.words.agent_messages import SAVING, WorkerReport
from everstep.core.words.cluster_messages import NotifyWorker, PartWritten, Sender, TaskEvent, TimePassed
from everstep.core.words.links import LinkBroke, LinkOpened
from everstep.core.words.ops import Kind, Worker
from everstep.core.worker.control import KeepLinks, SendReport, ShellAction, StateDirections, WorkerAction
from everstep.core.worker.worker_state import WorkerState
from everstep.sim.storm.connections import Connections
from everstep.sim.storm.scene import Scene
from everstep.sim.storm.shard_group import IDLE, FollowerSaid, StateArrived, VirtualGroup
from everstep.sim.storm.truth import VirtualState
from everstep.sim.storm.virtual_worker import CARRY_OUT, VirtualWorker

_SHARE_OF_AN_OP = {Kind.F: 1.0, Kind.I: 1.1, Kind.W: 0.9, Kind.B: 2.0}  # what is not listed takes a tenth
_TIME_PASSED = TimePassed()


class Surroundings(Protocol):
    """What processes need of the world around them."""

    def report(self, body: VirtualWorker, report: WorkerReport) -> None: ...

    def left(self, body: VirtualWorker) -> None:
        """It has ended by itself, in good order."""

    def saved(self, body: VirtualWorker, task: msg.SaveCheckpoint, state: VirtualState) -> None: ...

    def shelved(
        self, body: VirtualWorker, task: msg.StoreCopy, state: VirtualState, directions: StateDirections
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
        body = self.living[address] = VirtualWorker(
            sender,
            self.spec.rules,
            node=node,
            address=address,
            scene=self.scene,
        )
        if self.spec.shards > 1:
            body.group = VirtualGroup(body, self.spec.rules, self.spec.shards, self.connections)
        body.moved_us = self.agenda.now_us
        return body

    def wake_up(self, body: VirtualWorker) -> None:
        """It was asleep in the kernel."""
        body.asleep = False
        if body.alive and body.task is None:
            self._turn(body)
        elif body.alive:
            self._done(body)

    def drop(self, body: VirtualWorker, *, silently: bool = False) -> None:
        """It is gone. Its peers notice, at once or, where a whole machine went, when nobody answers."""
        body.alive = False
        body.inbox.clear()
        self.connections.end(body, silently=silently)

    # -------------------------------------------------------------- its loop

    def take(self, body: VirtualWorker, item: Any) -> None:
        body.inbox.append(item)
        if body.task is None and body.alive and not body.woken:
            wake_us = self.spec.weather.wake_us
            if wake_us:
                body.woken = True
                self.agenda.after(self.weather.spread(wake_us), self._wake, body)
            else:
                self._turn(body)

    def _wake(self, body: VirtualWorker) -> None:
        body.woken = False
        if body.task is None and body.alive:
            self._turn(body)

    def _turn(self, body: VirtualWorker) -> None:
        """The whole inbox, then one task."""
        if body.hung or body.asleep or body.leaving:
            return
        while body.inbox:
            self._obey(body, body.inbox.popleft())
        control, agenda = body.control, self.agenda
        if body.group is not None:
            body.group.looks_for_work()
        task = control.next()
        if body.group is not None:
            body.group.found(task)
        self._carry_out(body, control.take_actions())
        if control.may_leave(task):
            self._leave(body)
            return
        kind = type(task)
        if body.group is not None and kind in IDLE:
            body.group.turned()
        if kind is msg.Wait:
            body.show(agenda.now_us, agenda.done, busy=False, doing=task.missing)  # type: ignore[union-attr]
            return
        if kind is msg.Paused or kind is msg.Finished:
            body.show(agenda.now_us, agenda.done, busy=False, doing=kind.__name__)
            return
        body.task, body.began_us = task, agenda.now_us
        if kind is not msg.Snapshot:  # as the engine's beacon: who waits while a peer copies still waits
            body.show(agenda.now_us, agenda.done, busy=True, doing=_shown(task, body.me.stage))
        agenda.after(self._time_of(body, task), self._done, body)

    def _done(self, body: VirtualWorker) -> None:
        task = body.task
        if not body.alive or body.hung or body.asleep or task is None:
            return
        self.scene.mix(4, body.me)
        if self.trace.lines is not None:
            self.trace.tell(self.agenda.now_us, f"{body.me} {short(task)}")
        answer = body.do(task)
        body.task = None
        kind = type(task)
        if kind is not msg.Compute:
            if kind is msg.Snapshot:
                self.connections.send_state(body, task, answer)  # type: ignore[arg-type]
            elif kind is msg.SaveCheckpoint or kind is msg.StoreCopy:
                body.writing += 1
                given = (body, task, body.state, body.control.directions)
                self.scene.soon(self.spec.weather.save_us, self._written, *given)
            trigger = _TRIGGER_OF.get(kind)
            if trigger is not None:
                self.scene.trigger(trigger, body.me)
                if not body.alive:
                    return
        if body.group is not None:
            body.group.finished(answer, body.began_us / 1e6)
        body.control.finished(task, answer, began=body.began_us / 1e6)
        self._carry_out(body, body.control.take_actions())
        if body.group is not None:
            body.group.turned()
        self._turn(body)

    def _written(
        self, body: VirtualWorker, task: Any, state: VirtualState, directions: StateDirections
    ) -> None:
        """Beside its loop: it also goes on while the loop hangs."""
        body.writing -= 1
        if not body.alive:
            return
        if type(task) is msg.SaveCheckpoint:
            self.world.saved(body, task, state)
        else:
            self.world.shelved(body, task, state, directions)
        if body.leaving and not body.writing:
            self.world.left(body)

    def _leave(self, body: VirtualWorker) -> None:
        """As the engine's process: what its saver has in hand is written first."""
        body.leaving = True
        body.show(self.agenda.now_us, self.agenda.done, busy=True, doing=SAVING)
        if not body.writing:
            self.world.left(body)

    def _obey(self, body: VirtualWorker, item: Any) -> None:
        control, state = body.control, body.walker
        if type(item) is tuple:
            if body.group is None:
                parcel, facts, payload = item
                if state.arrived(parcel, facts):
                    body.payloads[parcel] = payload
            elif (whole := body.group.arrived(item)) is not None:
                self._accept(body, *whole)
            return
        self.scene.mix(5, body.me)
        if self.trace.lines is not None:
            self.trace.tell(self.agenda.now_us, f"{body.me} hears {item}")
        if type(item) is StateArrived:
            body.take_state(*item)
        elif type(item) is FollowerSaid:
            self._hear_follower(body, item)
        else:
            if body.group is not None:
                body.group.takes(item, self.agenda.now_us / 1e6)
            if type(item) is LinkOpened:
                body.answered.add(item.address)
            elif type(item) is LinkBroke:
                body.answered.discard(item.address)
            actions = control.handle(item, self.agenda.now_us / 1e6)
            if type(item) is NotifyWorker:
                self._notified(body, item)
            self._carry_out(body, actions)
            self._set_alarm(body)
        self._carry_out(body, control.take_actions())

    def _accept(self, body: VirtualWorker, parcel: msg.Parcel, facts: Any, payload: Any) -> None:
        """A parcel is here, on every shard."""
        wanted = body.walker.arrived(parcel, facts)
        if wanted:
            body.payloads[parcel] = payload
        assert body.group is not None
        body.group.decided(parcel, facts, wanted=wanted)

    def _hear_follower(self, body: VirtualWorker, item: FollowerSaid) -> None:
        assert body.group is not None
        slices = body.group.slices
        match item.message:
            case sh.ParcelIsHere(parcel=parcel):
                if slices.others(item.shard, parcel):
                    self._accept(body, *slices.take(parcel))
            case sh.StateIsHere(transfer=transfer):
                if slices.others_state(item.shard, transfer) and body.walker.may_load(transfer):
                    body.load_state(transfer, slices.take_state(transfer))
            case sh.ShardLink(event=event):
                self._obey(body, event)

    def _notified(self, body: VirtualWorker, order: NotifyWorker) -> None:
        match order.words:
            case act.InterruptWorkers():
                self.scene.trigger("interrupt", body.me)
            case act.ResumeStep(order=resume):
                self.checkers.ordered(body.me, resume)
                if body.walker.epoch == resume.epoch and not body.walker.joining:
                    self.checkers.resumed(body.me, resume, self.world.members(body))
                self.scene.trigger("resume", body.me)

    def _set_alarm(self, body: VirtualWorker) -> None:
        due = body.control.due_at()
        if due is not None:
            at_us = max(self.agenda.now_us + 1, int(due * 1e6) + 1)
            if body.alarm_us is None or at_us < body.alarm_us:
                body.alarm_us = at_us
                self.agenda.at(at_us, self._alarm, body, at_us)

    def _alarm(self, body: VirtualWorker, at_us: int) -> None:
        if body.alive and body.alarm_us == at_us:
            body.alarm_us = None
            self.take(body, _TIME_PASSED)

    # -------------------------------------------------------------- what it does besides

    def _carry_out(self, body: VirtualWorker, actions: Iterable[ShellAction | WorkerAction]) -> None:
        for action in actions:
            kind = type(action)
            if kind is msg.Send:
                self.connections.send(body, action)  # type: ignore[arg-type]
            elif kind is SendReport:
                report = action.report  # type: ignore[union-attr]
                self.world.report(body, report)
                if type(report) is TaskEvent:
                    trigger = _TRIGGER_OF.get(type(report.event))
                    if trigger is not None:
                        self.scene.trigger(trigger, body.me)
            elif kind is KeepLinks:
                for address in [a for a in body.links if a not in action.addresses]:  # type: ignore[union-attr]
                    body.links.pop(address).close()
            else:
                CARRY_OUT[kind](body, action)

    # -------------------------------------------------------------- how long things take

    def _time_of(self, body: VirtualWorker, task: msg.WorkItem) -> int:
        measured = self.spec.weather.op_times_us
        if measured is not None:
            kind = task.op.kind if type(task) is msg.Compute else _KIND_OF.get(type(task))
            return measured.get(kind, 1) * self.slow.get(body.me, 1) if kind is not None else 1
        share = _SHARE_OF_AN_OP[task.op.kind] if type(task) is msg.Compute else 0.1
        typical = int(self.spec.weather.op_us * share) * self.slow.get(body.me, 1)
        return self.weather.spread(typical)


def _shown(task: msg.WorkItem, stage: int) -> str:
    """By its beacon, as the engine's: ops by name, the reduce as R, the rest with the update."""
    if isinstance(task, msg.Compute):
        return str(task.op)
    return f"{stage}{'R' if type(task) in _REDUCE else 'U'}"


def short(task: Any) -> str:
    if isinstance(task, msg.Compute):
        return f"step {task.step} {task.op}{' (ghost)' if task.ghost else ''}"
    return "nothing" if task is None else str(task)


_REDUCE = (msg.Contribute, msg.SumChunk, msg.AssembleSum, msg.CombineTied)
_KIND_OF: dict[type, Kind] = {msg.SumChunk: Kind.R, msg.Update: Kind.U}
_TRIGGER_OF: dict[type, str] = {
    ev.StateCopied: "enter",
    ev.ChunksFilled: "fill",
    msg.SumChunk: "sum",
    msg.AssembleSum: "hold",
    msg.Update: "update",
    msg.Snapshot: "copy",
    msg.ApplyFeed: "feed",
    msg.SaveCheckpoint: "save",
    msg.StoreCopy: "save",
}


def part_written(
    body: VirtualWorker,
    task: msg.SaveCheckpoint | msg.StoreCopy,
    *,
    memory_of: str | None = None,
    share: tuple[int, int] = (0, 1),
) -> PartWritten:
    stage = body.me.stage
    return PartWritten(
        task=body.sender.task,
        step=task.state_step,
        stage=stage,
        attempt=task.attempt,
        part=stage,
        memory_of=memory_of,
        share=share,
    )
