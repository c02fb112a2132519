"""Other people's scripts on four machines: a fault, who is named, how long until the run is past it.

    python -m bench.script_faults                                       all scripts and faults, Everstep
    python -m bench.script_faults --script ddp --fault kill --launcher everstep --launcher torchrun
    python -m bench.script_faults --python nvrx=/opt/nvrx/bin/python --launcher nvrx --json
    python -m bench.script_faults --all-launchers --output faults.json --again     what faults.json lacks
    python -m bench.script_faults --all-launchers --side-by-side 7 --within-s 240     on 16 cores
    python -m bench.script_faults --read faults.json --markdown

Machines are namespaces (`harness/machines.py`, needs root); where these cannot be made, or with --here, a
machine is a set of processes of this one, and a lost machine is SIGKILL to all of them at once. The scripts
are those of `bench/scripts`, started by the same command on every machine; the launcher's endpoint is the
first one, the victim is the third.

kill, stop   SIGKILL or SIGSTOP of a rank        exception, spin   raised, or an endless loop, in a rank
lost         the machine is off at once; it is switched on again 5 s after the run is past the fault

past     from the fault to the first step beyond the last one before it (`-`: not within --limit-s)
redone   steps that were done before the fault and again after it
back     from switching a lost machine on to a step with all ranks
named    does the launcher say which rank (`lost`: machine) was at fault?
All times are from lines that ranks write at the end of a step, on one clock. `load` is the machine's load
before the trial: what other programs took. A script or launcher whose packages are not installed is skipped,
and says so. Peers are not asked about a spinning rank: torchrun sees none, NVRx and DLRover would need
heartbeats in the script. A stopped rank or a lost machine they notice when collectives of the others time
out, after 30 minutes unless --timeout-s is given.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # also where it is not installed

from everstep.ranks.looks import started_with
from harness.machines import Machines, absent, inside

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
NAMES = ("n1", "n2", "n3", "n4")
HEAD, VICTIM = "n1", "n3"
PORT, FAULT_AFTER = 29400, 25  # steps
RETURNS_AFTER_S = 5.0
FAULTS = ("kill", "stop", "exception", "spin", "lost")

KINDS = {
    "ddp": ("ddp.py", "--snapshot"),
    "fsdp2": ("fsdp2.py", "--snapshot"),
    "hf-trainer": ("hf_trainer.py",),
    "lightning": ("lightning_fit.py",),
    "deepspeed": ("deepspeed_zero2.py",),
    "ddp-disk": ("ddp.py",),  # as ddp, with its own checkpoints; so it is run by other launchers
    "fsdp2-disk": ("fsdp2.py",),
}
NEEDS = {"hf-trainer": "transformers", "lightning": "lightning", "deepspeed": "deepspeed"}
CELL = ("launcher", "script", "fault")
Cell = tuple[str, str, str]
PLAIN = {"ddp": "ddp-disk", "fsdp2": "fsdp2-disk"}  # for launchers that keep no states


def incident_names(logs: Mapping[str, str], victim: str, rank: int, name: str) -> bool:
    """Is the rank in the logs of the machines, or, where a machine is lost, its name?"""
    told = re.findall(r"incident \d+: (.*)", "\n".join(logs.values()))
    return any(re.search(rf"\b{name or f'rank {rank}'}\b", line) for line in told)


def torchelastic_names(logs: Mapping[str, str], victim: str, rank: int, name: str) -> bool:
    """It says which local rank of its machine has ended; of machines, and of ranks that have not, nothing."""
    return not name and "failed (exitcode" in logs.get(victim, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    command: Callable[[str, str], list[str]]  # of a machine's python and the address of the first machine
    named: Callable[[Mapping[str, str], str, int, str], bool]  # of the logs: see `incident_names`
    module: str  # that must be installed
    start: Callable[[str], list[str]] | None = None  # beside them, on the first machine
    environment: Mapping[str, str] = field(default_factory=dict)


def _everstep(python: str, head: str) -> list[str]:
    command = [python, "-m", "everstep.run", "--nnodes", "3:4", "--nproc-per-node", str(RANKS)]
    command += ["--max-restarts", "20", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:{PORT}"]
    command += ["--rdzv-id", "trial", "--rdzv-conf", "last_call_timeout=5"]
    return [*command, "--hang-after", "5"]


def _torchrun(python: str, head: str) -> list[str]:
    command = [python, "-m", "torch.distributed.run", "--nnodes", "3:4", "--nproc-per-node", str(RANKS)]
    command += ["--max-restarts", "20", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:{PORT}"]
    command += ["--rdzv-id", "trial", "--monitor-interval", "0.1", "--rdzv-conf", "last_call_timeout=5"]
    return command


def _nvrx(python: str, head: str) -> list[str]:
    command = [python, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--nnodes", "3:4"]
    command += ["--nproc-per-node", str(RANKS), "--max-restarts", "20", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"{head}:{PORT}", "--rdzv-id", "trial", "--monitor-interval", "0.1"]
    command += ["--ft-workload-check-interval", "1", "--workers-stop-timeout", "5"]
    return command


def _dlrover(python: str, head: str) -> list[str]:
    command = [python, "-m", "dlrover.trainer.torch.main", "--nnodes", "3:4", "--nproc_per_node", str(RANKS)]
    command += ["--max_restarts", "20", "--monitor-interval", "0.1"]
    return [*command, "--rdzv-conf", "join_timeout=600,lastcall_timeout=5,pend_timeout=3600"]


def _dlrover_master(python: str) -> list[str]:
    command = [python, "-m", "dlrover.python.master.main", "--platform", "local", "--job_name", "trial"]
    return [*command, "--port", str(PORT), "--node_num", str(len(NAMES))]


LAUNCHERS = {
    "everstep": Launcher(command=_everstep, named=incident_names, module="everstep"),
    "torchrun": Launcher(
        command=_torchrun,
        named=torchelastic_names,
        module="torch",
        # With the agents' store shared, ranks of a new round met gloo's addresses of the last one, and failed
        # as often as they were restarted.
        environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    "nvrx": Launcher(
        command=_nvrx, named=torchelastic_names, module="nvidia_resiliency_ext.fault_tolerance.launcher"
    ),
    "dlrover": Launcher(
        command=_dlrover,
        named=torchelastic_names,
        module="dlrover.trainer.torch.main",
        start=_dlrover_master,
    ),
}
RANKS = 1


class ProcessMachine:
    """Of `Machine` what a trial needs, without namespaces: processes know each other by a variable."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.address = name, folder, "127.0.0.1"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.folder.mkdir(parents=True)
        self._mark = f"TRIAL_MACHINE={folder}"

    def start(self, command: Sequence[str], log: str, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        name, _, value = self._mark.partition("=")
        own = {"OMP_NUM_THREADS": "1", "TRIAL_HOST": self.name, name: value, "GLOO_SOCKET_IFNAME": "lo"}
        with (self.folder / log).open("ab") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env={**os.environ, **more, **own}, start_new_session=True
            )
        self.processes.append(process)
        return process

    def run(self, *command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def switch_off(self) -> None:
        while pids := [pid for pid in started_with([self._mark.encode()]) if pid != os.getpid()]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.processes:
                process.poll()
        for process in self.processes:
            process.wait()
        self.processes.clear()


class ProcessMachines:
    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.shared = folder / "shared"
        self.shared.mkdir(parents=True)
        self._all = {name: ProcessMachine(name, folder / name) for name in names}

    def __enter__(self) -> ProcessMachines:
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._all:
            self.switch_off(name)

    def __getitem__(self, name: str) -> ProcessMachine:
        return self._all[name]

    def switch_on(self, name: str) -> None:
        """It is there."""

    def switch_off(self, name: str) -> None:
        self._all[name].switch_off()


def trial(launcher: str, script: str, fault: str, python: str, args: argparse.Namespace) -> Any:
    root = Path(tempfile.mkdtemp(prefix="script-faults-", dir="/var/tmp"))
    limit_s, keep = args.limit_s, args.keep
    try:
        with (ProcessMachines if args.here else Machines)(root, NAMES) as machines:
            found = _Trial(machines, launcher, script, fault, python).go(limit_s)
        if keep is not None:
            shutil.copytree(root, keep / f"{launcher}-{script}-{fault}", dirs_exist_ok=True)
        return found
    finally:
        shutil.rmtree(root, ignore_errors=True)


class _Trial:
    def __init__(self, machines: Any, launcher: str, script: str, fault: str, python: str) -> None:
        self._machines, self._launcher, self._python = machines, LAUNCHERS[launcher], python
        self._names = (launcher, script, fault)
        self._head = HEAD if isinstance(machines, Machines) else machines[HEAD].address
        self._fault = fault
        self._script = [str(SCRIPTS / KINDS[script][0]), *KINDS[script][1:]]
        self._folder = machines.shared / "trial"
        self._folder.mkdir()
        self._read, self._lines, self._victim = 0, [], VICTIM

    def go(self, limit_s: float) -> dict[str, Any]:
        began = time.monotonic()
        if self._launcher.start is not None:
            self._machines[HEAD].start(self._launcher.start(self._python), "log", self._environment(HEAD))
        for name in NAMES:
            self._start(name)
        found = dict(zip(CELL, self._names, strict=True))
        everywhere = len(NAMES) * RANKS
        if self._names[0] == "nvrx":  # of MIN:MAX nodes MIN train, the rest are spares
            everywhere = (len(NAMES) - 1) * RANKS

        def is_settled() -> bool:
            return self._highest(world=everywhere) >= FAULT_AFTER or self._has_ended()

        if not self._until(is_settled, 120 + limit_s) or self._has_ended():
            return found | {"error": "it did not start", "log": "\n".join(self._logs().values())[-3000:]}
        found["start_s"] = round(self._times("step")[0] - began, 2)
        hosts = {one["host"] for one in self._seen("step")} - {HEAD}
        if VICTIM not in hosts:  # it is a spare of NVRx
            self._victim = min(hosts)
        victim_pid = self._machines[self._victim].processes[0].pid
        rank, struck = self._strike()
        before = self._highest(until=struck)

        def past() -> float | None:
            after = [
                one["at"] for one in self._seen("step") if one["at"] > struck and one["step"] > before + 1
            ]
            return min(after, default=None)

        # A step that was under way at the fault may still be finished by those who had all they needed.
        self._until(lambda: (past() is not None and self._is_new_life(struck)) or self._has_ended(), limit_s)
        new = self._new_life(struck)
        beyond = [one["at"] for one in new if one["step"] > before]
        found["past_s"] = round(min(beyond) - struck, 2) if beyond else None
        found["redone"] = len({one["step"] for one in new if one["step"] <= before}) if beyond else None
        found["world"] = new[-1]["world"] if new else None
        if self._fault == "lost" and beyond and everywhere == len(NAMES) * RANKS:  # else it is a spare again
            found["back_s"] = self._return(everywhere, limit_s)
        name = ""
        if self._fault == "lost":  # a set of processes is named by the pid of its first one
            is_machine = isinstance(self._machines, Machines)
            name = self._victim if is_machine else f"{os.uname().nodename}-{victim_pid}"
        found["named"] = self._launcher.named(self._logs(), self._victim, rank, name)
        return found

    def _has_ended(self) -> bool:
        """On every machine: there is nothing to wait for."""
        return all(process.poll() is not None for name in NAMES for process in self._machines[name].processes)

    def _start(self, name: str) -> None:
        machine = self._machines[name]
        command = [*self._launcher.command(self._python, self._head), *self._script]
        machine.start(command, "log", self._environment(name))

    def _environment(self, name: str) -> dict[str, str]:
        number = str(NAMES.index(name))
        own = {"TRIAL_FOLDER": str(self._folder), "PYTHONUNBUFFERED": "1", "DS_ACCELERATOR": "cpu"}
        own |= {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONWARNINGS": "ignore"}
        own |= {"NODE_ID": number, "NODE_RANK": number, "NODE_NUM": str(len(NAMES))}  # of DLRover
        own |= {"POD_IP": self._machines[name].address, "DLROVER_MASTER_ADDR": f"{self._head}:{PORT}"}
        return own | {"ELASTIC_JOB_NAME": "trial"} | self._launcher.environment

    def _strike(self) -> tuple[int, float]:
        victim = next(one for one in reversed(self._seen("step")) if one["host"] == self._victim)
        rank, machine = victim["rank"], self._machines[self._victim]
        if self._fault in ("exception", "spin"):
            (self._folder / "fault.new").write_text(f"{self._fault} {rank}")
            (self._folder / "fault.new").rename(self._folder / "fault")
            assert self._until(lambda: bool(self._seen("fault")), 60), "the fault was not seen"
            return rank, self._seen("fault")[-1]["at"]
        if self._fault == "lost":
            struck = time.monotonic()
            self._machines.switch_off(self._victim)
            return rank, struck
        machine.run("kill", "-9" if self._fault == "kill" else "-STOP", str(victim["pid"]))
        return rank, time.monotonic()

    def _return(self, everywhere: int, limit_s: float) -> float | None:
        time.sleep(RETURNS_AFTER_S)
        on = time.monotonic()
        self._machines.switch_on(self._victim)
        self._start(self._victim)

        def whole() -> list[float]:
            return [o["at"] for o in self._seen("step") if o["at"] > on and o["world"] == everywhere]

        self._until(lambda: bool(whole()), limit_s)
        return round(whole()[0] - on, 2) if whole() else None

    # -------------------------------------------------------------- the diary

    def _seen(self, kind: str) -> list[dict[str, Any]]:
        path = self._folder / "diary"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                data = file.read().rpartition(b"\n")[0]
            self._read += len(data) + 1 if data else 0
            self._lines += [json.loads(line) for line in data.splitlines()]
        return [one for one in self._lines if one["kind"] == kind]

    def _times(self, kind: str) -> list[float]:
        return [one["at"] for one in self._seen(kind)]

    def _highest(self, *, world: int | None = None, until: float = float("inf")) -> int:
        """The last step that a rank has ended."""
        seen = (o for o in self._seen("step") if o["at"] <= until and world in (None, o["world"]))
        return max((one["step"] for one in seen), default=0)

    def _new_life(self, struck: float) -> list[dict[str, Any]]:
        hosts = {(one["host"], one["pid"]) for one in self._seen("begins") if one["at"] > struck}
        return [o for o in self._seen("step") if o["at"] > struck and (o["host"], o["pid"]) in hosts]

    def _is_new_life(self, struck: float) -> bool:
        before = self._highest(until=struck)
        return any(one["step"] > before for one in self._new_life(struck))

    def _logs(self) -> dict[str, str]:
        paths = {name: self._machines[name].folder / "log" for name in NAMES}
        return {n: f"=== {n}\n{p.read_text(errors='replace')}" for n, p in paths.items() if p.exists()}

    def _until(self, true: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not true():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--script", action="append", choices=list(KINDS), help="may be repeated")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="may be repeated")
    parser.add_argument("--launcher", action="append", choices=list(LAUNCHERS), help="may be repeated")
    parser.add_argument("--all-launchers", action="store_true")
    parser.add_argument(
        "--python", action="append", default=[], metavar="LAUNCHER=PATH", help="not below /tmp"
    )
    parser.add_argument("--here", action="store_true", help="no namespaces: machines are sets of processes")
    parser.add_argument("--limit-s", type=float, default=60)
    parser.add_argument("--timeout-s", default="0", help="of collectives; torch's own if not given (30 min)")
    parser.add_argument("--side-by-side", type=int, default=1, help="trials at a time, each with its own net")
    parser.add_argument("--within-s", type=float, help="no trial is started later")
    parser.add_argument("--keep", type=Path, help="folder for the logs")
    parser.add_argument("--output", type=Path, help="JSON file, written after each trial")
    parser.add_argument("--again", action="store_true", help="only what --output has no figure of yet")
    parser.add_argument("--read", type=Path, help="only show what --output has written")
    parser.add_argument("--markdown", action="store_true", help="launchers beside each other")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.read is not None:
        show(json.loads(args.read.read_text()), args)
        return
    if not args.here and (why := absent()):
        print(f"{why}; machines are sets of processes (--here)", file=sys.stderr)
        args.here = True
    if not args.here and args.side_by_side == 1:
        inside(["-m", "bench.script_faults", *sys.argv[1:]])
    os.environ["TRIAL_TIMEOUT_S"] = args.timeout_s
    path = filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    names = list(LAUNCHERS) if args.all_launchers else args.launcher or ["everstep"]
    rows: list[dict[str, Any]] = []
    if args.again and args.output is not None and args.output.exists():
        rows = [row for row in json.loads(args.output.read_text()) if "past_s" in row]
    done = {(row["launcher"], row["script"], row["fault"]) for row in rows}
    left = [cell for cell in cells(args.script, args.fault, names) if cell not in done]
    began = time.monotonic()

    def tried(cell: Cell) -> dict[str, Any]:
        if args.within_s is not None and time.monotonic() > began + args.within_s:
            return dict(zip(CELL, cell, strict=True)) | {"skipped": "not tried: the time was up"}
        return row_here(cell, args) if args.side_by_side == 1 else row_apart(cell, args)

    with ThreadPoolExecutor(args.side_by_side) as pool:
        for each in as_completed([pool.submit(tried, cell) for cell in left]):
            rows.append(each.result())
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if args.output is not None:
                args.output.write_text(json.dumps(rows, indent=1))
    order = cells(args.script, args.fault, names)
    rows.sort(key=lambda row: order.index(cell) if (cell := tuple(row[key] for key in CELL)) in order else -1)
    show(rows, args)


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(json.dumps(rows, indent=1) if args.json else beside(rows) if args.markdown else table(rows))


def cells(scripts: list[str] | None, faults: list[str] | None, launchers: list[str]) -> list[Cell]:
    """All launchers of one script and one fault in turn, so that they meet the same load."""
    chosen = scripts or [kind for kind in KINDS if kind not in PLAIN.values()]
    found: dict[Cell, None] = {}
    for script in chosen:
        for fault in faults or FAULTS:
            for launcher in launchers:
                if launcher == "everstep":
                    found[launcher, script, fault] = None
                elif fault != "spin":
                    found[launcher, PLAIN.get(script, script), fault] = None
    return list(found)


def row_here(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    launcher, script, _ = cell
    row: dict[str, Any] = dict(zip(CELL, cell, strict=True))
    python = dict(each.split("=", 1) for each in args.python).get(launcher, sys.executable)
    if why := missing(python, launcher, script):
        return row | {"skipped": why}
    row |= {"machines": "processes" if args.here else "namespaces", "load": round(os.getloadavg()[0], 1)}
    return row | trial(*cell, python, args)


def row_apart(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """In a process and a network of its own, beside other trials."""
    command = [sys.executable, "-m", "bench.script_faults", "--json", "--limit-s", str(args.limit_s)]
    command += ["--timeout-s", args.timeout_s]
    for name, value in zip(CELL, cell, strict=True):
        command += [f"--{name}", value]
    for each in args.python:
        command += ["--python", each]
    command += ["--here"] * args.here + (["--keep", str(args.keep)] if args.keep else [])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return dict(zip(CELL, cell, strict=True)) | {"error": last}
    row: dict[str, Any] = json.loads(done.stdout)[0]
    return row


def missing(python: str, launcher: str, script: str) -> str:
    """Why this cannot be run here; empty: it can."""
    for module in dict.fromkeys([LAUNCHERS[launcher].module, "torch", NEEDS.get(script, "torch")]):
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        tried = subprocess.run([python, "-c", f"import {module}"], capture_output=True, env=environment)
        if tried.returncode:
            last = (tried.stderr.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
            return f"{module} cannot be imported by {python}: {last}"
    return ""


COLUMNS = (("launcher", 10), ("script", 10), ("fault", 10), ("load", 5), ("start_s", 8), ("past_s", 7))
COLUMNS += (("redone", 7), ("back_s", 7), ("named", 6))


_WORDS = {"None": "-", "True": "yes", "False": "no"}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["".join(f"{name:<{width}} " for name, width in COLUMNS)]
    for row in rows:
        cells = ((row.get(name), width) for name, width in COLUMNS)
        shown = "".join(f"{_WORDS.get(str(cell), cell)!s:<{width}} " for cell, width in cells)
        lines.append(shown + row.get("error", row.get("skipped", "")))
    return "\n".join(lines)


def beside(rows: list[dict[str, Any]]) -> str:
    """A line per script and fault, a column per launcher."""
    ours = {plain: kind for kind, plain in PLAIN.items()}
    by = {(ours.get(row["script"], row["script"]), row["fault"], row["launcher"]): row for row in rows}
    names = [name for name in LAUNCHERS if any(key[2] == name for key in by)]
    lines = ["| script | fault | " + " | ".join(names) + " |", "|---" * (2 + len(names)) + "|"]
    for script, fault in dict.fromkeys(key[:2] for key in by):
        found = [by.get((script, fault, name)) for name in names]
        lines.append(f"| {script} | {fault} | " + " | ".join(_cell(row) for row in found) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "past_s" not in row:
        return str(row.get("skipped", row.get("error"))).partition(":")[0]
    if row["past_s"] is None:
        return "not past it" + (", named" if row["named"] else "")
    back = f"; back {row['back_s']} s" if row.get("back_s") is not None else ""
    return f"{row['past_s']} s, {row['redone']} again{', named' if row['named'] else ''}{back}"


if __name__ == "__main__":
    main()
