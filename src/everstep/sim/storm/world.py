"""The virtual cluster: nodes, processes, connections, and the coordinator's machine, in virtual time.

Everything that decides is the real thing: `core.task.recovery`, `core.worker`, `schedule.answer`. The world
only moves messages, lets time pass and takes things away. A process works as the engine's does: it takes all
that is in its inbox, runs one task to its end, and looks again; a death in between leaves the task undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from everstep.core.task.recovery import Recovery
from everstep.core.words import actions as act
from everstep.core.words import events as ev
from everstep.core.words import worker_messages as msg
from everstep.core.words.ops import Kind, Worker
from everstep.core.worker.worker_state import WorkerState
from everstep.drive.driver import Handled
from everstep.schedule import Instance, uniform
from everstep.schedule.answer import answer
from everstep.schedule.cache import PlanCache
from everstep.sim.agenda import Agenda
from everstep.sim.draw import Draw, Steady
from everstep.sim.storm.checkers import Checkers
from everstep.sim.storm.disk import CheckpointDisk
from everstep.sim.storm.network import Network, VirtualLink
from everstep.sim.storm.spec import Spec
from everstep.sim.storm.trace import StormTrace
from everstep.sim.storm.truth import Truth, VirtualState
from everstep.sim.storm.virtual_coordinator import RecoveryMachine, VirtualCoordinator, fingerprint
from everstep.sim.storm.virtual_worker import VirtualWorker

_SHARE_OF_AN_OP = {  # of the typical op; what is not listed takes a tenth
    Kind.F: 1.0,
    Kind.I: 1.1,
    Kind.W: 0.9,
    Kind.B: 2.0,
}


@dataclass(slots=True)
class VirtualNode:
    number: int
    up: bool = True
    heard: bool = True  # by the coordinator
    lemon: int = 0
    slowness: int = 1  # of its messages
    waiting: list[act.StartWorker] = field(default_factory=list)  # for power, or for the coordinator's word
    starting: dict[Worker, int] = field(default_factory=dict)
    muffled: list[VirtualLink] = field(default_factory=list)  # held while the coordinator does not hear it
    lost: list[tuple[Worker, int]] = field(default_factory=list)  # gone, and the coordinator does not know


class World:
    def __init__(self, spec: Spec, *, record: bool = False) -> None:
        self.spec = spec
        rules = spec.rules
        self.trace = StormTrace(record=record)
        self.agenda = Agenda()
        steady = spec.weather.op_times_us is not None
        self.weather = (Steady if steady else Draw)(spec.seed, "weather")
        self.network = Network(self.agenda, self.weather)
        self.truth = Truth(spec.seed, rules)
        self.checkers = Checkers(self.truth, rules, calm=not spec.faults and not spec.moves)
        self.disk = CheckpointDisk(rules.stages)
        self.head: VirtualCoordinator[Any, Any] = self._coordinator()
        self.bodies: dict[Worker, VirtualWorker] = {}
        self.zombies: list[VirtualWorker] = []  # alive, and given up by the coordinator
        self.orders: dict[Worker, VirtualLink] = {}
        self.slow: dict[Worker, int] = {}
        self.outcome: str | None = None
        self.num_deaths = 0
        self.num_stalls = 0
        self.triggers: dict[str, int] = {}
        self.on_trigger: Callable[[str, int, Worker], None] | None = None
        places = [Worker(k, s) for k in range(rules.replicas) for s in range(rules.stages)]
        if spec.scattered:
            places = Draw(spec.seed, "places").shuffled(places)
        self.home = {w: i // spec.workers_per_node for i, w in enumerate(places)}
        self.nodes = [VirtualNode(n) for n in range(max(self.home.values()) + 1)]
        self.plans = _plans(rules.replicas, rules.stages, rules.microbatches)

    def _coordinator(self) -> VirtualCoordinator[Any, Any]:
        return VirtualCoordinator(
            self.spec,
            self.agenda,
            self.checkers,
            fresh=lambda: RecoveryMachine(self.spec),
            fingerprint=lambda: fingerprint(self.recovery),
            port=self._decided,
            time_passed=None,
            orders_are_kept=False,
        )

    @property
    def recovery(self) -> Recovery:
        machine = self.head.machine
        assert isinstance(machine, RecoveryMachine)
        return machine.recovery

    def begin(self) -> None:
        machine = self.head.machine
        assert isinstance(machine, RecoveryMachine)
        self.perform(machine.first)

    # -------------------------------------------------------------- the coordinator's hands

    def _decided(self, one: Handled[ev.Event, act.Action]) -> None:
        if one.replayed:
            return
        if isinstance(one.event, ev.WorkerResumed) and one.event.epoch == self.recovery.epoch:
            self.checkers.resumed_in_epoch = one.event.epoch
        self.perform(one.actions)

    def perform(self, actions: list[act.Action]) -> None:
        for action in actions:
            if self.trace.lines is not None:
                self.trace.tell(self.agenda.now_us, f"  action {action}")
            _PERFORM[type(action)](self, action)

    def _start_worker(self, action: act.StartWorker) -> None:
        self._sent(self.agenda.now_us, 1, action.worker)
        self.agenda.after(self.weather.spread(self.spec.weather.order_us), self._agent_starts, action)

    def _agent_starts(self, action: act.StartWorker) -> None:
        node = self.nodes[self.home[action.worker]]
        if not node.up or not node.heard:
            node.waiting.append(action)
            return
        node.starting[action.worker] = action.incarnation
        self.agenda.after(self.weather.spread(self.spec.weather.start_us), self._process_up, action)

    def _process_up(self, action: act.StartWorker) -> None:
        worker, incarnation = action.worker, action.incarnation
        node = self.nodes[self.home[worker]]
        if node.starting.get(worker) != incarnation:
            return
        del node.starting[worker]
        body = VirtualWorker(
            WorkerState(worker, self.spec.rules, incarnation=incarnation),
            incarnation,
            node.number,
            self.truth,
            self.checkers,
            self.disk,
        )
        body.reports = VirtualLink(self._heard_report)
        body.snapshot_out = lambda task, state: self._send_snapshot(body, task, state)
        self.bodies[worker] = body
        self.orders[worker] = VirtualLink(lambda order: self._take(body, order))
        if not node.heard:
            self._muffle(node, body)
        self._note("start", worker, f"{worker} is up, incarnation {incarnation}, on node {node.number}")
        self._report(body, ev.WorkerStarted(worker=worker, incarnation=incarnation))
        self._trigger("start", worker)
        if node.lemon:
            node.lemon -= 1
            self.agenda.after(
                self.weather.spread(20 * self.spec.weather.op_us), self.lose_node, node.number, 10_000
            )

    def _interrupt(self, action: act.InterruptWorkers) -> None:
        for worker in action.workers:
            self._order(worker, ("interrupt", action.epoch))

    def _compute_plan(self, action: act.ComputePlan) -> None:
        delay = self.weather.spread(self.spec.weather.plan_us)
        self._trigger("plan", Worker(0, 0))
        self.agenda.after(delay, self._plan_ready, action, self.head.life)

    def _plan_ready(self, action: act.ComputePlan, life: int) -> None:
        if self.head.up and life == self.head.life:
            self.hear(answer(action, self.plans, self.spec.mode))

    def _resume(self, action: act.ResumeStep) -> None:
        book = {w: body.incarnation for w, body in self.bodies.items()}
        self._order(action.worker, ("resume", (action.order, book)))

    def _copy(self, action: act.CopyState) -> None:
        joiner = self.bodies.get(action.joiner)
        if joiner is not None:
            self._order(action.source, ("copy", (action, joiner.incarnation)))

    def _stop_feeding(self, action: act.StopFeeding) -> None:
        self._order(action.source, ("stop", action.joiner.replica))

    def _record_step(self, action: act.RecordStep) -> None:
        self.checkers.step_recorded(action)
        self.trace.mix(self.agenda.now_us, 2, action.step)
        self._trigger("record", Worker(0, 0))
        self._commit()

    def _finish(self, action: act.FinishTask) -> None:
        self.outcome = "finished"

    def _fail(self, action: act.FailTask) -> None:
        self.outcome = f"failed: {action.because}"

    def _close(self, action: act.CloseIncident) -> None:
        pass

    def _order(self, worker: Worker, order: tuple[str, Any]) -> None:
        link = self.orders.get(worker)
        if link is not None:
            self.network.send(link, order, self._delay(self.spec.weather.order_us, worker))

    # -------------------------------------------------------------- what the coordinator hears

    def hear(self, event: ev.Event) -> None:
        if self.trace.lines is not None:
            self.trace.tell(self.agenda.now_us, f"event {event}")
        self.head.hear(event)

    def _heard_report(self, event: ev.Event) -> None:
        self._sent(self.agenda.now_us, 3, None)
        self.hear(event)

    def _report(self, body: VirtualWorker, event: ev.Event) -> None:
        assert body.reports is not None
        self.network.send(body.reports, event, self._delay(self.spec.weather.order_us, body.me))

    def _commit(self) -> None:
        if self.head.up and (step := self.disk.whole_up_to(self.recovery.recorded)) is not None:
            self.hear(ev.CheckpointCommitted(step=step))

    # -------------------------------------------------------------- a process lives

    def _take(self, body: VirtualWorker, order: tuple[str, Any]) -> None:
        body.inbox.append(order)
        if body.task is None and body.alive:
            self._turn(body)

    def _turn(self, body: VirtualWorker) -> None:
        """As the engine's loop: the whole inbox, then one task."""
        if body.hung:
            return
        while body.inbox:
            self._obey(body, *body.inbox.popleft())
        task = body.walker.next()
        self._carry_out(body)
        if type(task) in _IDLE:
            return
        body.task = task
        agenda = self.agenda
        body.moment, body.moved_us = agenda.done, agenda.now_us
        agenda.after(self._time_of(body, task), self._done, body)

    def _done(self, body: VirtualWorker) -> None:
        task = body.task
        if not body.alive or body.hung or task is None:
            return
        worker = body.me
        self._sent(self.agenda.now_us, 4, worker)
        if self.trace.lines is not None:
            self.trace.tell(self.agenda.now_us, f"{worker} {_short(task)}")
        answer_ = body.do(task)
        body.task = None
        body.moment, body.moved_us = self.agenda.done, self.agenda.now_us
        kind = type(task)
        if kind is msg.Compute:
            if body.told_epoch != body.walker.epoch:
                body.told_epoch = body.walker.epoch
                self._report(
                    body,
                    ev.WorkerResumed(worker=worker, epoch=body.told_epoch, at=self.agenda.now_us / 1e6),
                )
        else:
            if kind is msg.SaveCheckpoint:
                delay = self.weather.spread(self.spec.weather.save_us)
                self.agenda.after(delay, self._saved, body, task, body.state)
            if kind is msg.StoreCopy:
                delay = self.weather.spread(self.spec.weather.save_us)
                self.agenda.after(delay, self._shelved, body, task, body.state)
            trigger = _TRIGGER_OF.get(kind)
            if trigger is not None:
                self._trigger(trigger, worker)
                if not body.alive:
                    return
        body.walker.finished(task, answer_)
        self._carry_out(body)
        self._turn(body)

    def _saved(self, body: VirtualWorker, task: msg.SaveCheckpoint, state: VirtualState) -> None:
        if body.alive:
            self.disk.sync(task.state_step, body.me.stage, state, (task.index, task.count), task.chunks)
            self._commit()

    def _shelved(self, body: VirtualWorker, task: msg.StoreCopy, state: VirtualState) -> None:
        """Here is one task's recovery alone, without nodes that could keep anything."""

    def _obey(self, body: VirtualWorker, verb: str, value: Any) -> None:
        walker = body.walker
        if verb == "parcel":
            parcel, facts, payload = value
            if walker.arrived(parcel, facts):
                body.payloads[parcel] = payload
            return
        self._sent(self.agenda.now_us, 5, body.me)
        if self.trace.lines is not None:
            self.trace.tell(self.agenda.now_us, f"{body.me} hears {verb} {value}")
        match verb:
            case "interrupt":
                self._trigger("interrupt", body.me)
                ledger = walker.interrupt(value)
                self._report(body, ev.LedgerReported(worker=body.me, epoch=value, ledger=ledger))
            case "resume":
                order, body.book = value
                walker.resume(order)
                if walker.epoch == order.epoch and not walker.joining:
                    self.checkers.resumed(body.me, order.epoch, self._others(body))
                self._trigger("resume", body.me)
            case "copy":
                copy, incarnation = value
                body.book[copy.joiner] = incarnation
                walker.copy_to(copy.joiner.replica, incarnation=copy.incarnation, transfer=copy.transfer)
            case "stop":
                walker.stop_feeding(value)
            case "mend":
                peer, incarnation = value
                if body.book.get(peer) == incarnation:
                    walker.link_reopened(peer)
            case _:
                body.take_state(*value)
        self._carry_out(body)

    def _others(self, me: VirtualWorker) -> Iterator[tuple[Worker, WorkerState]]:
        return ((w, body.walker) for w, body in self.bodies.items() if body is not me)

    def _carry_out(self, body: VirtualWorker) -> None:
        if body.walker.mail.commands:
            for command in body.walker.take_commands():
                _CARRY_OUT[type(command)](self, body, command)

    def _send(self, body: VirtualWorker, command: msg.Send) -> None:
        target = Worker(command.replica, command.stage)
        payload = body.payload_of(command.parcel)
        link = self._link(body, target)
        if link is not None:
            self.network.send(
                link,
                ("parcel", (command.parcel, command.value, payload)),
                self._delay(self.spec.weather.hop_us, body.me, target),
            )

    def _send_snapshot(self, body: VirtualWorker, task: msg.Snapshot, state: VirtualState) -> None:
        link = self._link(body, Worker(task.joiner, body.me.stage))
        if link is not None:
            takes = self.spec.weather.copy_us or 4 * self.spec.weather.hop_us
            for name, value in state._asdict().items():
                self.network.send(link, ("state", (task.transfer, name, value)), takes)

    def _link(self, body: VirtualWorker, target: Worker) -> VirtualLink | None:
        """The connection to the process that the sender was told of, if that one still lives."""
        incarnation = body.book.get(target)
        if incarnation is None:
            return None
        link = body.links.get((target, incarnation))
        if link is None:
            there = self._body(target, incarnation)
            if there is None:
                return None
            link = body.links[target, incarnation] = VirtualLink(lambda item: self._take(there, item))
        return link

    def _body(self, worker: Worker, incarnation: int) -> VirtualWorker | None:
        body = self.bodies.get(worker)
        if body is not None and body.incarnation == incarnation:
            return body
        return next((z for z in self.zombies if z.me == worker and z.incarnation == incarnation), None)

    def _tell_sealed(self, body: VirtualWorker, command: msg.TellSealed) -> None:
        self._report(
            body,
            ev.StepSealed(
                step=command.step,
                stage=body.me.stage,
                attempt=command.attempt,
                microbatches=command.microbatches,
                executed=command.executed,
                losses=command.losses,
                sum_of_squares=command.sum_of_squares,
            ),
        )

    def _tell_invalid(self, body: VirtualWorker, command: msg.TellInvalid) -> None:
        self._report(
            body,
            ev.UpdateInvalidated(
                worker=body.me, step=command.step, norm=command.norm, attempt=command.attempt
            ),
        )

    def _tell_unrestored(self, body: VirtualWorker, command: msg.TellUnrestored) -> None:
        failed = ev.RestoreFailed(worker=body.me, incarnation=body.incarnation, step=command.state_step)
        self._report(body, failed)

    def _tell_filled(self, body: VirtualWorker, command: msg.TellFilled) -> None:
        filled = ev.ChunksFilled(worker=body.me, incarnation=body.incarnation, step=command.step)
        self._report(body, filled)
        self._trigger("fill", body.me)

    def _tell_copied(self, body: VirtualWorker, command: msg.TellCopied) -> None:
        self._report(
            body,
            ev.StateCopied(
                worker=body.me,
                incarnation=body.incarnation,
                transfer=command.transfer.number,
                state_step=command.transfer.state_step,
            ),
        )
        self._trigger("enter", body.me)

    def stall(self) -> None:
        """Everybody waits and nothing is under way: after a while `core.faults.detector` says so."""
        self.num_stalls += 1
        self._note("stall", Worker(0, 0), "everybody waits for something that was lost")
        because = "everybody waits, nobody works"
        self.agenda.after(self.spec.weather.overdue_us, self.hear, ev.TrainingStalled(because=because))

    # -------------------------------------------------------------- processes and nodes die

    def kill(self, worker: Worker, reason: str, *, raised: bool = False) -> None:
        """The process is gone; its agent lives and tells."""
        body = self.bodies.get(worker)
        if body is None:
            return
        self._bury(body, reason)
        if raised:
            self._report(
                body,
                ev.WorkerRaised(
                    worker=worker,
                    incarnation=body.incarnation,
                    error="planted",
                    where=f"{worker} {body.incarnation}",
                ),
            )
        delay = self.weather.spread(self.spec.weather.exit_us)
        self.agenda.after(delay, self._report, body, self._exit(worker, body.incarnation, reason))

    def lose_node(self, number: int, span_us: int) -> None:
        """Power is gone: its processes, those being started, and the agent that would have told."""
        node = self.nodes[number]
        if not node.up:
            return
        node.up = False
        self._note("node", Worker(number, 0), f"node {number} loses power for {span_us / 1e3:g} ms")
        for body in [b for b in self.bodies.values() if b.node == number]:
            self._bury(body, "its node lost power")
            node.lost.append((body.me, body.incarnation))
        for zombie in [z for z in self.zombies if z.node == number]:
            self._end_zombie(zombie)
        node.lost += node.starting.items()
        node.starting.clear()
        silence = self.weather.spread(self.spec.weather.silence_us)
        self.agenda.after(min(silence, span_us), self._declare_lost, node)
        self.agenda.after(span_us, self._power_is_back, node)

    def _power_is_back(self, node: VirtualNode) -> None:
        node.up = True
        self._note("back", Worker(node.number, 0), f"node {node.number} is back")
        self._start_waiting(node)

    def _start_waiting(self, node: VirtualNode) -> None:
        if node.up and node.heard:
            waiting, node.waiting = node.waiting, []
            for action in waiting:
                self._agent_starts(action)

    def _declare_lost(self, node: VirtualNode) -> None:
        lost, node.lost = node.lost, []
        for worker, incarnation in lost:
            self.hear(self._exit(worker, incarnation, f"node {node.number} fell silent"))

    def drain_node(self, number: int, span_us: int) -> None:
        """Recovery knows of no operators: here it only loses power."""
        self.lose_node(number, span_us)

    def mute_node(self, number: int, span_us: int) -> None:
        """The coordinator does not hear the node. After a silence it takes the workers there for dead."""
        node = self.nodes[number]
        if not node.up or not node.heard:
            return
        node.heard = False
        self._note("mute", Worker(number, 0), f"node {number} is not heard for {span_us / 1e3:g} ms")
        for body in self.bodies.values():
            if body.node == number:
                self._muffle(node, body)
        silence = self.weather.spread(self.spec.weather.silence_us)
        if silence < span_us:
            self.agenda.after(silence, self._give_up_on, node)
        self.agenda.after(span_us, self._heard_again, node)

    def _muffle(self, node: VirtualNode, body: VirtualWorker) -> None:
        assert body.reports is not None
        for link in (body.reports, self.orders[body.me]):
            self.network.hold(link)
            node.muffled.append(link)

    def _give_up_on(self, node: VirtualNode) -> None:
        """Its workers live on as zombies: cut off from the coordinator, not from each other."""
        if node.heard or not node.up:
            return
        for body in [b for b in self.bodies.values() if b.node == node.number]:
            del self.bodies[body.me]
            self.orders.pop(body.me).close()
            assert body.reports is not None
            body.reports.close()
            self.zombies.append(body)
            self.hear(self._exit(body.me, body.incarnation, f"node {node.number} fell silent"))
        for worker, incarnation in node.starting.items():
            self.hear(self._exit(worker, incarnation, f"node {node.number} fell silent"))
        node.starting.clear()

    def _heard_again(self, node: VirtualNode) -> None:
        """The agent ends what the coordinator has given up, before it starts anything new."""
        node.heard = True
        for link in node.muffled:
            self.network.release(link)
        node.muffled.clear()
        for zombie in [z for z in self.zombies if z.node == node.number]:
            self._end_zombie(zombie)
        self._start_waiting(node)

    def _end_zombie(self, zombie: VirtualWorker) -> None:
        self.zombies.remove(zombie)
        self._drop_process(zombie)

    def _bury(self, body: VirtualWorker, reason: str) -> None:
        self.num_deaths += 1
        self._note("death", body.me, f"KILL {body.me} ({reason}) in {_short(body.task)}")
        del self.bodies[body.me]
        self.orders.pop(body.me).close()
        assert body.reports is not None
        self.network.lose_tail(body.reports)
        self._drop_process(body)

    def _drop_process(self, body: VirtualWorker) -> None:
        body.alive = False
        body.inbox.clear()
        for link in body.links.values():
            self.network.lose_tail(link)
        for other in [*self.bodies.values(), *self.zombies]:
            link_ = other.links.pop((body.me, body.incarnation), None)
            if link_ is not None:
                link_.close()

    @staticmethod
    def _exit(worker: Worker, incarnation: int, reason: str) -> ev.WorkerExited:
        return ev.WorkerExited(worker=worker, incarnation=incarnation, reason=reason)

    # -------------------------------------------------------------- time and trace

    def _time_of(self, body: VirtualWorker, task: msg.WorkItem) -> int:
        measured = self.spec.weather.op_times_us
        if measured is not None:
            kind = task.op.kind if type(task) is msg.Compute else _KIND_OF.get(type(task))
            return measured.get(kind, 1) * self.slow.get(body.me, 1) if kind is not None else 1
        share = _SHARE_OF_AN_OP[task.op.kind] if type(task) is msg.Compute else 0.1
        typical = int(self.spec.weather.op_us * share) * self.slow.get(body.me, 1)
        return self.weather.spread(typical)

    def _delay(self, typical_us: int, *between: Worker) -> int:
        for worker in between:
            slowness = self.nodes[self.home[worker]].slowness
            if slowness > 1:
                typical_us *= slowness
        return typical_us

    def _sent(self, time_us: int, code: int, worker: Worker | None) -> None:
        self.trace.mix(time_us, code, 0 if worker is None else worker[0] * 64 + worker[1] + 1)

    def _note(self, what: str, worker: Worker, text: str) -> None:
        self._sent(self.agenda.now_us, 6 + len(what), worker)
        self.trace.tell(self.agenda.now_us, text)

    def _trigger(self, what: str, worker: Worker) -> None:
        count = self.triggers[what] = self.triggers.get(what, 0) + 1
        if self.on_trigger is not None:
            self.on_trigger(what, count, worker)


