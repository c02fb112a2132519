"""Loading ahead: the next batches of a worker are made while it computes, and waiting for data has a name.

`expect` says which batches the worker's op list wants next; a bounded number of them is made ahead, one after
the other, in one thread. A data set of ours that draws nothing at random is called in that thread. A user's
own code may call `torch.manual_seed`, which is the whole process's: it is called in a forked child, or,
without loading ahead, in line.

The time that a worker stands still for its data is counted, and shown by its beacon as loading: a slow loader
is then seen as one, not as a slow or hung op.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from everstep.engine.datasets.data import Dataset
from everstep.engine.datasets.stream_reader import end_with_parent
from everstep.errors import EverstepError, UserError
from everstep.log import say, warn
from everstep.net import host_memory

AHEAD = 2  # batches, where nothing else is said
_SHOW_AFTER_S = 0.02
_SAY_AFTER_S = 5.0
Key = tuple[int, int]  # step, microbatch


class Loader:
    """A data set that loads ahead. Used by one thread."""

    def __init__(self, data: Dataset, *, ahead: int | None = None) -> None:
        """`ahead`: None for the usual, which is none for a user's own code."""
        own = bool(getattr(data, "in_a_thread", False))
        self.ahead = (AHEAD if own else 0) if ahead is None else ahead
        self.waited_s = 0.0  # in all
        self.shows: Callable[[], None] = lambda: None  # called when it begins to wait
        self.device = torch.device("cpu")  # a GPU: batches are put where it can read them by itself
        stand_by(data)
        self._data: Any = data if own or not self.ahead else ForkedData(data)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data") if self.ahead else None
        self._loading: dict[Key, Future[Any]] = {}

    def expect(self, wanted: Sequence[Key]) -> None:
        """These come next, in this order; what was loaded and is not among them is dropped."""
        if self._thread is None:
            return
        wanted = wanted[: self.ahead + 1]
        for key in [key for key in self._loading if key not in wanted]:
            self._loading.pop(key).cancel()
        for key in wanted:
            if key not in self._loading:
                self._loading[key] = self._thread.submit(self._made, *key)

    def batch(self, step: int, microbatch: int) -> Any:
        if self._thread is None:
            began = time.monotonic()
            self.shows()
            made = self._data.batch(step, microbatch)
            self.waited_s += time.monotonic() - began
            return made
        future = self._loading.pop((step, microbatch), None)
        if future is None:
            for other in self._loading.values():  # what is needed now goes first
                other.cancel()
            self._loading.clear()
            future = self._thread.submit(self._made, step, microbatch)
        return future.result() if future.done() else self._wait(future, step, microbatch)

    def _made(self, step: int, microbatch: int) -> Any:
        batch = self._data.batch(step, microbatch)
        if self.device.type == "cpu":
            return batch
        return tree_map_only(torch.Tensor, partial(host_memory.pinned, device=self.device), batch)

    def _wait(self, future: Future[Any], step: int, microbatch: int) -> Any:
        began, said_s, within_s = time.monotonic(), 0.0, _SHOW_AFTER_S
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    if not future.done():
                        future.exception(within_s)
                if future.done():
                    return future.result()
                self.shows()
                within_s = _SAY_AFTER_S
                waited_s = time.monotonic() - began
                if waited_s >= max(_SAY_AFTER_S, 2 * said_s):
                    said_s = waited_s
                    say(f"waiting for data: batch({step}, {microbatch}) takes {waited_s:.0f} s")
        finally:
            self.waited_s += time.monotonic() - began

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if hasattr(self._data, "close"):
            self._data.close()


def stand_by(data: Any) -> None:
    """What a data set forks, it forks now: later there are threads, and a GPU in use."""
    if hasattr(data, "stand_by"):
        data.stand_by()


class ForkedData:
    """A data set in a child process, which ends with this one. Forked: nothing of it has to be pickled."""

    def __init__(self, data: Dataset) -> None:
        self._line, theirs = Pipe()
        self._lock = threading.Lock()
        self.pid = os.fork()
        if self.pid == 0:
            self._line.close()
            _serve(data, theirs)
        theirs.close()

    def batch(self, step: int, microbatch: int) -> Any:
        with self._lock:
            try:
                self._line.send_bytes(pickle.dumps((step, microbatch)))
                ok, answer = pickle.loads(self._line.recv_bytes())
            except (EOFError, OSError):
                raise EverstepError(
                    f"the process that loads data ended in batch({step}, {microbatch}); with load_ahead = 0 "
                    "it is loaded by the worker itself, and its traceback is shown."
                ) from None
        if ok:
            return answer
        kind, text, trace = answer
        warn(trace)
        raise (UserError if kind == "UserError" else RuntimeError)(text)

    def close(self) -> None:
        self._line.close()
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _serve(data: Dataset, line: Connection) -> NoReturn:
    """The child's whole life."""
    try:
        end_with_parent()
        torch.set_num_threads(1)
        while True:
            step, microbatch = pickle.loads(line.recv_bytes())
            try:
                answer: Any = (True, data.batch(step, microbatch))
            except BaseException as error:  # the user's code: passed to the worker, which raises it
                kind, text = type(error).__name__, str(error)
                said = text if isinstance(error, UserError) else f"data raised {kind}: {text}"
                answer = (False, (kind, said, traceback.format_exc(limit=50)))
            line.send_bytes(pickle.dumps(answer))
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)
