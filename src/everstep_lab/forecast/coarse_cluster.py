"""A cluster as coarse as can be around the real coordinator and planner, in virtual time.

The coordinator decides everything. Its nodes and workers obey: a process takes so long to start, a state so
long to copy, a stopped process is reported after a while. Steps are those of `coarse_steps`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.copy_placement import Keepers
from everstep.drive.ports import ClusterDriver, ClusterPorts, HandledEvent
from everstep.drive.thinking import Thinking
from everstep.node.agent import RETRY_MOST_S
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.work import EpochFacts, Ledger, OwnOrders
from everstep_lab.agenda import Agenda
from everstep_lab.forecast.coarse_steps import Actor, CoarseSteps, ForecastKind, Going, overdue
from everstep_lab.forecast.cores import ForkServers, Start

SLOTS = 3
NOTICE_S, ORDER_S, COPY_S = 0.03, 0.005, 0.1
SILENCE_S = 1.0
HANG_S = 1.5  # until an agent reports a stopped worker
DISK_S = 0.2  # until a part of a checkpoint is written


@dataclass(slots=True)
class ForecastNode:
    boot: int = 1
    up: bool = True
    stopped: bool = False
    number: int = 0
    held: list[Callable[[], None]] = field(default_factory=list)


class CoarseCluster:
    def __init__(
        self, kinds: Sequence[ForecastKind], nodes: Sequence[str], *, cores: int, is_warm: bool
    ) -> None:
        self.kinds = {kind.name: kind for kind in kinds}
        self.machine = Coordinator(
            patience=msg.Patience(restarts_per_node=1_000_000, restarts_per_place=1_000_000), planned=True
        )
        self.agenda, self.thinking = Agenda(), Thinking()
        self.nodes = {name: ForecastNode() for name in nodes}
        self.actors: dict[tuple[str, Worker], Actor] = {}
        self.done = dict.fromkeys(self.kinds, 0)  # steps on record
        self.programs: dict[str, Start] = {}  # the coordinator, or an agent, that starts
        self.hears = True  # the coordinator is up, and not stopped
        self._late: list[Callable[[], None]] = []
        self._lines = CoarseLines(self.agenda)
        self.steps = CoarseSteps(self.agenda, self.actors, kinds=kinds, cores=cores, sealed=self._sealed)
        cold_s = min(kind.cold_s - kind.begin_s for kind in kinds)  # those of all nodes started at once
        self.servers = ForkServers(self.steps.cores, nodes, max(0.0, cold_s) * min(1.0, cores / len(nodes)))
        self.driver = ClusterDriver(
            self.machine,
            clock=self,
            store=self,
            port=ClusterPorts(self, self, self).take,
            time_passed=msg.TimePassed(),
            most_at_once=1,
        )
        for name in nodes:
            self._join(name)
            if not is_warm:
                self.servers.start(name)

    def submit(self, name: str, kind: ForecastKind) -> None:
        self.steps.going[name] = Going(kind=kind)
        self.driver.hear(
            msg.TaskSubmitted(
                task=name,
                job={},
                shape=kind.shape,
                steps=kind.steps,
                weight=kind.weight,
                secret="s",
                has_checkpoints=True,
            )
        )

    # -------------------------------------------------------------- the driver's ports

    def time(self) -> float:
        return self.agenda.now_us / 1e6

    def wake_at(self, when: float) -> None:
        """The storm looks often enough."""

    def write(self, entries: Sequence[tuple[float, msg.ClusterEvent]], done: Callable[[], None]) -> None:
        done()

    def handled(self, one: HandledEvent) -> None:
        self.thinking.handled(one, self.machine)
        for action in one.actions:
            if isinstance(action, msg.RecordRow):
                going = self.steps.going[action.task]
                if action.record.step > going.recorded:
                    self.done[going.kind.name] += action.record.step - going.recorded
                    going.recorded = action.record.step

    def send(self, action: msg.Dispatch) -> None:
        self.machine.acknowledged(action.node, action.number)
        self._lines.carry(
            lambda: self.after(
                ORDER_S, self._to_agent, action.node, lambda: self._obey(action.node, action.order)
            )
        )

    def received(self, node: str, number: int) -> None:
        """Nothing is sent again here."""

    def think(self, action: msg.Think) -> None:
        for event in self.thinking.answer(self.machine, action):
            self.after(0.01, self.tell, event)

    def choose(self, action: msg.ChooseAssignment) -> None:
        if action.version == self.machine.version:
            self.after(0.01, self._chosen, action)

    def _chosen(self, action: msg.ChooseAssignment) -> None:
        if action.version == self.machine.version:
            for event in self.thinking.choose(self.machine, action, self.time()):
                self.tell(event)

    # -------------------------------------------------------------- lines

    def tell(self, event: msg.ClusterEvent) -> None:
        """To the coordinator, when it hears."""
        if self.hears:
            self.driver.hear(event)
        else:
            self._late.append(lambda: self.tell(event))

    def miss_coordinator(self, *, is_dead: bool) -> None:
        self.hears = False
        if is_dead:
            self._lines.cut()

    def hear_again(self) -> None:
        self.started("coordinator")
        self.hears = True
        self._lines.mend()
        late, self._late = self._late, []
        for deed in late:
            deed()

    def report(self, node: str, report: msg.NodeReport, sender: msg.Sender | None) -> None:
        known = self.nodes[node]
        if known.up:
            self.after(ORDER_S, self._from_agent, node, known.boot, report, sender)

    def _from_agent(self, node: str, boot: int, report: msg.NodeReport, sender: msg.Sender | None) -> None:
        known = self.nodes[node]
        if not known.up or known.boot != boot:
            return
        if known.stopped:
            known.held.append(lambda: self._from_agent(node, boot, report, sender))
            return
        known.number += 1
        said = msg.FromNode(node=node, boot=str(boot), number=known.number, report=report, sender=sender)
        self._lines.carry(lambda: self.tell(said))

    def _to_agent(self, node: str, deed: Callable[[], None]) -> None:
        known = self.nodes[node]
        if known.up and known.stopped:
            known.held.append(deed)
        elif known.up:
            deed()

    # -------------------------------------------------------------- nodes

    def _join(self, name: str) -> None:
        known = self.nodes[name]
        self.tell(msg.NodeJoined(node=name, boot=str(known.boot), slots=SLOTS, host=name, memory_port=1))

    def lose(self, node: str) -> None:
        known = self.nodes[node]
        known.up, known.stopped, known.held = False, False, []
        self.started(node)  # if it did not come up
        self.servers.lose(node)
        for key, actor in [each for each in self.actors.items() if each[1].node == node]:
            self.steps.going[key[0]].waits |= not actor.joining
            self.ends(*key, "its node is gone", silently=True)
        self.after(SILENCE_S, self._miss, node, known.boot)
        self.after(HANG_S, self._missed, node)

    def bring_back(self, node: str) -> None:
        self.started(node)
        known = self.nodes[node]
        if not known.up:
            known.up, known.boot, known.number = True, known.boot + 1, 0
            self.servers.start(node)
            self._join(node)

    def freeze(self, node: str, *, whole: bool) -> None:
        known = self.nodes[node]
        known.stopped = True
        for (task, _), actor in self.actors.items():
            if actor.node == node and whole:
                actor.stopped = True
                self.steps.settle(task)
        self.after(SILENCE_S, self._miss, node, known.boot)
        self.after(HANG_S, self._missed, node)

    def thaw(self, node: str) -> None:
        known = self.nodes[node]
        known.stopped = False
        for (task, _), actor in self.actors.items():
            if actor.node == node:
                actor.stopped = False
                self.steps.settle(task)
        held, known.held = known.held, []
        if known.up:
            self._join(node)
        for deed in held:
            deed()

    def _miss(self, node: str, boot: int) -> None:
        known = self.nodes[node]
        if known.boot == boot and (known.stopped or not known.up):
            self.tell(msg.NodeFellSilent(node=node, silent_s=SILENCE_S))

    def starts(self, program: str) -> None:
        """An agent or the coordinator; when it is up, the trace says."""
        self.started(program)  # one that did not come up
        self.programs[program] = self.steps.cores.start(math.inf, lambda: None)

    def started(self, program: str) -> None:
        if (start := self.programs.pop(program, None)) is not None:
            self.steps.cores.end(start)

    # -------------------------------------------------------------- what agents do

    def _obey(self, node: str, order: msg.Order) -> None:
        match order:
            case msg.StartProcess():
                self._start(node, order)
            case msg.StartProcesses():
                for start in order.starts:
                    self._start(node, start)
            case msg.InterruptTask():
                for worker in order.workers:
                    self._interrupt((order.task, worker), order.epoch)
                self.steps.settle(order.task)
            case msg.ResumeTask(facts=EpochFacts() as facts):
                for worker, own, _ in order.workers:
                    self._resume((order.task, worker), facts, own)
                self.steps.settle(order.task)
            case msg.KillProcess():
                actor = self.actors.get((order.task, order.worker))
                if actor is not None and actor.incarnation == order.incarnation and actor.node == node:
                    self.ends(order.task, order.worker, "killed by SIGKILL")
            case msg.NotifyWorker():
                self._notify(order)
            case msg.CloseTask():
                for task, worker in [k for k, a in self.actors.items() if k[0] == order.task]:
                    if self.actors[task, worker].node == node:
                        self.ends(task, worker, "exited with code 0")
            case msg.KeepOnly():
                for (task, worker), actor in list(self.actors.items()):
                    if actor.node == node and (task, worker, actor.incarnation) not in order.keep:
                        self.ends(task, worker, "killed by SIGKILL")
            case msg.FindCheckpoint(live=True):
                step = self.steps.going[order.task].disk
                looked = ev.CheckpointsLooked(search=order.search, step=step)
                self.report(node, msg.TaskEvent(task=order.task, event=looked), None)
            case msg.FindCheckpoint():
                step = self.steps.going[order.task].disk
                found = msg.CheckpointFound(task=order.task, step=step, search=order.search)
                self.report(node, found, None)
            case msg.CommitCheckpoint():
                self.steps.going[order.task].disk = order.step
                committed = msg.TaskEvent(task=order.task, event=ev.CheckpointCommitted(step=order.step))
                self.report(node, committed, None)

    def _start(self, node: str, order: msg.StartProcess) -> None:
        kind, cores = self.steps.going[order.task].kind, self.steps.cores
        key = (order.task, order.worker)
        actor = self.actors[key] = Actor(node, order.incarnation)
        each = min(1.0, cores.count / (1 + self.steps.workers))
        work_s = kind.start_s(each, beside_s=NOTICE_S + COPY_S)

        def begin() -> None:
            if self.actors.get(key) is actor:
                cores.start(work_s, lambda: self._started(key, actor))

        self.servers.when_up(node, begin)

    def _started(self, key: tuple[str, Worker], actor: Actor) -> None:
        if self.actors.get(key) is actor:
            actor.starts = False
            event = ev.WorkerStarted(worker=key[1], incarnation=actor.incarnation, address=(actor.node, 1))
            self._say(key, actor, event)

    def _interrupt(self, key: tuple[str, Worker], epoch: int) -> None:
        actor, going = self.actors.get(key), self.steps.going[key[0]]
        if actor is not None and not actor.stopped:
            actor.goes = False
            ledger = Ledger(step=going.step if not actor.joining else actor.step, joining=actor.joining)
            self._say(key, actor, ev.LedgerReported(worker=key[1], epoch=epoch, ledger=ledger))

    def _resume(self, key: tuple[str, Worker], facts: EpochFacts, own: OwnOrders) -> None:
        actor, going = self.actors.get(key), self.steps.going[key[0]]
        if actor is not None and not actor.stopped:
            actor.step, actor.joining, actor.goes = own.step, False, True
            if facts.restore is not None or own.step != going.step:
                going.step, going.left = own.step, 1.0
            going.until, going.waits = facts.until, False
            self._say(key, actor, ev.WorkerResumed(worker=key[1], epoch=facts.epoch, at=self.time()))

    def _notify(self, order: msg.NotifyWorker) -> None:
        actor = self.actors.get((order.task, order.worker))
        if actor is None or actor.stopped:
            return
        match order.words:
            case act.CopyState(joiner=joiner, transfer=transfer):
                self.after(COPY_S, self._copied, order.task, joiner, transfer)
        self.steps.settle(order.task)

    def _copied(self, task: str, joiner: Worker, transfer: int) -> None:
        other = self.actors.get((task, joiner))
        if other is not None:
            other.step = self.steps.going[task].step
            event = ev.StateCopied(
                worker=joiner, incarnation=other.incarnation, transfer=transfer, state_step=other.step - 1
            )
            self._say((task, joiner), other, event)

    def _say(self, key: tuple[str, Worker], actor: Actor, event: Any) -> None:
        sender = msg.Sender(key[0], key[1], actor.incarnation)
        self.report(actor.node, msg.TaskEvent(task=key[0], event=event), sender)

    def ends(self, task: str, worker: Worker, reason: str, *, silently: bool = False) -> None:
        actor = self.actors.pop((task, worker))
        if not silently:
            exited = ev.WorkerExited(worker=worker, incarnation=actor.incarnation, reason=reason)
            self.after(NOTICE_S, self._say, (task, worker), actor, exited)
        self.steps.settle(task)

    # -------------------------------------------------------------- what workers report

    def overdue(self, task: str, worker: Worker, actor: Actor) -> None:
        if actor.stopped and self.actors.get((task, worker)) is actor:
            self._say_overdue(task, worker, actor)

    def _missed(self, node: str) -> None:
        """Members elsewhere wait for those on a node that is gone or stopped."""
        for task, going in self.steps.going.items():
            members = self.steps.members(task)
            if going.waits or any(actor.node == node and actor.stopped for actor in members.values()):
                for worker, actor in members.items():
                    if actor.node != node and not actor.stopped:
                        self._say_overdue(task, worker, actor)

    def _say_overdue(self, task: str, worker: Worker, actor: Actor) -> None:
        report = overdue(task, worker, actor, self.steps.going[task].step, HANG_S)
        self.report(actor.node, report, msg.Sender(task, worker, actor.incarnation))

    def _sealed(self, task: str) -> None:
        going, known = self.steps.going[task], self.machine.tasks.get(task)
        if known is None or known.managed is None:
            return
        step, kind = going.step, going.kind
        attempt = known.managed.attempt_of(step)
        first: dict[int, tuple[Worker, Actor]] = {}
        for worker, actor in self.steps.members(task).items():
            first.setdefault(worker.stage, (worker, actor))
        total = kind.shape.replicas * kind.shape.microbatches
        for stage, (worker, actor) in first.items():
            losses: tuple[tuple[Microbatch, float], ...] = ()
            if stage == kind.shape.stages - 1:
                losses = tuple((Microbatch(k, 0), 1.0) for k in range(kind.shape.replicas))
            sealed = ev.StepSealed(
                step=step,
                stage=stage,
                attempt=attempt,
                microbatches=total,
                executed=3 * total,
                losses=losses,
                sum_of_squares=1.0,
            )
            self._say((task, worker), actor, sealed)
            self._keep(task, going, worker, actor, step, attempt)
        self.steps.next_step(task)

    def _keep(self, task: str, going: Going, worker: Worker, actor: Actor, step: int, attempt: int) -> None:
        kind, sender = going.kind, msg.Sender(task, worker, actor.incarnation)
        known = self.machine.tasks[task]

        def part(memory_of: str | None) -> msg.PartWritten:
            return msg.PartWritten(
                task=task, step=step, stage=worker.stage, attempt=attempt, part={}, memory_of=memory_of
            )

        leaves = step == going.until
        if leaves or step % kind.save_every == 0 or step == kind.steps:
            self.after(DISK_S, self.report, actor.node, part(None), sender)
        if leaves or (kind.copy_every and step % kind.copy_every == 0):
            self.report(actor.node, part(actor.node), sender)
            if worker in known.seats and not leaves:
                self.report(actor.node, part(Keepers(self.machine.roster, known).of(worker).name), sender)

    # -------------------------------------------------------------- time

    def at(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        self.agenda.at(int(seconds * 1e6), what, *args)

    def after(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        self.agenda.after(max(1, int(seconds * 1e6)), what, *args)


class CoarseLines:
    """Between the agents and the coordinator. After its death an agent tries again every two seconds, so half
    of that passes until it is heard. A coordinator that dies again before that has healed nothing.
    """

    def __init__(self, agenda: Agenda) -> None:
        self._agenda, self._are_up, self._deaths = agenda, True, 0
        self._held: list[Callable[[], None]] = []

    def carry(self, what: Callable[[], None]) -> None:
        if self._are_up:
            what()
        else:
            self._held.append(what)

    def cut(self) -> None:
        self._are_up = False
        self._deaths += 1

    def mend(self) -> None:
        """The coordinator is there again."""
        if not self._are_up:
            self._agenda.after(int(RETRY_MOST_S / 2 * 1e6), self._mended, self._deaths)

    def _mended(self, deaths: int) -> None:
        if deaths != self._deaths or self._are_up:
            return
        self._are_up = True
        held, self._held = self._held, []
        for each in held:
            each()
