"""One task's recovery in a virtual cluster: nodes, processes, connections, and the machine that heals it.

Everything that decides is the real thing: `core.task.recovery`, `core.worker`, `schedule.recovery_answer`.
The world only moves messages, lets time pass and takes things away. Nodes are as simple as can be here: they
start and lose processes; agents and the coordinator around them are in `cluster_world`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.core.task.recovery import Recovery
from everstep.core.worker.worker_state import WorkerState
from everstep.drive.driver import Handled
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import work
from everstep.protocol.messages import NotifyWorker, ResumeWorker, Sender, TaskEvent, WorkerReport
from everstep.protocol.ops import Worker
from everstep.protocol.work import StateDirections
from everstep.schedule.recovery_answer import answer
from everstep_lab.draw import Draw
from tests.storms.network import VirtualLink
from tests.storms.processes import Processes, short
from tests.storms.scene import Scene
from tests.storms.spec import Spec
from tests.storms.truth import VirtualState
from tests.storms.virtual_coordinator import RecoveryMachine, VirtualCoordinator, fingerprint
from tests.storms.virtual_worker import VirtualWorker

TASK = "storm"


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
        self.scene = Scene(spec, record=record)
        self.processes = Processes(self, self.scene)
        self.head: VirtualCoordinator[Any, Any] = VirtualCoordinator(
            self.scene,
            fresh=lambda: RecoveryMachine(spec),
            fingerprint=lambda: fingerprint(self.recovery),
            port=self._decided,
            time_passed=None,
            orders_are_kept=False,
        )
        self.workers: dict[Worker, VirtualWorker] = {}
        self.zombies: list[VirtualWorker] = []  # alive, and given up by the coordinator
        self.orders: dict[Worker, VirtualLink] = {}
        self.reports: dict[Sender, VirtualLink] = {}
        rules = spec.rules
        places = [Worker(k, s) for k in range(rules.replicas) for s in range(rules.stages)]
        if spec.scattered:
            places = Draw(spec.seed, "places").shuffled(places)
        self.home = {w: i // spec.workers_per_node for i, w in enumerate(places)}
        self.nodes = [VirtualNode(n) for n in range(max(self.home.values()) + 1)]

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
            self.scene.checkers.resumed_in_epoch = one.event.epoch
        self.perform(one.actions)

    def perform(self, actions: list[act.Action]) -> None:
        for action in actions:
            if self.scene.trace.lines is not None:
                self.scene.trace.tell(self.scene.agenda.now_us, f"  action {action}")
            _PERFORM[type(action)](self, action)

    def _start_worker(self, action: act.StartWorker) -> None:
        self.scene.mix(1, action.worker)
        self.scene.soon(self.spec.weather.order_us, self._agent_starts, action)

    def _agent_starts(self, action: act.StartWorker) -> None:
        node = self.nodes[self.home[action.worker]]
        if not node.up or not node.heard:
            node.waiting.append(action)
            return
        node.starting[action.worker] = action.incarnation
        self.scene.soon(self.spec.weather.start_us, self._process_up, action)

    def _process_up(self, action: act.StartWorker) -> None:
        worker, incarnation = action.worker, action.incarnation
        node = self.nodes[self.home[worker]]
        if node.starting.get(worker) != incarnation:
            return
        del node.starting[worker]
        process = self.processes.start(Sender(TASK, worker, incarnation), node.number)
        self.reports[process.sender] = VirtualLink(self._heard_report)
        self.workers[worker] = process
        self.orders[worker] = VirtualLink(lambda order: self.processes.take(process, order))
        if not node.heard:
            self._muffle(node, process)
        self.scene.note("start", worker, f"{worker} is up, incarnation {incarnation}, on node {node.number}")
        self.report(process, process.started())
        self.scene.trigger("start", worker)
        if node.lemon:
            node.lemon -= 1
            self.scene.soon(20 * self.spec.weather.op_us, self.lose_node, node.number, 10_000)

    def _interrupt(self, action: act.InterruptWorkers) -> None:
        for worker in action.workers:
            self._order(worker, action)

    def _compute_plan(self, action: act.ComputePlan) -> None:
        self.scene.trigger("plan", Worker(0, 0))
        self.scene.soon(self.spec.weather.plan_us, self._plan_ready, action, self.head.life)

    def _plan_ready(self, action: act.ComputePlan, life: int) -> None:
        if self.head.up and life == self.head.life:
            self.hear(answer(action, self.scene.plans, self.spec.mode))

    def _record_step(self, action: act.RecordStep) -> None:
        self.scene.checkers.step_recorded(action)
        if self.spec.rules.chunks:
            states = {w: process.worker_state for w, process in self.workers.items() if process.alive}
            self.scene.checkers.chunks_held(self.recovery, states)
        self.scene.trace.mix(self.scene.agenda.now_us, 2, action.step)
        self.scene.trigger("record", Worker(0, 0))
        self._commit()

    def _finish(self, action: act.FinishTask) -> None:
        self.scene.outcome = "finished"

    def _fail(self, action: act.FailTask) -> None:
        self.scene.outcome = f"failed: {action.because}"

    def _order(self, worker: Worker, words: Any) -> None:
        link = self.orders.get(worker)
        if link is not None:
            book = tuple((w, *process.address) for w, process in self.workers.items())
            order = NotifyWorker(task=TASK, worker=worker, words=words, book=book)
            self.scene.network.send(link, order, self._delay(worker))

    def _resume(self, action: act.ResumeWorkers) -> None:
        facts = replace(action.facts, book={w: process.address for w, process in self.workers.items()})
        for worker, own in action.orders.items():
            link = self.orders.get(worker)
            if link is not None:
                order = ResumeWorker(
                    task=TASK, worker=worker, facts=facts, own=own, states=work.StateDirections()
                )
                self.scene.network.send(link, order, self._delay(worker))

    def _delay(self, worker: Worker) -> int:
        return self.spec.weather.order_us * self.nodes[self.home[worker]].slowness

    # -------------------------------------------------------------- what the coordinator hears

    def hear(self, event: ev.Event) -> None:
        if self.scene.trace.lines is not None:
            self.scene.trace.tell(self.scene.agenda.now_us, f"event {event}")
        self.head.hear(event)

    def _heard_report(self, event: ev.Event) -> None:
        self.scene.mix(3, None)
        self.hear(event)

    def _commit(self) -> None:
        if self.head.up and (step := self.scene.disk.whole_up_to(self.recovery.recorded)) is not None:
            self.hear(ev.CheckpointCommitted(step=step))

    # -------------------------------------------------------------- around the processes

    def report(self, process: VirtualWorker, report: WorkerReport) -> None:
        if isinstance(report, TaskEvent):
            self.scene.network.send(self.reports[process.sender], report.event, self._delay(process.me))

    def left(self, process: VirtualWorker) -> None:
        raise AssertionError("no worker is asked to leave here")

    def saved(self, process: VirtualWorker, task: work.SaveCheckpoint, state: VirtualState) -> None:
        share = (task.index, task.count)
        self.scene.disk.sync(task.state_step, process.me.stage, state, share, task.chunks)
        self._commit()

    def shelved(
        self, process: VirtualWorker, task: work.StoreCopy, state: VirtualState, directions: StateDirections
    ) -> None:
        """Here are no nodes that could keep anything."""

    def slowness(self, node: int) -> int:
        return self.nodes[node].slowness

    def members(self, me: VirtualWorker) -> Iterator[tuple[Worker, WorkerState]]:
        return ((w, process.worker_state) for w, process in self.workers.items() if process is not me)

    # -------------------------------------------------------------- processes and nodes die

    def stall(self) -> None:
        """Everybody waits and nothing is under way: after a while `core.faults.detector` says so."""
        self.scene.num_stalls += 1
        self.scene.note("stall", Worker(0, 0), "everybody waits for something that was lost")
        stalled = ev.TrainingStalled(because="all workers wait, none works")
        self.scene.agenda.after(self.spec.weather.overdue_us, self.hear, stalled)

    def kill(self, worker: Worker, reason: str, *, raised: bool = False) -> None:
        """The process is gone; its agent lives and reports it."""
        process = self.workers.get(worker)
        if process is None:
            return
        self._bury(process, reason)
        if raised:
            number = process.incarnation
            where = f"{worker} {number}"
            event = ev.WorkerRaised(worker=worker, incarnation=number, error="planted", where=where)
            self.report(process, TaskEvent(task=TASK, event=event))
        exited = TaskEvent(task=TASK, event=_exit(worker, process.incarnation, reason))
        self.scene.soon(self.spec.weather.exit_us, self.report, process, exited)

    def hang(self, worker: Worker, *, asleep: bool) -> None:
        """It stands still until its agent kills it."""
        process = self.workers[worker]
        process.hung = True
        self.scene.agenda.after(self.spec.weather.overdue_us, self._end_hang, process)

    def _end_hang(self, process: VirtualWorker) -> None:
        if self.workers.get(process.me) is process:
            self.kill(process.me, "an op was overdue")

    def lose_node(self, number: int, span_us: int) -> None:
        """Power is gone: its processes, those being started, and the agent that would have reported it."""
        node = self.nodes[number]
        if not node.up:
            return
        node.up = False
        text = f"node {number} loses power for {span_us / 1e3:g} ms"
        self.scene.note("node", Worker(number, 0), text)
        for process in [p for p in self.workers.values() if p.node == number]:
            self._bury(process, "its node lost power", silently=True)
            node.lost.append((process.me, process.incarnation))
        for zombie in [z for z in self.zombies if z.node == number]:
            self._end_zombie(zombie, silently=True)
        node.lost += node.starting.items()
        node.starting.clear()
        silence = self.scene.weather.spread(self.spec.weather.silence_us)
        self.scene.agenda.after(min(silence, span_us), self._declare_lost, node)
        self.scene.agenda.after(span_us, self._power_is_back, node)

    def _power_is_back(self, node: VirtualNode) -> None:
        node.up = True
        self.scene.note("back", Worker(node.number, 0), f"node {node.number} is back")
        self._start_waiting(node)

    def _start_waiting(self, node: VirtualNode) -> None:
        if node.up and node.heard:
            waiting, node.waiting = node.waiting, []
            for action in waiting:
                self._agent_starts(action)

    def _declare_lost(self, node: VirtualNode) -> None:
        lost, node.lost = node.lost, []
        for worker, incarnation in lost:
            self.hear(_exit(worker, incarnation, f"node {node.number} fell silent"))

    def mute_node(self, number: int, span_us: int) -> None:
        """The coordinator does not hear the node. After a silence it takes the workers there for dead."""
        node = self.nodes[number]
        if not node.up or not node.heard:
            return
        node.heard = False
        text = f"node {number} is not heard for {span_us / 1e3:g} ms"
        self.scene.note("mute", Worker(number, 0), text)
        for process in self.workers.values():
            if process.node == number:
                self._muffle(node, process)
        silence = self.scene.weather.spread(self.spec.weather.silence_us)
        if silence < span_us:
            self.scene.agenda.after(silence, self._give_up_on, node)
        self.scene.agenda.after(span_us, self._heard_again, node)

    def _muffle(self, node: VirtualNode, process: VirtualWorker) -> None:
        for link in (self.reports[process.sender], self.orders[process.me]):
            self.scene.network.hold(link)
            node.muffled.append(link)

    def _give_up_on(self, node: VirtualNode) -> None:
        """Its workers live on as zombies: cut off from the coordinator, not from each other."""
        if node.heard or not node.up:
            return
        for process in [p for p in self.workers.values() if p.node == node.number]:
            del self.workers[process.me]
            self.orders.pop(process.me).close()
            self.reports[process.sender].close()
            self.zombies.append(process)
            self.hear(_exit(process.me, process.incarnation, f"node {node.number} fell silent"))
        for worker, incarnation in node.starting.items():
            self.hear(_exit(worker, incarnation, f"node {node.number} fell silent"))
        node.starting.clear()

    def _heard_again(self, node: VirtualNode) -> None:
        """The agent ends what the coordinator has given up, before it starts anything new."""
        node.heard = True
        for link in node.muffled:
            self.scene.network.release(link)
        node.muffled.clear()
        for zombie in [z for z in self.zombies if z.node == node.number]:
            self._end_zombie(zombie)
        self._start_waiting(node)

    def _end_zombie(self, zombie: VirtualWorker, *, silently: bool = False) -> None:
        self.zombies.remove(zombie)
        self.processes.drop(zombie, silently=silently)

    def _bury(self, process: VirtualWorker, reason: str, *, silently: bool = False) -> None:
        self.scene.num_deaths += 1
        self.scene.note("death", process.me, f"KILL {process.me} ({reason}) in {short(process.task)}")
        del self.workers[process.me]
        self.orders.pop(process.me).close()
        self.scene.network.lose_tail(self.reports[process.sender])
        self.processes.drop(process, silently=silently)


def _exit(worker: Worker, incarnation: int, reason: str) -> ev.WorkerExited:
    return ev.WorkerExited(worker=worker, incarnation=incarnation, reason=reason)


_PERFORM: dict[type, Callable[[World, Any], None]] = {
    act.StartWorker: World._start_worker,
    act.InterruptWorkers: World._interrupt,
    act.ComputePlan: World._compute_plan,
    act.ResumeWorkers: World._resume,
    act.CopyState: lambda world, action: world._order(action.source, action),
    act.StopFeeding: lambda world, action: world._order(action.source, action),
    act.RecordStep: World._record_step,
    act.CloseIncident: lambda world, action: None,
    act.FinishTask: World._finish,
    act.FailTask: World._fail,
}
