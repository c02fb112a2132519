"""The shell around `ranks.supervision`: starts the ranks of a script and owns their processes.

One thread, one selector. It wakes up for: a pidfd (a rank has ended: no polling), a rank's line (it has
raised, it loads torch), the rendezvous socket (a connection that was not announced), a signal, and four
times a second for a look at /proc, the only way to see a process that is stopped or does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, assert_never

from everstep.errors import UserError
from everstep.ranks import looks as rank_looks
from everstep.ranks import store as rank_store
from everstep.ranks import words
from everstep.ranks.environment import RankPlace, rank_environment
from everstep.ranks.fork_server import RankStart, RankStarter
from everstep.ranks.hang_diagnosis import HangDiagnosis
from everstep.ranks.output import OutputStream, Pump
from everstep.ranks.rank_main import LINE, MAX_MESSAGE_BYTES, STACKS
from everstep.ranks.running_rank import RunningRank
from everstep.ranks.signals import signal_socket
from everstep.ranks.supervision import Supervision

_LOOK_EVERY_S = 0.25
_FAMILY_EVERY_S = 1.0

Tell = Callable[[words.Action, float], None]  # an action, and the seconds since the run began


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptLaunch:
    command: Sequence[str]  # the script and its arguments, or -m, a module and its arguments
    policy: words.RestartPolicy
    run_id: str
    log_dir: Path
    master_address: str = "127.0.0.1"
    master_port: int = 0  # 0: a free one for every life
    output: BinaryIO = field(default_factory=lambda: sys.stdout.buffer)
    errors: BinaryIO = field(default_factory=lambda: sys.stderr.buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    code: int
    because: str
    seconds: float
    incidents: list[words.ScriptIncident]
    restarts: int
    exit_codes: dict[int, int]  # of the last life
    pids: list[list[int]]  # of every life
    started: float  # on the monotonic clock, as the incidents' times


class Ranks:
    """One run, from its first attempt to its last. `run()` may be called once."""

    def __init__(self, launch: ScriptLaunch, starter: RankStarter, tell: Tell) -> None:
        self.launch, self._starter, self._tell = launch, starter, tell
        self.supervision = Supervision(launch.policy)
        self._ranks: dict[int, RunningRank] = {}
        self._selector = selectors.DefaultSelector()
        self._pump = Pump()
        self._store = rank_store.StoreHost(starter.fork_store)
        self._listener: socket.socket | None = None
        self._pids: list[list[int]] = []
        self._end: words.EndRun | None = None
        self._diagnosis: HangDiagnosis | None = None
        self._started = self._look_at = self._family_at = 0.0
        self._oom_kills = 0

    def run(self) -> Ran:
        self._started = time.monotonic()
        self._pump.start()
        try:
            with signal_socket() as signals:
                self._selector.register(signals, selectors.EVENT_READ, (-1, "signal"))
                self._handle(words.RunRequested())
                while self._end is None:
                    self._turn()
        finally:
            self._clean_up()
        return Ran(
            code=self._end.code,
            because=self._end.because,
            seconds=time.monotonic() - self._started,
            incidents=self.supervision.incidents,
            restarts=self.supervision.restarts,
            exit_codes=dict(self.supervision.exit_codes),
            pids=self._pids,
            started=self._started,
        )

    # -------------------------------------------------------------- what has happened

    def _turn(self) -> None:
        now = time.monotonic()
        dues = [self._look_at, self.supervision.deadline(), self._diagnosis.due if self._diagnosis else None]
        due = min(each for each in dues if each is not None)
        ready = self._selector.select(max(0.0, due - now))
        for key, _ in sorted(ready, key=lambda item: item[0].data[1] == "exited"):  # last words first
            rank, what = key.data
            if what == "signal":
                assert isinstance(key.fileobj, socket.socket)
                self._take_signals(key.fileobj)
            else:
                self._take(rank, what)
        if time.monotonic() >= self._look_at:
            self._look()
        if self._diagnosis is not None and (answer := self._diagnosis.answer(self._ranks)) is not None:
            self._diagnosis = None
            self._handle(answer)
        deadline = self.supervision.deadline()
        if deadline is not None and time.monotonic() >= deadline:
            self._handle(words.ScriptTimePassed())

    def _take(self, rank: int, what: str) -> None:
        match what:
            case "connection":
                self._serve_store()
            case "line" if rank in self._ranks:
                self._hear(rank)
            case "exited" if rank in self._ranks:
                self._bury(rank)

    def _hear(self, number: int) -> None:
        rank = self._ranks[number]
        try:
            data = rank.line.recv(MAX_MESSAGE_BYTES)
            message = json.loads(data) if data else None
        except BlockingIOError:
            return
        except (OSError, ValueError):
            message = None
        if not isinstance(message, dict):  # closed, or not ours: its exit is seen anyway
            with contextlib.suppress(KeyError):
                self._selector.unregister(rank.line)
            return
        match message.get("kind"):
            case "torch":
                rank.has_torch = True
                self._serve_store()
            case "recorded":
                rank.is_recorded = True
            case "raised":
                self._handle(
                    words.RankRaised(
                        rank=number,
                        life=self.supervision.life,
                        error=str(message.get("error", "an exception")),
                        where=str(message.get("where", "")),
                        traceback=str(message.get("traceback", "")),
                        raised_at=_number(message.get("raised_at")),
                    )
                )

    def _bury(self, number: int) -> None:
        """A rank has ended: what it said, what is left of its process group, then the event."""
        rank = self._ranks[number]
        while number in self._ranks and self._has_words(rank):
            self._hear(number)
        code = rank.process.exit_code()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        for stream in (rank.stdout, rank.stderr):
            stream.take()
        for source in (rank.line, rank.process.pidfd):
            with contextlib.suppress(KeyError):
                self._selector.unregister(source)
        rank.line.close()
        rank.process.reap()
        del self._ranks[number]
        life = self.supervision.life
        # Written by torchelastic's @record; the rank's own report, if there is one, has come before.
        recorded = rank.recorded_error() if code != 0 else None
        if recorded is not None:
            error, traceback = recorded
            self._handle(words.RankRaised(rank=number, life=life, error=error, traceback=traceback))
        self._handle(
            words.RankExited(
                rank=number, life=life, code=code, reason=self._reason(code), words=rank.stderr.tail()
            )
        )

    def _has_words(self, rank: RunningRank) -> bool:
        with selectors.DefaultSelector() as look:
            look.register(rank.line, selectors.EVENT_READ)
            if not look.select(0):
                return False
        try:
            return bool(rank.line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def _reason(self, code: int) -> str:
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        by_kernel = code == -signal.SIGKILL and rank_looks.oom_kills() > self._oom_kills
        return f"killed by {name}" + (" (the kernel has run out of memory)" if by_kernel else "")

    def _look(self) -> None:
        now = time.monotonic()
        self._look_at = now + _LOOK_EVERY_S
        if self.launch.policy.hang_after_s is not None and now >= self._family_at:
            self._family_at = now + _FAMILY_EVERY_S
            for rank in self._ranks.values():
                rank.family_cpu_s = rank_looks.family_cpu_s(rank.process.pid)
        looks = {number: found for number, rank in self._ranks.items() if (found := rank.look()) is not None}
        if looks:
            self._handle(words.RanksSeen(life=self.supervision.life, looks=looks))

    def _take_signals(self, reader: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in reader.recv(64):
                name = signal.Signals(number).name
                self._handle(words.Interrupted(signal=name, code=128 + number))

    # -------------------------------------------------------------- what is done about it

    def _handle(self, event: words.Event) -> None:
        for action in self.supervision.handle(event, time.monotonic()):
            self._tell(action, time.monotonic() - self._started)
            match action:
                case words.StartRanks():
                    self._start_ranks(action.life)
                case words.SignalRanks():
                    self._signal_ranks(action)
                case words.DiagnoseHang():
                    self._diagnosis = HangDiagnosis(action, time.monotonic())
                    self._diagnosis.ask(self._ranks)
                case words.TellPerson():
                    pass
                case words.EndRun():
                    self._end = action
                case _:
                    assert_never(action)

    def _start_ranks(self, life: int) -> None:
        self._listen()
        assert self._listener is not None
        self._oom_kills = rank_looks.oom_kills()
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        self._pids.append([])
        for number in range(self.launch.policy.ranks):
            folder = self.launch.log_dir / self.launch.run_id / f"attempt_{life}" / str(number)
            with contextlib.suppress(OSError):  # a full disk; its output is shown all the same
                folder.mkdir(parents=True, exist_ok=True)
            place = RankPlace(
                rank=number,
                ranks=self.launch.policy.ranks,
                life=life,
                max_restarts=self.launch.policy.max_restarts,
                run_id=self.launch.run_id,
                master_address=self.launch.master_address,
                master_port=self._listener.getsockname()[1],
                folder=folder,
            )
            self._start_rank(place)

    def _start_rank(self, place: RankPlace) -> None:
        stdout = OutputStream(place.rank, place.folder / "stdout.log", self.launch.output)
        stderr = OutputStream(place.rank, place.folder / "stderr.log", self.launch.errors)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        private = {LINE: str(theirs.fileno()), STACKS: str(place.folder / "stacks.txt")}
        process = self._starter.start(
            RankStart(
                command=self.launch.command,
                environment={**rank_environment(place, os.environ), **private},
                stdout=stdout.writer,
                stderr=stderr.writer,
                line=theirs.fileno(),
            )
        )
        theirs.close()
        for stream in (stdout, stderr):
            stream.started()
            self._pump.add(stream)
        rank = RunningRank(process=process, line=ours, stdout=stdout, stderr=stderr, folder=place.folder)
        self._ranks[place.rank] = rank
        self._pids[-1].append(process.pid)
        self._selector.register(process.pidfd, selectors.EVENT_READ, (place.rank, "exited"))
        self._selector.register(ours, selectors.EVENT_READ, (place.rank, "line"))

    def _listen(self) -> None:
        """A fresh socket for a fresh store."""
        self._stop_listening()
        address, port = self.launch.master_address, self.launch.master_port
        if port:
            self._store.close()  # the store of the life before holds this very port
        try:
            self._listener = rank_store.listen(address, port)
        except OSError as error:
            raise UserError(
                f"--rdzv-port {port} on {address} cannot be used ({error.strerror}); leave it out for a "
                "free one."
            ) from None
        self._selector.register(self._listener, selectors.EVENT_READ, (-1, "connection"))

    def _serve_store(self) -> None:
        """Hand the socket over, once a life."""
        if self._listener is not None and self._listener.fileno() in self._selector.get_map():
            self._selector.unregister(self._listener)
            self._store.serve(self._listener)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._listener)
            self._listener.close()

    def _signal_ranks(self, action: words.SignalRanks) -> None:
        """The whole group of each. A stopped process hears nothing but SIGKILL."""
        for number in action.ranks:
            if (rank := self._ranks.get(number)) is None:
                continue
            found = rank.look()
            is_stopped = found is not None and found.state in "Tt"
            wanted = signal.SIGKILL if is_stopped else signal.Signals[action.signal]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, wanted)

    def _clean_up(self) -> None:
        """End every process, whatever happened."""
        for rank in self._ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.line.close()
        self._stop_listening()
        self._store.close()
        self._starter.close()
        self._pump.close()
        self._selector.close()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
