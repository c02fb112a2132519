"""`everstep run --nproc`: a script's ranks on this machine alone, with the machines of a cluster.

`Coordinator` decides, a keeper carries out, both in this process: what a cluster sends over wires is a call
here, there is no journal, and if this process ends, so do its ranks. There is one node, so a fault that needs
other hardware (SEV1) ends the run.

    coordinator ──BeginLife, EndLife, LocateRanks──► keeper ──► ranks
        ▲                                              │
        └──── RanksIdle, RankFailed, RanksStill ───────┘
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.lives import Lives
from everstep.core.faults.severity import Severity
from everstep.drive.ports import ClusterDriver, ClusterPorts, HandledEvent
from everstep.errors import UserError
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.incidents import Incident
from everstep.protocol.messages import RankRules, Sender
from everstep.protocol.shape import Shape
from everstep.ranks.keeper import Inbox, Keeper, KeeperSettings, made

NODE, TASK = "here", "task"
HOST = "127.0.0.1"
_MOST_PIDS = 16  # in one line
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_IGNORED = (signal.SIGUSR1, signal.SIGUSR2)  # a scheduler's warning to all processes; scripts may handle it


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptLaunch:
    rules: RankRules  # with logs
    output: BinaryIO = field(default_factory=lambda: sys.stdout.buffer)
    errors: BinaryIO = field(default_factory=lambda: sys.stderr.buffer)

    @property
    def logs(self) -> Path:
        return Path(self.rules.logs) / self.rules.run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    code: int
    because: str
    seconds: float
    incidents: list[Incident]
    restarts: int
    exit_codes: dict[int, int]  # of the last life
    pids: list[dict[int, int]]  # of every life, by rank
    started: float  # on the monotonic clock, as the incidents' times


class _StoppedEarlyError(Exception):
    """A signal came before there was a keeper to end its ranks."""


class ScriptRun:
    """One run, from its first life to its last. `run` may be called once."""

    def __init__(self, launch: ScriptLaunch, note: Callable[[str], None]) -> None:
        self.launch = launch
        self.coordinator = Coordinator()
        self._note_line = note
        self._driver = ClusterDriver(
            self.coordinator,
            clock=self,
            store=self,
            port=ClusterPorts(self, self, self).take,
            time_passed=msg.TimePassed(),
        )
        self._inbox, self._secret = Inbox(), secrets.token_hex(32)
        self._keeper: Keeper | None = None
        self._sender: Sender | None = None
        self._lives: Lives | None = None
        self._pids: list[dict[int, int]] = []
        self._reports = self._judged = 0
        self._end: tuple[str, str] | None = None  # state of the task, and why
        self._signal: signal.Signals | None = None
        self._refusal = ""  # why there is no other life, on this one machine
        self._suspicion = ""  # that was told
        self._is_stuck = False
        self._started = 0.0

    def run(self) -> Ran:
        self._started = time.monotonic()
        rules = self.launch.rules
        try:
            with _handled(self._interrupted):
                self._driver.hear(msg.NodeJoined(node=NODE, boot=NODE, slots=rules.ranks, host=HOST))
                shape = Shape(1, 1, 1, shards=rules.ranks)
                submitted = msg.TaskSubmitted(
                    task=TASK, job={}, shape=shape, steps=0, secret=self._secret, ranks=rules
                )
                self._driver.hear(submitted)
                assert self._keeper is not None, "the task has not been given its slots"
                while not self._keeper.is_done and not self._is_stuck:
                    self._keeper.turn(self.coordinator.due_at())
                    self._driver.look_at_clock()
        except _StoppedEarlyError:
            pass
        finally:
            if self._keeper is not None:
                self._keeper.close()
        if self._signal is None and not self._is_stuck:
            self._left()
        code, because = self._outcome()
        self._note(f"ended with code {code}: {because}")
        return Ran(
            code=code,
            because=because,
            seconds=time.monotonic() - self._started,
            incidents=list(self.coordinator.log.incidents),
            restarts=len(self._pids) - 1 if self._pids else 0,
            exit_codes={} if self._keeper is None else dict(self._keeper.codes),
            pids=self._pids,
            started=self._started,
        )

    def _outcome(self) -> tuple[int, str]:
        if self._signal is not None:
            return 128 + self._signal, f"Stopped by {self._signal.name}; every rank has ended."
        lives = self._lives
        assert lives is not None
        if self._is_stuck:
            return lives.exit_code or 1, "Not even SIGKILL ends every rank: one hangs in the kernel."
        assert self._end is not None, "the keeper has left, and the task has not ended"
        state, because = self._end
        if state == "finished":
            return 0, _sentence(because)
        return lives.exit_code or 1, _sentence(self._refusal or because)

    def _interrupted(self, number: int) -> None:
        """Once: SIGTERM and the grace. Twice: SIGKILL. In a signal handler."""
        self._inbox.put(msg.EndWorker(gently=self._signal is None))
        self._signal = self._signal or signal.Signals(number)
        if self._keeper is None:  # it loads what the script imports, and that may take long
            raise _StoppedEarlyError

    # -------------------------------------------------------------- what the keeper says

    def _reported(self, report: msg.RankReport) -> None:
        if isinstance(report, msg.RanksStarted):
            self._pids.append(dict(report.pids))
            shown = ", ".join(f"{rank}: {pid}" for rank, pid in list(report.pids.items())[:_MOST_PIDS])
            more = ", …" * (len(report.pids) > _MOST_PIDS)
            self._note_line(f"everstep: processes by rank  {shown}{more}")  # for kill, py-spy and gdb
        self._hear(report)

    def _hear(self, report: msg.NodeReport) -> None:
        self._reports += 1
        self._driver.hear(
            msg.FromNode(node=NODE, boot=NODE, number=self._reports, report=report, sender=self._sender)
        )

    def _left(self) -> None:
        """The keeper has: for the coordinator that is the exit of a worker, after which a task is over."""
        assert self._sender is not None
        _, worker, incarnation = self._sender
        exited = ev.WorkerExited(worker=worker, incarnation=incarnation, reason="it was told to leave")
        self._hear(msg.TaskEvent(task=TASK, event=exited))

    # -------------------------------------------------------------- the driver's ports

    def time(self) -> float:
        return time.monotonic()

    def wake_at(self, when: float) -> None:
        """`turn` waits no longer than that."""

    def write(self, entries: Sequence[tuple[float, msg.ClusterEvent]], done: Callable[[], None]) -> None:
        """There is no journal."""
        done()

    def received(self, node: str, number: int) -> None:
        """Nothing is sent again here."""

    def think(self, action: msg.Think) -> None:
        """A script has no schedule."""

    def choose(self, action: msg.ChooseAssignment) -> None:
        """One task has all slots."""

    def send(self, action: msg.Dispatch) -> None:
        self.coordinator.acknowledged(NODE, action.number)
        match action.order:
            case msg.StartProcess() as order:
                self._keep(order)
            case msg.BeginLife() as order:
                self._tell_begin(order)
                self._inbox.put(order)
            case msg.EndLife() as order:
                self._inbox.put(order)
            case msg.LocateRanks() as order:
                self._note(f"{order.because}.")
                self._inbox.put(order)
            case msg.CopySnapshot() | msg.DrainSnapshot() | msg.OrderRanks() as order:
                self._inbox.put(order)
            case msg.CloseTask(gently=gently):
                self._inbox.put(msg.EndWorker(gently=gently))
            case msg.KillProcess():
                self._is_stuck = True

    def handled(self, one: HandledEvent) -> None:
        task = self.coordinator.tasks.get(TASK)
        self._lives = self._lives or (None if task is None else task.lives)
        suspicion = "" if self._lives is None else self._lives.suspicion
        if suspicion != self._suspicion:
            self._suspicion = suspicion
            if suspicion:
                self._note(f"{suspicion}. Nothing is ended.")
        for incident in self.coordinator.log.incidents[self._judged :]:
            if incident.verdict is None:
                break
            self._judged += 1
            self._note(f"{incident.what}. {_verdict(incident)}")
            if incident.verdict.severity == Severity.SEV1 and not self._refusal:
                self._refusal = (
                    f"{incident.what}. This is {incident.verdict.kind} (SEV1): the same machine would fail "
                    "again, so it is not restarted here; run it on another one."
                )
                self._driver.hear(msg.CancelRequested(task=TASK))
        for action in one.actions:
            if isinstance(action, msg.TaskEnded):
                self._end = (action.state, action.because)

    def _keep(self, order: msg.StartProcess) -> None:
        """This process is the agent and the keeper."""
        assert self._keeper is None, "a second keeper"
        self._sender = Sender(TASK, order.worker, order.incarnation)
        self._keeper = made(
            KeeperSettings(
                sender=self._sender,
                rules=self.launch.rules,
                host=HOST,
                logs=Path(self.launch.rules.logs),
                environment=os.environ,
                output=self.launch.output,
                errors=self.launch.errors,
                note=self._note,
                secret=self._secret,
            ),
            self._reported,
            self._inbox,
        )
        self._keeper.open()
        if self._keeper.port_error:
            raise UserError(self._keeper.port_error)

    # -------------------------------------------------------------- in words

    def _note(self, text: str) -> None:
        self._note_line(f"everstep: {time.monotonic() - self._started:.3f} s  {text}")

    def _tell_begin(self, order: msg.BeginLife) -> None:
        if order.life == 1:
            self._note("all ranks started")
            return
        allowed = self.launch.rules.max_restarts
        left = allowed - order.restarts + 1
        self._note(f"all ranks restarted: {order.because}; {left} of {allowed} restarts were left.")


@contextlib.contextmanager
def _handled(interrupted: Callable[[int], None]) -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in (*_SIGNALS, *_IGNORED)}
    for each, handler in before.items():
        if each in _IGNORED:
            signal.signal(each, signal.SIG_IGN)
        elif each != signal.SIGHUP or handler != signal.SIG_IGN:  # under nohup a run outlives its terminal
            signal.signal(each, lambda number, _: interrupted(number))
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _verdict(incident: Incident) -> str:
    """What is done about it is a line of its own: all ranks begin again, or the run ends."""
    assert incident.verdict is not None
    return f"{_sentence(incident.verdict.because)} {Severity(incident.verdict.severity)}."


def run_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def summary(launch: ScriptLaunch, ran: Ran) -> str:
    counts = {"restart": ran.restarts, "incident": len(ran.incidents)}
    parts = [f"{ran.seconds:.1f} s", *(f"{n} {what}{'s' * (n != 1)}" for what, n in counts.items())]
    return f"everstep: {', '.join(parts)}; logs in {launch.logs}"


def document(launch: ScriptLaunch, ran: Ran) -> dict[str, Any]:
    pids = ran.pids[-1] if ran.pids else {}
    return {
        "command": list(launch.rules.command),
        "ranks": [
            {"rank": rank, "pid": pids.get(rank), "exit_code": ran.exit_codes.get(rank)}
            for rank in range(launch.rules.ranks)
        ],
        "restarts": ran.restarts,
        "max_restarts": launch.rules.max_restarts,
        "incidents": [_incident(each, ran) for each in ran.incidents],
        "exit_code": ran.code,
        "because": ran.because,
        "seconds": round(ran.seconds, 3),
        "run_id": launch.rules.run_id,
        "logs": str(launch.logs),
    }


def _incident(incident: Incident, ran: Ran) -> dict[str, Any]:
    verdict = incident.verdict
    is_over = incident.stops_training and not incident.epoch  # no life came after it
    resumed = None if is_over else incident.resumed_at
    noticed_at = incident.evidence_at if verdict is None else verdict.at
    return {
        "number": incident.number,
        "what": incident.what,
        "rank": incident.rank,
        "life": ran.restarts if is_over else incident.epoch - 2 if incident.epoch else None,  # from 0
        "at_s": round(noticed_at - ran.started, 3),
        "evidence": [each.text for each in incident.evidence],
        "traceback": incident.traceback or None,
        "verdict": None if verdict is None else verdict.kind,
        "severity": None if verdict is None else f"SEV{verdict.severity}",
        "remedy": "stop" if is_over else incident.remedies[-1].what,
        "because": "" if verdict is None else _verdict(incident),
        "noticed_ms": round((noticed_at - incident.evidence_at) * 1e3, 3),
        "noticed_at": noticed_at,
        "restarted_ms": None if resumed is None else round((resumed - noticed_at) * 1e3, 3),
    }
