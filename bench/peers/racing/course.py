"""One system's race: its processes are started, the trace's faults are done to them, the diary is kept."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from racing.systems import Part, System

from harness.race_trace import NODE_AWAY_S, NODES, OPERATOR_S, PER_NODE, SLOW_FOR_S, WORKERS, Fault

RELAUNCH_AFTER_S = 5.0  # a part that ended by itself, as a scheduler would
SLOW_ON_S, SLOW_OFF_S = 0.03, 0.06


class Course:
    def __init__(
        self, system: System, folder: Path, *, port: int, cores: str | None, say: Callable[[str], None]
    ) -> None:
        self.system, self.folder, self.cores, self.say = system, folder, cores, say
        self.diary = folder / "diary"
        self.parts = {part.name: part for part in system.parts(folder, port)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.due: list[tuple[float, Callable[[], None]]] = []  # what is to be done later
        self.happened: list[dict[str, Any]] = []
        self.relaunched = 0
        self.began = 0.0
        self.stop = threading.Event()
        self.away: set[int] = set()
        self._lines: list[dict[str, Any]] = []
        self._read = 0

    def run(
        self, faults: tuple[Fault, ...], seconds: float, start_limit_s: float, line: threading.Barrier
    ) -> bool:
        """False if it never finished a step. The clock starts when all systems have passed the `line`."""
        (self.folder / "checkpoints").mkdir()
        try:
            self.launched = time.monotonic()
            for part in self.parts.values():
                self._start(part)
            first = self._first_step(start_limit_s)
            if first is not None:
                self.say(f"first step after {first - self.launched:.1f} s")
            began = self.began = self._all_are_up(line)
            if first is None:
                return False
            for fault in faults:
                self.due.append((began + fault.at_s, lambda fault=fault: self._do(fault, began)))
            while time.monotonic() < began + seconds and not self.stop.is_set():
                self._turn()
                time.sleep(0.02)
            return True
        finally:
            self.end()

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines of the diary so far."""
        if self.diary.exists():
            with self.diary.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            self._lines += [json.loads(line) for line in whole.splitlines()]
        return self._lines

    # -------------------------------------------------------------- processes

    def _start(self, part: Part) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **part.env}
        env |= {"RACE_DIARY": str(self.diary), "RACE_FOLDER": str(self.folder / "checkpoints")}
        env |= {"RACE_NODE": str(part.node or 0), "RACE_WORKERS": str(WORKERS), "PYTHONUNBUFFERED": "1"}
        command = ["taskset", "-c", self.cores, *part.command] if self.cores else part.command
        with (self.folder / f"{part.name}.log").open("ab") as log:
            self.processes[part.name] = subprocess.Popen(
                command,
                env=env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _first_step(self, limit_s: float) -> float | None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not self.stop.is_set():
            at = [line["at"] for line in self.lines() if line["kind"] == "step"]
            if at:
                return min(at)
            self._turn()
            time.sleep(0.02)
        self.say("no step within the limit")
        return None

    def _all_are_up(self, line: threading.Barrier) -> float:
        """When the last system, or the time that it may take to start, has come."""
        waiter = threading.Thread(target=line.wait, daemon=True)
        waiter.start()
        while waiter.is_alive() and not self.stop.is_set():
            self._turn()
            waiter.join(0.02)
        return time.monotonic()

    def _turn(self) -> None:
        now = time.monotonic()
        ready = [entry for entry in self.due if entry[0] <= now]
        self.due = [entry for entry in self.due if entry[0] > now]
        for _, act in sorted(ready, key=lambda entry: entry[0]):
            act()
        for name, process in list(self.processes.items()):
            if process.poll() is not None and self.parts[name].node not in self.away:
                del self.processes[name]
                if not self.system.rejoins:
                    self.say(f"{name} ended with {process.returncode}")
                    if not self.processes:
                        self.relaunched += 1
                        self._later(RELAUNCH_AFTER_S, self._start_all)
                    continue
                self.relaunched += 1
                self.say(f"{name} ended with {process.returncode}; started again in {RELAUNCH_AFTER_S:.0f} s")
                self._later(RELAUNCH_AFTER_S, lambda part=self.parts[name]: self._start_if_here(part))

    def _start_all(self) -> None:
        self.say("everything has ended; all start again")
        for part in self.parts.values():
            self._start(part)

    def _start_if_here(self, part: Part) -> None:
        if part.node not in self.away and part.name not in self.processes:
            self._start(part)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self.due.append((time.monotonic() + seconds, act))

    def workers(self) -> dict[int, int]:
        """By slot: of every node the newest that are alive, by rank."""
        found: dict[int, int] = {}
        for node in range(NODES):
            born = [line for line in self.lines() if line["kind"] == "born" and line["node"] == node]
            order = {line["pid"]: line["order"] for line in born}
            live = [pid for pid in order if _alive(pid)][-PER_NODE:]
            found |= {PER_NODE * node + place: pid for place, pid in enumerate(sorted(live, key=order.get))}
        return found

    # -------------------------------------------------------------- faults

    def _do(self, fault: Fault, began: float) -> None:
        node = fault.slot // PER_NODE
        live = self.workers()
        near = sorted(slot for slot in live if slot // PER_NODE == node and slot != 0)
        slot = fault.slot if fault.slot in live else (near[0] if near else None)
        note = {"kind": fault.kind, "slot": slot, "planned_s": fault.at_s}
        note["at_s"] = round(time.monotonic() - began, 3)
        self.happened.append(note)
        self.say(
            f"{note['at_s']:6.1f} s  {fault.kind}  "
            + (f"node {node}" if fault.kind == "node" else f"worker {slot}")
        )
        if fault.kind == "node":
            self._lose(node)
        elif slot is None:
            note["missed"] = True  # its system has no worker there now
        elif fault.kind == "kill":
            _signal(live[slot], signal.SIGKILL)
        elif fault.kind == "hang":
            _signal(live[slot], signal.SIGSTOP)
            self._later(OPERATOR_S, lambda: self._operator(live[slot], note))
        else:
            self._slow(live[slot], time.monotonic() + SLOW_FOR_S)

    def _operator(self, pid: int, note: dict[str, Any]) -> None:
        if _alive(pid):
            note["operator"] = True
            self.say(f"a worker that hangs since {OPERATOR_S:.0f} s is killed")
            _signal(pid, signal.SIGKILL)

    def _slow(self, pid: int, until: float, stopped: bool = False) -> None:
        if time.monotonic() >= until:
            _signal(pid, signal.SIGCONT)
            return
        _signal(pid, signal.SIGCONT if stopped else signal.SIGSTOP)
        self._later(SLOW_ON_S if stopped else SLOW_OFF_S, lambda: self._slow(pid, until, not stopped))

    def _lose(self, node: int) -> None:
        self.away.add(node)
        doomed = [slot_pid for slot, slot_pid in self.workers().items() if slot // PER_NODE == node]
        for name, part in self.parts.items():
            if part.node == node and name in self.processes:
                process = self.processes.pop(name)
                doomed += [*descendants(process.pid), process.pid]
        for pid in doomed:
            _signal(pid, signal.SIGKILL)
        self._forget(node)
        self._later(NODE_AWAY_S, lambda: self._return(node))

    def _forget(self, node: int) -> None:
        """What was in the memory of a node."""
        patterns = [pattern for part in self.parts.values() if part.node == node for pattern in part.memory]
        for path in (Path(name) for pattern in patterns for name in glob.glob(pattern)):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _return(self, node: int) -> None:
        self.away.discard(node)
        self.say(f"node {node} is back")
        if not self.system.rejoins:
            return
        for part in self.parts.values():
            if part.node == node:
                self._start(part)

    def end(self) -> None:
        """Everything that this race started."""
        everyone = {
            pid for process in self.processes.values() for pid in [*descendants(process.pid), process.pid]
        }
        everyone |= set(self.workers().values())
        for pid in everyone:
            _signal(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        for node in range(NODES):
            self._forget(node)


def descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from descendants(int(child))
                yield int(child)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
