"""The whole cluster in a storm: the real `Coordinator` behind the real driver, over real agents' decisions.

What `world` does for one task's recovery, this does for everything around it: nodes with slots (some to
spare), agents with lines that are cut, heartbeats, looks at progress, a journal. A worker may be moved to
another node, and one that was given up may still be alive behind a cut line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from everstep.core.agent.agent import AgentSaid, LineOpened, OrderHeard, ReportsKept
from everstep.core.agent.agent_messages import ProcessSpoke
from everstep.core.cluster.checkpoints import UNSAVED
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.node_states import NodeLiveness
from everstep.core.cluster.snapshot import digest, freeze, thaw
from everstep.core.cluster.staffing import CHANGES_STAGE
from everstep.core.cluster.task import OVER
from everstep.core.task.recovery import Recovery
from everstep.core.task.states import Member
from everstep.core.worker.worker_state import WorkerState
from everstep.drive.ports import ClusterPorts, HandledEvent
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.messages import WorkerReport
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.protocol.work import Finished, SaveCheckpoint, StateDirections, StoreCopy
from everstep.schedule.recovery_answer import answer
from everstep_lab.draw import Draw
from tests.storms.checkers import Violation
from tests.storms.lines import Lines
from tests.storms.others import SHAPE, OtherTasks
from tests.storms.processes import Processes, part_written
from tests.storms.scene import Scene, plans_of
from tests.storms.shard_group import LOCAL_US
from tests.storms.spec import Spec
from tests.storms.truth import VirtualState
from tests.storms.virtual_agent import LIMITS, LOOK_US, VirtualAgent
from tests.storms.virtual_coordinator import RecoveryMachine, VirtualCoordinator
from tests.storms.virtual_worker import VirtualWorker
from tests.storms.waits import Waits
from tests.storms.world import TASK

SPARE_NODES = 1
GRAY_HOUR_S = 1e-3  # rates of weeks in a storm
PATIENCE = msg.Patience(
    restarts_per_place=60,
    backoff_s=0.005,
    backoff_most_s=0.03,
    long_life_s=0.5,
    isolation_s=0.3,
    lonely_silence_s=0.1,
    cut_silence_s=0.4,  # longer than any silence of a listener that hears nobody of one task
    awaited_silence_s=0.06,
    links_settle_s=0.05,
)
# Elsewhere nothing hangs for good: there a report that is lost must not be hidden by a deadline.
HANGING = replace(PATIENCE, first_start_s=3.0, start_s=1.5, first_copy_s=1.5, disk_answer_s=1.0, look_s=0.5)


class ClusterWorld:
    def __init__(self, spec: Spec, *, record: bool = False) -> None:
        self.spec = spec
        self.scene = Scene(spec, record=record)
        self._num_moves = 0
        self.processes = Processes(self, self.scene)
        rules = spec.rules
        count = -(-(rules.replicas * rules.stages + len(spec.others)) // spec.workers_per_node) + SPARE_NODES
        self.others = OtherTasks(self)
        self.nodes = [
            VirtualAgent(n, spec.workers_per_node * spec.shards, self, self.scene, self.processes)
            for n in range(count)
        ]
        self.workers: dict[Worker, VirtualWorker] = {}  # the newest process of each worker
        ports = ClusterPorts(self, self, self)
        self.lines = Lines(self)
        self._shown = 0  # the number of the last event that is on the record
        self.is_cancelled = False  # an operator's word, on record
        self.asked: set[tuple[str, int]] = set()  # of schedules: task, epoch
        self.waits = Waits(self)
        self._planner = Draw(spec.seed, "planner")
        self._roles = Draw(spec.seed, "planner of roles")
        self._left: dict[str, int] = {}  # by node: the stage that its worker has left for another one
        self.head: VirtualCoordinator[Any, Any] = VirtualCoordinator(
            self.scene,
            fresh=self._fresh,
            fingerprint=lambda: digest(self.coordinator),
            port=ports.take,
            time_passed=msg.TimePassed(),
            orders_are_kept=True,
            turned=self.lines.coordinator_turned,
        )

    def _fresh(self) -> Coordinator:
        patience = HANGING if self.spec.hangs else PATIENCE
        limits = LIMITS if self.spec.gray is None else replace(LIMITS, gray_hour_s=GRAY_HOUR_S)
        return Coordinator(patience=patience, limits=limits, planned=self.spec.planned)

    @property
    def coordinator(self) -> Coordinator:
        machine = self.head.machine
        assert isinstance(machine, Coordinator)
        return machine

    @property
    def recovery(self) -> Recovery:
        task = self.coordinator.tasks.get(TASK)
        found = None if task is None else task.managed
        return RecoveryMachine(self.spec).recovery if found is None else found

    def begin(self) -> None:
        rules = self.spec.rules
        for agent in self.nodes:
            agent.open_line()
            self.scene.agenda.after(LOOK_US + agent.number, agent.look, agent.boot)
        submitted = msg.TaskSubmitted(
            task=TASK,
            job=None,
            shape=self._shape(),
            steps=rules.steps,
            secret="",
            has_checkpoints=bool(rules.checkpoint_every),
            votes_on_all=rules.vote_every == 1,
            needs=msg.TaskNeeds(),
        )
        self.head.hear(submitted)
        self.others.begin()
        for at_us, span_us in self.spec.pauses:
            self.scene.agenda.at(at_us, self.hear, msg.PauseRequested(task=TASK))
            self.scene.agenda.at(at_us + span_us, self.hear, msg.UnpauseRequested(task=TASK))
        if self.spec.cancel_us is not None:
            self.scene.agenda.at(self.spec.cancel_us, self.hear, msg.CancelRequested(task=TASK))
        for at_us in self.spec.moves:
            self.scene.agenda.at(at_us, self._move)
        for at_us, number in self.spec.gray.errors if self.spec.gray is not None else ():
            self.scene.agenda.at(at_us, self._correct, number)

    def _correct(self, number: int) -> None:
        """A node's kernel has corrected an error of its memory. Only a gray node may be suspected for it."""
        agent = self.nodes[number % len(self.nodes)]
        agent.struck |= self.spec.gray is not None and number == self.spec.gray.node
        text = "EDAC MC0: 1 CE memory read error on CPU_SrcID#0"
        agent.happens(AgentSaid(msg.KernelSpoke(text=text, slots=())))

    def stall(self) -> None:
        raise Violation("liveness: everybody waits and no detector sees it")

    def wake_all(self) -> None:
        for agent in self.nodes:
            for process in list(agent.workers.values()):
                if process.asleep:
                    agent.wake(process)

    def is_quiet(self) -> bool:
        """No process lives, none waits to be started, and no slot is lost."""
        return not self.left_behind()

    def left_behind(self) -> str:
        up = [agent for agent in self.nodes if agent.up]
        waiting = [order for agent in up for order in agent.state.processes.waiting.values()]
        return ", ".join(
            [f"{process.me} lives on n{process.node}" for process in self.processes.living.values()]
            + [f"the worker of {one.sender.task} lives" for one in self.others.living()]
            + [f"{order.worker} waits" for order in waiting]
            + [incident.what for incident in self.coordinator.log.open_ones()]
        )

    def check_the_coordinator(self) -> None:
        """Every incident is closed, and the journal replays to the same state."""
        coordinator = self.coordinator
        for incident in coordinator.log.open_ones():
            raise Violation(f"incidents close: number {incident.number} ({incident.what}) is open")
        alarms = [incident.what for incident in coordinator.log.incidents]
        if alarms and self.spec.is_calm:
            raise Violation(f"no false alarm: {alarms[0]} in a calm run")
        isolated = [f"slot {s} of {n.name}" for n in coordinator.nodes.values() for s in n.isolated_slots]
        if self.spec.flip is None and self.spec.spike is None and isolated:
            raise Violation(f"no false alarm: {isolated[0]} is isolated, and no number was wrong")
        is_one_wrong = self.spec.flip is not None or self.spec.spike is not None
        if (place := self.scene.checkers.bad_at) is not None:
            bad = {f"slot {slot} of n{place[0]}" for slot in place[1]}
            if healthy := sorted(set(isolated) - bad):
                raise Violation(f"no healthy slot is isolated: {healthy[0]} is, {', '.join(bad)} is wrong")
        if is_one_wrong and self.spec.faults == () and len(isolated) > 1:
            raise Violation(f"no healthy slot is isolated: {', '.join(isolated)} are, for one wrong number")
        again = self.head.replayed(self.head.acted)
        assert isinstance(again, Coordinator)
        self.scene.checkers.journal_replayed(digest(coordinator), digest(again))
        if self.spec.seed % 3 == 0:
            self._check_snapshot()

    def _check_snapshot(self) -> None:
        """A journal that was shortened to a snapshot, at any entry, gives the same state."""
        entries = self.head.journal.entries[: self.head.acted]
        at = Draw(self.spec.seed, "snapshot").below(len(entries) + 1)
        thawed = self._fresh()
        half = self.head.replayed(at)
        assert isinstance(half, Coordinator)
        thaw(thawed, json.loads(json.dumps(freeze(half))))
        for moment, event in entries[at:]:
            thawed.handle(event, moment)
        if digest(thawed) != digest(self.coordinator):
            raise Violation(f"journal: a snapshot at entry {at} of {len(entries)} gives another state")

    # -------------------------------------------------------------- the coordinator's ports

    def hear(self, event: msg.ClusterEvent) -> None:
        if self.scene.trace.lines is not None:
            self.scene.trace.tell(self.scene.agenda.now_us, f"event {event}")
        self.head.hear(event)

    def handled(self, one: HandledEvent) -> None:
        """On the record, once: what is read again after a restart was there before the crash."""
        if not one.replayed:
            self.waits.look()
        if isinstance(one.event, msg.NodeJoined) and not one.replayed:
            self._welcome(one.event, {a.number for a in one.actions if isinstance(a, msg.Dispatch)})
        if one.number <= self._shown:
            return
        self._shown = one.number
        if isinstance(one.event, msg.CancelRequested) and one.event.task == TASK:
            self._check_cancel()
        if isinstance(one.event, msg.FromNode) and one.actions:
            self._check_sender(one.event)
            self._check_exit(one.event)
        for action in one.actions:
            if self.scene.trace.lines is not None:
                self.scene.trace.tell(self.scene.agenda.now_us, f"  action {action}")
            match action:
                case msg.RecordRow(task=task) | msg.TaskEnded(task=task) if task != TASK:
                    self.others.handled(action)
                case msg.Dispatch(order=msg.KillProcess() as order) if action.because.startswith(
                    CHANGES_STAGE
                ):
                    self._left[action.node] = order.worker.stage
                case msg.RecordRow():
                    self._count_roles()
                    self.scene.checkers.step_recorded(action.record)
                    self.scene.checkers.voters_counted(self.recovery)
                    if self.spec.rules.chunks:
                        states = {
                            w: process.worker_state for w, process in self.workers.items() if process.alive
                        }
                        self.scene.checkers.chunks_held(self.recovery, states)
                    self.scene.trace.mix(self.scene.agenda.now_us, 2, action.record.step)
                case msg.NodeChanged():
                    self._node_changed(action)
                case msg.TaskEnded(state=state, because=because) if state != "paused":
                    self._check_end(state, because)
                    self.scene.outcome = "finished" if state == "finished" else f"{state}: {because}"

    def _check_end(self, state: str, because: str) -> None:
        """Whoever dies while the last state is written, others write it: only storage that hangs costs it."""
        if state == "finished" and UNSAVED in because and not self.scene.num_stuck_disks:
            raise Violation(f"the last state is kept: the task ended with {because!r}")

    def _count_roles(self) -> None:
        """Workers that have moved to another stage, and are members there."""
        task = self.coordinator.tasks[TASK]
        for worker, seat in task.seats.items():
            stage = self._left.get(seat.node, worker.stage)
            if stage != worker.stage and isinstance(self.recovery.places.get(worker), Member):
                del self._left[seat.node]
                self.scene.num_roles += 1

    def _check_cancel(self) -> None:
        """From then on the task is over, or on its way: it may be about to finish."""
        self.is_cancelled = True
        task = self.coordinator.tasks[TASK]
        ends = task.state if task.ending is None else task.ending.state
        if ends not in OVER:
            raise Violation(f"cancels: the task is cancelled, and will be {ends}")

    def _check_exit(self, event: msg.FromNode) -> None:
        """A worker that ended because one of its shards did: the report names the shard."""
        match event.report:
            case msg.TaskEvent(
                task=task, event=ev.WorkerExited(worker=worker, incarnation=incarnation, reason=reason)
            ) if task == TASK:
                process = self.workers.get(worker)
                lost = 0 if process is None or process.incarnation != incarnation else process.lost_shard
                if lost and f"shard {lost}" not in reason:
                    raise Violation(f"one incident: {worker} lost shard {lost}; its agent says {reason!r}")

    def _check_sender(self, event: msg.FromNode) -> None:
        """What a process did counts only while the coordinator believes in it."""
        report, sender = event.report, event.sender
        is_seal = isinstance(report, msg.TaskEvent) and isinstance(report.event, ev.StepSealed)
        if sender is None or sender.task != TASK or not (is_seal or isinstance(report, msg.PartWritten)):
            return
        seat = self.coordinator.tasks[TASK].seats.get(sender.worker)
        if seat is not None and (seat.node, seat.incarnation) != (event.node, sender.incarnation):
            raise Violation(
                f"late reports: what {sender.worker} on {event.node} did counts, though it was given up"
            )

    def _welcome(self, event: msg.NodeJoined, fresh: set[int]) -> None:
        """A new connection: what the old one may have lost goes first, by its number."""
        agent, node = self._agent(event.node), self.coordinator.nodes[event.node]
        if agent.line is None or agent.boot_name != event.boot:
            return
        agent.line.is_known = True
        agent.send(LineOpened(self.head.life, node.heard))
        for order in node.pending:
            if order.number not in fresh:
                self.send(order)

    def send(self, action: msg.Dispatch) -> None:
        """On the connection of the boot that the coordinator knows; an older one is closed."""
        agent = self._agent(action.node)
        self.scene.memory.ordered(action.order, self.coordinator.tasks)
        if self.coordinator.nodes[action.node].boot == agent.boot_name:
            agent.send(OrderHeard(action.number, action.order, self.head.life))

    def received(self, node: str, number: int) -> None:
        self._agent(node).send(ReportsKept(number, self.head.life))

    def think(self, action: msg.Think) -> None:
        self.scene.trigger("plan", Worker(0, 0))
        self.asked.add((action.task, action.question.epoch))
        self.scene.soon(self.spec.weather.plan_us, self._thought, action, self.head.life)

    def choose(self, action: msg.ChooseAssignment) -> None:
        if not self.spec.planned:
            raise Violation("no planner was asked for")
        self.scene.soon(self.spec.weather.plan_us, self._chosen, action.version, self.head.life)

    def _chosen(self, version: int, life: int) -> None:
        """As many workers as it likes, until everything is healed; fewer than all only for a while."""
        if not self.head.up or life != self.head.life:
            return
        shape = self._shape()
        most = shape.replicas * shape.stages
        workers, again_s = most, None
        if not self.waits.is_healed and self._planner.chance(0.1 if self.spec.roles else 0.4):
            workers = self._planner.choice((0, shape.stages, self._planner.between(shape.stages, most)))
            again_s = self._planner.between(5, 100) / 1e3
        because = "the storm's planner"
        self.hear(
            msg.AssignmentChosen(
                version=version,
                workers={TASK: workers, **dict.fromkeys(self.others.open, 1)},
                because=because,
                spread=(TASK,) if self.spec.roles and workers and self._roles.chance(0.7) else (),
                review_s=again_s,
            )
        )

    def _thought(self, action: msg.Think, life: int) -> None:
        if self.head.up and life == self.head.life:
            self.asked.discard((action.task, action.question.epoch))
            plans = self.scene.plans if action.task == TASK else plans_of(SHAPE)
            found = answer(action.question, plans, self.spec.mode)
            self.hear(msg.PlanAnswered(task=action.task, event=found))

    def _node_changed(self, action: msg.NodeChanged) -> None:
        trains = any(not one.worker_state.joining for one in self._agent(action.node).workers.values())
        if action.state == "gone" and self.spec.is_deaf_only and trains:
            raise Violation(f"the listener is in doubt first: {action.node} is given up ({action.because})")
        kept_out = action.state in ("isolated", "lemon", "silent", "gone")
        if kept_out and not self._agent(action.node).struck:
            raise Violation(f"no false isolation: {action.node} is {action.state} ({action.because})")

    # -------------------------------------------------------------- the agents' surroundings

    def connect(self, agent: VirtualAgent) -> None:
        self.lines.connect(agent)

    def acknowledged(self, agent: VirtualAgent) -> None:
        if self.head.up and agent.name in self.coordinator.nodes:
            self.coordinator.acknowledged(agent.name, agent.state.done)

    def started(self, agent: VirtualAgent, process: VirtualWorker) -> None:
        other = self.workers.get(process.me)
        if other is not None and other.alive:
            older, newer = sorted((other, process), key=lambda one: one.incarnation)
            self._check_given_up(older)
            self.workers[process.me] = newer
        else:
            self.workers[process.me] = process
        text = f"{process.me} is up, incarnation {process.incarnation}, on {agent.name}"
        self.scene.note("start", process.me, text)
        if agent.lemon:
            agent.lemon -= 1
            self.scene.soon(20_000, self.lose_node, agent.number, 10_000)

    def _check_given_up(self, old: VirtualWorker) -> None:
        """A worker has two processes only where the older one is given up for good: its node is gone, or
        just back and about to hear of it, or it cannot be killed. An agent that was stopped meanwhile may be
        the one that starts the older one, from an order of before.
        """
        agent = self.nodes[old.node]
        node = self.coordinator.nodes[agent.name]
        heard = not agent.is_cut_off() and node.liveness is NodeLiveness.HEARD
        if heard and not old.asleep and agent.state.done >= node.sent:
            raise Violation(f"one owner: {old.me} lives on {agent.name} and is started again")

    def _agent(self, name: str) -> VirtualAgent:
        return self.nodes[int(name[1:])]

    # -------------------------------------------------------------- around the processes

    def report(self, process: VirtualWorker, report: WorkerReport) -> None:
        if isinstance(report, msg.LinkMended):
            self._check_mended(process, report)
        self.nodes[process.node].happens(ProcessSpoke(process.sender, report))

    def _check_mended(self, process: VirtualWorker, report: msg.LinkMended) -> None:
        """The peer may be dead by now; but it has answered since the link broke last."""
        if process.control.book[report.peer] not in process.answered:
            raise Violation(f"honest reports: {process.me}'s link to {report.peer} mended without an answer")

    def left(self, process: VirtualWorker) -> None:
        """In good order: with nothing in hand, and after the last step with the right state."""
        state = process.worker_state
        if not (process.control.over or state.joining or state.paused):
            if not isinstance(state.next(), Finished):
                raise Violation(f"nothing left undone: {process.me} leaves in step {state.now.step}")
            if state.now.step == self.spec.rules.steps + 1:
                self.scene.checkers.state_saved(process.me, self.spec.rules.steps, process.state)
        self.processes.drop(process)
        self.nodes[process.node].died(process, "exited with code 0")

    def saved(self, process: VirtualWorker, task: SaveCheckpoint, state: VirtualState) -> None:
        share = (task.index, task.count)
        self.scene.disk.sync(task.state_step, process.me.stage, state, share, task.chunks)
        for index in task.chunks or (task.index,):
            self.report(process, part_written(process, task, share=(index, task.count)))

    def shelved(
        self, process: VirtualWorker, task: StoreCopy, state: VirtualState, directions: StateDirections
    ) -> None:
        if task.leaving and not directions.copy_at_end:
            return
        own = self.nodes[process.node].name
        self._keep(process, own, task, state)
        stays = task.leaving and not directions.copy_away
        if directions.copy_to is not None and directions.copy_to.node != own and not stays:
            self.scene.soon(
                self.spec.weather.hop_us * 4, self._keep, process, directions.copy_to.node, task, state
            )

    def _keep(self, process: VirtualWorker, node: str, task: StoreCopy, state: VirtualState) -> None:
        if process.alive and self._agent(node).up:
            self.scene.memory.put(node, task.state_step, process.me.stage, state)
            self.report(process, part_written(process, task, memory_of=node))

    def slowness(self, node: int) -> int:
        return self.nodes[node].slowness

    def members(self, me: VirtualWorker) -> Iterator[tuple[Worker, WorkerState]]:
        if self._is_believed(me):
            for worker, process in self.workers.items():
                if process is not me and process.alive and self._is_believed(process):
                    yield worker, process.worker_state

    def _is_believed(self, process: VirtualWorker) -> bool:
        """By the coordinator; one that was given up may live on behind a cut line."""
        seat = self.coordinator.tasks[TASK].seats.get(process.me)
        own = None if seat is None else (seat.node, seat.incarnation)
        return own == (self.nodes[process.node].name, process.incarnation)

    def _move(self) -> None:
        """Another shape is asked for, which happens to be the same: everything but the arithmetic of it. Or
        an update.
        """
        self._num_moves += 1
        if self._num_moves % 2:
            self.scene.note("move", Worker(0, 0), "another shape is asked for")
            self.hear(msg.ReshapeRequested(task=TASK, job=None, shape=self._shape()))
        else:
            self.scene.note("move", Worker(0, 0), "an update is asked for")
            self.hear(msg.UpdateRequested(task=TASK, job=None, shape=self._shape()))

    def _shape(self) -> Shape:
        rules = self.spec.rules
        return Shape(
            rules.replicas,
            rules.stages,
            rules.microbatches,
            chunks=rules.chunks,
            shards=self.spec.shards,
        )

    # -------------------------------------------------------------- what goes wrong

    def kill(self, worker: Worker, reason: str, *, raised: bool = False) -> None:
        process = self.workers[worker]
        agent = self.nodes[process.node]
        agent.struck = True
        if raised:
            number = process.incarnation
            where = f"{worker} {number}"
            event = ev.WorkerRaised(worker=worker, incarnation=number, error="planted", where=where)
            self.report(process, msg.TaskEvent(task=TASK, event=event))
        agent.kill(process, reason)

    def hang(self, worker: Worker, *, asleep: bool) -> None:
        """It stands still; `asleep`: in the kernel, where SIGKILL does not reach it either."""
        process = self.workers[worker]
        self.nodes[process.node].struck = True
        process.hung = not asleep and not process.asleep  # who sleeps in the kernel cannot be stopped again
        process.asleep |= asleep

    def kill_shard(self, worker: Worker, target: int) -> None:
        """One of a worker's processes, not the first."""
        process = self.workers[worker]
        agent = self.nodes[process.node]
        if process.group is None or agent.frozen:
            return
        agent.struck = True
        follower = process.group.followers[target % len(process.group.followers)]
        self.scene.note("shard", worker, f"shard {follower.index} of {worker} is killed")
        self.processes.connections.end_follower(follower)
        self.scene.soon(LOCAL_US, agent.end_shard, process, follower.index)

    def lose_node(self, number: int, span_us: int) -> None:
        agent = self.nodes[number]
        if not agent.up:
            return
        agent.struck = True
        text = f"{agent.name} loses power for {span_us / 1e3:g} ms"
        self.scene.note("node", Worker(number, 0), text)
        agent.lose_power()
        self.scene.memory.drop(agent.name)
        self.lines.watch_silence(agent, span_us)
        self.scene.agenda.after(span_us, self._power_returns, agent)

    def _power_returns(self, agent: VirtualAgent) -> None:
        agent.get_power()
        self.scene.note("back", Worker(agent.number, 0), f"{agent.name} is back")
        self.lines.connect(agent)
        self.scene.agenda.after(LOOK_US, agent.look, agent.boot)

    def drain_node(self, number: int, span_us: int) -> None:
        agent = self.nodes[number]
        self.scene.note("drain", Worker(number, 0), f"an operator drains {agent.name}")
        self.hear(msg.DrainRequested(node=agent.name))
        self.scene.soon(2_000, self.lose_node, number, span_us)

    def announce(self, number: int, span_us: int) -> None:
        """A spot notice, which is kept."""
        agent = self.nodes[number]
        agent.struck = True
        self.scene.note("notice", Worker(number, 0), f"{agent.name} leaves in {span_us / 1e3:g} ms")
        self.hear(msg.LeaveAnnounced(node=agent.name, leaves_in_s=span_us / 1e6, by="the storm"))
        self.scene.agenda.after(span_us, self.lose_node, number, span_us)

    def mute_node(self, number: int, span_us: int) -> None:
        self.lines.cut(number, span_us)

    def deafen(self, span_us: int, *, to_all: bool) -> None:
        """Every line to the coordinator is cut, or those of this task's nodes."""
        task = self.coordinator.tasks.get(TASK)
        names = {seat.node for seat in task.seats.values()} if task is not None and not to_all else None
        cut = [agent.number for agent in self.nodes if names is None or agent.name in names]
        self.lines.cut_together(cut, span_us)

    def kill_fork_server(self, number: int) -> None:
        self.scene.note("server", Worker(number, 0), f"the fork server of n{number} is killed")
        self.nodes[number].has_server = False
