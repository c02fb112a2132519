"""A worker that gets its model from a person's script: the script is run as Python would run it, up to its
`everstep.train(...)`, which trains here and ends the process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from everstep.engine.prepare import context
from everstep.engine.prepare.program import Program
from everstep.errors import UserError
from everstep.job.job import Job


def run(script: Sequence[str], job: Job, train: Callable[[Program], None]) -> None:
    path, *arguments = script
    context.become_worker(context.WorkerContext(job, train))
    run_as_main(path, arguments)
    raise UserError(f"script {path!r} called everstep.train in the launcher, and not in a worker.")


def run_as_main(path: str, arguments: list[str]) -> None:
    """`python path arguments...`, in this process."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    runpy.run_path(path, run_name="__main__")
