"""Agents and workers as far as a coordinator can tell: without processes, they obey at once and say what it
must hear. Workers run no ops: they take part, report a ledger, and seal when a script says so.

The one crew of every world without processes: `tests.support.fake_cluster` (scripts, step by step),
`tests.core.fleet` (thousands of workers in one process) and `harness.fake_agents` (real lines to a daemon).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker, parse_ops
from everstep.protocol.work import Ledger, OwnOrders


@dataclass(slots=True)
class Actor:
    node: str
    incarnation: int
    step: int = 1
    joining: bool = True
    ops: str = ""  # of a step, in their notation


class Crew:
    """What its members do not do is said by its public fields."""

    def __init__(
        self,
        say: Callable[[str, msg.NodeReport, msg.Sender | None], None],
        *,
        clock: Callable[[], float],
        host: str | None = None,
        half_done: bool = False,
    ) -> None:
        """`host`: of all nodes; None: each has its name. `half_done`: ledgers have ops in them."""
        self._say, self._clock, self._host, self._half_done = say, clock, host, half_done
        self.actors: dict[tuple[str, Worker], Actor] = {}
        self.starts = True  # off: processes are ordered and never report
        self.commits = True  # off: commits are not answered
        self.looks = True  # off: a look at the folder of a task that runs is not answered
        self.copies = True  # off: joiners get no state
        self.ledgers = True  # off: interrupts are answered by `answer`
        self._interrupted: list[tuple[str, Worker, int]] = []
        self.on_disk = 0  # the step of the checkpoint that a search finds
        self.compiled: bool | None = False  # the run that wrote it
        self.hung_disks: set[str] = set()  # nodes that do not answer searches
        self.hang_at_start: set[Worker] = set()  # their processes never report
        self.sums: dict[str, str] = {}  # by node: how its version sums gradients
        self.kernels = ev.UsesKernels()  # of workers that start from now on
        self.checks: dict[str, tuple[msg.CheckResult, ...]] = {}  # what each node's checks find
        # What a node measures of the network to another one.
        self.pairs: Callable[[str, msg.MeasurePair], msg.PairMeasured | None] | None = None
        # Joiners of another crew: a copy by its task, the order and the step of its source.
        self.elsewhere: Callable[[str, act.CopyState, int], None] = lambda task, words, step: None

    def obey(self, node: str, order: msg.Order) -> None:
        match order:
            case msg.StartProcess() if self.starts:
                self._start(node, order)
            case msg.StartProcesses() if self.starts:
                for start in order.starts:
                    self._start(node, start)
            case msg.InterruptTask():
                self._interrupted += [(order.task, worker, order.epoch) for worker in order.workers]
                if self.ledgers:
                    self.answer()
            case msg.ResumeTask():
                facts = order.facts if order.news is None else order.news.facts
                assert facts is not None
                for worker, own, _ in order.workers:
                    self._resume(order.task, worker, facts.epoch, own)
            case msg.KillProcess():
                actor = self.actors.get((order.task, order.worker))
                if actor is not None and actor.incarnation == order.incarnation:
                    self.ends(order.task, order.worker, "killed by SIGKILL")
            case msg.NotifyWorker(words=act.CopyState() as words) if self.copies:
                self._copy(order.task, order.worker, words)
            case msg.CloseTask():
                for name, worker in [
                    k for k, a in self.actors.items() if k[0] == order.task and a.node == node
                ]:
                    self.ends(name, worker, "exited with code 0")
            case msg.KeepOnly():
                for (name, worker), actor in list(self.actors.items()):
                    if actor.node == node and (name, worker, actor.incarnation) not in order.keep:
                        self.ends(name, worker, "killed by SIGKILL")
            case msg.CheckNode():
                checked = msg.NodeChecked(results=self.checks.get(node, ()), because=order.because)
                self._say(node, checked, None)
            case msg.MeasurePair() if self.pairs is not None and (pair := self.pairs(node, order)):
                self._say(node, pair, None)
            case msg.FindCheckpoint(live=True):
                if self.looks:
                    looked = ev.CheckpointsLooked(search=order.search, step=self.on_disk)
                    self._say(node, msg.TaskEvent(task=order.task, event=looked), None)
            case msg.FindCheckpoint() if node not in self.hung_disks:
                found = msg.CheckpointFound(
                    task=order.task, step=self.on_disk, search=order.search, compiled=self.compiled
                )
                self._say(node, found, None)
            case msg.CommitCheckpoint() if self.commits:
                committed = ev.CheckpointCommitted(step=order.step)
                self._say(node, msg.TaskEvent(task=order.task, event=committed), None)

    def says(self, task: str, worker: Worker, event: ev.Event) -> None:
        self.reports(task, worker, msg.TaskEvent(task=task, event=event))

    def reports(self, task: str, worker: Worker, report: msg.NodeReport) -> None:
        actor = self.actors[task, worker]
        self._say(actor.node, report, msg.Sender(task, worker, actor.incarnation))

    def ends(self, task: str, worker: Worker, reason: str, **more: object) -> None:
        actor = self.actors.pop((task, worker))
        exited = ev.WorkerExited(worker=worker, incarnation=actor.incarnation, reason=reason, **more)
        sender = msg.Sender(task, worker, actor.incarnation)
        self._say(actor.node, msg.TaskEvent(task=task, event=exited), sender)

    def lose(self, *nodes: str) -> None:
        """Workers that go with their nodes, and say nothing."""
        self.actors = {key: actor for key, actor in self.actors.items() if actor.node not in nodes}

    def answer(self) -> None:
        """The interrupts so far."""
        interrupted, self._interrupted = self._interrupted, []
        for one in interrupted:
            self._interrupt(*one)

    def _start(self, node: str, order: msg.StartProcess) -> None:
        self.actors[order.task, order.worker] = Actor(node, order.incarnation)
        if order.worker not in self.hang_at_start:
            address = (self._host or node, _port(node, order.slot))
            worker, sums = order.worker, self.sums.get(node, "")
            started = ev.WorkerStarted(
                worker=worker, incarnation=order.incarnation, address=address, sums=sums, kernels=self.kernels
            )
            self.says(order.task, worker, started)

    def _interrupt(self, task: str, worker: Worker, epoch: int) -> None:
        actor = self.actors.get((task, worker))
        if actor is not None:
            has_done = self._half_done and not actor.joining
            done = parse_ops(actor.ops)[: 12 + worker.replica % 3] if has_done else ()
            ledger = Ledger(step=actor.step, joining=actor.joining, done=done)
            self.says(task, worker, ev.LedgerReported(worker=worker, epoch=epoch, ledger=ledger))

    def _resume(self, task: str, worker: Worker, epoch: int, own: OwnOrders) -> None:
        actor = self.actors.get((task, worker))
        if actor is not None:
            actor.step, actor.joining, actor.ops = own.step, False, own.steady
            self.says(task, worker, ev.WorkerResumed(worker=worker, epoch=epoch, at=self._clock()))

    def _copy(self, task: str, worker: Worker, words: act.CopyState) -> None:
        source = self.actors.get((task, worker))
        if source is not None and not self.copied(task, words, source.step):
            self.elsewhere(task, words, source.step)

    def copied(self, task: str, words: act.CopyState, step: int) -> bool:
        """A joiner has the state of a worker that is in this step; False: it is not of this crew."""
        joiner = self.actors.get((task, words.joiner))
        if joiner is None:
            return False
        joiner.step = step
        copied = ev.StateCopied(
            worker=words.joiner,
            incarnation=joiner.incarnation,
            transfer=words.transfer,
            state_step=step - 1,
        )
        self.says(task, words.joiner, copied)
        return True


def _port(node: str, slot: int) -> int:
    """As a kernel gives them out: no pattern that would make an address shorter than it is."""
    return 32768 + zlib.crc32(f"{node}/{slot}".encode()) % 28000
