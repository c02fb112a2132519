"""A storm on real processes of one machine: what may happen to a cluster, drawn from a seed, and undone.

Every fault leaves something to undo later (a stopped process goes on, a dead agent is started again, a
drained node is readmitted); `calm` undoes all that is left. The faults are values in a table: `FAULTS` has
the name of each, how often it is drawn, and the method that does it.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError
from harness.cluster import Cluster, descendants

NODES = ("a", "b", "c")
SLOTS = 3
GRACE_S = 8.0  # of an agent that is asked to end
DISK_BYTES, LOG_BYTES = 48 << 20, 16 << 20
STORAGE_FLAG = "storage-hangs"
HANG_S = 150.0  # at most: a start that hangs is given up after 120 s
_HUNG_STORAGE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
static void wait_for_storage(void) { while (access(FLAG, F_OK) == 0) usleep(20000); }
int fsync(int fd) {
  static int (*real)(int);
  if (!real) real = dlsym(RTLD_NEXT, "fsync");
  wait_for_storage();
  return real(fd);
}
int rename(const char *from, const char *to) {
  static int (*real)(const char *, const char *);
  if (!real) real = dlsym(RTLD_NEXT, "rename");
  if (__builtin_strstr(from, FOLDER)) wait_for_storage();
  return real(from, to);
}
"""
Undo = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """A job that is submitted again and again; its losses are those of one clean run."""

    name: str
    weight: float
    job: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Happening:
    """Something done to a node, a task or a worker."""

    at_s: float
    what: str
    node: str = ""
    task: str = ""
    worker: str = ""
    number: int = 0


