"""From any action back to its beginning: which event it follows from, and which action that event answers.

    event 12  worker 0:1 has waited too long      ──►  stop worker 0:1        (an action names its event)
    event 13  worker 0:1 exited                   ──►  interrupt, start …     (an event answers an action)

An action carries the number of its event. An event is an answer if it has the name of what was ordered or
asked: the exit of the process that was to be stopped, the ledger of the epoch that was begun, the answer to a
question. Names are kept for the recent past only; a chain that goes further back ends there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from everstep.drive.ports import HandledEvent
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.work import EpochFacts

KEPT = 4000  # events, and names of actions
LONGEST = 50  # links of one chain
MOST_ACTIONS = 40  # of one event
Name = tuple[Hashable, ...]


class CausedAction(NamedTuple):
    """An action in words, and the event it follows from."""

    text: str
    because: str
    cause: int


@dataclass(frozen=True, slots=True)
class CauseLink:
    """One event in words, what followed from it, and the action that it answers, if it is an answer."""

    number: int
    at: float
    text: str
    actions: tuple[CausedAction, ...]
    answers: CausedAction | None


class Causes:
    """Keeps words, not events: a plan or a ledger can be large."""

    def __init__(
        self,
        *,
        of_event: Callable[[msg.ClusterEvent], str],
        of_action: Callable[[msg.ClusterAction], str],
    ) -> None:
        self._of_event, self._of_action = of_event, of_action
        self._links: deque[CauseLink] = deque(maxlen=KEPT)
        self._asked: OrderedDict[Name, CausedAction] = OrderedDict()

    def handled(self, one: HandledEvent) -> None:
        if one.event is None:
            return
        answers = next((self._asked[name] for name in answered_by(one.event) if name in self._asked), None)
        done = [self._told(action) for action in one.actions[:MOST_ACTIONS]]
        link = CauseLink(one.number, one.at, self._of_event(one.event), tuple(dict.fromkeys(done)), answers)
        self._links.append(link)
        shared: dict[type[object], CausedAction] = {}  # by kind, where too many are alike to tell them apart
        if len(one.actions) > MOST_ACTIONS:
            counts = Counter(map(_kind, one.actions))
            first = {_kind(action): action for action in reversed(one.actions)}
            for kind, count in counts.items():
                if count > MOST_ACTIONS:
                    shared[kind] = self._told(first[kind], f", and {count - 1} more like this")
        for action in one.actions:
            told = shared.get(_kind(action))
            for name in asked_by(action):
                told = told or self._told(action)
                self._asked[name] = told
                self._asked.move_to_end(name)
        while len(self._asked) > KEPT:
            self._asked.popitem(last=False)

    def _told(self, action: msg.ClusterAction, more: str = "") -> CausedAction:
        return CausedAction(self._of_action(action) + more, action.because, action.cause)

    def link(self, number: int) -> CauseLink | None:
        place = number - self._links[0].number if self._links else -1
        return self._links[place] if 0 <= place < len(self._links) else None

    def chain(self, number: int) -> list[CauseLink]:
        """This event, then the event whose action it answers, and so on to the beginning."""
        found: list[CauseLink] = []
        while (link := self.link(number)) is not None and len(found) < LONGEST:
            found.append(link)
            if link.answers is None or link.answers.cause >= number:
                break
            number = link.answers.cause
        return found


def _kind(action: msg.ClusterAction) -> type[object]:
    return type(action.order if isinstance(action, msg.Dispatch) else action)


def asked_by(action: msg.ClusterAction) -> Iterator[Name]:
    """The names by which an answer to this action is known."""
    match action:
        case msg.Think(task=task, question=question):
            yield "plan", task, question.epoch
        case msg.ChooseAssignment(version=version):
            yield "assignment", version
        case msg.Dispatch(node=node, order=order):
            match order:
                case msg.InterruptTask(task=task, epoch=epoch):  # by node: workers may be thousands
                    yield "ledger", task, node, epoch
                case msg.ResumeTask(task=task, facts=EpochFacts(epoch=epoch)):
                    yield "resume", task, node, epoch
                case msg.StartProcess(task=task, worker=worker, incarnation=incarnation):
                    yield "start", task, worker, incarnation
                case msg.StartProcesses(task=task, starts=starts):
                    for start in starts:
                        yield "start", task, start.worker, start.incarnation
                case msg.KillProcess(task=task, worker=worker, incarnation=incarnation):
                    yield "end", task, worker, incarnation
                case msg.CloseTask(task=task):
                    yield "close", task, node
                case msg.FindCheckpoint(task=task, search=search):
                    yield "search", task, search
                case msg.CommitCheckpoint(task=task, step=step):
                    yield "commit", task, step
                case msg.NotifyWorker(task=task, worker=worker, words=words):
                    yield _notified(task, worker, words)


def _notified(task: str, worker: Hashable, words: object) -> Name:
    match words:
        case act.CopyState(joiner=joiner):
            return "copy", task, joiner
        case _:
            return "other", task, worker


def answered_by(event: msg.ClusterEvent) -> Iterator[Name]:
    """The names of the actions that this event may answer, the likeliest first."""
    match event:
        case msg.PlanAnswered(task=task, event=ev.PlanComputed(epoch=epoch)):
            yield "plan", task, epoch
        case msg.AssignmentChosen(version=version):
            yield "assignment", version
        case msg.FromNode(report=msg.CheckpointFound() | msg.CheckpointUnusable() as report):
            yield "search", report.task, report.search
        case msg.FromNode(report=msg.SaveFailed(task=task, step=step), sender=None):
            yield "commit", task, step
        case msg.FromNode(node=node, report=msg.TaskEvent(task=task, event=inner)):
            yield from _answered_by_worker(node, task, inner)


def _answered_by_worker(node: str, task: str, event: ev.Event) -> Iterator[Name]:
    match event:
        case ev.WorkerStarted(worker=worker, incarnation=incarnation):
            yield "start", task, worker, incarnation
        case ev.WorkerExited(worker=worker, incarnation=incarnation):
            yield "end", task, worker, incarnation
            yield "close", task, node
        case ev.LedgerReported(epoch=epoch):
            yield "ledger", task, node, epoch
        case ev.WorkerResumed(epoch=epoch):
            yield "resume", task, node, epoch
        case ev.StateCopied(worker=worker):
            yield "copy", task, worker
        case ev.CheckpointCommitted(step=step):
            yield "commit", task, step
