"""Reports to the coordinator: numbered, kept until it has them on disk, and never too many.

The line may be cut for days. What is of no use later (op times, suspicions) is then not kept at all; if the
rest still grows beyond its bound, the oldest seals go first: a later seal of a stage implies the earlier
ones, and what is lost with them are rows of losses, not steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.table import TABLE

MOST_KEPT = 200_000  # some 60 MB


@dataclass(frozen=True, slots=True)
class KeptReport:
    number: int
    report: msg.NodeReport
    sender: msg.Sender | None


class ReportQueue:
    def __init__(self, *, ahead_s: float = 0.0, most: int = MOST_KEPT) -> None:
        """`ahead_s`: from the clock that workers use to the coordinator's."""
        self.number = 0  # of the last report
        self.num_heard = 0  # the coordinator has all up to this one
        self.num_dropped = 0
        self.connected = False
        self._ahead_s, self._most = ahead_s, most
        self._kept: deque[KeptReport] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_awaited(self) -> int:
        """Reports that the coordinator will say it has: not those of which it keeps nothing."""
        return sum(not TABLE[type(kept.report)].fleeting for kept in self._kept)

    def add(self, report: msg.NodeReport, sender: msg.Sender | None) -> None:
        if TABLE[type(report)].fleeting and not self.connected:
            return
        if len(self._kept) >= self._most:
            self._make_room()
        self.number += 1
        self._kept.append(KeptReport(self.number, self._on_their_clock(report), sender))

    def restore(self, kept: Iterable[KeptReport], number: int) -> None:
        """What another agent has left; `number`: of its last report."""
        self._kept = deque(kept)
        self.number = number

    def heard(self, number: int) -> None:
        """The coordinator has all reports up to this one."""
        self.num_heard = max(self.num_heard, number)
        while self._kept and self._kept[0].number <= number:
            self._kept.popleft()

    def after(self, number: int, *, at_most: int = 256) -> Iterator[KeptReport]:
        """The next ones to send."""
        if not self._kept or self._kept[-1].number <= number:
            return
        # Numbers rise by one, except where some were dropped: begin at the earliest place it can be.
        first = max(0, len(self._kept) - (self._kept[-1].number - number))
        found = 0
        for index in range(first, len(self._kept)):
            if self._kept[index].number > number:
                yield self._kept[index]
                found += 1
                if found == at_most:
                    return

    def _make_room(self) -> None:
        """All but the newest half of the seals go; whatever is oldest, if there is no seal to drop."""
        seals = [kept.number for kept in self._kept if _is_seal(kept.report)]
        gone = set(seals[: (len(seals) + 1) // 2]) or {self._kept[0].number}
        self._kept = deque(kept for kept in self._kept if kept.number not in gone)
        self.num_dropped += len(gone)

    def _on_their_clock(self, report: msg.NodeReport) -> msg.NodeReport:
        match report:
            case msg.TaskEvent(event=ev.WorkerResumed() as event):
                return replace(report, event=replace(event, at=event.at + self._ahead_s))
            case msg.TaskEvent(event=ev.WorkerExited(killed_at=float(at)) as event):
                return replace(report, event=replace(event, killed_at=at + self._ahead_s))
            case _:
                return report


def _is_seal(report: msg.NodeReport) -> bool:
    return isinstance(report, msg.TaskEvent) and isinstance(report.event, ev.StepSealed)
