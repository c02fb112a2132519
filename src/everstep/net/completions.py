"""What happens once the device has finished: messages leave, op times are known, the host is never far ahead.

A GPU works behind the host. A message must not leave before the kernels that make its tensors have ended, and
the host must not wait for them: a thread of its own waits for one event after the other, in order, and then
does what was asked for. So the receiver of a message knows that its tensors are whole, even if its sender
dies in the same moment.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from everstep.protocol.ops import Kind

AHEAD = 2  # ops that may be launched and not finished: enough to keep the device busy


class FinishedOp(NamedTuple):
    """An op that the device has finished: its times are the device's, on the machine's monotonic clock."""

    kind: Kind
    step: int
    started_ns: int
    ended_ns: int


class Completions:
    def __init__(self, device: torch.device, failed: Callable[[BaseException], None]) -> None:
        self._device, self._failed = device, failed
        self._queue: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        self._launched: deque[tuple[torch.cuda.Event, str]] = deque()
        self._finished: deque[FinishedOp] = deque()
        self._thread = threading.Thread(target=self._run, name="completions", daemon=True)
        self._thread.start()

    def after_now(self, do: Callable[[], None]) -> None:
        """Do this once everything that is launched now has finished."""
        self._queue.put((self._event(), do))

    def op_begins(self) -> torch.cuda.Event:
        return self._event(timing=True)

    def op_launched(
        self, kind: Kind, step: int, began: torch.cuda.Event, doing: str, shows: Callable[[str], None]
    ) -> None:
        """Its kernels are queued. Wait if the device is too far behind, and show which op it is in: if that
        one hangs, the beacon says so.
        """
        ends = self._event(timing=True)

        def finished() -> None:
            ended_ns = time.monotonic_ns()
            took_ns = int(began.elapsed_time(ends) * 1e6)
            self._finished.append(FinishedOp(kind, step, ended_ns - took_ns, ended_ns))

        self._queue.put((ends, finished))
        self._launched.append((ends, doing))
        if len(self._launched) > AHEAD:
            behind, its_name = self._launched.popleft()
            if not behind.query():  # type: ignore[no-untyped-call]
                shows(its_name)
                behind.synchronize()

    def finished_ops(self) -> list[FinishedOp]:
        """Those since this was last asked."""
        found = []
        while self._finished:
            found.append(self._finished.popleft())
        return found

    def drain(self) -> None:
        """Return when the device has finished all that was computed. Lanes have streams of their own: one
        to a dead peer never ends by itself.
        """
        self._launched.clear()
        torch.cuda.current_stream(self._device).synchronize()

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _event(self, *, timing: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True, enable_timing=timing)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _run(self) -> None:
        try:
            torch.cuda.set_device(self._device)
            while (item := self._queue.get()) is not None:
                event, do = item
                event.synchronize()
                do()
        except BaseException as error:  # the device is broken: the worker must hear of it
            self._failed(error)
