"""How long until training goes on after one of two workers is killed: Everstep and others, in turns.

    python bench/peers/run.py                     all systems, 3 rounds
    python bench/peers/run.py --only nvrx --json  some of them, as JSON
    python bench/peers/run.py --device cuda --installed --steps 300    over NCCL, both workers on one GPU

Every system trains the same GPT (trial.py) with two workers of one thread each. When worker 1 has finished
step 25 we wait for half a step and send it SIGKILL. Times are read from the workers' diary, on one clock
(CLOCK_MONOTONIC):

    first    from the kill to the first step that somebody finishes in a new life (restarted, or a new epoch)
    past     from the kill to the first step beyond the last one finished before it
    redone   steps that had been finished and were run again

A run without a step within the limit after the kill is counted as hung and its times are left out. Other
systems are installed with pip into a virtual environment each, from requirements-*.txt beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VICTIM = 1
Line = dict[str, Any]  # of the diary
Commands = list[tuple[list[str], dict[str, str]]]  # to start: arguments, additions to the environment


@dataclass(frozen=True, slots=True)
class System:
    name: str
    environment: str | None  # None: the one this runs in
    commands: Callable[[Path, list[str]], Commands]  # of its python, and a trial's arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    system: str
    hung: bool
    first_s: float | None
    past_s: float | None
    steps_redone: int | None
    world_after: int | None
    step_ms: float  # a healthy one, before the kill
    launch_s: float  # to the first step


# ------------------------------------------------------------------ the systems


def _everstep(python: Path, arguments: list[str]) -> Commands:
    return [([str(python), str(HERE / "everstep_train.py"), *arguments], {})]


def _torchrun(python: Path, arguments: list[str]) -> Commands:
    options = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "3"]
    return [([str(python), *options, str(HERE / "ddp_train.py"), *arguments], {})]


def _nvrx(*interval_ms: str) -> Callable[[Path, list[str]], Commands]:
    def commands(python: Path, arguments: list[str]) -> Commands:
        command = [str(python), str(HERE / "nvrx_train.py"), *arguments, *interval_ms]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_ports()), "WORLD_SIZE": "2"}
        return [(command, {**where, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]

    return commands


def _version_of_nvrx() -> str:
    """The one that is installed here, or the one that would be."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("nvidia-resiliency-ext")
    return (HERE / "requirements-nvrx.txt").read_text().rpartition("==")[2].strip()


NVRX = f"NVRx {_version_of_nvrx()} in-process"
SYSTEMS = {
    "everstep": System("Everstep", None, _everstep),
    "nvrx": System(f"{NVRX}, defaults", "nvrx", _nvrx()),
    "nvrx-100ms": System(f"{NVRX}, 100 ms", "nvrx", _nvrx("100")),
    "torchrun": System("torchrun --max-restarts 3", "torchrun", _torchrun),
}


def _free_ports() -> int:
    """A port that is free now, and the one after it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


def prepared(system: System, root: Path, *, installed: bool) -> Path:
    """The system's python, with its packages; they are installed on first use, unless this one has them."""
    if system.environment is None or installed:
        return Path(sys.executable)
    home = root / system.environment
    stamp, wanted = home / "installed", HERE / f"requirements-{system.environment}.txt"
    if not stamp.exists() or stamp.read_text() != wanted.read_text():
        print(f"installing {wanted.name} ...", file=sys.stderr, flush=True)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([home / "bin" / "pip", "install", "--quiet", "-r", wanted], check=True)
        stamp.write_text(wanted.read_text())
    return home / "bin" / "python"


# ------------------------------------------------------------------ one trial


