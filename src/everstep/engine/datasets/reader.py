"""Reads a source that can only be iterated, in a thread of the one process that holds the buffer's lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

import numpy as np
import torch

from everstep.engine.datasets.buffer import BatchBuffer
from everstep.engine.datasets.rows import Collate, stacked
from everstep.engine.layers.boundary import Value, mapped, tensors_in
from everstep.errors import UserError
from everstep.log import warn

_LOOK_S = 0.002
_TRIES, _AGAIN_S = 3, 0.5  # in a row without a batch between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is iterated, and how its elements become microbatches."""

    source: Any
    rows: int | None
    collate: Collate | None
    repeat: bool
    live: bool

    @property
    def can_begin_again(self) -> bool:
        """An iterator is used up by whoever iterates it."""
        return not hasattr(self.source, "__next__")

    def begin(self, number: int, epoch: int, state: Any) -> Iterator[tuple[Value, int, Any]]:
        """Batches from `number` on: (batch, epoch, state after it). `state`: that after the batch before."""
        skip = 0 if state is not None or self.live else number
        epoch = 0 if skip else epoch
        while True:
            made = self._made(epoch)
            if state is not None:
                made.load_state_dict(state)
                state = None
            found = 0
            for batch in self._batches(iter(made)):
                found += 1
                if skip:
                    skip -= 1
                    continue
                yield self._tensors(batch), epoch, made.state_dict() if _is_stateful(made) else None
            if not self.repeat:
                return
            if not found:
                raise UserError("the stream has no batch at all.")
            epoch += 1

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
    """`ahead`: how many batches beyond the highest wanted are stored."""

    def __init__(self, source: Source, buffer: BatchBuffer, lock: BinaryIO, *, ahead: int) -> None:
        self._source, self._buffer, self._lock, self._ahead = source, buffer, lock, ahead
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with self._lock:  # closing the file gives the lock back
            failures, reached = 0, -1
            while not self._over.is_set():
                number = self._buffer.begin()
                failures, reached = (0, number) if number > reached else (failures, reached)
                try:
                    return self._read(number)
                except UserError as error:
                    return self._buffer.stop(0, str(error))
                except Exception as error:  # the user's iterable
                    failures += 1
                    if failures == _TRIES or not self._source.can_begin_again:
                        return self._buffer.stop(0, f"the stream raised {type(error).__name__}: {error}")
                    warn(f"the stream raised {type(error).__name__}: {error}; it begins again")
                    self._over.wait(failures * _AGAIN_S)

    def _read(self, number: int) -> None:
        before = self._buffer.get(number - 1) if number else None
        facts: dict[str, Any] = before[1] if before is not None else {"epoch": 0, "state": None}
        for batch, epoch, state in self._source.begin(number, facts["epoch"], facts["state"]):
            self._buffer.put(number, batch, epoch=epoch, state=state)
            number += 1
            while number > self._buffer.wanted() + self._ahead:
                if self._over.wait(_LOOK_S):
                    return
            if self._over.is_set():
                return
        self._buffer.stop(
            number, f"the stream ended after {number} batches; give fewer steps, more data or repeat=True."
        )


def _is_stateful(made: Any) -> bool:
    return callable(getattr(made, "state_dict", None)) and callable(getattr(made, "load_state_dict", None))


def _from_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, tuple | list):
        return type(value)(map(_from_numpy, value))
    return {key: _from_numpy(item) for key, item in value.items()} if isinstance(value, dict) else value
