"""An agent's decisions, all of them: its processes, its reports, and which orders count.

Orders are numbered by the coordinator, and one heard twice is carried out once. They carry the term of the
coordinator that gave them; one of an older term is refused, for that coordinator is deposed and may not know
it. So the line may break at any moment, for as long as it likes: workers keep training, reports are kept, and
when it is back both sides say up to where they have heard.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.core.agent.agent_messages import AgentAction, OrderGiven, ProcessEvent, SendToCoordinator
from everstep.core.agent.process import AgentLimits
from everstep.core.agent.processes import NodeProcesses
from everstep.core.agent.reports import ReportQueue
from everstep.core.faults.detector import DetectorLimits
from everstep.protocol.messages import NodeReport, Order, Sender
from everstep.protocol.table import Document


@dataclass(frozen=True, slots=True)
class LineOpened:
    """A coordinator of this term answers; it has the reports up to `heard`."""

    term: int
    heard: int
    journal: str = ""  # the id of its journal


@dataclass(frozen=True, slots=True)
class LineClosed:
    pass


@dataclass(frozen=True, slots=True)
class OrderHeard:
    number: int
    order: Order
    term: int


@dataclass(frozen=True, slots=True)
class ReportsKept:
    """The coordinator has these reports on disk."""

    number: int
    term: int


@dataclass(frozen=True, slots=True)
class AgentSaid:
    """Something of the node itself: a line of its kernel's log, the answer of work on its disk. `sender`: the
    process that it is about.
    """

    report: NodeReport
    sender: Sender | None = None


@dataclass(frozen=True, slots=True)
class LeaveLine:
    """Close the line to this coordinator and look for another."""

    because: str


LineEvent = LineOpened | LineClosed | OrderHeard | ReportsKept | AgentSaid
AgentEvent = LineEvent | ProcessEvent


class AgentState:
    def __init__(
        self,
        *,
        detector: DetectorLimits | None = None,
        limits: AgentLimits | None = None,
        ahead_s: float = 0.0,
    ) -> None:
        self.processes = NodeProcesses(detector or DetectorLimits(), limits or AgentLimits())
        self.reports = ReportQueue(ahead_s=ahead_s)
        self.done = 0  # the last order carried out
        self.term = 0  # of the newest coordinator heard
        self.journal = ""  # whose orders these are: terms of another one are not compared with it
        self._has_left = False  # the line: an order of it was not carried out, so none after it counts

    def handle(self, event: AgentEvent, now: float) -> list[AgentAction | LeaveLine]:
        match event:
            case LineOpened():
                self._has_left = False
                if event.journal and event.journal != self.journal:
                    self.journal, self.term = event.journal, event.term
                if refused := self._refuses(event.term):
                    return refused
                self.reports.connected = True
                self.reports.heard(event.heard)
                self.processes.progress.tell_again()
                return []
            case LineClosed():
                self.reports.connected = False
                return []
            case OrderHeard():
                return self._ordered(event, now)
            case ReportsKept():
                if refused := self._refuses(event.term):
                    return refused
                self.reports.heard(event.number)
                return []
            case AgentSaid():
                self.reports.add(event.report, event.sender)
                return []
            case _:
                return self._report(self.processes.handle(event, now))

    def image(self) -> Document:
        """What the next agent must know, besides the reports that are kept."""
        line = {"done": self.done, "term": self.term, "journal": self.journal}
        return line | self.processes.image()

    def restore(self, image: Document, now: float) -> None:
        self.done, self.term, self.journal = image["done"], image["term"], image["journal"]
        self.processes.restore(image, now)

    def due_at(self) -> float | None:
        return self.processes.due_at()

    def validate(self) -> None:
        self.processes.validate()

    def _ordered(self, event: OrderHeard, now: float) -> list[AgentAction | LeaveLine]:
        if refused := self._refuses(event.term):
            return refused
        if event.number <= self.done or self._has_left:
            return []
        if not self.processes.understands(event.order):
            self._has_left = True
            return [LeaveLine("its changes are to facts that are not known here")]
        self.done = event.number
        return self._report(self.processes.handle(OrderGiven(event.order), now))

    def _refuses(self, term: int) -> list[AgentAction | LeaveLine]:
        if term < self.term:
            because = f"it is of term {term}, and one of term {self.term} leads; its orders are refused"
            return [LeaveLine(because)]
        self.term = term
        return []

    def _report(self, actions: list[AgentAction]) -> list[AgentAction | LeaveLine]:
        """Keep what is for the coordinator; the rest is for the shell."""
        rest: list[AgentAction | LeaveLine] = []
        for action in actions:
            if isinstance(action, SendToCoordinator):
                self.reports.add(action.report, action.sender)
            else:
                rest.append(action)
        return rest
