"""What a storm on real processes should have earned: the same faults, in virtual time.

The coordinator and the planner are the real ones and decide everything. Nodes and workers are as coarse as
can be: a process takes so long to start, a step takes so long while every member takes part, a stopped
process is reported after a while. The times are those that the storm has measured before its first fault
(`harness.real_storm.Storm.measure`), and when a killed coordinator or agent was up again is the trace's;
everything that waits for something else follows from the decisions. A task with fewer workers is as fast as
with all: there are fewer cores than workers. A worker, fork server, agent or coordinator that starts takes
from the others what a task that trains takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.copy_placement import memory_for
from everstep.core.cluster.task import OVER
from everstep.core.words import actions as act
from everstep.core.words import cluster_messages as msg
from everstep.core.words import events as ev
from everstep.core.words.ops import Microbatch, Worker, parse_worker
from everstep.core.words.shape import Shape
from everstep.core.words.worker_messages import Ledger
from everstep.drive.ports import ClusterDriver, ClusterPorts, HandledEvent
from everstep.drive.thinking import Thinking
from everstep.sim.agenda import Agenda

SLOTS = 3
NOTICE_S, ORDER_S, COPY_S = 0.03, 0.005, 0.1
SILENCE_S = 1.0
HANG_S = 1.5  # until an agent reports a stopped worker
AGENT_S, COORDINATOR_S = 1.5, 1.5  # until they are up
DISK_S = 0.2  # until a part of a checkpoint is written


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastKind:
    """A kind of task, and how long things take with it."""

    name: str
    weight: float
    shape: Shape
    steps: int
    alone_s: float
    beside_s: float
    begin_s: float
    cold_s: float
    again_s: float = 0.0  # until a killed worker takes part again, beside other tasks; 0: not measured
    again_cold_s: float = 0.0  # the same where the fork server must start first
    save_every: int = 5
    copy_every: int = 0


@dataclass(slots=True)
class Actor:
    """A worker's process."""

    node: str
    incarnation: int
    step: int = 1
    joining: bool = True
    goes: bool = False  # it was ordered to run, and not to stop
    stopped: bool = False
    starts: bool = True  # its process is not up yet


@dataclass(slots=True)
class Going:
    """A task as its workers see it."""

    kind: ForecastKind
    step: int = 1
    left: float = 1.0  # of the step
    since_s: float = 0.0
    rate: float = 0.0  # steps per second
    number: int = 0  # of the last appointment
    until: int | None = None
    attempt: int = 0
    disk: int = 0


@dataclass(slots=True)
class ForecastNode:
    boot: int = 1
    up: bool = True
    stopped: bool = False
    warm_at_s: float = 0.0  # when its fork server is up
    number: int = 0
    held: list[Callable[[], None]] = field(default_factory=list)


