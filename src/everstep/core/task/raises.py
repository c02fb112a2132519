"""Exceptions of workers: one can be its machine's fault, the same one from two processes is not.

"The same" means at the same op and of the same kind. Two replicas that fail at one op for different reasons
(one out of memory, one without a network) are two faults of two machines. A microbatch's op is on one worker
at a time, so another process that raises there was given the same input. R and U are on all replicas of a
stage at once: what two of them raise together may have one cause outside of both, such as a GPU that they
share, and is the same only if a worker's replacement raises it again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from everstep.protocol.events import RaisedFor, WorkerRaised
from everstep.protocol.ops import Worker

_KEPT = 100  # the most recent ones
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_OF_MICROBATCH = re.compile(r"\d+[FIW]\d+\.\d+$")
_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|not enough memory", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class Raises:
    first: dict[tuple[str, ...], tuple[Worker, int]] = field(default_factory=dict)  # place, kind -> process

    def repeated(self, event: WorkerRaised) -> str | None:
        """Why the task must fail, if another process has raised the same at the same op."""
        process = event.worker, event.incarnation
        of_microbatch = _OF_MICROBATCH.search(event.where) is not None
        place = (event.where,) if of_microbatch else (event.where, str(event.worker))
        other, incarnation = self.first.setdefault((*place, kind_of(event.error)), process)
        if len(self.first) > _KEPT:
            del self.first[next(iter(self.first))]
        if (other, incarnation) == process:
            return None
        both = (
            f"worker {other} and its replacement"
            if other == event.worker
            else f"workers {other} and {event.worker}"
        )
        cause = ""
        if _MEMORY.search(event.error):
            cause = ", so the step needs more memory than there is"
        elif of_microbatch and event.raised_for is not RaisedFor.INPUT:  # which says itself what is wrong
            cause = ", so the input causes it"
        return f"{both} raised the same exception at {event.where}{cause}: {event.error}"


def kind_of(error: str) -> str:
    """The first line without its numbers: addresses and sizes differ from process to process."""
    return _NUMBERS.sub("#", error.split("\n", 1)[0])[:200]
