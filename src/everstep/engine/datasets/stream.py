"""`everstep.stream`: what can only be iterated, made replayable by a buffer on disk.

The n-th batch of the source is microbatch n of the run, counted through all steps. Every worker has a process
beside it that can read the source; one of them does, and stores every batch in a folder that all workers see:

    source ──► reader (holds the lock) ──► 017.batch, 018.batch ... ──► batch(step, microbatch), anywhere

What the source draws at random, a DataLoader for each epoch, is so drawn from generators of its own: in a
thread of a worker it would be from those of the layers' dropout. They are seeded before the source is begun.

A batch exists once its file has its name, so it is complete or absent. If a worker dies, so does its reader,
the lock is free and another one reads on behind the last stored batch: a source with `state_dict` and
`load_state_dict` is set to the state stored with that batch, any other is iterated from its start and what is
stored already is skipped. Old batches are removed; how many stay says how far back a run can be restored.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.engine import keys
from everstep.engine.datasets.buffer import BatchBuffer
from everstep.engine.datasets.data import named_arguments
from everstep.engine.datasets.rows import Collate
from everstep.engine.datasets.stream_reader import Reader, Source
from everstep.engine.layers.boundary import Value
from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.job.job import Job

MOST_BYTES = 8 << 30
_POLL_S, _SLOWEST_POLL_S = 0.001, 0.02
BUFFER = "buffer"  # in a job's data options: the folder the launcher has made for a run without checkpoints


@named_arguments
def stream(
    source: Any,
    *,
    rows: int | None = None,
    collate: Collate | None = None,
    repeat: bool = False,
    live: bool = False,
    keep_steps: int | None = None,
    folder: str | Path | None = None,
) -> Stream:
    """An iterable, such as a DataLoader, a streaming data set or a function that returns one, as data.

    rows         how many of its elements make a microbatch; None: each element is one
    collate      makes a batch of a list of elements
    repeat       start over when it ends
    live         never skip: after a failure of its reader, read on wherever the source is
    keep_steps   how many steps back a batch can be asked for again; two checkpoint intervals, if not given
    folder       of the buffer, seen by all workers; in the checkpoint folder, if not given
    """
    if not callable(source) and not hasattr(source, "__iter__"):
        raise UserError(
            f"everstep.stream was given a {type(source).__name__}, which cannot be iterated; give an "
            "iterable, or a function that returns one."
        )
    if repeat and hasattr(source, "__next__"):
        raise UserError(
            "everstep.stream was given an iterator, which cannot start over; give a function that makes it, "
            "or repeat=False."
        )
    return Stream(
        source=Source(source=source, rows=rows, collate=collate, repeat=repeat, live=live),
        keep_steps=keep_steps,
        folder=None if folder is None else Path(folder),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Not yet of a job."""

    source: Source
    keep_steps: int | None
    folder: Path | None

    def for_job(self, job: Job) -> BufferedStream:
        interval = job.checkpoint.interval if job.checkpoint else job.steps
        keep = 2 * interval + 2 if self.keep_steps is None else self.keep_steps
        return BufferedStream(
            self.source,
            _folder(job, self.folder, "stream"),
            microbatches=job.microbatches_in_step,
            keep_steps=max(2, keep),
            seed=keys.key(job.seed, keys.DATA),
        )

    def for_evaluation(self, job: Job, batches: int) -> BufferedStream:
        """Its first batches, which are asked for again and again: all of them stay, and no more are read.
        The launcher reads them before the start, anew each time.
        """
        return BufferedStream(
            self.source,
            _folder(job, self.folder, "evaluation-stream"),
            microbatches=1,
            keep_steps=batches,
            seed=keys.key(job.seed, keys.DATA),
            most=batches,
        )

    def length(self) -> int | None:
        """How many batches it has; None: that is not known."""
        try:
            return len(self.source.source) // (self.source.rows or 1)
        except (TypeError, NotImplementedError):
            return None

    def batch(self, step: int, microbatch: int) -> Value:
        raise UserError("a stream gives batches once it is given to everstep.train, or to a job.")


def _folder(job: Job, given: Path | None, name: str) -> Path:
    if given is not None:
        return job.path(str(given))
    if BUFFER in job.data.options:
        return Path(job.data.options[BUFFER], name)
    if job.checkpoint is None or "://" in job.checkpoint.folder:
        raise UserError("everstep.stream needs a folder that all workers see; give folder=.")
    return job.path(job.checkpoint.folder) / name


class BufferedStream:
    """A stream of a job. `batch` may be called by several workers at once, from one thread of each."""

    in_a_thread = True

    def __init__(
        self,
        source: Source,
        folder: Path,
        *,
        microbatches: int,
        keep_steps: int,
        seed: int,
        most: int | None = None,
    ) -> None:
        """`most`: batches that are ever asked for."""
        self.microbatches, self.keep_steps, self._most = microbatches, keep_steps, most
        self._source = replace(source, seed=seed)
        self.buffer = BatchBuffer(folder, keep=keep_steps * microbatches, most_bytes=MOST_BYTES)
        self._reader: Reader | None = None

    def prepare(self, *, fresh: bool) -> None:
        """By the launcher, before the workers start. `fresh`: no checkpoint refers to what is stored."""
        if fresh or self._most is not None:
            self.buffer.forget_all()
        self._open()
        self.buffer.may_go_on()

    def _open(self) -> None:
        """Also by each worker: on a cluster no launcher has done it."""
        folder, facts = self.buffer.folder, {"microbatches": self.microbatches}
        folder.mkdir(parents=True, exist_ok=True)
        known = self.buffer.facts()
        if known is None:
            self.buffer.set_facts(facts)
        elif known != facts:
            raise UserError(
                f"the stream in {folder} was read with {known['microbatches']} microbatches per step, and "
                f"the job has {self.microbatches}; keep their number, or start in another checkpoint folder."
            )

    def preview(self) -> Value:
        """Any batch, to check its form: a stored one, else the first of the source. Those of an evaluation
        are all read: should there be fewer, the run would end hours after its start.
        """
        try:
            if self._most is not None:
                self._batch(self._most - 1)
            return self._batch(self.buffer.first())
        finally:
            self.close()

    def batch(self, step: int, microbatch: int) -> Value:
        return self._batch((step - 1) * self.microbatches + microbatch)

    def _batch(self, number: int) -> Value:
        wait_s = _POLL_S
        while (found := self.buffer.get(number)) is None:
            self.stand_by()
            self.buffer.want(number)
            if number < self.buffer.first():
                raise UserError(
                    f"batch {number} of the stream is no longer stored: its buffer goes back to batch "
                    f"{self.buffer.first()}; give everstep.stream a larger keep_steps "
                    f"(now {self.keep_steps})."
                )
            if (why := self.buffer.why_stopped(number)) is not None:
                raise UserError(why)
            assert self._reader is not None
            self._reader.ask()
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _SLOWEST_POLL_S)
        self.buffer.want(number)
        return found[0]

    def stand_by(self) -> None:
        """Have a process that can read the source."""
        if self._reader is None:
            self._open()
            ahead = 2 * self.microbatches
            self._reader = Reader(self._source, self.buffer, ahead=ahead, most=self._most)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
