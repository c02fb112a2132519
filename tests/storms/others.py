"""Other tasks of a storm: what a coordinator sees of workers, without their arithmetic.

One worker each, on the same nodes as the task that is simulated in full. They compete with it for slots, die
with its nodes, and are ordered about by the same agents; so what the coordinator decides about one task while
another one recovers is tried. A worker here starts, pauses, resumes and seals its steps one after the other;
when it dies, its task begins again. Each task must finish, or be cancelled, with its rows in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from everstep.core.agent import agent_messages as ag
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.messages import Sender
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.shape import Shape
from everstep.protocol.work import EpochFacts, Ledger, applied
from tests.storms.checkers import Violation

if TYPE_CHECKING:
    from tests.storms.cluster_world import ClusterWorld
    from tests.storms.virtual_agent import VirtualAgent

SHAPE = Shape(1, 1, 1)
STEP_US = 4_000


@dataclass(slots=True, eq=False)
class OtherWorker:
    sender: Sender
    agent: VirtualAgent
    slots: frozenset[int]
    alive: bool = True
    step: int = 1
    joining: bool = True
    paused: bool = True
    facts: EpochFacts | None = None
    copy_to: str = ""  # the node that keeps a copy of its state

    @property
    def me(self) -> Worker:
        return self.sender.worker


@dataclass(slots=True)
class OtherTasks:
    world: ClusterWorld
    open: set[str] = field(default_factory=set)  # those that are not over
    recorded: dict[str, int] = field(default_factory=dict)  # by task: its last step

    def begin(self) -> None:
        agenda = self.world.scene.agenda
        for task in self.world.spec.others:
            self.open.add(task.name)
            submitted = msg.TaskSubmitted(
                task=task.name, job=None, shape=SHAPE, steps=task.steps, secret="", has_checkpoints=False
            )
            agenda.at(task.submitted_us, self.world.hear, submitted)
            for at_us in task.killed_us:
                agenda.at(at_us, self._kill, task.name)
            if task.cancelled_us is not None:
                agenda.at(task.cancelled_us, self.world.hear, msg.CancelRequested(task=task.name))

    def living(self) -> list[OtherWorker]:
        return [one for agent in self.world.nodes for one in agent.others.values() if one.alive]

    def _kill(self, task: str) -> None:
        for one in self.living():
            if one.sender.task == task:
                one.agent.struck = True
                self.world.scene.note("other", one.me, f"the worker of {task} on {one.agent.name} dies")
                self.ends(one, "killed by SIGKILL")

    # -------------------------------------------------------------- what is on record

    def handled(self, action: msg.ClusterAction) -> None:
        match action:
            case msg.RecordRow(task=task, record=record):
                last = self.recorded.get(task, 0)
                if record.step > last + 1:
                    raise Violation(f"rows: {task} goes from step {last} to {record.step}")
                self.recorded[task] = record.step
            case msg.TaskEnded(task=task, state=state, because=because):
                drawn = next(one for one in self.world.spec.others if one.name == task)
                is_right = state == "finished" and self.recorded.get(task) == drawn.steps
                if not is_right and not (state == "cancelled" and drawn.cancelled_us is not None):
                    raise Violation(
                        f"liveness: {task} is {state} at step {self.recorded.get(task)}: {because}"
                    )
                self.open.discard(task)

    # -------------------------------------------------------------- processes

    def start(self, agent: VirtualAgent, sender: Sender, slots: frozenset[int]) -> None:
        one = agent.others[sender] = OtherWorker(sender, agent, slots)
        agent.happens(ag.ProcessSpawned(sender))
        if one.alive:
            agent.happens(ag.ProcessGreeted(sender))
            address = (agent.name, 10_000 + min(slots))
            self._says(one, ev.WorkerStarted(worker=one.me, incarnation=sender.incarnation, address=address))

    def ends(self, one: OtherWorker, reason: str) -> None:
        if one.alive:
            one.alive = False
            one.agent.died(one, reason)

    def take(self, one: OtherWorker, order: object) -> None:
        """An order, which is there at once."""
        one.agent.happens(ag.ProcessSpoke(one.sender, msg.OrderTaken()))
        match order:
            case msg.NotifyWorker(words=act.InterruptWorkers(epoch=epoch)):
                one.paused = True
                ledger = Ledger(step=one.step, joining=one.joining)
                self._says(one, ev.LedgerReported(worker=one.me, epoch=epoch, ledger=ledger))
            case msg.ResumeWorker(facts=facts, own=own, states=states):
                one.facts = applied(one.facts, facts)
                one.copy_to = "" if states.copy_to is None else states.copy_to.node
                one.step, one.joining, one.paused = own.step, False, False
                epoch = one.facts.epoch
                now = self.world.scene.now()
                self._says(one, ev.WorkerResumed(worker=one.me, epoch=epoch, at=now))
                self.world.scene.soon(STEP_US, self._step, one, epoch)
            case msg.EndWorker():
                self.ends(one, "exited with code 0")

    def _step(self, one: OtherWorker, epoch: int) -> None:
        facts = one.facts
        if not one.alive or one.paused or facts is None or facts.epoch != epoch:
            return
        attempt = max(number for first, number in facts.attempts if first <= one.step)
        if facts.until is not None and one.step > facts.until:
            self._save(one, facts.until, attempt)
            return
        sealed = ev.StepSealed(
            step=one.step,
            stage=0,
            attempt=attempt,
            microbatches=1,
            executed=3,
            losses=((Microbatch(0, 0), 1.0),),
            sum_of_squares=1.0,
        )
        one.step += 1
        self._says(one, sealed)
        self.world.scene.soon(STEP_US, self._step, one, epoch)

    def _save(self, one: OtherWorker, step: int, attempt: int) -> None:
        """It holds still after this step: its state goes to the memory of two nodes."""
        for node in dict.fromkeys(filter(None, (one.agent.name, one.copy_to))):
            part = msg.PartWritten(
                task=one.sender.task, step=step, stage=0, attempt=attempt, part=0, memory_of=node
            )
            one.agent.happens(ag.ProcessSpoke(one.sender, part))

    def _says(self, one: OtherWorker, event: ev.Event) -> None:
        said = msg.TaskEvent(task=one.sender.task, event=event)
        one.agent.happens(ag.ProcessSpoke(one.sender, said))
