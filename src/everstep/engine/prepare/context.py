"""Where `everstep.train` finds itself: in the process that launches, or in one of the workers it launched.

A script runs in both. The launcher's call starts the workers and returns a result; in a worker the same call
hands over the script's model, data and optimizer, and never returns. The settings are the launcher's: what
`everstep run` overrides is overridden everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
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


_worker: WorkerContext | None = None


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