_KIND_OF: dict[type, Kind] = {msg.SumChunk: Kind.R, msg.Update: Kind.U}
_IDLE = (msg.Wait, msg.Paused, msg.Finished)
_TRIGGER_OF: dict[type, str] = {
    msg.SumChunk: "sum",
    msg.AssembleSum: "hold",
    msg.Update: "update",
    msg.Snapshot: "copy",
    msg.ApplyFeed: "feed",
    msg.SaveCheckpoint: "save",
    msg.StoreCopy: "save",
}
_PERFORM: dict[type, Callable[[World, Any], None]] = {
    act.StartWorker: World._start_worker,
    act.InterruptWorkers: World._interrupt,
    act.ComputePlan: World._compute_plan,
    act.ResumeStep: World._resume,
    act.CopyState: World._copy,
    act.StopFeeding: World._stop_feeding,
    act.RecordStep: World._record_step,
    act.CloseIncident: World._close,
    act.FinishTask: World._finish,
    act.FailTask: World._fail,
}
_CARRY_OUT: dict[type, Callable[[World, VirtualWorker, Any], None]] = {
    msg.Send: World._send,
    msg.Forget: lambda world, body, command: body.forget(command),
    msg.ReleaseGradients: lambda world, body, command: body.release_gradients(command),
    msg.DropStashes: lambda world, body, command: body.drop_stashes(command),
    msg.ReleaseSum: lambda world, body, command: body.release_sum(command),
    msg.ReleaseChunks: lambda world, body, command: body.chunks.release(command.chunks),
    msg.TellFilled: World._tell_filled,
    msg.DiscardWork: lambda world, body, command: body.discard(command),
    msg.TellSealed: World._tell_sealed,
    msg.TellInvalid: World._tell_invalid,
    msg.TellCopied: World._tell_copied,
    msg.TellUnrestored: World._tell_unrestored,
}


@lru_cache(maxsize=64)
def _plans(replicas: int, stages: int, microbatches: int) -> PlanCache:
    """A pure function of the shape, so storms may share it."""
    grid = uniform(replicas=replicas, stages=stages, value=1.0)
    return PlanCache(
        Instance(
            replicas=replicas,
            stages=stages,
            microbatches=microbatches,
            forward=grid,
            input_grad=grid,
            weight_grad=grid,
        )
    )


def _short(task: Any) -> str:
    if isinstance(task, msg.Compute):
        return f"step {task.step} {task.op}{' (ghost)' if task.ghost else ''}"
    return "nothing" if task is None else str(task)
