"""The launcher's end of a run's page: a port on loopback, and a follower behind it after the first request.

Until a browser calls, the page is a listening socket in the launcher's selector and nothing else. Then the
follower (`server.run_page`) is started with that socket, gets a snapshot, and is sent every event. Sending
never waits: a follower that does not read is let go, and the next call starts another. So the page can fail
in any way it likes; training goes on.

Anyone with the address and its token may cancel the run, and in a demo hurt its workers. The token stands
behind the `#`, which browsers send to no server.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.core.cluster.snapshot import freeze
from everstep.drive.ports import HandledEvent
from everstep.drive.step_rows import KEPT_ROWS, rows_document
from everstep.errors import UserError
from everstep.log import warn
from everstep.node.worker_lines import Loop
from everstep.protocol import messages as msg
from everstep.protocol.codec import encode
from everstep.protocol.ops import Worker, parse_worker

if TYPE_CHECKING:
    from everstep.launch.local.run import LocalTask

LOOPBACK = "127.0.0.1"
KEPT_ACTIONS = 300
MAX_UNSENT = 8 << 20  # bytes
MAX_LOG = 1 << 20
FAREWELL_S = 5.0
SLOWER = 3.0  # times, a slowed worker


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """What goes wrong in here ends the page and not the run that called."""

    @wraps(method)
    def safely(self: RunPage, *arguments: Any) -> None:
        if self._broken:
            return
        try:
            method(self, *arguments)
        except Exception as error:  # the border to the run's main loop
            self._broken = True
            warn(f"page: given up ({type(error).__name__}: {error})")
            with contextlib.suppress(Exception):
                self._unwatch()
                self._hang_up()

    return safely


class RunPage:
    """One address for one run after another. `attach` and `detach` are called by the run itself."""

    def __init__(self, *, port: int = 0, may_hurt: bool = False) -> None:
        self.may_hurt = may_hurt
        self.token = secrets.token_urlsafe(18)
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((LOOPBACK, port))
        except OSError as error:
            self._listener.close()
            raise UserError(f"--web {port} cannot be used: {error.strerror}.") from None
        self._listener.listen(64)
        self._kept: Path | None = None
        self._follower: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._unsent, self._unread = bytearray(), bytearray()
        self._loop: Loop | None = None
        self._watched: int | None = None  # file descriptor
        self._broken = False
        self._task: LocalTask | None = None
        self._actions: deque[tuple[float, msg.ClusterAction]] = deque(maxlen=KEPT_ACTIONS)
        self._slowed: set[tuple[Worker, int]] = set()  # with the incarnation: a new life is fast again

    @property
    def place(self) -> str:
        return f"http://{LOOPBACK}:{self._listener.getsockname()[1]}/"

    @property
    def address(self) -> str:
        """With the token: for a terminal, and not for a log, where it would be there for all who read it."""
        return f"{self.place}#token={self.token}"

    def kept_address(self) -> Path:
        """A file that holds it, which only this user can read, until the run is over."""
        if self._kept is None:
            number, name = tempfile.mkstemp(prefix="everstep-page-", text=True)
            with open(number, "w") as writing:
                writing.write(self.address + "\n")
            self._kept = Path(name)
        return self._kept

    @property
    def watched(self) -> bool:
        """Has there been a request?"""
        return self._line is not None

    # -------------------------------------------------------------- a run's life

    @_harmless
    def attach(self, task: LocalTask, loop: Loop) -> None:
        self._task, self._loop = task, loop
        self._actions.clear()
        if self._line is not None:
            self._begin()
        self._watch()

    @_harmless
    def detach(self) -> None:
        """The run is over; the page may stay."""
        self._unwatch()
        self._loop = None
        self._slowed.clear()
        self._flush()

    @_harmless
    def handled(self, one: HandledEvent) -> None:
        """The run has handled an event."""
        self._actions += [(one.at, action) for action in one.actions if not isinstance(action, msg.RecordRow)]
        if self._line is not None and one.event is not None:
            self._send({"at": one.at, "event": encode(one.event)})

    @_harmless
    def tick(self) -> None:
        """Between two turns of the run."""
        if self._unsent:
            self._flush()

    def compare(self, losses: Mapping[int, float]) -> None:
        """Losses of the same job without faults, to be drawn beside those of the run."""
        if self._line is not None:
            self._send({"without_faults": {str(step): loss for step, loss in losses.items()}})

    def stay(self) -> None:
        """Until the follower ends, or Ctrl-C."""
        if self._follower is not None:
            with contextlib.suppress(KeyboardInterrupt):
                self._follower.wait()

    def close(self) -> None:
        """No run will follow. What was said is still read: the follower ends by itself."""
        if self._kept is not None:
            self._kept.unlink(missing_ok=True)
        self._listener.close()
        self._hang_up()
        if self._follower is not None:
            try:
                self._follower.wait(FAREWELL_S)
            except subprocess.TimeoutExpired:
                self._follower.kill()
                self._follower.wait()

    def __enter__(self) -> RunPage:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -------------------------------------------------------------- the follower

    @_harmless
    def _called(self) -> None:
        """A request: the follower answers it."""
        self._unwatch()
        ours, theirs = socket.socketpair()
        fds = (self._listener.fileno(), theirs.fileno())
        command = [sys.executable, "-m", "everstep.server.run_page", *map(str, fds)]
        with theirs:
            try:
                self._follower = subprocess.Popen(
                    command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
            except OSError:
                ours.close()  # no page, then
                return
        ours.setblocking(False)
        self._line = ours
        self._unsent.clear()
        self._unread.clear()
        self._watch()
        self._send({"token": self.token, "may_hurt": self.may_hurt})
        self._begin()

    def _begin(self) -> None:
        assert self._task is not None
        steps, name = rows_document(self._task.outcome.steps), next(iter(self._task.coordinator.tasks), "")
        steps["rows"] = steps["rows"][-KEPT_ROWS:]
        self._send(
            {
                "state": freeze(self._task.coordinator),
                "ahead_s": time.time() - time.monotonic(),
                "actions": [(at, encode(action)) for at, action in self._actions],
                "steps": {name: steps} if steps["rows"] else {},
            }
        )

    def _send(self, message: Mapping[str, Any]) -> None:
        self._unsent += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        if self._line is None:
            return
        try:
            while self._unsent:
                del self._unsent[: self._line.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT:
                self._let_go()
        except OSError:
            self._let_go()

    def _let_go(self) -> None:
        """It does not read, or is gone. The next call starts another."""
        if self._line is None:
            return
        self._unwatch()
        self._hang_up()
        if self._follower is not None:
            self._follower.kill()
            self._follower.wait()
            self._follower = None
        self._watch()

    def _watch(self) -> None:
        """For words of the follower, or for a request where there is none."""
        if self._loop is not None:
            self._watched = (self._line or self._listener).fileno()
            self._loop.watch(self._watched, self._called if self._line is None else self._read)

    def _unwatch(self) -> None:
        if self._loop is not None and self._watched is not None:
            self._loop.unwatch(self._watched)
        self._watched = None

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    # -------------------------------------------------------------- what readers ask

    @_harmless
    def _read(self) -> None:
        assert self._line is not None
        try:
            data = self._line.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._let_go()
            return
        self._unread += data
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        for line in lines:
            asked = json.loads(line)
            self._send({"answer": asked["ask"], "value": self._answer(asked)})

    def _answer(self, asked: Mapping[str, Any]) -> Any:
        assert self._task is not None
        try:
            match asked["what"]:
                case "readings":
                    return self._task.readings_document()
                case "log":
                    return self._task.workers.logs.read(
                        asked["task"],
                        parse_worker(asked["worker"]),
                        most=min(MAX_LOG, asked["bytes"]),
                        start=asked.get("from"),
                    )
                case "cancel":
                    self._task.finish("cancelled by an operator on its page")
                    return "it ends"
                case verb if self.may_hurt:
                    return self._hurt(verb, parse_worker(asked["worker"]))
        except (OSError, KeyError, UserError) as error:
            return {"error": str(error)}
        return {"error": "this is possible in a demo only"}

    def _hurt(self, verb: str, worker: Worker) -> Any:
        assert self._task is not None
        if worker not in self._task.processes:
            return {"error": f"worker {worker} is not running; choose another."}
        match verb:
            case "kill":
                self._task.kill(worker)
                return f"sent SIGKILL to worker {worker}"
            case "stop":
                with contextlib.suppress(ProcessLookupError):
                    pidfd = self._task.processes[worker].child.pidfd
                    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
                return f"worker {worker} is stopped (SIGSTOP)"
            case "slow":
                life = worker, self._task.processes[worker].incarnation
                slowed = life in self._slowed
                self._slowed ^= {life}
                self._task.slow(worker, 1.0 if slowed else SLOWER)
                if slowed:
                    return f"worker {worker} has its normal speed again"
                return f"worker {worker} now takes {SLOWER:g} times as long; repeat to undo"
        return {"error": f"{verb!r} is not kill, stop or slow"}
