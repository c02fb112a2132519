"""The coordinator's storm: the real `Coordinator` and its detectors over agents that lose the line and power.

What `world.py` does for one task's recovery, this does for the whole machine: nodes with slots (some to
spare), agents with numbered reports and orders, heartbeats, looks at progress, a journal. A worker may be
moved to another node, and one that was given up may still be alive behind a cut line.

    process ──► agent ──(numbered, held back while the line is cut)──► journal ──► Coordinator
       ▲          │  ▲                                                                │
       └──────────┘  └──────────────(numbered orders, heard once)────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.snapshot import digest
from everstep.core.faults.detector import DetectorLimits, Glance, ProgressWatch
from everstep.core.task.recovery import Recovery
from everstep.core.words import actions as act
from everstep.core.words import cluster_messages as msg
from everstep.core.words import events as ev
from everstep.core.words.ops import Worker
from everstep.core.words.shape import Shape
from everstep.core.words.worker_messages import Finished, Paused, SaveCheckpoint, StoreCopy, Wait
from everstep.core.worker.worker_state import WorkerState
from everstep.drive.ports import ClusterPorts, HandledEvent
from everstep.schedule.answer import answer
from everstep.sim.storm.checkers import Violation
from everstep.sim.storm.disk import ShelfMemory
from everstep.sim.storm.network import VirtualLink
from everstep.sim.storm.spec import Spec
from everstep.sim.storm.truth import VirtualState
from everstep.sim.storm.virtual_coordinator import RecoveryMachine, VirtualCoordinator
from everstep.sim.storm.virtual_worker import VirtualWorker
from everstep.sim.storm.world import World

TASK = "storm"
LOOK_US = 8_000
CLOSE_US = 30_000
CLOSE_LOOKS = 20  # at those who may finish what they have in hand
SPARE_NODES = 1
# The defaults are for ops of a tenth of a second; here an op takes a millisecond.
LIMITS = DetectorLimits(
    overdue_floor_s=0.03,
    hang_floor_s=0.06,
    hang_alone_s=0.5,
    wait_floor_s=0.03,
    stall_floor_s=0.12,
    first_op_s=0.3,
)
PATIENCE = msg.Patience(
    restarts_per_place=60,
    backoff_s=0.005,
    backoff_most_s=0.03,
    isolation_s=0.3,
    lonely_silence_s=0.1,
    awaited_silence_s=0.1,
)
TIMES_S = {"F": 0.001, "I": 0.0011, "W": 0.0009, "B": 0.002, "R": 0.0003, "U": 0.0003}


@dataclass(slots=True)
class VirtualAgent:
    """One node. `boot` changes with every power cycle, and with it the numbers start again."""

    number: int
    slots: int
    boot: int = 1
    up: bool = True
    heard: bool = True
    greeted: bool = False  # the coordinator knows of this connection: it sends nothing on one it does not
    lemon: int = 0
    slowness: int = 1
    sent: int = 0
    done: int = 0  # the last order carried out in this boot
    to_head: VirtualLink | None = None
    to_agent: VirtualLink | None = None
    starting: dict[Worker, int] = field(default_factory=dict)
    progress: ProgressWatch = field(default_factory=lambda: ProgressWatch(LIMITS))
    struck: bool = False  # something has gone wrong here: it may be suspected

    @property
    def name(self) -> str:
        return f"n{self.number}"

    @property
    def boot_name(self) -> str:
        return f"{self.name}-{self.boot}"


class ClusterWorld(World):
    def __init__(self, spec: Spec, *, record: bool = False) -> None:
        super().__init__(spec, record=record)
        rules = spec.rules
        count = -(-rules.replicas * rules.stages // spec.workers_per_node) + SPARE_NODES
        self.agents = [VirtualAgent(n, spec.workers_per_node) for n in range(count)]
        self.nodes = self.agents  # type: ignore[assignment]
        self.home = dict.fromkeys(self.home, 0)
        self.seat: dict[tuple[int, int], VirtualWorker] = {}  # (node, slot) -> the live process there
        for agent in self.agents:
            self._connect(agent)
        self.closing = False
        self.shelf = ShelfMemory()

    def _coordinator(self) -> VirtualCoordinator[Any, Any]:
        self._ports = ClusterPorts(self, self, self)
        self._shown = 0  # the number of the last event that is on the record
        return VirtualCoordinator(
            self.spec,
            self.agenda,
            self.checkers,
            fresh=lambda: Coordinator(patience=PATIENCE, limits=LIMITS),
            fingerprint=lambda: digest(self.coordinator),
            port=self._ports.take,
            time_passed=msg.TimePassed(),
            orders_are_kept=True,
            turned=self._coordinator_turned,
        )

    @property
    def coordinator(self) -> Coordinator:
        machine = self.head.machine
        assert isinstance(machine, Coordinator)
        return machine

    @property
    def recovery(self) -> Recovery:
        task = self.coordinator.tasks.get(TASK)
        found = None if task is None else task.recovery
        return RecoveryMachine(self.spec).recovery if found is None else found

    def begin(self) -> None:
        rules = self.spec.rules
        for agent in self.agents:
            self.head.hear(agent_joined(agent))
        submitted = msg.TaskSubmitted(
            task=TASK,
            job=None,
            shape=Shape(rules.replicas, rules.stages, rules.microbatches, rules.chunks),
            steps=rules.steps,
            secret="",
            has_checkpoints=bool(rules.checkpoint_every),
        )
        self.head.hear(submitted)
        for at_us in self.spec.moves:
            self.agenda.at(at_us, self._move)
        for agent in self.agents:
            self.agenda.after(LOOK_US + agent.number, self._look, agent, agent.boot)

    def stall(self) -> None:
        raise Violation("liveness: everybody waits and no detector sees it")

    def check_the_coordinator(self) -> None:
        """Every incident is closed, nobody sits anywhere, and the journal tells the same story."""
        coordinator = self.coordinator
        for incident in coordinator.log.open_ones():
            raise Violation(f"incidents close: number {incident.number} ({incident.what}) is open")
        alarms = [i.what for i in coordinator.log.incidents if "updated eagerly" not in i.what]
        if not self.spec.faults and alarms:
            raise Violation(f"no false alarm: {alarms[0]} in a calm run")
        again = self.head.replayed(self.head.acted)
        assert isinstance(again, Coordinator)
        self.checkers.journal_replayed(digest(coordinator), digest(again))

    # -------------------------------------------------------------- the coordinator's hands

    def handled(self, one: HandledEvent) -> None:
        """On the record, once: what is read again after a restart was there before the crash."""
        if isinstance(one.event, msg.NodeJoined) and not one.replayed:
            self._greet(one.event, {a.number for a in one.actions if isinstance(a, msg.Dispatch)})
        if one.number <= self._shown:
            return
        self._shown = one.number
        for action in one.actions:
            if self.trace.lines is not None:
                self.trace.tell(self.agenda.now_us, f"  action {action}")
            match action:
                case msg.RecordRow():
                    self.checkers.step_recorded(action.record)
                    self.trace.mix(self.agenda.now_us, 2, action.record.step)
                case msg.NodeChanged():
                    self._node_changed(action)
                case msg.TaskEnded():
                    self.outcome = (
                        "finished" if action.state == "finished" else f"{action.state}: {action.because}"
                    )

    def _greet(self, event: msg.NodeJoined, fresh: set[int]) -> None:
        """A new connection: what the old one may have lost goes first, by its number."""
        agent = self.agents[int(event.node[1:])]
        agent.greeted = agent.greeted or agent.boot_name == event.boot
        for order in self.coordinator.nodes[event.node].pending:
            if order.number not in fresh:
                self.send(order)

    def _coordinator_turned(self) -> None:
        """Connections die with the coordinator; each agent opens another one when there is one again."""
        for agent in self.agents:
            agent.greeted = False
            if agent.to_agent is not None:
                agent.to_agent.queue.clear()
            if self.head.up and agent.up and agent.heard:
                delay = self.weather.spread(self.spec.weather.order_us)
                self.agenda.after(delay, self._reconnect, agent, agent.boot, self.head.life)

    def _reconnect(self, agent: VirtualAgent, boot: int, life: int) -> None:
        if agent.up and agent.heard and agent.boot == boot and life == self.head.life:
            self.hear(agent_joined(agent))

    def think(self, action: msg.Think) -> None:
        delay = self.weather.spread(self.spec.weather.plan_us)
        self._trigger("plan", Worker(0, 0))
        self.agenda.after(delay, self._thought, action, self.head.life)

    def choose(self, action: msg.ChooseAssignment) -> None:
        raise Violation("no planner was asked for")

    def received(self, node: str, number: int) -> None:
        """The line keeps what it has not delivered."""

    def send(self, action: msg.Dispatch) -> None:
        """On the connection of the boot that the coordinator knows; an older one is closed."""
        agent = self.agents[int(action.node[1:])]
        known = self.coordinator.nodes[action.node].boot
        if agent.to_agent is not None and known == agent.boot_name and agent.greeted:
            self.network.send(agent.to_agent, action, self.spec.weather.order_us)

    def _thought(self, action: msg.Think, life: int) -> None:
        if self.head.up and life == self.head.life:
            found = answer(action.question, self.plans, self.spec.mode)
            self.hear(msg.PlanAnswered(task=TASK, event=found))  # type: ignore[arg-type]

    def _node_changed(self, action: msg.NodeChanged) -> None:
        agent = self.agents[int(action.node[1:])]
        if action.state in ("isolated", "lemon") and not agent.struck:
            raise Violation(f"no false isolation: {action.node} is {action.state} ({action.because})")

    # -------------------------------------------------------------- agents

    def _connect(self, agent: VirtualAgent) -> None:
        boot = agent.boot
        agent.to_head = VirtualLink(self._reported)
        agent.to_agent = VirtualLink(lambda order: self._ordered(agent, boot, order))
        agent.sent = agent.done = 0
        agent.greeted = False

    def _reported(self, event: Any) -> None:
        self._sent(self.agenda.now_us, 3, None)
        self.hear(event)

    def _tell(
        self, agent: VirtualAgent, report: msg.NodeReport, sender: tuple[Worker, int] | None = None
    ) -> None:
        """Numbered; the line keeps the order, and keeps it all while it is cut."""
        if agent.up and agent.to_head is not None:
            agent.sent += 1
            event = msg.FromNode(
                node=agent.name,
                boot=agent.boot_name,
                number=agent.sent,
                report=report,
                sender=None if sender is None else msg.Sender(TASK, *sender),
            )
            self.network.send(agent.to_head, event, self.spec.weather.order_us * agent.slowness)

    def _ordered(self, agent: VirtualAgent, boot: int, action: msg.Dispatch) -> None:
        if not agent.up or agent.boot != boot or action.number <= agent.done:
            return
        agent.done = action.number
        if self.head.up:
            self.coordinator.acknowledged(agent.name, action.number)
        order = action.order
        self._sent(self.agenda.now_us, 5, getattr(order, "worker", None))
        match order:
            case msg.StartProcess():
                self.closing = False
                agent.starting[order.worker] = order.incarnation
                delay = self.weather.spread(self.spec.weather.start_us)
                self.agenda.after(delay, self._up, agent, boot, order)
            case msg.KillProcess():
                body = self._body(order.worker, order.incarnation)
                if body is not None and body.node == agent.number:
                    self._end(body, "ended by order")
                elif agent.starting.get(order.worker) == order.incarnation:
                    del agent.starting[order.worker]
                    self._tell_exit(agent, order.worker, order.incarnation, "ended by order")
            case msg.NotifyWorker():
                self._pass_on(agent, order)
            case msg.CloseTask():
                self.closing = True
                there = {b.me: b.incarnation for b in self.bodies.values() if b.node == agent.number}
                gently = CLOSE_LOOKS if order.gently else 0
                self.agenda.after(CLOSE_US, self._close_all, agent, boot, there | agent.starting, gently)
            case msg.DropCopies():
                self.shelf.drop(agent.name, order.before)
            case msg.KeepOnly():
                self._keep_only(agent, {(w, i) for _, w, i in order.keep})
            case msg.FindCheckpoint():
                found = msg.CheckpointFound(task=TASK, step=self.disk.committed, search=order.search)
                self._tell(agent, found)
            case msg.DiscardPartial():
                pass
            case msg.CommitCheckpoint():
                self.disk.committed = max(self.disk.committed, order.step)
                self._tell(agent, msg.TaskEvent(task=TASK, event=ev.CheckpointCommitted(step=order.step)))

    def _up(self, agent: VirtualAgent, boot: int, order: msg.StartProcess) -> None:
        worker = order.worker
        if not agent.up or agent.boot != boot or agent.starting.get(worker) != order.incarnation:
            return
        del agent.starting[worker]
        there = self.seat.get((agent.number, order.slot))
        if there is not None:
            raise Violation(
                f"one owner: {worker} starts in {agent.name}:{order.slot}, where {there.me} lives"
            )
        old = self.bodies.pop(worker, None)
        if old is not None:
            self._check_given_up(old)
            self.zombies.append(old)
        body = VirtualWorker(
            WorkerState(worker, self.spec.rules, incarnation=order.incarnation),
            order.incarnation,
            agent.number,
            self.truth,
            self.checkers,
            self.disk,
        )
        me = (worker, order.incarnation)
        body.reports = VirtualLink(lambda event: self._tell(agent, msg.TaskEvent(task=TASK, event=event), me))
        body.snapshot_out = lambda task, state: self._send_snapshot(body, task, state)
        body.shelf = self.shelf
        self.bodies[worker], self.home[worker] = body, agent.number
        self.orders[worker] = VirtualLink(lambda order_: self._take(body, order_))
        self.seat[agent.number, order.slot] = body
        agent.progress.expects(TASK, worker, TIMES_S)
        self._note("start", worker, f"{worker} is up, incarnation {order.incarnation}, on {agent.name}")
        address = (agent.name, order.incarnation)
        self._report(body, ev.WorkerStarted(worker=worker, incarnation=order.incarnation, address=address))
        self._trigger("start", worker)
        if agent.lemon:
            agent.lemon -= 1
            self.agenda.after(self.weather.spread(20_000), self.lose_node, agent.number, 10_000)

    def _check_given_up(self, old: VirtualWorker) -> None:
        """A second process of a worker is started only where the first is given up for good: its node is
        gone, or just back and about to be told.
        """
        agent = self.agents[old.node]
        node = self.coordinator.nodes[agent.name]
        if agent.up and agent.heard and agent.done >= node.sent:
            raise Violation(f"one owner: {old.me} lives on {agent.name} ({node.state}) and is started again")

    def _pass_on(self, agent: VirtualAgent, order: msg.NotifyWorker) -> None:
        body = self.bodies.get(order.worker)
        if body is None or body.node != agent.number:
            return
        book = {worker: incarnation for worker, _, incarnation in order.book}
        match order.words:
            case act.InterruptWorkers(epoch=epoch):
                self._take(body, ("interrupt", epoch))
            case act.ResumeStep(order=resume):
                body.directions[resume.epoch] = order
                self._take(body, ("resume", (resume, book)))
            case act.CopyState(joiner=joiner) as copy:
                if joiner in book:
                    self._take(body, ("copy", (copy, book[joiner])))
            case act.StopFeeding(joiner=joiner):
                self._take(body, ("stop", joiner.replica))

    def _keep_only(self, agent: VirtualAgent, keep: set[tuple[Worker, int]]) -> None:
        for worker, incarnation in list(agent.starting.items()):
            if (worker, incarnation) not in keep:
                del agent.starting[worker]
        for body in [*self.bodies.values(), *self.zombies]:
            if body.node == agent.number and (body.me, body.incarnation) not in keep:
                self._end(body, "given up while the line was cut")

    def _close_all(self, agent: VirtualAgent, boot: int, there: dict[Worker, int], looks: int) -> None:
        """The task or its shape is over: what has finished its last step must have the right state.

        Those who were there when it was told end; gently, they may finish what they have in hand.
        """
        if agent.boot != boot or not agent.up:
            return
        bodies = [b for b in self.bodies.values() if b.node == agent.number]
        bodies = [b for b in bodies if there.get(b.me) == b.incarnation]
        if looks and any(b.shelving or not isinstance(b.walker.next(), Finished | Paused) for b in bodies):
            self.agenda.after(CLOSE_US, self._close_all, agent, boot, there, looks - 1)
            return
        for body in bodies:
            walker = body.walker
            if not walker.joining and walker.now.step == self.spec.rules.steps + 1:
                self.checkers.state_saved(body.me, self.spec.rules.steps, body.state)
            self._end(body, "the task is over")
        for worker, incarnation in list(agent.starting.items()):
            if there.get(worker) == incarnation:
                del agent.starting[worker]
                self._tell_exit(agent, worker, incarnation, "the task is over")

    def _tell_exit(self, agent: VirtualAgent, worker: Worker, incarnation: int, reason: str) -> None:
        agent.progress.forget(TASK, worker)
        exited = ev.WorkerExited(worker=worker, incarnation=incarnation, reason=reason)
        self._tell(agent, msg.TaskEvent(task=TASK, event=exited), (worker, incarnation))

    def _look(self, agent: VirtualAgent, boot: int) -> None:
        """The agent's glance at its workers, a few times in an op's patience."""
        if not agent.up or agent.boot != boot or self.outcome is not None:
            return
        now = self.agenda.now_us / 1e6
        for worker, body in self.bodies.items():
            if body.node == agent.number and not self.closing:
                glance = Glance(
                    moment=body.moment,
                    step=body.walker.now.step,
                    busy=body.task is not None or body.hung,
                    doing=_doing(body),
                    age_s=(self.agenda.now_us - body.moved_us) / 1e6,
                )
                told = agent.progress.look(TASK, worker, body.incarnation, glance, stopped=False, now=now)
                if told is not None:
                    self._tell(agent, told, (worker, body.incarnation))
        self.agenda.after(LOOK_US, self._look, agent, boot)

    def _others(self, me: VirtualWorker) -> Iterator[tuple[Worker, WorkerState]]:
        seats = self.coordinator.tasks[TASK].seats
        for worker, body in self.bodies.items():
            believed = worker in seats and seats[worker].incarnation == body.incarnation
            if body is not me and believed:
                yield worker, body.walker

    def _saved(self, body: VirtualWorker, task: SaveCheckpoint, state: VirtualState) -> None:
        if body.alive:
            share = (task.index, task.count)
            self.disk.sync(task.state_step, body.me.stage, state, share)
            stage = body.me.stage
            report = msg.PartWritten(
                task=TASK,
                step=task.state_step,
                stage=stage,
                attempt=task.attempt,
                part=stage,
                share=share,
            )
            self._tell(self.agents[body.node], report, (body.me, body.incarnation))

    # -------------------------------------------------------------- states in memory

    def _move(self) -> None:
        """Another shape is asked for, which happens to be the same: everything but the arithmetic of it."""
        rules = self.spec.rules
        shape = Shape(rules.replicas, rules.stages, rules.microbatches, rules.chunks)
        self._note("move", Worker(0, 0), "another shape is asked for")
        self.hear(msg.ReshapeRequested(task=TASK, job=None, shape=shape))  # type: ignore[arg-type]

    def _shelved(self, body: VirtualWorker, task: StoreCopy, state: VirtualState) -> None:
        body.shelving -= 1
        told = body.directions.get(body.walker.epoch)
        if not body.alive or told is None or (task.leaving and not told.copy_at_end):
            return
        own = self.agents[body.node].name
        self._keep(body, own, task, state)
        if told.copy_to is not None and told.copy_to.node != own and not task.leaving:
            delay = self.weather.spread(self.spec.weather.hop_us * 4)
            self.agenda.after(delay, self._keep, body, told.copy_to.node, task, state)

    def _keep(self, body: VirtualWorker, node: str, task: StoreCopy, state: VirtualState) -> None:
        step = task.state_step
        if body.alive and self.agents[int(node[1:])].up:
            self.shelf.put(node, step, body.me.stage, state)
            stage = body.me.stage
            part = msg.PartWritten(
                task=TASK, step=step, stage=stage, attempt=task.attempt, part=stage, memory_of=node
            )
            self._tell(self.agents[body.node], part, (body.me, body.incarnation))

    # -------------------------------------------------------------- deaths

    def kill(self, worker: Worker, reason: str, *, raised: bool = False) -> None:
        body = self.bodies.get(worker)
        if body is not None:
            self.agents[body.node].struck = True
            super().kill(worker, reason, raised=raised)

    def _end(self, body: VirtualWorker, reason: str) -> None:
        """By its agent, which tells; a zombie's end is told too, and heard by nobody."""
        if self.bodies.get(body.me) is body:
            super().kill(body.me, reason)
        elif body in self.zombies:
            self.zombies.remove(body)
            self._drop_process(body)
            self._tell_exit(self.agents[body.node], body.me, body.incarnation, reason)

    def _drop_process(self, body: VirtualWorker) -> None:
        super()._drop_process(body)
        for place in [p for p, b in self.seat.items() if b is body]:
            del self.seat[place]
        self.agents[body.node].progress.forget(TASK, body.me)

    def lose_node(self, number: int, span_us: int) -> None:
        agent = self.agents[number]
        if not agent.up:
            return
        agent.up, agent.struck = False, True
        self._note("node", Worker(number, 0), f"{agent.name} loses power for {span_us / 1e3:g} ms")
        for body in [b for b in self.bodies.values() if b.node == number]:
            self._bury(body, "its node lost power")
        for zombie in [z for z in self.zombies if z.node == number]:
            self.zombies.remove(zombie)
            self._drop_process(zombie)
        agent.starting.clear()
        self.shelf.drop(agent.name)
        for link in (agent.to_head, agent.to_agent):
            if link is not None:
                link.close()
        self._watch_silence(agent, span_us)
        self.agenda.after(span_us, self._power_returns, agent)

    def _power_returns(self, agent: VirtualAgent) -> None:
        agent.boot += 1
        agent.up = agent.heard = True
        agent.progress = ProgressWatch(LIMITS)
        self._connect(agent)
        self._note("back", Worker(agent.number, 0), f"{agent.name} is back")
        self.hear(agent_joined(agent))
        self.agenda.after(LOOK_US, self._look, agent, agent.boot)

    def drain_node(self, number: int, span_us: int) -> None:
        agent = self.agents[number]
        self._note("drain", Worker(number, 0), f"an operator drains {agent.name}")
        self.hear(msg.DrainRequested(node=agent.name))  # type: ignore[arg-type]
        self.agenda.after(self.weather.spread(2_000), self.lose_node, number, span_us)

    def mute_node(self, number: int, span_us: int) -> None:
        agent = self.agents[number]
        if not agent.up or not agent.heard:
            return
        agent.heard, agent.struck, agent.greeted = False, True, False
        self._note("mute", Worker(number, 0), f"the line to {agent.name} is cut for {span_us / 1e3:g} ms")
        for link in (agent.to_head, agent.to_agent):
            if link is not None:
                self.network.hold(link)
        self._watch_silence(agent, span_us)
        self.agenda.after(span_us, self._line_returns, agent, agent.boot)

    def _watch_silence(self, agent: VirtualAgent, span_us: int) -> None:
        silence = self.weather.spread(self.spec.weather.silence_us)
        if silence < span_us:
            self.agenda.after(silence, self._fell_silent, agent, agent.boot, silence)

    def _fell_silent(self, agent: VirtualAgent, boot: int, silence_us: int) -> None:
        if agent.boot == boot and not (agent.up and agent.heard):
            self.hear(msg.NodeFellSilent(node=agent.name, silent_s=silence_us / 1e6))  # type: ignore[arg-type]

    def _line_returns(self, agent: VirtualAgent, boot: int) -> None:
        if agent.boot != boot or not agent.up:
            return
        agent.heard = True
        if agent.to_agent is not None:
            agent.to_agent.queue.clear()  # the old connection's; those that still count are sent again
        self.hear(agent_joined(agent))
        for link in (agent.to_head, agent.to_agent):
            if link is not None:
                self.network.release(link)


def agent_joined(agent: VirtualAgent) -> Any:
    return msg.NodeJoined(
        node=agent.name, boot=agent.boot_name, slots=agent.slots, host=agent.name, memory_port=1
    )


def _doing(body: VirtualWorker) -> str:
    task = body.task or body.walker.next()
    if isinstance(task, Wait):
        return task.missing
    if isinstance(task, Paused | Finished):
        return type(task).__name__
    return str(getattr(task, "op", type(task).__name__))
