"""Saving behind the training's back, in its bubbles: training stalls for what no bubble had room for.

    step t      snapshot ─► buffer A ─► writer thread: hash, write, flush, tell
    step t + k  snapshot ─► buffer B      (A may still be on its way to disk)
    step t + 2k waits for A while A makes progress: memory is bounded by two copies of the state

A state changes only in an update. With `hold=False` it is copied until then, piece by piece, while the worker
waits for others:

    update of t │ F B … F  waits  F B  waits  │ update of t + 1
                           copied      copied │ `before_update`: what is left is copied now

Storage that has stopped answering (a dead file server) must cost saves, not training: a save that finds both
buffers taken and no byte written for `STALL_S` is refused, and later ones at once until bytes flow again. The
last state of a task is never refused, as no later one would make up for it: it has a buffer of its own.

Buffers are kept from save to save, so that after the first two nothing is allocated and no page is touched
for the first time. Tensors of a GPU are copied into pinned memory on a stream of their own: `save` returns
when the copies are queued, and `before_update` makes the stream wait for what is left of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

Write = Callable[[int, dict[str, Tensor]], Any]
Pace = Callable[[], None]  # called between two pieces of work
STALL_S = 5.0  # without a written byte, while a save waits for room
PIECE = 1 << 20  # elements that are copied at once
LOOK_S = 0.002


class Bubbles:
    """The times in which a worker waits for others. Before its loop says anything, it waits."""

    def __init__(self) -> None:
        self._waits = threading.Event()
        self._waits.set()

    def begin(self) -> None:
        self._waits.set()

    def end(self) -> None:
        self._waits.clear()

    def pace(self) -> Pace:
        """Between two pieces: until the worker waits, and at most as long as the last piece took. So work
        behind its back has all of its bubbles, and never more than half of the time in which it computes.
        """
        began = time.monotonic()

        def next_piece() -> None:
            nonlocal began
            self._waits.wait(time.monotonic() - began)
            began = time.monotonic()

        return next_piece


class Snapshots:
    """One set of host buffers for a state, filled again and again."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.copied: Any = None  # a CUDA event, after which the buffers hold the state
        self.whole = threading.Event()  # the CPU has copied all that it copies
        self._left: list[tuple[Tensor, Tensor]] = []  # live tensors that it has still to copy
        self._stream: Any = None

    def take(self, state: Mapping[str, Tensor], *, at_once: bool = True) -> None:
        """Copy a state. On a GPU this queues the copies behind what the current stream is doing. On a CPU, if
        not `at_once`, `take_rest` copies the large tensors.
        """
        self.whole.clear()
        fitted = {name: self._buffer(name, tensor) for name, tensor in state.items()}
        self.tensors = fitted
        cuda = next((tensor.device for tensor in state.values() if tensor.is_cuda), None)
        if cuda is None:
            pairs = [(fitted[name], tensor.detach()) for name, tensor in state.items()]
            self._left = [pair for pair in pairs if pair[1].numel() >= 1 << 16]
            if small := [pair for pair in pairs if pair[1].numel() < 1 << 16]:
                torch._foreach_copy_([a for a, _ in small], [b for _, b in small])
            if at_once:
                self.take_rest()
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
        self.whole.set()

    def take_rest(self, pace: Pace | None = None) -> None:
        """What `take` has left: with all threads of this process, or in pieces."""
        try:
            for into, live in self._left:
                for a, b in [(into, live)] if pace is None else _pieces(into, live):
                    if pace is not None:
                        pace()
                    a.copy_(b)
        finally:
            self._left = []
            self.whole.set()

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
        bubbles: Bubbles | None = None,
    ) -> None:
        self._write, self._num_written, self._stall_s = write, num_written, stall_s
        self._bubbles = bubbles or Bubbles()
        self._stalled_at: int | None = None  # bytes written when the storage was last found not to answer
        self._buffers = (Snapshots(), Snapshots())
        self._pending: list[tuple[Snapshots, Future[Any]]] = []

    def save(
        self,
        step: int,
        state: Mapping[str, Tensor],
        *,
        hold: bool = True,
        write: Write | None = None,
        wait_s: float | None = None,
        last: bool = False,
    ) -> Future[Any] | None:
        """Copy the state and return; the future has what `write` returned. None: nothing was copied, for two
        writes are under way and the storage does not answer.

        `hold=False`: the caller calls `before_update` before it changes these tensors. `write`: for this
        copy, instead of the saver's own. `wait_s`: for room, of one that has nothing else to do meanwhile,
        however the storage was before. `last`: it has a third buffer, if both are taken.
        """
        if len(self._pending) >= 2 and not last and not self._make_room(wait_s):
            return None
        busy = [snapshots for snapshots, _ in self._pending]
        snapshots = next((one for one in self._buffers if one not in busy), None) or Snapshots()
        snapshots.take(state, at_once=hold)
        if hold:
            snapshots.hold_stream()
        done: Future[Any] = Future()
        before = self._pending[-1][1] if self._pending else None
        work = (step, snapshots, before, done, write or self._write)
        thread = threading.Thread(target=self._run, args=work, name="saver", daemon=True)
        self._pending.append((snapshots, done))
        thread.start()
        return done

    def before_update(self, waiting: Callable[[], None] = lambda: None) -> None:
        """From here on the state may change: by this thread, or by what it gives to the current stream.
        `waiting` is called if that takes a while.
        """
        for snapshots, _ in self._pending:
            if not snapshots.whole.is_set():
                self._bubbles.begin()
                if not snapshots.whole.wait(LOOK_S):
                    waiting()
                    snapshots.whole.wait()
                self._bubbles.end()
            snapshots.hold_stream()

    def finish(self, within_s: float | None = None) -> bool:
        """Until everything is written, or this time is over. Is it?"""
        while self._pending:
            try:
                self._pending[0][1].exception(within_s)
            except TimeoutError:
                return False
            self._pending.pop(0)
        return True

    def _make_room(self, wait_s: float | None) -> bool:
        """Until an older write is done; False if the storage does not answer."""
        while len(self._pending) >= 2:
            seen = self._num_written()
            if wait_s is None:
                wait_s = 0.0 if seen == self._stalled_at else self._stall_s
            try:
                # Its owner hears of errors from the future.
                self._pending[0][1].exception(wait_s)
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
            snapshots.take_rest(self._bubbles.pace())
            if before is not None:
                before.exception()  # one at a time, in order
            snapshots.wait_copied()
            done.set_result(write(step, snapshots.tensors))
        except BaseException as error:  # handed to the owner of the future
            done.set_exception(error)


def _pieces(into: Tensor, live: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(into.view(-1), PIECE), torch.split(live.reshape(-1), PIECE), strict=True)
