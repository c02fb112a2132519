"""What happens once the device has finished: messages leave, and the host is never far ahead.

A GPU works behind the host. A message must not leave before the kernels that make its tensors have ended,
and the host must not wait for them: a thread of its own waits for one event after the other, in order, and
then does what was asked for. So whoever gets a message knows that its tensors are whole, even if its sender
dies in the same moment.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

AHEAD = 2  # ops that may be launched and not finished: enough to keep the device busy


class Completions:
    def __init__(self, device: torch.device, failed: Callable[[BaseException], None]) -> None:
        self._device, self._failed = device, failed
        self._queue: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        self._launched: deque[torch.cuda.Event] = deque()
        self._thread = threading.Thread(target=self._run, name="completions", daemon=True)
        self._thread.start()

    def after_now(self, do: Callable[[], None]) -> None:
        """Do this once everything that is launched now has finished."""
        self._queue.put((self._event(), do))

    def op_launched(self) -> None:
        """Wait if the device is too far behind."""
        self._launched.append(self._event())
        if len(self._launched) > AHEAD:
            self._launched.popleft().synchronize()

    def drain(self) -> None:
        """Return when the device has finished all it was given."""
        self._launched.clear()
        torch.cuda.synchronize(self._device)

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
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
