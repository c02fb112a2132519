"""The keeper of a node in a Slurm job: what `srun` starts there.

Every keeper keeps its node's agent running. One of them leads: it holds the lock of the run's folder, keeps
the coordinator running beside its agent (unless that runs elsewhere), gives it the task, and every few
seconds lays what Slurm says beside what the coordinator says (`node_rules`). When the leader's node dies,
the lock is free, and the next keeper that tries it leads: it starts the coordinator from the same journal,
and the agents find it by its file. The first node of the job tries at once, the others later by rank, so that
it is slow on purpose: a thousand nodes must not overload the file server.

    node 1  keeper ── agent      lock ✔   coordinator      ╳ dies
    node 2  keeper ── agent      lock … ────────────────────── ✔  coordinator   (same journal, new address)
    node 3  keeper ── agent      lock … …

When the task is over the leader says so in the run's folder, and all keepers leave.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError
from everstep.launch.slurm import shell as slurm
from everstep.launch.slurm.address import free_port
from everstep.launch.slurm.leading_keeper import Leader
from everstep.launch.slurm.run import Run
from everstep.log import append_to, trim
from everstep.net.sockets import in_url

EVERSTEP = (sys.executable, "-m", "everstep.cli.main")
TURN_S = 0.5
FIRST_TRY_S, TRY_EVERY_S, TRY_BY_RANK_S = 2.0, 2.0, 0.5
ASK_ABOUT_JOB_S = 15.0
LOOKS_PER_S = 20.0  # of all keepers together, at the run's folder: it is on a shared file system
LOOK_MOST_S = 30.0
RESTART_FIRST_S, RESTART_MOST_S = 1.0, 30.0
CALM_S = 60.0  # a child that lived so long is restarted without waiting
MAX_FAILURES = 8  # of an agent, one after the other: then this node is of no use to the run
LEAVE_S = 25.0  # of Slurm's KillWait, 30 s by default, for tasks to save their states
END_S = LEAVE_S + 3.0
TRIM_EVERY_S = 10.0
NOTICE_S = 120.0  # from SIGUSR1 to the job's end: --signal=USR1@120 in everstep.sbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmKeeperSettings:
    run: Path
    job_file: Path
    job: str  # the Slurm job's number; for a spare, that of the job it belongs to
    node: str
    host: str  # the node's address
    rank: int
    attempt: int
    slots: int  # 0: as many as the agent finds
    slots_given: bool = False  # by a person; else every node counts its own
    wanted: int  # nodes
    spare: bool = False
    port: int = 7077
    coordinator: str = ""  # where it runs, if not here
    ca: Path | None = None
    interface: str = ""
    watch_s: float = 5.0


def look_every_s(nodes: int) -> float:
    """How often one of so many keepers looks into the run's folder."""
    return min(LOOK_MOST_S, max(TURN_S, nodes / LOOKS_PER_S))


