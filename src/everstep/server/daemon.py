"""The coordinator as a process: it stands by, leads for a term, and stands by again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from everstep.protocol import messages as msg
from everstep.schedule.task_scheduler import TaskScheduler
from everstep.server.agent_connections import AgentConnections
from everstep.server.journal import Journal, LostLeadership
from everstep.server.record import SILENCE_S, ClusterRecord
from everstep.server.step_files import StepFiles
from everstep.server.term import Term


class Daemon:
    def __init__(
        self,
        journal: Journal,
        *,
        folder: Path,
        policy: msg.PolicySet | None = None,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.journal = journal
        self.record = ClusterRecord() if say is None else ClusterRecord(say=say)
        self.record.files = StepFiles(folder, self.record.say)
        self._policy, self._silence_s, self._clock = policy, silence_s, clock
        self.term: Term | None = None

    async def begin(self) -> Term:
        """Read the journal; from then on this process acts."""
        self.term = Term(self.journal, self.record, silence_s=self._silence_s, clock=self._clock)
        await self.term.read(self._policy)
        return self.term

    async def lead(self) -> None:
        """Until cancelled, or LostLeadership."""
        term = await self.begin()
        try:
            await term.run()
        finally:
            self.term = None

    # -------------------------------------------------------------- what the API asks

    @property
    def lines(self) -> AgentConnections:
        return self._leading().lines

    @property
    def schedulers(self) -> dict[str, TaskScheduler]:
        return self._leading().thinking.schedulers

    async def handle(self, event: msg.ClusterEvent) -> None:
        await self._leading().handle(event)

    def _leading(self) -> Term:
        if self.term is None:
            raise LostLeadership("this coordinator does not lead; try again")
        return self.term
