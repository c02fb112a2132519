"""Exceptions of workers: one can be its machine's fault, the same one from two processes is the input's.

"The same" means at the same op and of the same kind. Two replicas that fail at one op for different reasons
(one out of memory, one without a network) are two faults of two machines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from everstep.protocol.events import WorkerRaised
from everstep.protocol.ops import Worker

_KEPT = 100  # the most recent ones
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(slots=True, kw_only=True)
class Raises:
    first: dict[tuple[str, str], tuple[Worker, int]] = field(default_factory=dict)  # where, kind -> process

    def repeated(self, event: WorkerRaised) -> str | None:
        """Why the task must fail, if another process has raised the same at the same op."""
        process = event.worker, event.incarnation
        other, incarnation = self.first.setdefault((event.where, kind_of(event.error)), process)
        if len(self.first) > _KEPT:
            del self.first[next(iter(self.first))]
        if (other, incarnation) == process:
            return None
        both = (
            f"worker {other} and its replacement"
            if other == event.worker
            else f"workers {other} and {event.worker}"
        )
        return f"{both} raised the same exception at {event.where}, so the input causes it: {event.error}"


def kind_of(error: str) -> str:
    """The first line without its numbers: addresses and sizes differ from process to process."""
    return _NUMBERS.sub("#", error.split("\n", 1)[0])[:200]
