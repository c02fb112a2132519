"""Reads a source that can only be iterated, in a process of its own: the one that holds the buffer's lock."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import torch

from everstep.engine import device as devices
from everstep.engine import keys
from everstep.engine.datasets.buffer import BatchBuffer
from everstep.engine.datasets.rows import Collate, stacked
from everstep.engine.layers.boundary import Value, mapped, tensors_in
from everstep.errors import EverstepError, UserError, named
from everstep.forked import leave_to_owner
from everstep.log import warn

_LOOK_S = 0.002
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_END = object()
_TRIES, _AGAIN_S = 3, 0.5  # in a row without a batch between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is iterated, and how its elements become microbatches."""

    source: Any
    rows: int | None
    collate: Collate | None
    repeat: bool
    live: bool
    seed: int = 0

    @property
    def can_begin_again(self) -> bool:
        """An iterator is used up by iterating it."""
        return not hasattr(self.source, "__next__")

    def begin(self, number: int, epoch: int, state: Any) -> Iterator[tuple[Value, int, Any]]:
        """Batches from `number` on: (batch, epoch, state after it). `state`: that after the batch before.

        What an epoch or a batch draws at random follows from its number, not from what this process has drawn
        before: a source that is set to its state draws what the reader before would have drawn.
        """
        skip = 0 if state is not None or self.live else number
        epoch = 0 if skip else epoch
        number -= skip
        while True:
            self._seed(0, epoch)
            made = self._made(epoch)
            if state is not None:
                made.load_state_dict(state)
                state = None
            found, batches = 0, self._batches(iter(made))
            while True:
                self._seed(1, number)
                batch = next(batches, _END)
                if batch is _END:
                    break
                found += 1
                number += 1
                if skip:
                    skip -= 1
                    continue
                yield self._tensors(batch), epoch, made.state_dict() if _is_stateful(made) else None
            if not self.repeat:
                return
            if not found:
                raise UserError("the stream has no batch at all.")
            epoch += 1

    def _seed(self, what: int, number: int) -> None:
        devices.seed(torch.device("cpu"), keys.key(self.seed, keys.DATA, what, number))

    def _made(self, epoch: int) -> Any:
        is_iterable = hasattr(self.source, "__iter__") and not isinstance(self.source, type)
        made = self.source if is_iterable else self.source()
        if not hasattr(made, "__iter__"):
            raise UserError(
                f"the stream's function gave a {type(made).__name__}, which cannot be iterated; return an "
                "iterable."
            )
        if hasattr(made, "set_epoch"):
            made.set_epoch(epoch)
        return made

    def _batches(self, elements: Iterator[Any]) -> Iterator[Any]:
        collate = self.collate or stacked
        if self.rows is None:
            yield from elements if self.collate is None else (collate([element]) for element in elements)
            return
        while len(group := list(islice(elements, self.rows))) == self.rows:
            yield collate(group)

    def _tensors(self, batch: Any) -> Value:
        """Arrays become tensors; a list of two is a pair, as DataLoader gives it."""
        if isinstance(batch, list) and len(batch) == 2:
            batch = tuple(batch)
        batch = _from_numpy(batch)
        if not isinstance(batch, dict | tuple) or not tensors_in(batch):
            raise UserError(
                f"the stream gave a {type(batch).__name__}; an element is (inputs, targets), or a dict of "
                "tensors; give collate= a function that makes it one."
            )
        return mapped(torch.Tensor.detach, batch)


class Reader:
    """A process that reads when it is asked to and nobody else does. It is forked, so nothing is pickled, and
    what the source draws at random is drawn from generators of its own. It ends with this process.
    `ahead`: how many batches beyond the highest wanted are stored. `most`: of an evaluation, how many it has.
    """

    def __init__(self, source: Source, buffer: BatchBuffer, *, ahead: int, most: int | None = None) -> None:
        self._source, self._buffer, self._ahead, self._most = source, buffer, ahead, most
        self._reads = mmap.mmap(-1, 1)  # 1: it does
        asked, self._ask = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._ask)
            self._serve(asked)
        os.close(asked)

    def ask(self) -> None:
        """Read, if nobody does."""
        if os.waitpid(self._pid, os.WNOHANG) != (0, 0):
            self._pid = 0
            raise EverstepError("the process that reads the stream ended; was it out of memory?")
        if self._reads[0] == 0:
            os.write(self._ask, b"r")

    def stop(self) -> None:
        os.close(self._ask)
        if self._pid:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)

    # -------------------------------------------------------------- in the process

    def _serve(self, asked: int) -> NoReturn:
        """Its whole life."""
        try:
            end_with_parent()
            torch.set_num_threads(1)
            while os.read(asked, 4096):  # asked often, it answers once
                self._reads[0] = 1
                lock = self._buffer.lock()
                if lock is not None:
                    with lock:  # closing the file gives the lock back
                        self._run()
                self._reads[0] = 0
            os._exit(0)
        finally:
            os._exit(1)

    def _run(self) -> None:
        failures, reached = 0, -1
        while True:
            number = self._buffer.begin()
            failures, reached = (0, number) if number > reached else (failures, reached)
            try:
                return self._read(number)
            except UserError as error:
                return self._buffer.stop(0, str(error))
            except Exception as error:  # the user's iterable
                failures += 1
                if failures == _TRIES or not self._source.can_begin_again:
                    return self._buffer.stop(0, f"the stream raised {named(error)}")
                warn(f"the stream raised {named(error)}; it begins again")
                time.sleep(failures * _AGAIN_S)

    def _read(self, number: int) -> None:
        if number == self._most:
            return
        before = self._buffer.get(number - 1) if number else None
        facts: dict[str, Any] = before[1] if before is not None else {"epoch": 0, "state": None}
        for batch, epoch, state in self._source.begin(number, facts["epoch"], facts["state"]):
            self._buffer.put(number, batch, epoch=epoch, state=state)
            number += 1
            if number == self._most:
                return
            if self._most is not None and self._buffer.is_full():
                size = f"{self._buffer.most_bytes / 1e9:.0f} GB"
                return self._buffer.stop(
                    number,
                    f"{number} of {self._most} batches to evaluate on take {size}, which is all that is "
                    "stored of a stream; give fewer, or data with an index, such as everstep.rows.",
                )
            while number > self._buffer.wanted() + self._ahead:
                time.sleep(_LOOK_S)
        if number == 0:
            raise UserError("the stream has no batch at all.")
        fewer = "fewer steps" if self._most is None else f"an evaluation {number} batches"
        self._buffer.stop(
            number, f"the stream ended after {number} batches; give {fewer}, more data or repeat=True."
        )


def end_with_parent() -> None:
    """A forked child is killed when the thread that made it ends; it leaves other signals to its parent."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_to_owner()


def _is_stateful(made: Any) -> bool:
    return callable(getattr(made, "state_dict", None)) and callable(getattr(made, "load_state_dict", None))


def _from_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, tuple | list):
        return type(value)(map(_from_numpy, value))
    return {key: _from_numpy(item) for key, item in value.items()} if isinstance(value, dict) else value