class KeptProcess:
    """A process that is started again when it ends, later each time it ends soon."""

    def __init__(self, command: Sequence[str], *, log: Path, token: str, say: Callable[[str], None]) -> None:
        self.command, self.log, self.say = list(command), log, say
        self._environment = {**os.environ, "EVERSTEP_TOKEN": token}
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._not_before = self._trim_at = 0.0
        self._wait_s = RESTART_FIRST_S
        self.failures = 0  # one after the other

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def lives(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def keep(self, now: float) -> None:
        if self.lives or now < self._not_before:
            if now >= self._trim_at:
                self._trim_at = now + TRIM_EVERY_S
                trim(self.log)
            return
        if self._process is not None:
            calm = now - self._started >= CALM_S
            code, self._process = self._process.returncode, None
            self.failures = 1 if calm else self.failures + 1
            self._wait_s = RESTART_FIRST_S if calm else min(self._wait_s * 2, RESTART_MOST_S)
            self._not_before = now + (0.0 if calm else self._wait_s)
            self.say(f"{self.command[3]} ended with {code}; its output is in {self.log}")
            return
        words = append_to(self.log)
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, env=self._environment
        )
        os.close(words)
        self._started = now

    def warn(self) -> None:
        """The job will end soon."""
        if self._process is not None and self.lives:
            self._process.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        if self._process is None:
            return
        if self.lives:
            self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class SlurmKeeper:
    def __init__(self, settings: SlurmKeeperSettings, *, say: Callable[[str], None]) -> None:
        self.settings, self._say = settings, say
        self.run_folder = Run(settings.run, attempt=settings.attempt)
        self.leader: Leader | None = None
        self._words = self.run_folder.logs / f"keeper-{settings.node}.log"
        self._end_signal = 0
        self._look_at = 0.0
        self._port = settings.port
        self._asked_at = time.monotonic()
        self._try_at = time.monotonic() + (0.0 if settings.rank == 0 else self._patience_s)

    @property
    def _patience_s(self) -> float:
        return FIRST_TRY_S + TRY_BY_RANK_S * self.settings.rank

    def run(self) -> int:
        """Until the task is over, or Slurm ends it."""
        run = self.run_folder
        run.make(wanted=self.settings.wanted)
        if not run.keep(self.settings.node):
            self.say("this node already has a keeper")
            return 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        agent = self._child("agent", self._agent_command())
        signal.signal(signal.SIGUSR1, lambda number, frame: agent.warn())
        if self.settings.spare:
            self.say(f"replaces a lost node of job {self.settings.job}")
        coordinator = None
        try:
            while not self._end_signal:
                now = time.monotonic()
                if self._looks(now) and (code := run.exit_code) is not None:
                    self.say("the task has ended")
                    return code
                agent.keep(now)
                if agent.failures >= MAX_FAILURES:
                    self.say(f"its agent failed {agent.failures} times; this keeper gives up")
                    return 1
                if self._leads(now):
                    if coordinator is None and not self.settings.coordinator:
                        coordinator = self._child("coordinator", self._coordinator_command())
                    if coordinator is not None:
                        coordinator.keep(now)
                    assert self.leader is not None
                    self.leader.turn(now)
                elif self.settings.spare and self._is_left_alone(now):
                    return 0
                time.sleep(TURN_S)
            return 128 + self._end_signal
        finally:
            if self.leader is not None:
                self.leader.close()
            agent.end()
            if coordinator is not None:
                coordinator.end()

    def _looks(self, now: float) -> bool:
        """Is it time to look whether the task has ended? The leader knows at once, for it says so itself."""
        if self.leader is None and now < self._look_at:
            return False
        self._look_at = now + look_every_s(self.settings.wanted)
        return True

    def say(self, line: str) -> None:
        """Into a file of its own too: what srun gathers ends with the first node, by a broken pipe."""
        self._say(f"{self.settings.node}: {line}")
        with contextlib.suppress(OSError), self._words.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        trim(self._words)

    # -------------------------------------------------------------- who leads

    def _leads(self, now: float) -> bool:
        if self.leader is None and not self.settings.spare and now >= self._try_at:
            self._try_at = now + max(TRY_EVERY_S, self._patience_s)
            if self.run_folder.try_to_lead():
                self._port = free_port(self.settings.host, self.settings.port)
                address = self.settings.coordinator or f"http://{in_url(self.settings.host)}:{self._port}"
                where = "elsewhere" if self.settings.coordinator else "here"
                self.say(f"leads; the coordinator runs {where}, at {address}")
                self.leader = Leader(self.settings, self.run_folder, address=address, say=self.say)
        return self.leader is not None

    def _is_left_alone(self, now: float) -> bool:
        """A spare serves one life of one job."""
        if now - self._asked_at < ASK_ABOUT_JOB_S:
            return False
        self._asked_at = now
        try:
            job = slurm.job(self.settings.job)
        except EverstepError as error:
            self.say(f"cannot ask about job {self.settings.job}: {error}")
            return False
        if job is not None and job.runs and not self.run_folder.has_ended_life:
            return False
        self.say(f"job {self.settings.job} has ended or was requeued; this spare leaves")
        return True

    # -------------------------------------------------------------- its processes

    def _child(self, what: str, command: Sequence[str]) -> KeptProcess:
        log = self.run_folder.logs / f"{what}-{self.settings.node}.log"
        return KeptProcess([*EVERSTEP, *command], log=log, token=self.run_folder.token, say=self.say)

    def _agent_command(self) -> list[str]:
        settings = self.settings
        place = settings.coordinator or self.run_folder.place
        command = ["agent", "--node", settings.node, "--host", settings.host, "--coordinator", place]
        command += ["--log-dir", str(self.run_folder.logs), "--notice-on-signal", f"{NOTICE_S:g}"]
        command += ["--grace", f"{LEAVE_S:g}"]
        if settings.slots:
            command += ["--slots", str(settings.slots)]
        return command + (["--ca", str(settings.ca)] if settings.ca else [])

    def _coordinator_command(self) -> list[str]:
        settings = self.settings
        # The nodes of a job do not know yet which of them will lead, so there is no certificate for it.
        command = ["coordinator", "--host", settings.host, "--port", str(self._port), "--insecure"]
        command += ["--state", str(self.run_folder.state), "--name", settings.node]
        return [*command, "--grace", f"{LEAVE_S:g}"]

    def _on_signal(self, number: int, frame: Any) -> None:
        self._end_signal = number
