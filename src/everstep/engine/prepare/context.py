"""Where `everstep.train` finds itself: in the process that launches, or in one of the workers it launched.

A script runs in both. The launcher's call starts the workers and returns a result; in a worker the same call
hands over the script's model, data and optimizer, and never returns. The settings are the launcher's: what
`everstep run` overrides is overridden everywhere.

A script may also be imported, for one of its functions: by a job file, or by an export of what it has
trained. The call is then neither of the two, and stops the import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.engine.prepare.program import Program
    from everstep.job.job import Job


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """This process is a worker: `train` runs a program here until the task is over."""

    job: Job
    train: Callable[[Program], None]


class StartedInImportError(BaseException):
    """A module that is imported for a function would train. Not an `Exception`: the module's own handlers do
    not keep it.
    """


_worker: WorkerContext | None = None
_is_importing = False


def become_worker(worker: WorkerContext) -> None:
    global _worker
    _worker = worker


def current_worker() -> WorkerContext | None:
    return _worker


def in_worker() -> bool:
    """Is the script run by a worker? What must happen once, such as deleting a folder, is for the launcher:
    a worker may start again in the middle of a run.
    """
    return _worker is not None


@contextmanager
def importing() -> Iterator[None]:
    """A module is imported for one of its functions: nothing in it may train or write."""
    global _is_importing
    before, _is_importing = _is_importing, True
    try:
        yield
    finally:
        _is_importing = before


def refuse_in_import(call: str) -> None:
    """At the start of each call that trains or writes."""
    if _is_importing:
        raise StartedInImportError(call)