class Trial:
    """One run of one system, from its launch to the end of all its processes."""

    def __init__(self, system: System, python: Path, folder: Path, args: argparse.Namespace) -> None:
        self.system, self.folder, self.args = system, folder, args
        self.diary, checkpoints = folder / "diary", folder / "checkpoints"
        checkpoints.mkdir()
        arguments = [str(self.diary), str(checkpoints), str(args.steps), args.device]
        self.launched = time.monotonic()
        self.processes = [self._launch(command, env) for command, env in system.commands(python, arguments)]

    def run(self) -> Measured:
        patience_s = 0.0  # if this bench is ended itself
        try:
            killed = self._kill()
            self._wait(lambda lines: past(lines, killed) is not None, self.args.limit_s)
            healed = not self._hung(killed)
            if healed:  # it goes on to its end
                with contextlib.suppress(TimeoutError):
                    self._wait(lambda lines: lines[-1]["step"] == self.args.steps, self.args.limit_s)
            else:
                print(f"{self.system.name} hung; it printed last:\n{self._output()}", file=sys.stderr)
            patience_s = self.args.end_limit_s
            return self._measured(killed)
        finally:
            self._end(patience_s)

    def _launch(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        # Threads are limited here, before torch is loaded: later is too late for some of its kernels.
        env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _kill(self) -> float:
        """SIGKILL in the middle of a step of the victim; when it was."""

        def due(lines: list[Line]) -> bool:
            return any(line["rank"] == VICTIM and line["step"] >= self.args.kill_at for line in lines)

        if not self._wait(due, self.args.start_limit_s):
            raise SystemExit(
                f"{self.system.name} did not reach step {self.args.kill_at} within "
                f"{self.args.start_limit_s:.0f} s:\n{self._output()}"
            )
        lines = [line for line in self.lines() if line["rank"] == VICTIM]
        time.sleep(max(0.0, lines[-1]["at"] + step_s(lines) / 2 - time.monotonic()))
        now = time.monotonic()
        os.kill(lines[-1]["pid"], signal.SIGKILL)
        return now

    def _hung(self, killed: float) -> bool:
        return past(self.lines(), killed) is None

    def _measured(self, killed: float) -> Measured:
        lines = self.lines()
        before, after = split(lines, killed)
        beyond = past(lines, killed)
        done = max(line["step"] for line in before)
        return Measured(
            system=self.system.name,
            hung=beyond is None,
            step_ms=1e3 * step_s(before),
            first_s=after[0]["at"] - killed if after else None,
            past_s=beyond["at"] - killed if beyond else None,
            steps_redone=max(0, done - after[0]["step"] + 1) if after else None,
            world_after=after[-1]["world"] if after else None,
            launch_s=lines[0]["at"] - self.launched,
        )

    def _wait(self, is_so: Callable[[list[Line]], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            lines = self.lines()
            if lines and is_so(lines):
                return True
            if all(process.poll() is not None for process in self.processes):
                return False
            time.sleep(0.005)
        return False

    def lines(self) -> list[Line]:
        """The whole lines of the diary, in the order of time."""
        text = self.diary.read_text() if self.diary.exists() else ""
        return sorted(
            (json.loads(line) for line in text.splitlines(True) if line.endswith("\n")),
            key=lambda line: line["at"],
        )

    def _output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")[-4000:]

    def _end(self, patience_s: float) -> None:
        """Let everything that this trial started end, then make it."""
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience_s)
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for pid in {line["pid"] for line in self.lines()}:
            if str(self.diary) in _command_line(pid):  # a worker that outlived its launcher
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def split(lines: list[Line], killed: float) -> tuple[list[Line], list[Line]]:
    """Lines before the kill, and those of lives that began after it."""
    before = [line for line in lines if line["at"] <= killed]
    old = {line["life"] for line in before}
    return before, [line for line in lines if line["at"] > killed and line["life"] not in old]


def past(lines: list[Line], killed: float) -> Line | None:
    """The first step beyond all that was finished before the kill."""
    before, after = split(lines, killed)
    done = max(line["step"] for line in before)
    return next((line for line in after if line["step"] > done), None)


def step_s(lines: list[Line]) -> float:
    """The median step; the first five warm up."""
    ends = [line["at"] for line in lines if line["rank"] == VICTIM and line["step"] >= 5]
    return statistics.median(b - a for a, b in pairwise(ends))


# ------------------------------------------------------------------ all of them


def rounds(args: argparse.Namespace, root: Path) -> Iterator[Measured]:
    systems = [SYSTEMS[name] for name in args.only or SYSTEMS]
    pythons = [prepared(system, root, installed=args.installed) for system in systems]
    for number in range(args.rounds):
        for system, python in zip(systems, pythons, strict=True):
            with tempfile.TemporaryDirectory(prefix="trial-") as folder:
                found = Trial(system, python, Path(folder), args).run()
            how = "hung" if found.hung else f"first {found.first_s:.3f} s, past {found.past_s:.3f} s"
            print(f"  round {number + 1}/{args.rounds} {system.name}: {how}", file=sys.stderr, flush=True)
            yield found


def table(found: list[Measured]) -> str:
    lines = [
        f"{'':34} {'runs':>4} {'hung':>4} {'first s':>20} {'past s':>20} {'redone':>6} {'world':>5} "
        f"{'step ms':>7} {'launch s':>8}"
    ]
    for name in dict.fromkeys(run.system for run in found):
        runs = [run for run in found if run.system == name]
        healed = [run for run in runs if not run.hung]
        lines.append(
            f"{name:34} {len(runs):4} {len(runs) - len(healed):4} {_spread([r.first_s for r in healed]):>20} "
            f"{_spread([r.past_s for r in healed]):>20} {_most([r.steps_redone for r in healed]):>6} "
            f"{_most([r.world_after for r in healed]):>5} {statistics.median(r.step_ms for r in runs):7.1f} "
            f"{statistics.median(r.launch_s for r in runs):8.1f}"
        )
    return "\n".join(lines)


def _spread(values: list[Any]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})" if values else "-"


def _most(values: list[Any]) -> str:
    return "-" if not values else "/".join(str(value) for value in sorted(set(values)))


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--only", action="append", choices=list(SYSTEMS), help="a system; may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kill-at", type=int, default=25, help="the victim's last finished step")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--limit-s", type=float, default=60, help="no step so long after the kill: hung")
    parser.add_argument("--start-limit-s", type=float, default=180, help="to reach the step of the kill")
    parser.add_argument("--end-limit-s", type=float, default=15, help="for a finished system to exit")
    parser.add_argument("--environments", default="runs/peers", help="where virtual environments are made")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: both workers share one GPU")
    parser.add_argument("--installed", action="store_true", help="this Python has all packages")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended
    root = Path(args.environments).resolve()
    found = list(rounds(args, root))
    print(json.dumps([asdict(run) for run in found], indent=1) if args.json else table(found))


if __name__ == "__main__":
    main()
