"""A Slurm of our own on this machine: munged, slurmctld and some slurmd, all in one folder, on loopback.

Debian's slurmd may run several times on one machine (`-N`); every node has an address of its own out of
127.0.0.0/8, so what binds to a node's address is really reached by it. Nothing of a Slurm that is installed
here is touched: configuration, key, sockets, spool and state lie under `folder`, and ports are free ones.
Needs no root: it runs as whoever starts it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CONFIGURATION = """\
ClusterName=bench
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={slurmd_timeout_s}
KillWait=5
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
"""


def missing() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]


class SlurmCluster:
    """Everything it starts, it ends, by pid."""

    def __init__(self, folder: Path, *, nodes: int = 4, slurmd_timeout_s: int = 5) -> None:
        self.folder = folder
        self.nodes = [f"n{i + 1}" for i in range(nodes)]
        self.environment = {
            **os.environ,
            "PATH": _PATH,
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self._timeout_s = slurmd_timeout_s
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self._configure()
            self._start_munge()
            self._start("slurmctld", "slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
            for node in self.nodes:
                self.start_node(node)
            self.until(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "all nodes are idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            pids = [pid for node in self.nodes for pid in self.processes_of(node)]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + 5
            while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
                time.sleep(0.05)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    # -------------------------------------------------------------- nodes

    def start_node(self, node: str) -> None:
        self._start(f"slurmd-{node}", "slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"))

    def kill_node(self, node: str) -> list[str]:
        """SIGKILL to the slurmd and to all that ran on its node: what a power cut leaves. Who was killed."""
        slurmd = self._daemons.pop(f"slurmd-{node}")
        slurmd.kill()
        slurmd.wait()
        return ["slurmd", *self.kill_steps(node)]

    def kill_steps(self, node: str) -> list[str]:
        """SIGKILL to all that runs on a node, but not to its slurmd. Who was killed."""
        pids = self.processes_of(node)
        names = [_name(pid) for pid in pids]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return names

    def processes_of(self, node: str) -> list[int]:
        """Steps of that node: what carries its name in its environment, and the slurmstepd above it."""
        found: dict[int, None] = {}
        for pid in _pids():
            environment = _environment(pid)
            ours = environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]
            if ours and environment.get("SLURMD_NODENAME") == node:
                found[pid] = None
                parent = _parent(pid)
                if parent is not None and _name(parent).startswith("slurmstepd"):
                    found[parent] = None
        return list(found)

    def states(self) -> dict[str, str]:
        told = self.run("sinfo", "--noheader", "--Node", "--format=%N %T")
        return dict(line.split() for line in told.splitlines())

    # -------------------------------------------------------------- asking

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def until(self, true: Callable[[], object], what: str, *, within_s: float = 60.0) -> object:
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                if (told := true()) not in (None, False):
                    return told
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {within_s:g} s: {what}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-800:]}"
            for path in sorted(self.folder.glob("slurm*.log"))
            if not path.name.endswith(".out.log")
        )

    # -------------------------------------------------------------- making it

    def _configure(self) -> None:
        user = pwd.getpwuid(os.getuid()).pw_name
        text = _CONFIGURATION.format(
            folder=self.folder, user=user, ctld_port=_free_port(), slurmd_timeout_s=self._timeout_s
        )
        for i, node in enumerate(self.nodes):
            text += f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.{11 + i} Port={_free_port()} "
            text += "CPUs=1 RealMemory=1000 State=UNKNOWN\n"
            (self.folder / f"spool-{node}").mkdir(parents=True)
        text += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start_munge(self) -> None:
        key, place = self.folder / "munge.key", self.folder / "munge.socket"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = [f"--{what}-file={self.folder / f'munge.{what}'}" for what in ("key", "pid", "log", "seed")]
        self._start("munged", "munged", "--foreground", "--force", f"--socket={place}", *files)
        self.until(lambda: self.run("munge", f"--socket={place}", "--no-input"), "munged answers")

    def _start(self, name: str, *command: str) -> None:
        program = shutil.which(command[0], path=_PATH)
        assert program is not None, command[0]
        with (self.folder / f"{name}.out.log").open("ab") as words:
            self._daemons[name] = subprocess.Popen(
                [program, *command[1:]],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                start_new_session=True,
            )


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _pids() -> Iterator[int]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            yield int(path.name)


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone"
    if "everstep.cli.main" in words and Path(words[0]).name != "srun":
        after = words[words.index("everstep.cli.main") + 1 :]
        return " ".join(["everstep", *after[: 2 if after[:1] == ["launch"] else 1]])
    if "everstep.node.fork_server" in words:
        return "worker"
    return Path(words[0]).name if words[0] else "gone"


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
