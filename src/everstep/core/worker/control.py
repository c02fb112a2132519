"""What a worker does about its orders, its links and its reports; `WorkerState` decides about its steps.

A shell (the engine's loop, or a virtual worker) hands over what happens and carries out what comes back:

    order, LinkBroke, TimePassed ──► handle() ──► reports, links to keep, directions for states
    task = next() ──► run it ──► finished(task) ──► take_actions() ──► sends, releases, reports
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from everstep.core.worker.mending import LinkMending, MendLimits
from everstep.core.worker.worker_state import WorkerState
from everstep.errors import MOST_TRACEBACK, DeviceError, UserError, clipped
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import work
from everstep.protocol.messages import (
    EndWorker,
    LinkDown,
    LinkMended,
    NotifyWorker,
    OrderTaken,
    PlantFaults,
    ResumeWorker,
    Sender,
    TaskEvent,
    TimePassed,
    WorkerOrder,
    WorkerReport,
)
from everstep.protocol.ops import Worker
from everstep.protocol.table import Handlers
from everstep.protocol.work import LinkBroke, LinkOpened, PeerAddress, StateDirections

ControlEvent = WorkerOrder | LinkBroke | LinkOpened | TimePassed


SAME_KERNELS = ev.UsesKernels()


@dataclass(frozen=True, slots=True)
class SendReport:
    report: WorkerReport


@dataclass(frozen=True, slots=True)
class KeepLinks:
    """Only these peers are left; connections to others are closed and what is queued for them is dropped."""

    addresses: frozenset[PeerAddress]


WorkerAction = SendReport | KeepLinks
ShellAction = work.Command | SendReport


class WorkerControl:
    on_order: ClassVar = Handlers[list[WorkerAction]](WorkerOrder)
    on_notice: ClassVar = Handlers[list[WorkerAction]](act.Notice)

    def __init__(self, sender: Sender, state: WorkerState, limits: MendLimits | None = None) -> None:
        self.sender, self.state = sender, state
        self.facts: work.EpochFacts | None = None  # of the last epoch it was told
        self.book: dict[Worker, PeerAddress] = {}
        self.directions = StateDirections()
        self.mending = LinkMending(limits)
        self.over = False  # leave at once
        self._finishing = False
        self._resumed_epoch = 0  # the last one in which it said that it runs ops
        self._waits_for: tuple[int, str] | None = None
        self._reports: list[ShellAction] = []

    # -------------------------------------------------------------- what happens

    def handle(self, event: ControlEvent, now: float) -> list[WorkerAction]:
        match event:
            case LinkBroke(address=address, error=error):
                return self._link_broke(address, error, now)
            case LinkOpened(address=address):
                self.mending.opened(address, now)
                return []
            case TimePassed():
                return self._mend(now)
            case _:
                return self.on_order.handler(self, event)(event)

    @on_order
    def _notified(self, order: NotifyWorker) -> list[WorkerAction]:
        return [SendReport(OrderTaken()), *self.on_notice.handler(self, order.words)(order, order.words)]

    @on_order
    def _ended(self, order: EndWorker) -> list[WorkerAction]:
        self._finishing = True
        self.over = self.over or not order.gently
        return []

    @on_order
    def _faults_planted(self, order: PlantFaults) -> list[WorkerAction]:
        """Its shell has them."""
        return []

    @on_notice
    def _interrupt(self, order: NotifyWorker, words: act.InterruptWorkers) -> list[WorkerAction]:
        ledger = self.state.interrupt(words.epoch)
        return [self._event(ev.LedgerReported(worker=self.sender.worker, epoch=words.epoch, ledger=ledger))]

    @on_notice
    def _copy_state(self, order: NotifyWorker, words: act.CopyState) -> list[WorkerAction]:
        for worker, host, port in order.book:
            if worker == words.joiner:
                self.book[worker] = (host, port)
                self.state.feeder.copy_to(worker.replica, words.incarnation, words.transfer)
        return []

    @on_notice
    def _stop_feeding(self, order: NotifyWorker, words: act.StopFeeding) -> list[WorkerAction]:
        self.state.feeder.stop(words.joiner.replica)
        return []

    @on_order
    def _resume(self, order: ResumeWorker) -> list[WorkerAction]:
        return [SendReport(OrderTaken()), *self._begin_epoch(order)]

    def _begin_epoch(self, order: ResumeWorker) -> list[WorkerAction]:
        facts = self.facts = work.applied(self.facts, order.facts)
        if facts.epoch < self.state.epoch:
            return []
        resume = work.resume(facts, order.own)
        self.book = dict(facts.book)
        # Where to load from changes with an order to load only: an interrupt may have come before the load.
        loads = order.states if resume.restore is not None else self.directions
        self.directions = replace(order.states, copies=loads.copies, other_holders=loads.other_holders)
        addresses = frozenset(self.book.values())
        self.mending.keep(addresses)
        self.state.resume(resume)
        return [KeepLinks(addresses)]

    def _link_broke(self, address: PeerAddress, error: str, now: float) -> list[WorkerAction]:
        """If it could not be opened again, the coordinator compares with what others say."""
        down_s = self.mending.broke(address, now, error)
        if down_s is None:
            return []
        task, worker, _ = self.sender
        return [
            SendReport(
                LinkDown(task=task, worker=worker, peer=peer, address=address, down_s=down_s, error=error)
            )
            for peer, at in self.book.items()
            if at == address
        ]

    def _mend(self, now: float) -> list[WorkerAction]:
        send, held = self.mending.due(now)
        for peer, address in self.book.items():
            if address in send:
                self.state.link_reopened(peer)
        task, worker, _ = self.sender
        return [
            SendReport(LinkMended(task=task, worker=worker, peer=peer, error=held[address]))
            for peer, address in self.book.items()
            if address in held
        ]

    def due_at(self) -> float | None:
        """When `TimePassed` is wanted next."""
        return self.mending.due_at()

    # -------------------------------------------------------------- what it does

    def finished(self, task: work.WorkItem, answer: work.Answer, *, began: float) -> None:
        """`began`: when the task was begun, in seconds of the shell's clock."""
        if type(task) is work.Compute and self._resumed_epoch != self.state.epoch:
            self._resumed_epoch = self.state.epoch
            resumed = ev.WorkerResumed(worker=self.sender.worker, epoch=self._resumed_epoch, at=began)
            self._reports.append(self._event(resumed))
        self.state.finished(task, answer)

    def take_actions(self) -> list[ShellAction]:
        """What the shell shall do besides the task; empties the list."""
        if not self._reports and not self.state.mail.commands:
            return []
        found, self._reports = self._reports, []
        for command in self.state.take_commands():
            found.append(self._event(command) if isinstance(command, ev.Event) else command)
        return found

    def may_leave(self, task: work.WorkItem) -> bool:
        """Asked to finish, and nothing is in hand."""
        idle = type(task) is work.Paused or type(task) is work.Finished
        return self.over or (self._finishing and (idle or self.state.joining))

    # -------------------------------------------------------------- what it shows and says

    def shows(self, *, busy: bool, doing: str) -> bool:
        """Is this news for its beacon? Woken by something else, it still waits for the same thing: the beacon
        keeps the time since when, or a peer that is gone would never be missed.
        """
        waits_for = None if busy else (self.state.now.step, doing)
        if waits_for is not None and waits_for == self._waits_for:
            return False
        self._waits_for = waits_for
        return True

    def started(
        self, address: PeerAddress, sums: str = "", kernels: ev.UsesKernels = SAME_KERNELS
    ) -> SendReport:
        """`sums`: how it sums gradients."""
        _, worker, incarnation = self.sender
        return self._event(
            ev.WorkerStarted(
                worker=worker, incarnation=incarnation, address=address, sums=sums, kernels=kernels
            )
        )

    def where(self) -> str:
        now = self.state.now
        return f"step {now.step} {now.todo[-1] if now.todo else ''}"

    def _event(self, event: ev.Event) -> SendReport:
        return SendReport(TaskEvent(task=self.sender.task, event=event))


def raised(
    sender: Sender,
    error: str,
    *,
    where: str,
    traceback: str,
    raised_for: ev.RaisedFor = ev.RaisedFor.UNKNOWN,
) -> TaskEvent:
    """What a worker says of an exception before it ends. Bounded: a text may quote a whole tensor."""
    event = ev.WorkerRaised(
        worker=sender.worker,
        incarnation=sender.incarnation,
        error=clipped(error),
        where=where,
        traceback=clipped(traceback, MOST_TRACEBACK),
        raised_for=raised_for,
    )
    return TaskEvent(task=sender.task, event=event)


def raised_for(error: BaseException) -> ev.RaisedFor:
    match error:
        case UserError():
            return ev.RaisedFor.INPUT
        case DeviceError():
            return ev.RaisedFor.DEVICE
        case _:
            return ev.RaisedFor.UNKNOWN
