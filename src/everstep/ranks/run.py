"""The shell around `ranks.supervision`: a script's ranks on this machine alone, life by life.

`RankGroup` owns the processes; here are the signals, the looks at /proc four times a second, the only way to
see a process that is stopped or does nothing, and what supervision decides.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, assert_never

from everstep.log import say
from everstep.ranks import words
from everstep.ranks.environment import RankPlace
from everstep.ranks.fork_server import RankStarter
from everstep.ranks.group import RankGroup, rank_folder
from everstep.ranks.hang_diagnosis import HangDiagnosis
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
    role: str = "default"
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
        self.launch, self._tell = launch, tell
        self.supervision = Supervision(launch.policy)
        self._group = RankGroup(
            launch.command, starter, happened=self._handle, output=launch.output, errors=launch.errors
        )
        self._pids: list[list[int]] = []
        self._end: words.EndRun | None = None
        self._diagnosis: HangDiagnosis | None = None
        self._started = self._look_at = self._family_at = 0.0

    def run(self) -> Ran:
        self._started = time.monotonic()
        self._group.open()
        try:
            with signal_socket() as signals:
                self._group.selector.register(signals, selectors.EVENT_READ, (-1, "signal"))
                self._handle(words.RunRequested())
                while self._end is None:
                    self._turn()
        finally:
            self._group.close()
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
        ready = self._group.selector.select(max(0.0, due - now))
        for key, _ in sorted(ready, key=lambda item: item[0].data[1] == "exited"):  # last words first
            rank, what = key.data
            if what == "signal":
                assert isinstance(key.fileobj, socket.socket)
                self._take_signals(key.fileobj)
            else:
                self._group.take(rank, what)
        if time.monotonic() >= self._look_at:
            self._look()
        if self._diagnosis is not None and (answer := self._diagnosis.answer(self._group.ranks)) is not None:
            self._diagnosis = None
            self._handle(answer)
        deadline = self.supervision.deadline()
        if deadline is not None and time.monotonic() >= deadline:
            self._handle(words.ScriptTimePassed())

    def _look(self) -> None:
        now = time.monotonic()
        self._look_at = now + _LOOK_EVERY_S
        if self.launch.policy.hang_after_s is not None and now >= self._family_at:
            self._family_at = now + _FAMILY_EVERY_S
            self._group.look_at_families()
        if looks := self._group.looks():
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
                    self._group.signal(action.ranks, action.signal)
                case words.DiagnoseHang():
                    self._diagnosis = HangDiagnosis(action, time.monotonic())
                    self._diagnosis.ask(self._group.ranks)
                case words.TellPerson():
                    pass
                case words.EndRun():
                    self._end = action
                case _:
                    assert_never(action)

    def _start_ranks(self, life: int) -> None:
        launch = self.launch
        address, port = self._group.listen(launch.master_address, launch.master_port)
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        pids = self._group.start(
            RankPlace(
                rank=number,
                ranks=launch.policy.ranks,
                life=life,
                restarts=life,
                role=launch.role,
                max_restarts=launch.policy.max_restarts,
                run_id=launch.run_id,
                master_address=address,
                master_port=port,
                folder=rank_folder(launch.log_dir, launch.run_id, life, number),
            )
            for number in range(launch.policy.ranks)
        )
        self._pids.append(list(pids.values()))
        shown = ", ".join(f"{rank}: {pid}" for rank, pid in list(pids.items())[:16])
        say(f"everstep: processes by rank  {shown}{', …' * (len(pids) > 16)}")  # for kill, py-spy and gdb
