"""What a run's data needs of its launcher: the number of its steps, a folder, a clean start."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from everstep.engine.datasets.documents import PackedDocuments
from everstep.engine.datasets.rows import Rows
from everstep.engine.datasets.stream import BUFFER, BufferedStream, Stream
from everstep.engine.datasets.tokens import Tokens
from everstep.engine.stage.evaluation import Evaluation
from everstep.errors import UserError
from everstep.job.job import Job
from everstep.launch.local.resuming import first_row
from everstep.node import disk_orders
from everstep.protocol.ops import Worker
from everstep.store.search import NoStart

LEAST_S, SHARE = 0.05, 0.2  # of a step: a wait that is worth a sentence
COLD_STEPS = 10  # the first steps of a run load cold: they say nothing of those that follow


def steps_of(data: Any, epochs: Any, shape: Mapping[str, int], checkpoint: Any) -> int:
    """How many steps bring every row `epochs` times, those of earlier starts among them."""
    if not hasattr(data, "order_in"):
        raise UserError("epochs needs data that has rows: everstep.rows, tokens or table; else give steps.")
    if not isinstance(epochs, int | float) or isinstance(epochs, bool) or epochs <= 0:
        raise UserError(f"epochs is {epochs!r}; it must be a number above 0.")
    order = data.order_in(shape["replicas"] * shape["microbatches"], seed=0)
    return max(1, int(replace(order, start=first_row(checkpoint, order)).steps(epochs)))


def tokens_of_each(data: Any, tested: Any = None) -> int | None:
    """In a microbatch, where all have as many, those of an evaluation too; None: that is not known."""
    lengths: list[int] = []
    for one in (data, *([] if tested is None else [tested])):
        packed = one.dataset if isinstance(one, Rows) else one
        if not isinstance(packed, PackedDocuments | Tokens):
            return None
        lengths.append(one.rows * packed.sequence)
    return lengths[0]


@contextlib.contextmanager
def buffered(job: Job, *data: Any) -> Iterator[Job]:
    """A stream without a folder of its own, in a run without checkpoints, has one as long as the run."""
    homeless = any(isinstance(one, Stream) and one.folder is None for one in data)
    if not homeless or job.checkpoint is not None:
        yield job
        return
    folder = tempfile.mkdtemp(prefix="everstep-stream-")
    try:
        yield replace(job, data=replace(job.data, options={**job.data.options, BUFFER: folder}))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepare(job: Job, data: Any, evaluation: Evaluation | None) -> None:
    """A stream's buffer starts empty where no checkpoint refers to it."""
    tested = None if evaluation is None else evaluation.data
    streams = [one for one in (data, tested) if isinstance(one, BufferedStream)]
    if not streams:
        return
    folders = [one.buffer.folder for one in streams]
    if len(set(folders)) < len(folders):
        raise UserError(
            f"the streams of training and of evaluation are both stored in {folders[0]}; give each its own."
        )
    try:
        fresh = disk_orders.newest(job.needs().checkpoints).step == 0
    except NoStart:  # said when the run starts; nothing is thrown away until it is known
        fresh = False
    for one in streams:
        one.prepare(fresh=fresh)


class DataWaits:
    """Notices workers that wait for their data for a good part of a step; says so once, and again if it
    doubles. The first steps load cold and say nothing.
    """

    def __init__(self) -> None:
        self._said_s = 0.0

    def warning(self, worker: Worker, waits_s: float, step_s: float, steps: int) -> str | None:
        """`steps`: done so far by this run."""
        if steps < COLD_STEPS or waits_s < max(LEAST_S, SHARE * step_s) or waits_s < 2 * self._said_s:
            return None
        self._said_s = waits_s
        return (
            f"worker {worker} waits {waits_s:.2g} s of every {max(step_s, waits_s):.2g} s step for its data; "
            "load ahead (load_ahead=4), or make it faster"
        )