class StormForecast:
    def __init__(self, kinds: Sequence[ForecastKind], nodes: Sequence[str]) -> None:
        self.kinds = {kind.name: kind for kind in kinds}
        self.machine = Coordinator(
            patience=msg.Patience(restarts_per_node=1_000_000, restarts_per_place=1_000_000), planned=True
        )
        self.agenda, self.thinking = Agenda(), Thinking()
        self.nodes = {name: ForecastNode() for name in nodes}
        self.actors: dict[tuple[str, Worker], Actor] = {}
        self.going: dict[str, Going] = {}
        self.done = dict.fromkeys(self.kinds, 0)
        self.counts = dict.fromkeys(self.kinds, 0)
        self.hears = True  # the coordinator is up, and not stopped
        self.knows_starts = False  # the trace says when agents and coordinators were up again
        self._late: list[Callable[[], None]] = []
        self._programs: set[str] = set()  # the coordinator, or an agent, that starts
        ports = ClusterPorts(self, self, self)
        self.driver = ClusterDriver(
            self.machine,
            clock=self,
            store=self,
            port=ports.take,
            time_passed=msg.TimePassed(),
            most_at_once=1,
        )
        for name in nodes:
            self._join(name)

    # -------------------------------------------------------------- the run

    def run(self, trace: Sequence[dict[str, Any]], seconds: float) -> dict[str, int]:
        """Steps on record after so long, by kind of task."""
        self.knows_starts = any(entry["what"] == "coordinator up" for entry in trace)
        for entry in trace:
            if entry["what"] != "submit" and entry["at_s"] < seconds:
                self._at(entry["at_s"], self._strike, entry)
        self._look()
        while (at := self.agenda.next_at()) is not None and at <= seconds * 1e6:
            self.agenda.step()
        return self.done

    def _look(self) -> None:
        """One task of each kind at a time, as the storm keeps it."""
        for kind in self.kinds.values():
            alive = [
                t for t in self.machine.tasks.values() if _kind(t.name) == kind.name and t.state not in OVER
            ]
            if not alive and self.hears:
                self.counts[kind.name] += 1
                name = f"{kind.name}-{self.counts[kind.name]}"
                self.going[name] = Going(kind=kind)
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
        if self.hears:
            self.driver.look_at_clock()
        self._after(0.1, self._look)

    # -------------------------------------------------------------- the driver's ports

    def time(self) -> float:
        return self.agenda.now_us / 1e6

    def wake_at(self, when: float) -> None:
        """`_look` looks often enough."""

    def write(self, entries: Sequence[tuple[float, msg.ClusterEvent]], done: Callable[[], None]) -> None:
        done()

    def handled(self, one: HandledEvent) -> None:
        self.thinking.handled(one, self.machine)
        for action in one.actions:
            if isinstance(action, msg.RecordRow):
                going = self.going[action.task]
                if action.record.step > going.attempt:  # here: the highest step on record
                    self.done[going.kind.name] += action.record.step - going.attempt
                    going.attempt = action.record.step

    def send(self, action: msg.Dispatch) -> None:
        self.machine.acknowledged(action.node, action.number)
        self._after(ORDER_S, self._to_agent, action.node, lambda: self._obey(action.node, action.order))

    def received(self, node: str, number: int) -> None:
        """Nothing is sent again here."""

    def think(self, action: msg.Think) -> None:
        answer = self.thinking.answer(self.machine, action)
        if answer is not None:
            self._after(0.01, self._tell, answer)

    def choose(self, action: msg.ChooseAssignment) -> None:
        if action.version == self.machine.version:
            self._after(0.01, self._chosen, action)

    def _chosen(self, action: msg.ChooseAssignment) -> None:
        if action.version == self.machine.version:
            self._tell(self.thinking.choose(self.machine, action, self.time()))

    # -------------------------------------------------------------- lines

    def _tell(self, event: msg.ClusterEvent) -> None:
        """To the coordinator, when it hears."""
        if self.hears:
            self.driver.hear(event)
        else:
            self._late.append(lambda: self._tell(event))

    def _report(self, node: str, report: msg.NodeReport, sender: msg.Sender | None) -> None:
        known = self.nodes[node]
        boot = known.boot
        if known.up:
            self._after(ORDER_S, self._from_agent, node, boot, report, sender)

    def _from_agent(self, node: str, boot: int, report: msg.NodeReport, sender: msg.Sender | None) -> None:
        known = self.nodes[node]
        if not known.up or known.boot != boot:
            return
        if known.stopped:
            known.held.append(lambda: self._from_agent(node, boot, report, sender))
            return
        known.number += 1
        said = msg.FromNode(node=node, boot=str(boot), number=known.number, report=report, sender=sender)
        self._tell(said)

    def _to_agent(self, node: str, deed: Callable[[], None]) -> None:
        known = self.nodes[node]
        if known.up and known.stopped:
            known.held.append(deed)
        elif known.up:
            deed()

    # -------------------------------------------------------------- what agents do

    def _join(self, name: str) -> None:
        known = self.nodes[name]
        self._tell(msg.NodeJoined(node=name, boot=str(known.boot), slots=SLOTS, host=name, memory_port=1))

    def _obey(self, node: str, order: msg.Order) -> None:
        match order:
            case msg.StartProcess():
                self._start(node, order)
            case msg.KillProcess():
                actor = self.actors.get((order.task, order.worker))
                if actor is not None and actor.incarnation == order.incarnation and actor.node == node:
                    self._ends(order.task, order.worker, "killed by SIGKILL")
            case msg.NotifyWorker():
                self._notify(order)
            case msg.CloseTask():
                for task, worker in [k for k, a in self.actors.items() if k[0] == order.task]:
                    if self.actors[task, worker].node == node:
                        self._ends(task, worker, "exited with code 0")
            case msg.KeepOnly():
                for (task, worker), actor in list(self.actors.items()):
                    if actor.node == node and (task, worker, actor.incarnation) not in order.keep:
                        self._ends(task, worker, "killed by SIGKILL")
            case msg.FindCheckpoint():
                found = msg.CheckpointFound(
                    task=order.task, step=self.going[order.task].disk, search=order.search
                )
                self._report(node, found, None)
            case msg.CommitCheckpoint():
                self.going[order.task].disk = order.step
                committed = msg.TaskEvent(task=order.task, event=ev.CheckpointCommitted(step=order.step))
                self._report(node, committed, None)

    def _start(self, node: str, order: msg.StartProcess) -> None:
        known, kind = self.nodes[node], self.going[order.task].kind
        warm_s = max(0.0, known.warm_at_s - self.time())
        key = (order.task, order.worker)
        actor = self.actors[key] = Actor(node, order.incarnation)
        again_s = kind.again_s or kind.begin_s - kind.alone_s
        self._after(warm_s + max(0.05, again_s - NOTICE_S - COPY_S), self._started, key, actor)

    def _started(self, key: tuple[str, Worker], actor: Actor) -> None:
        if self.actors.get(key) is actor:
            actor.starts = False
            self._set_rates()
            event = ev.WorkerStarted(worker=key[1], incarnation=actor.incarnation, address=(actor.node, 1))
            self._say(key, actor, event)

    def _notify(self, order: msg.NotifyWorker) -> None:
        key = (order.task, order.worker)
        actor, going = self.actors.get(key), self.going[order.task]
        if actor is None or actor.stopped:
            return
        match order.words:
            case act.InterruptWorkers(epoch=epoch):
                actor.goes = False
                ledger = Ledger(step=going.step if not actor.joining else actor.step, joining=actor.joining)
                self._say(key, actor, ev.LedgerReported(worker=key[1], epoch=epoch, ledger=ledger))
            case act.ResumeStep(order=resume):
                actor.step, actor.joining, actor.goes = resume.step, False, True
                if resume.restore is not None or resume.step != going.step:
                    going.step, going.left = resume.step, 1.0
                going.until = resume.until
                resumed = ev.WorkerResumed(worker=key[1], epoch=resume.epoch, at=self.time())
                self._say(key, actor, resumed)
            case act.CopyState(joiner=joiner, transfer=transfer):
                self._after(COPY_S, self._copied, order.task, joiner, transfer)
        self._settle(order.task)

    def _copied(self, task: str, joiner: Worker, transfer: int) -> None:
        other = self.actors.get((task, joiner))
        if other is not None:
            other.step = self.going[task].step
            event = ev.StateCopied(
                worker=joiner, incarnation=other.incarnation, transfer=transfer, state_step=other.step - 1
            )
            self._say((task, joiner), other, event)

    def _say(self, key: tuple[str, Worker], actor: Actor, event: Any) -> None:
        sender = msg.Sender(key[0], key[1], actor.incarnation)
        self._report(actor.node, msg.TaskEvent(task=key[0], event=event), sender)

    def _ends(self, task: str, worker: Worker, reason: str, *, silently: bool = False) -> None:
        actor = self.actors.pop((task, worker))
        if not silently:
            exited = ev.WorkerExited(worker=worker, incarnation=actor.incarnation, reason=reason)
            self._after(NOTICE_S, self._say, (task, worker), actor, exited)
        self._settle(task)

    # -------------------------------------------------------------- steps

    def _settle(self, task: str) -> None:
        """Its workers have changed: how fast does it go now?"""
        for name in self.going if task not in self.going else [task]:
            self._set_rate(name)

    def _set_rate(self, task: str) -> None:
        going, now = self.going[task], self.time()
        going.left -= (now - going.since_s) * going.rate
        going.since_s = now
        was, going.rate = going.rate, self._rate(task)
        going.number += 1
        if going.rate:
            self._after(max(0.0, going.left / going.rate), self._sealed, task, going.number)
        if bool(was) != bool(going.rate):
            for other in [name for name, each in self.going.items() if name != task and each.rate]:
                self._set_rate(other)

    def _rate(self, task: str) -> float:
        members = {w: a for (t, w), a in self.actors.items() if t == task and not a.joining}
        kind = self.going[task].kind
        stages = {worker.stage for worker in members}
        if len(stages) < kind.shape.stages or not all(a.goes and not a.stopped for a in members.values()):
            return 0.0
        others = sum(1 for name, each in self.going.items() if name != task and each.rate)
        others += self._starting(task)
        share = min(1.0, others / max(1, len(self.kinds) - 1))
        step_s = kind.alone_s + (kind.beside_s - kind.alone_s) * share
        return 1 / max(1e-3, step_s)

    def _starting(self, task: str) -> int:
        """Other tasks whose workers start, and programs that do."""
        tasks = {
            name
            for (name, _), actor in self.actors.items()
            if name != task and actor.starts and not self.going[name].rate
        }
        servers = sum(known.up and known.warm_at_s > self.time() for known in self.nodes.values())
        return len(tasks) + servers + len(self._programs)

    def _set_rates(self) -> None:
        for name, going in self.going.items():
            if going.rate:
                self._set_rate(name)

    def _sealed(self, task: str, number: int) -> None:
        going, known = self.going[task], self.machine.tasks.get(task)
        if going.number != number or known is None or known.recovery is None:
            return
        step, kind = going.step, going.kind
        attempt = known.recovery.attempt_of(step)
        first = {}
        for (name, worker), actor in sorted(self.actors.items(), key=lambda item: item[0]):
            if name == task and not actor.joining:
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
        going.step, going.left, going.since_s = step + 1, 1.0, self.time()
        for (name, _), actor in self.actors.items():
            if name == task and not actor.joining:
                actor.step = step + 1
                actor.goes = actor.goes and step < min(kind.steps, going.until or kind.steps)
        self._set_rate(task)

    def _keep(self, task: str, going: Going, worker: Worker, actor: Actor, step: int, attempt: int) -> None:
        kind, sender = going.kind, msg.Sender(task, worker, actor.incarnation)
        known = self.machine.tasks[task]

        def part(memory_of: str | None) -> msg.PartWritten:
            return msg.PartWritten(
                task=task, step=step, stage=worker.stage, attempt=attempt, part={}, memory_of=memory_of
            )

        if step % kind.save_every == 0 or step == kind.steps:
            self._after(DISK_S, self._report, actor.node, part(None), sender)
        leaves = step == going.until
        if leaves or (kind.copy_every and step % kind.copy_every == 0):
            self._report(actor.node, part(actor.node), sender)
            if worker in known.seats and not leaves:
                away = memory_for(self.machine.nodes, known, worker).node
                self._report(actor.node, part(away), sender)

    # -------------------------------------------------------------- the trace

    def _strike(self, entry: dict[str, Any]) -> None:
        what, node = entry["what"], entry.get("node", "")
        task = self._task(entry)
        match what:
            case "kill worker" | "stop worker" | "continue worker":
                self._hit(what, task, parse_worker(entry["worker"]))
            case "kill agent" | "kill node":
                self._lose(node)
            case "start agent":
                self._programs.add(node)
                if not self.knows_starts:
                    self._after(AGENT_S, self._return, node)
            case "agent up":
                self._return(node)
            case "stop agent" | "stop node":
                self._freeze(node, whole=what == "stop node")
            case "continue agent" | "continue node":
                self._thaw(node)
            case "kill fork server":
                self.nodes[node].warm_at_s = self.time() + self._cold_s()
                self._after(self._cold_s(), self._set_rates)
            case "kill coordinator" | "stop coordinator" | "rotate the token":
                self.hears = False
            case "start coordinator":
                self._programs.add("coordinator")
                if not self.knows_starts:
                    self._after(COORDINATOR_S, self._hear_again)
            case "coordinator up" | "continue coordinator":
                self._hear_again()
            case "drain" | "drain at once":
                self._tell(msg.DrainRequested(node=node, force=what == "drain at once"))
            case "readmit":
                self._tell(msg.ReadmitRequested(node=node, by="an operator"))
            case "pause" | "resume" | "resize" | "cancel" if task:
                self._ask(what, task, entry)

        self._set_rates()

    def _task(self, entry: dict[str, Any]) -> str:
        """The task of that kind that is there now."""
        kind = _kind(entry.get("task", ""))
        alive = [t.name for t in self.machine.tasks.values() if _kind(t.name) == kind and t.state not in OVER]
        return alive[-1] if alive else ""

    def _ask(self, what: str, task: str, entry: dict[str, Any]) -> None:
        match what:
            case "pause":
                self._tell(msg.PauseRequested(task=task))
            case "resume":
                self._tell(msg.UnpauseRequested(task=task))
            case "resize":
                self._tell(msg.ResizeRequested(task=task, workers=entry["number"]))
            case _:
                self._tell(msg.CancelRequested(task=task))

    def _hit(self, what: str, task: str, worker: Worker) -> None:
        actor = self.actors.get((task, worker))
        if actor is None:
            return
        if what == "kill worker":
            self._ends(task, worker, "killed by SIGKILL")
        elif what == "stop worker":
            actor.stopped = True
            self._after(HANG_S, self._overdue, task, worker, actor)
        else:
            actor.stopped = False
        self._settle(task)

    def _overdue(self, task: str, worker: Worker, actor: Actor) -> None:
        if actor.stopped and self.actors.get((task, worker)) is actor:
            step = self.going[task].step
            report = msg.OpOverdue(
                task=task,
                worker=worker,
                incarnation=actor.incarnation,
                step=step,
                doing="1F0.0",
                busy=True,
                stopped=True,
                elapsed_s=HANG_S,
                expected_s=0.1,
            )
            self._report(actor.node, report, msg.Sender(task, worker, actor.incarnation))

    def _lose(self, node: str) -> None:
        known = self.nodes[node]
        known.up, known.stopped, known.held = False, False, []
        for task, worker in [key for key, actor in self.actors.items() if actor.node == node]:
            self._ends(task, worker, "its node is gone", silently=True)
        self._after(SILENCE_S, self._miss, node, known.boot)

    def _return(self, node: str) -> None:
        self._programs.discard(node)
        known = self.nodes[node]
        if not known.up:
            known.up, known.boot, known.number = True, known.boot + 1, 0
            known.warm_at_s = self.time() + self._cold_s()
            self._after(self._cold_s(), self._set_rates)
            self._join(node)

    def _freeze(self, node: str, *, whole: bool) -> None:
        known = self.nodes[node]
        known.stopped = True
        for (task, _), actor in self.actors.items():
            if actor.node == node and whole:
                actor.stopped = True
                self._settle(task)
        self._after(SILENCE_S, self._miss, node, known.boot)

    def _thaw(self, node: str) -> None:
        known = self.nodes[node]
        known.stopped = False
        for (task, _), actor in self.actors.items():
            if actor.node == node:
                actor.stopped = False
                self._settle(task)
        held, known.held = known.held, []
        self._join(node)
        for deed in held:
            deed()

    def _miss(self, node: str, boot: int) -> None:
        known = self.nodes[node]
        if known.boot == boot and (known.stopped or not known.up):
            self._tell(msg.NodeFellSilent(node=node, silent_s=SILENCE_S))

    def _hear_again(self) -> None:
        self._programs.discard("coordinator")
        self.hears = True
        late, self._late = self._late, []
        for deed in late:
            deed()

    def _cold_s(self) -> float:
        """How much longer a start takes where the fork server is not up."""
        if all(kind.again_cold_s for kind in self.kinds.values()):
            return max(0.0, min(kind.again_cold_s - kind.again_s for kind in self.kinds.values()))
        return max(0.0, min(kind.cold_s - kind.begin_s for kind in self.kinds.values()))

    # -------------------------------------------------------------- time

    def _at(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        self.agenda.at(int(seconds * 1e6), what, *args)

    def _after(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        self.agenda.after(max(1, int(seconds * 1e6)), what, *args)


def _kind(task: str) -> str:
    return task.rpartition("-")[0]