@dataclass(slots=True)
class Storm:
    cluster: Cluster
    seed: int
    disk: Path  # where checkpoints go
    kinds: dict[str, JobKind]
    say: Callable[[str], None]
    random: random.Random = field(init=False)
    happenings: list[Happening] = field(default_factory=list)
    submitted: dict[str, str] = field(default_factory=dict)  # task -> kind
    cancelled: set[str] = field(default_factory=set)
    _undo: list[tuple[float, Undo]] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _taken: set[str] = field(default_factory=set)  # what something is done to at the moment
    put_back: set[str] = field(
        default_factory=set
    )  # tasks of an older journal: rows in between are not in it
    rows_lost: dict[str, list[list[int]]] = field(default_factory=dict)  # steps that no one has reported

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    # -------------------------------------------------------------- the run

    def rage(self, seconds: float, every_s: float) -> None:
        """Faults, and tasks for them, for so long."""
        self._began = time.monotonic()
        next_at = 3.0
        while (now := time.monotonic() - self._began) < seconds:
            self._keep_busy()
            self._undo_due(now)
            if now >= next_at:
                next_at = now + self.random.expovariate(1 / every_s)
                self._strike()
            time.sleep(0.1)

    def calm(self) -> None:
        """Undo what is left, in the order in which it is due."""
        self._undo_due(float("inf"))
        for task in self._alive():
            with contextlib.suppress(EverstepError):
                if task["state"] == "paused":
                    self.cluster.client.post(f"/v1/tasks/{task['task']}/unpause")

    def _strike(self) -> None:
        (fault,) = self.random.choices(FAULTS, weights=[fault.weight for fault in FAULTS])
        with contextlib.suppress(EverstepError, StopIteration, OSError, KeyError, IndexError):
            fault.do(self)

    def _undo_due(self, now: float) -> None:
        while due := [each for each in self._undo if each[0] <= now]:
            first = min(due, key=lambda each: each[0])
            self._undo.remove(first)  # what it does may undo others
            first[1]()

    def _keep_busy(self) -> None:
        """One task of each kind at a time."""
        with contextlib.suppress(EverstepError, StopIteration, OSError):
            alive = {self.submitted[task["task"]] for task in self._alive() if task["task"] in self.submitted}
            for kind in self.kinds.values():
                if kind.name not in alive:
                    self._submit(kind)

    def _submit(self, kind: JobKind) -> None:
        number = 1 + sum(each == kind.name for each in self.submitted.values())
        name = f"{kind.name}-{number}"
        job = kind.job | {"checkpoint": {**kind.job["checkpoint"], "folder": str(self.disk / name)}}
        self._remove_finished()
        self.submitted[name] = kind.name
        self._note("submit", task=name)
        self.cluster.submit(job, name, weight=kind.weight)

    # -------------------------------------------------------------- what is there

    def _remove_finished(self) -> None:
        """The checkpoints of tasks that are over, as an operator would: they would fill the small disk."""
        if "journal" in self._taken:
            return  # the older one that is to come may know them as running
        alive = {task["task"] for task in self._alive()}
        for name in set(self.submitted) - alive:
            shutil.rmtree(self.disk / name, ignore_errors=True)

    def _alive(self) -> list[Any]:
        tasks = self.cluster.client.get("/v1/status")["tasks"]
        return [task for task in tasks if task["state"] not in ("finished", "failed", "cancelled")]

    def _worker(self) -> tuple[str, str, int]:
        """Of which task, which one, its pid."""
        task = self.random.choice([task["task"] for task in self._alive()])
        rows = self.cluster.client.get(f"/v1/tasks/{task}/readings")["workers"]
        row = self.random.choice(sorted(rows, key=lambda row: str(row["worker"])))
        return task, str(row["worker"]), int(row["pid"])

    def _fork_servers(self, node: str) -> list[int]:
        """The direct children of an agent: it starts nothing else."""
        return _children(self.cluster.agents[node].pid)

    def _free_node(self) -> str:
        """One that nothing is being done to; and never the last two at once."""
        if len([node for node in NODES if node in self._taken]) >= 1:
            raise IndexError
        node = self.random.choice(NODES)
        self._taken.add(node)
        return node

    def _note(self, what: str, **about: Any) -> None:
        at_s = round(time.monotonic() - self._began, 3)
        self.happenings.append(Happening(at_s, what, **about))
        self.say(f"{at_s:7.1f} s  {what} {' '.join(map(str, about.values()))}")

    def _later(self, seconds: float, what: str, undo: Undo, free: str = "", **about: Any) -> None:
        def undone() -> None:
            self._taken.discard(free)
            self._note(what, **about)
            undo()

        self._undo.append((time.monotonic() - self._began + seconds, undone))

    # -------------------------------------------------------------- faults of processes

    def kill_worker(self) -> None:
        task, worker, pid = self._worker()
        self._note("kill worker", task=task, worker=worker)
        os.kill(pid, signal.SIGKILL)

    def stop_worker(self) -> None:
        task, worker, pid = self._worker()
        self._note("stop worker", task=task, worker=worker, number=pid)
        os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._later(
            self.random.uniform(0.2, 10.0), "continue worker", go_on, task=task, worker=worker, number=pid
        )

    def kill_agent(self) -> None:
        node = self._free_node()
        self._note("kill agent", node=node)
        self.cluster.agents[node].kill()
        self.cluster.agents[node].wait()
        self._later(self.random.uniform(0.5, 6.0), "start agent", lambda: self._start(node), node, node=node)

    def kill_node(self) -> None:
        node = self._free_node()
        self._note("kill node", node=node)
        self.cluster.signal_node(node, signal.SIGKILL)
        self.cluster.agents[node].wait()
        self._later(self.random.uniform(0.5, 6.0), "start agent", lambda: self._start(node), node, node=node)

    def stop_agent(self) -> None:
        node = self._free_node()
        process = self.cluster.agents[node]
        self._note("stop agent", node=node)
        process.send_signal(signal.SIGSTOP)
        go_on = lambda: process.send_signal(signal.SIGCONT)  # noqa: E731
        self._later(self.random.uniform(0.5, 20.0), "continue agent", go_on, node, node=node)

    def stop_node(self) -> None:
        node = self._free_node()
        pids = [*descendants(self.cluster.agents[node].pid), self.cluster.agents[node].pid]
        self._note("stop node", node=node)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

        self._later(self.random.uniform(0.5, 20.0), "continue node", go_on, node, node=node)

    def kill_fork_server(self) -> None:
        node = self.random.choice([node for node in NODES if node not in self._taken])
        pid = self.random.choice(self._fork_servers(node))
        self._note("kill fork server", node=node)
        os.kill(pid, signal.SIGKILL)

    def stop_fork_server(self) -> None:
        node = self._free_node()
        pid = self.random.choice(self._fork_servers(node))
        self._note("stop fork server", node=node)
        os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._later(self.random.uniform(1.0, 20.0), "continue fork server", go_on, node, node=node)

    def kill_coordinator(self) -> None:
        if "coordinator" in self._taken:
            return
        self._taken.add("coordinator")
        self._note("kill coordinator")
        self.cluster.kill_coordinator()
        after_s = self.random.uniform(0.0, 4.0)
        self._later(after_s, "start coordinator", self._start_coordinator, "coordinator")

    def stop_coordinator(self) -> None:
        if "coordinator" in self._taken:
            return
        self._taken.add("coordinator")
        process = self.cluster.coordinators["first"]
        self._note("stop coordinator")
        process.send_signal(signal.SIGSTOP)
        go_on = lambda: process.send_signal(signal.SIGCONT)  # noqa: E731
        self._later(self.random.uniform(0.5, 6.0), "continue coordinator", go_on, "coordinator")

    def end_agent(self) -> None:
        """SIGTERM: `systemctl stop`, an eviction, a reboot."""
        node = self._free_node()
        process = self.cluster.agents[node]
        self._note("end agent", node=node)
        process.terminate()

        def start_again() -> None:
            process.wait(60.0)  # it has its grace, and some seconds to end workers
            self._start(node)

        after_s = GRACE_S + self.random.uniform(0.0, 6.0)
        self._later(after_s, "start agent", start_again, node, node=node)

    def hang_start(self) -> None:
        """A worker dies, and the next one stops before it has reported."""
        task, worker, pid = self._worker()
        servers = {node: self._fork_servers(node) for node in NODES if node not in self._taken}
        node, server = next(
            (node, server)
            for node, all_here in servers.items()
            for server in all_here
            if pid in _children(server)
        )
        before = set(_children(server))
        self._note("hang a start", node=node, task=task, worker=worker)
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while not (started := set(_children(server)) - before):
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)
        hung = started.pop()
        os.kill(hung, signal.SIGSTOP)

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(hung, signal.SIGCONT)

        self._later(self.random.uniform(2.0, HANG_S), "let a start go on", go_on, number=hung)

    def restore_journal(self) -> None:
        """The coordinator's journal of some seconds ago is put back, as from a backup."""
        if "coordinator" in self._taken:
            return
        state = self.cluster.folder / "state-first"
        backup = self.cluster.folder / "journal-backup"
        self._taken |= {"coordinator", "journal"}
        self._note("back up the journal")
        self.cluster.kill_coordinator()
        shutil.rmtree(backup, ignore_errors=True)
        backup.mkdir()
        for file in state.glob("journal.sqlite*"):
            shutil.copy2(file, backup)
        known = set(self.submitted)
        self._start_coordinator()

        def put_back() -> None:
            self.cluster.kill_coordinator()
            for file in state.glob("journal.sqlite*"):
                file.unlink()
            for file in backup.iterdir():
                shutil.copy2(file, state)
            self.put_back |= known
            self.cancelled |= set(self.submitted) - known  # it has never heard of them
            self._taken.discard("journal")
            self._start_coordinator()

        self._later(self.random.uniform(2.0, 15.0), "put the older journal back", put_back, "coordinator")

    # -------------------------------------------------------------- what operators do

    def drain(self) -> None:
        node = self._free_node()
        force = self.random.random() < 0.5
        self._note("drain at once" if force else "drain", node=node)
        try:
            self.cluster.client.post(f"/v1/nodes/{node}/drain", {"force": force})
        except EverstepError:  # refused, or the coordinator is away
            self._taken.discard(node)
            raise
        self._later(self.random.uniform(1.0, 15.0), "readmit", lambda: self._readmit(node), node, node=node)

    def pause(self) -> None:
        name = self.random.choice([task["task"] for task in self._alive() if task["state"] == "running"])
        self._note("pause", task=name)
        self.cluster.client.post(f"/v1/tasks/{name}/pause")

        def resume() -> None:
            self._until_heard(lambda: self.cluster.client.post(f"/v1/tasks/{name}/unpause"))

        self._later(self.random.uniform(0.5, 8.0), "resume", resume, task=name)

    def resize(self) -> None:
        task = self.random.choice(self._alive())
        workers = self.random.randint(task["shape"]["stages"], task["places"])
        self._note("resize", task=task["task"], number=workers)
        self.cluster.client.post(f"/v1/tasks/{task['task']}/resize", {"workers": workers})

    def cancel(self) -> None:
        name = self.random.choice([task["task"] for task in self._alive()])
        self._note("cancel", task=name)
        self.cancelled.add(name)
        self.cluster.client.post(f"/v1/tasks/{name}/cancel")

    def rotate_token(self) -> None:
        """Agents read their token file again; a coordinator must be started again to know another one."""
        if "coordinator" in self._taken or self.cluster.token_file is None:
            return
        self._taken.add("coordinator")
        self._note("rotate the token")
        self.cluster.kill_coordinator()
        self.cluster.set_token(secrets.token_hex(8))
        after_s = self.random.uniform(0.0, 2.0)
        self._later(after_s, "start coordinator", self._start_coordinator, "coordinator")

    def fill_disk(self) -> None:
        if "disk" in self._taken:
            return
        self._taken.add("disk")
        self._note("fill the disk of checkpoints")
        filler = self.disk / "filler"
        _fill(filler)
        empty = lambda: filler.unlink(missing_ok=True)  # noqa: E731
        self._later(self.random.uniform(1.0, 10.0), "empty the disk", empty, "disk")

    def fill_log_disk(self) -> None:
        if "log disk" in self._taken:
            return
        self._taken.add("log disk")
        self._note("fill the disk of logs")
        filler = self.cluster.log_folder / "filler"
        _fill(filler)
        empty = lambda: filler.unlink(missing_ok=True)  # noqa: E731
        self._later(self.random.uniform(2.0, 20.0), "empty the disk of logs", empty, "log disk")

    def hang_storage(self) -> None:
        """Whoever flushes or renames a file of a checkpoint waits."""
        if "storage" in self._taken:
            return
        self._taken.add("storage")
        self._note("hang the storage")
        flag = self.cluster.folder / STORAGE_FLAG
        flag.touch()
        mend = lambda: flag.unlink(missing_ok=True)  # noqa: E731
        self._later(self.random.uniform(1.0, 30.0), "mend the storage", mend, "storage")

    # -------------------------------------------------------------- how things come back

    def _start(self, node: str) -> None:
        self.cluster.start_agent(node, slots=SLOTS, grace=GRACE_S)

    def _start_coordinator(self) -> None:
        self.cluster.start_coordinator()
        self._note("coordinator up")

    def _readmit(self, node: str) -> None:
        self._until_heard(lambda: self.cluster.client.post(f"/v1/nodes/{node}/readmit"))

    def _until_heard(self, ask: Callable[[], Any]) -> None:
        """A coordinator that is away is waited for; one that refuses has its reasons."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                ask()
                return
            except (StopIteration, OSError):
                pass
            except EverstepError as error:
                if "no coordinator at" not in str(error) and "does not answer" not in str(error):
                    return
            self._undo_due(time.monotonic() - self._began)
            time.sleep(0.2)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _fill(filler: Path) -> None:
    room = os.statvfs(filler.parent)
    with contextlib.suppress(OSError), filler.open("wb") as file:
        file.write(bytes(room.f_bavail * room.f_bsize))


@dataclass(frozen=True, slots=True)
class FaultKind:
    name: str
    weight: float  # how often it is drawn
    do: Callable[[Storm], None]


FAULTS = (
    FaultKind("kill worker", 6, Storm.kill_worker),
    FaultKind("stop worker", 4, Storm.stop_worker),
    FaultKind("kill agent", 2, Storm.kill_agent),
    FaultKind("kill node", 2, Storm.kill_node),
    FaultKind("stop agent", 2, Storm.stop_agent),
    FaultKind("stop node", 2, Storm.stop_node),
    FaultKind("kill fork server", 2, Storm.kill_fork_server),
    FaultKind("stop fork server", 1, Storm.stop_fork_server),
    FaultKind("kill coordinator", 3, Storm.kill_coordinator),
    FaultKind("stop coordinator", 2, Storm.stop_coordinator),
    FaultKind("drain", 2, Storm.drain),
    FaultKind("pause", 2, Storm.pause),
    FaultKind("resize", 2, Storm.resize),
    FaultKind("cancel", 0.5, Storm.cancel),
    FaultKind("rotate token", 1, Storm.rotate_token),
    FaultKind("fill disk", 2, Storm.fill_disk),
    FaultKind("end agent", 2, Storm.end_agent),
    FaultKind("hang a start", 1, Storm.hang_start),
    FaultKind("fill log disk", 1, Storm.fill_log_disk),
    FaultKind("hang storage", 1, Storm.hang_storage),
    FaultKind("restore journal", 1, Storm.restore_journal),
)


STRIKES = {
    *(fault.name for fault in FAULTS),
    "drain at once",
    "rotate the token",
    "fill the disk of checkpoints",
    "fill the disk of logs",
    "hang the storage",
    "put the older journal back",
}


def hung_storage(folder: Path) -> str:
    """A library for agents and workers: flushes wait while the flag is there; empty: no compiler."""
    if shutil.which("cc") is None:
        return ""
    source, made = folder / "storage.c", folder / "storage.so"
    source.write_text(_HUNG_STORAGE)
    defined = [f'-DFLAG="{folder / STORAGE_FLAG}"', f'-DFOLDER="{folder / "disk"}"']
    subprocess.run(["cc", "-shared", "-fPIC", *defined, "-o", str(made), str(source), "-ldl"], check=True)
    return str(made)


@contextlib.contextmanager
def small_disk(folder: Path, size: int = DISK_BYTES) -> Any:
    """A file system of its own where root may mount one; else a plain folder, which is never full."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted and folder.name == "logs":  # to be read afterwards
            shutil.copytree(folder, folder.with_name("kept-logs"), dirs_exist_ok=True)
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)
