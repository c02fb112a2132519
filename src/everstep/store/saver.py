"""Saving behind the training's back: training stalls for one copy into host memory, nothing else.

    step t      snapshot ─► buffer A ─► writer thread: hash, write, flush, tell
    step t + k  snapshot ─► buffer B      (A may still be on its way to disk)
    step t + 2k waits for A while A makes progress: memory is bounded by two copies of the state

Storage that has stopped answering (a dead file server) must cost saves, not training: a save that finds both
buffers taken and no byte written for `STALL_S` is refused, and later ones at once until bytes flow again.

Buffers are kept from save to save, so that after the first two nothing is allocated and no page is touched
for the first time. Tensors of a GPU are copied into pinned memory on a stream of their own: `save` returns
when the copies are queued. Only an update may not overtake them: with `hold=False` the next forward and
backward run beside the copy, and `before_update` makes the stream wait for what is left of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

Write = Callable[[int, dict[str, Tensor]], Any]
STALL_S = 5.0  # without a written byte, while a save waits for room


class Snapshots:
    """One set of host buffers for a state, filled again and again."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.copied: Any = None  # a CUDA event, after which the buffers hold the state
        self._stream: Any = None

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state. On a GPU this queues the copies behind what the current stream is doing."""
        fitted = {name: self._buffer(name, tensor) for name, tensor in state.items()}
        self.tensors = fitted
        cuda = next((tensor.device for tensor in state.values() if tensor.is_cuda), None)
        if cuda is None:
            _copy([fitted[name] for name in state], list(state.values()))
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(cuda)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(cuda))
        with torch.cuda.stream(self._stream):
            for name, tensor in state.items():
                fitted[name].copy_(tensor.detach(), non_blocking=True)
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record(self._stream)

    def wait_copied(self) -> None:
        """Until the state may change again."""
        if self.copied is not None:
            self.copied.synchronize()

    def hold_stream(self) -> None:
        """Later work of the current stream waits for the copies; the CPU does not."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        old = self.tensors.get(name)
        if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
            return old
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class AsyncSaver:
    """`write(step, tensors)` runs in a thread, on a copy; at most two copies exist.

    `num_written` counts the bytes that writes have got rid of: while it grows the storage is alive.
    """

    def __init__(
        self,
        write: Write = lambda step, tensors: None,
        *,
        num_written: Callable[[], int] = lambda: 0,
        stall_s: float = STALL_S,
    ) -> None:
        self._write, self._num_written, self._stall_s = write, num_written, stall_s
        self._stalled_at: int | None = None  # bytes written when the storage was last found not to answer
        self._buffers = (Snapshots(), Snapshots())
        self._pending: list[tuple[Snapshots, Future[Any]]] = []
        self._newest: Snapshots | None = None

    def save(
        self, step: int, state: Mapping[str, Tensor], *, hold: bool = True, write: Write | None = None
    ) -> Future[Any] | None:
        """Copy the state and return; the future has what `write` returned. None: nothing was copied, for two
        writes are under way and the storage does not answer.

        `hold=False`: the caller calls `before_update` before it changes a GPU's tensors. `write`: for this
        copy, instead of the saver's own.
        """
        if len(self._pending) == 2 and not self._make_room():
            return None
        busy = [snapshots for snapshots, _ in self._pending]
        snapshots = next(one for one in self._buffers if one not in busy)
        snapshots.take(state)
        self._newest = snapshots
        if hold:
            snapshots.hold_stream()
        done: Future[Any] = Future()
        before = self._pending[-1][1] if self._pending else None
        work = (step, snapshots, before, done, write or self._write)
        thread = threading.Thread(target=self._run, args=work, name="saver", daemon=True)
        self._pending.append((snapshots, done))
        thread.start()
        return done

    def before_update(self) -> None:
        """From here on the current stream may change what the newest snapshot copies."""
        if self._newest is not None:
            self._newest.hold_stream()

    def finish(self, within_s: float | None = None) -> bool:
        """Until everything is written, or this time is over. Is it?"""
        while self._pending:
            try:
                self._pending[0][1].exception(within_s)
            except TimeoutError:
                return False
            self._pending.pop(0)
        return True

    def _make_room(self) -> bool:
        """Until the older write is done; False if the storage does not answer."""
        while True:
            seen = self._num_written()
            try:
                # Its owner hears of errors from the future.
                self._pending[0][1].exception(0 if seen == self._stalled_at else self._stall_s)
            except TimeoutError:
                if self._num_written() == seen:
                    self._stalled_at = seen
                    return False
            else:
                self._pending.pop(0)
                return True

    def _run(
        self,
        step: int,
        snapshots: Snapshots,
        before: Future[Any] | None,
        done: Future[Any],
        write: Write,
    ) -> None:
        try:
            if before is not None:
                before.exception()  # one at a time, in order
            snapshots.wait_copied()
            done.set_result(write(step, snapshots.tensors))
        except BaseException as error:  # handed to the owner of the future
            done.set_exception(error)


def _copy(into: list[Tensor], given: list[Tensor]) -> None:
    """Large tensors with all threads, one after the other; small ones in one call."""
    small = [(a, b.detach()) for a, b in zip(into, given, strict=True) if b.numel() < 1 << 16]
    for a, b in zip(into, given, strict=True):
        if b.numel() >= 1 << 16:
            a.copy_(b.detach())
    if small:
        torch._foreach_copy_([a for a, _ in small], [b for _, b in small])
