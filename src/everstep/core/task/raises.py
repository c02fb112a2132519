"""Exceptions of workers: one may be its machine's fault, the same one from two processes is the input's."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.core.words.events import WorkerRaised
from everstep.core.words.ops import Worker


@dataclass(slots=True, kw_only=True)
class Raises:
    first: dict[str, tuple[Worker, int]] = field(default_factory=dict)  # where -> the process that raised

    def repeated(self, event: WorkerRaised) -> str | None:
        """Why the task must fail, if another process has raised at the same op."""
        process = event.worker, event.incarnation
        if self.first.setdefault(event.where, process) == process:
            return None
        return f"two workers raised at {event.where}, so another would too: {event.error}"
