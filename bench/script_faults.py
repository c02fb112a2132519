"""Other people's scripts on four machines: a fault, who is named, how long until the run is past it.

    python -m bench.script_faults                                       all scripts and faults, Everstep
    python -m bench.script_faults --script ddp --fault kill --launcher everstep --launcher torchrun
    python -m bench.script_faults --python nvrx=/opt/nvrx/bin/python --launcher nvrx --json

Machines are namespaces (`harness/machines.py`, needs root). The scripts are those of `bench/scripts`, started
by the same command on every machine; the launcher's endpoint is the first one, the victim is the third.

kill, stop   SIGKILL or SIGSTOP of a rank        exception, spin   raised, or an endless loop, in a rank
lost         the machine is off at once; it is switched on again 5 s after the run is past the fault

past     from the fault to the first step beyond the last one before it (`-`: not within --limit-s)
redone   steps that were done before the fault and again after it
back     from switching a lost machine on to a step with all ranks
named    does the launcher say which rank (`lost`: machine) was at fault?
All times are from lines that ranks write at the end of a step, on one clock.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.machines import Machines, absent, inside

SCRIPTS = Path(__file__).resolve().parent / "scripts"
NAMES = ("n1", "n2", "n3", "n4")
HEAD, VICTIM = "n1", "n3"
PORT, FAULT_AFTER = 29400, 25  # steps
RETURNS_AFTER_S = 5.0
FAULTS = ("kill", "stop", "exception", "spin", "lost")
KINDS = {
    "ddp": ("ddp.py", "--snapshot"),
    "ddp-disk": ("ddp.py",),
    "fsdp2": ("fsdp2.py", "--snapshot"),
    "hf-trainer": ("hf_trainer.py",),
    "lightning": ("lightning_fit.py",),
    "deepspeed": ("deepspeed_zero2.py",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    command: Callable[[str, str], list[str]]  # of a machine's python and its name
    named: Callable[[str, int, str], bool]  # of the logs of all machines: is the rank (or machine) in there?
    start: Callable[[str], list[str]] | None = None  # beside them, on the first machine


def _everstep(python: str, name: str) -> list[str]:
    command = [python, "-m", "everstep.run", "--nnodes", "3:4", "--nproc-per-node", str(RANKS)]
    command += ["--max-restarts", "20", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HEAD}:{PORT}"]
    return [*command, "--rdzv-id", "trial", "--hang-after", "5"]


def _torchrun(python: str, name: str) -> list[str]:
    command = [python, "-m", "torch.distributed.run", "--nnodes", "3:4", "--nproc-per-node", str(RANKS)]
    command += ["--max-restarts", "20", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HEAD}:{PORT}"]
    command += ["--rdzv-id", "trial", "--monitor-interval", "0.1", "--rdzv-conf", "last_call_timeout=5"]
    return command


def _nvrx(python: str, name: str) -> list[str]:
    command = [python, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--nnodes", "3:4"]
    command += ["--nproc-per-node", str(RANKS), "--max-restarts", "20", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"{HEAD}:{PORT}", "--rdzv-id", "trial", "--monitor-interval", "0.1"]
    command += ["--ft-param-workload_check_interval", "1", "--rdzv-conf", "last_call_timeout=5"]
    return command


def _dlrover(python: str, name: str) -> list[str]:
    command = [python, "-m", "dlrover.trainer.torch.main", "--nnodes", "3:4", "--nproc_per_node", str(RANKS)]
    command += ["--max_restarts", "20", "--monitor-interval", "0.1"]
    return [*command, "--rdzv-conf", "join_timeout=600,lastcall_timeout=5,pend_timeout=3600"]


def _dlrover_master(python: str) -> list[str]:
    command = [python, "-m", "dlrover.python.master.main", "--platform", "local", "--job_name", "trial"]
    return [*command, "--port", str(PORT), "--node_num", str(len(NAMES))]


def _incident_names(text: str, rank: int, name: str) -> bool:
    told = re.findall(r"incident \d+: (.*)", text)
    if name:
        return any(re.search(rf"\b{name}\b", line) for line in told)
    return any(re.search(rf"\brank {rank}\b", line) for line in told)


def _torchelastic_names(text: str, rank: int, name: str) -> bool:
    """It says which local rank of its machine has ended; of machines, and of ranks that have not, nothing."""
    part = text.partition(f"=== {VICTIM}")[2].partition("===")[0]
    return not name and "failed (exitcode" in part


LAUNCHERS = {
    "everstep": Launcher(command=_everstep, named=_incident_names),
    "torchrun": Launcher(command=_torchrun, named=_torchelastic_names),
    "nvrx": Launcher(command=_nvrx, named=_torchelastic_names),
    "dlrover": Launcher(command=_dlrover, named=_torchelastic_names, start=_dlrover_master),
}
RANKS = 1


def trial(launcher: str, script: str, fault: str, python: str, limit_s: float, keep: Path | None) -> Any:
    root = Path(tempfile.mkdtemp(prefix="script-faults-", dir="/var/tmp"))
    try:
        with Machines(root, NAMES) as machines:
            found = _Trial(machines, launcher, script, fault, python).go(limit_s)
        if keep is not None:
            shutil.copytree(root, keep / f"{launcher}-{script}-{fault}", dirs_exist_ok=True)
        return found
    finally:
        shutil.rmtree(root, ignore_errors=True)


class _Trial:
    def __init__(self, machines: Machines, launcher: str, script: str, fault: str, python: str) -> None:
        self._machines, self._launcher, self._python = machines, LAUNCHERS[launcher], python
        self._names = (launcher, script, fault)
        self._fault = fault
        self._script = [str(SCRIPTS / KINDS[script][0]), *KINDS[script][1:]]
        self._folder = machines.shared / "trial"
        self._folder.mkdir()
        self._read, self._lines = 0, []

    def go(self, limit_s: float) -> dict[str, Any]:
        began = time.monotonic()
        if self._launcher.start is not None:
            self._machines[HEAD].start(self._launcher.start(self._python), "log", self._environment(HEAD))
        for name in NAMES:
            self._start(name)
        found = dict(zip(("launcher", "script", "fault"), self._names, strict=True))
        everywhere = len(NAMES) * RANKS
        if self._names[0] == "nvrx":  # of MIN:MAX nodes MIN train, the rest are spares
            everywhere = (len(NAMES) - 1) * RANKS
        if not self._until(lambda: self._highest(world=everywhere) >= FAULT_AFTER, 120 + limit_s):
            return found | {"error": "it did not start", "log": self._log()[-3000:]}
        found["start_s"] = round(self._times("step")[0] - began, 2)
        rank, struck = self._strike()
        before = self._highest(until=struck)

        def past() -> float | None:
            after = [
                one["at"] for one in self._seen("step") if one["at"] > struck and one["step"] > before + 1
            ]
            return min(after, default=None)

        # A step that was under way at the fault may still be finished by those who had all they needed.
        self._until(lambda: past() is not None and self._is_new_life(struck), limit_s)
        new = self._new_life(struck)
        beyond = [one["at"] for one in new if one["step"] > before]
        found["past_s"] = round(min(beyond) - struck, 2) if beyond else None
        found["redone"] = len({one["step"] for one in new if one["step"] <= before}) if beyond else None
        found["world"] = new[-1]["world"] if new else None
        if self._fault == "lost" and beyond:
            found["back_s"] = self._return(everywhere, limit_s)
        name = VICTIM if self._fault == "lost" else ""
        found["named"] = self._launcher.named(self._log(), rank, name)
        return found

    def _start(self, name: str) -> None:
        machine = self._machines[name]
        command = [*self._launcher.command(self._python, name), *self._script]
        machine.start(command, "log", self._environment(name))

    def _environment(self, name: str) -> dict[str, str]:
        number = str(NAMES.index(name))
        own = {"TRIAL_FOLDER": str(self._folder), "PYTHONUNBUFFERED": "1", "DS_ACCELERATOR": "cpu"}
        own |= {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONWARNINGS": "ignore"}
        own |= {"NODE_ID": number, "NODE_RANK": number, "NODE_NUM": str(len(NAMES))}  # of DLRover
        own |= {"POD_IP": self._machines[name].address, "DLROVER_MASTER_ADDR": f"{HEAD}:{PORT}"}
        return own | {"ELASTIC_JOB_NAME": "trial"}

    def _strike(self) -> tuple[int, float]:
        victim = next(one for one in reversed(self._seen("step")) if one["host"] == VICTIM)
        rank, machine = victim["rank"], self._machines[VICTIM]
        if self._fault in ("exception", "spin"):
            (self._folder / "fault.new").write_text(f"{self._fault} {rank}")
            (self._folder / "fault.new").rename(self._folder / "fault")
            assert self._until(lambda: bool(self._seen("fault")), 60), "the fault was not seen"
            return rank, self._seen("fault")[-1]["at"]
        if self._fault == "lost":
            struck = time.monotonic()
            self._machines.switch_off(VICTIM)
            return rank, struck
        machine.run("kill", "-9" if self._fault == "kill" else "-STOP", str(victim["pid"]))
        return rank, time.monotonic()

    def _return(self, everywhere: int, limit_s: float) -> float | None:
        time.sleep(RETURNS_AFTER_S)
        on = time.monotonic()
        self._machines.switch_on(VICTIM)
        self._start(VICTIM)

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

    def _log(self) -> str:
        logs = {name: self._machines[name].folder / "log" for name in NAMES}
        return "".join(f"=== {n}\n{p.read_text(errors='replace')}" for n, p in logs.items() if p.exists())

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
    parser.add_argument(
        "--python", action="append", default=[], metavar="LAUNCHER=PATH", help="not below /tmp"
    )
    parser.add_argument("--limit-s", type=float, default=60)
    parser.add_argument("--keep", type=Path, help="folder for the logs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if why := absent():
        sys.exit(why)
    inside(["-m", "bench.script_faults", *sys.argv[1:]])
    pythons = dict(each.split("=", 1) for each in args.python)
    rows = []
    for script in args.script or [kind for kind in KINDS if kind != "ddp-disk"]:
        for fault in args.fault or FAULTS:
            for launcher in args.launcher or ["everstep"]:
                python = pythons.get(launcher, sys.executable)
                rows.append(trial(launcher, script, fault, python, args.limit_s, args.keep))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(rows, indent=1) if args.json else table(rows))


COLUMNS = (("launcher", 10), ("script", 10), ("fault", 10), ("start_s", 8), ("past_s", 7), ("redone", 7))
COLUMNS += (("back_s", 7), ("named", 6))


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["".join(f"{name:<{width}} " for name, width in COLUMNS)]
    for row in rows:
        cells = ((row.get(name), width) for name, width in COLUMNS)
        shown = (({None: "-", True: "yes", False: "no"}.get(cell, cell), width) for cell, width in cells)
        lines.append("".join(f"{cell!s:<{width}} " for cell, width in shown) + row.get("error", ""))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
