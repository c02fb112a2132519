"""A torchrun-style script loses a rank: how soon is it noticed, how long until its ranks compute together?

    python bench/ranks.py                     3 rounds of each launcher, then 20 faults of each kind
    python bench/ranks.py --rounds 5 --json
    python bench/ranks.py --rounds 0          only how soon faults are noticed

restart    from SIGKILL of rank 1 to the end of the first all-reduce (gloo) that all ranks of the next life
           have done. The script loads torch and nothing else, so this is the launcher's share and the
           loading of torch. A launcher without one within the limit is counted as hung.
noticed    from the fault to the verdict: SIGKILL from outside, at a random moment; an exception from its
           raising; a SIGSTOP to the line that names the rank. Ranks without torch.
Launchers take turns. Times are on one clock (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
RANKS, VICTIM = 2, 1
LAUNCHERS = {
    "everstep run": [str(BIN / "everstep"), "run", "--nproc", "2"],
    "everstep run --preload torch": [str(BIN / "everstep"), "run", "--nproc", "2", "--preload", "torch"],
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", "--max-restarts", "3"],
    "torchrun, looks every 0.1 s": [
        *(str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", "--max-restarts", "3"),
        *("--monitor-interval", "0.1"),
    ],
}


# ------------------------------------------------------------------ the script that is launched


def be_a_rank(folder: Path) -> None:
    """Meet, and all-reduce until there is a file `stop`, which all ranks must have seen."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with (folder / f"{life}-{rank}").open("w", buffering=1) as diary:
        for _ in range(100_000):
            seen = torch.tensor([float((folder / "stop").exists())])
            dist.all_reduce(seen)
            diary.write(f"{os.getpid()} {time.monotonic()}\n")
            if seen.item() == dist.get_world_size():
                break
            time.sleep(0.02)
    dist.destroy_process_group()


# ------------------------------------------------------------------ restart


def restart(name: str, limit_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ranks-") as root:
        folder = Path(root)
        started = time.monotonic()
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [*LAUNCHERS[name], str(Path(__file__).resolve()), "--rank-of", root],
                cwd=root,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        try:
            return _one_restart(name, folder, process, started, limit_s)
        finally:
            _end(process, folder)


def _one_restart(
    name: str, folder: Path, process: subprocess.Popen[bytes], started: float, limit_s: float
) -> dict[str, Any]:
    def reached(life: int, number: int) -> float | None:
        """When all ranks of a life have done so many all-reduces."""
        times = [_lines(folder / f"{life}-{rank}") for rank in range(RANKS)]
        return max(each[number - 1][1] for each in times) if all(len(e) >= number for e in times) else None

    if _wait(lambda: reached(0, 20), process, 180) is None:
        raise SystemExit(f"{name} did not start:\n{(folder / 'output').read_text()[-3000:]}")
    launched = reached(0, 1)
    assert launched is not None
    killed = time.monotonic()
    os.kill(_lines(folder / f"0-{VICTIM}")[-1][0], signal.SIGKILL)
    again = _wait(lambda: reached(1, 1), process, limit_s)
    return {
        "launcher": name,
        "launch_s": launched - started,
        "restart_s": None if again is None else again - killed,
    }


def _lines(path: Path) -> list[tuple[int, float]]:
    text = path.read_text() if path.exists() else ""
    return [
        (int(pid), float(at))
        for pid, at in (line.split() for line in text.splitlines(True) if line[-1] == "\n")
    ]


def _wait(
    value: Callable[[], float | None], process: subprocess.Popen[bytes], limit_s: float
) -> float | None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        found = value()
        if found is not None:
            return found
        time.sleep(0.005)
    return None


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Let it end; then make it, and whoever of its ranks is left."""
    (folder / "stop").touch()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=35)
    if process.poll() is None:
        process.kill()
        process.wait()
    for diary in folder.glob("*-*"):
        for pid in {pid for pid, _ in _lines(diary)}:
            if str(folder) in _command_line(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


# ------------------------------------------------------------------ noticing

_SCRIPT = """
import os, sys, time
kind, folder = sys.argv[1:]
rank, life = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
path = f"{folder}/{life}"
if rank == int(life) % 2:
    with open(path + ".new", "w") as file: file.write(str(os.getpid()))
    os.rename(path + ".new", path)
while not os.path.exists(path): time.sleep(0.005)
time.sleep(0.05)
if kind == "exception" and rank == int(life) % 2: raise OSError("a fault of the bench")
time.sleep(60)
"""


def noticed(kind: str, faults: int, seed: int) -> list[float]:
    """Milliseconds, one for each fault of this kind."""
    from everstep.core.cluster import lives
    from everstep.launch.local.script_run import ScriptLaunch, ScriptRun
    from everstep.protocol.messages import RankRules
    from everstep.ranks import keeper

    keeper.STOPPED_PATIENCE_S, lives.BACKOFF_S = 0.1, 0.0
    with tempfile.TemporaryDirectory(prefix="ranks-") as root:
        folder = Path(root)
        (folder / "script.py").write_text(_SCRIPT)
        rules = RankRules(
            command=("script.py", kind, root),
            run_id="bench",
            folder=root,
            ranks=RANKS,
            max_restarts=faults - 1,
            logs=str(folder / "logs"),
        )
        named: list[float] = []

        def note(text: str) -> None:
            if "is stopped (SIGSTOP)" in text:
                named.append(time.monotonic())

        run = ScriptRun(ScriptLaunch(rules=rules, output=io.BytesIO(), errors=io.BytesIO()), note)
        struck: list[float] = []
        sender = {"sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP}.get(kind)
        if sender is not None:
            arguments = (folder, sender, faults, struck, random.Random(seed))
            threading.Thread(target=_strike, args=arguments, daemon=True).start()
        ran = run.run()
        wrong = [one.what for life, one in enumerate(ran.incidents) if one.rank != life % 2]
        assert not wrong, f"the wrong rank was named: {wrong}"
        assert len(ran.incidents) == faults
        noticed = [one.verdict.at for one in ran.incidents if one.verdict is not None]
        if kind == "exception":
            began = [one.evidence_at for one in ran.incidents]
            return [(b - a) * 1e3 for a, b in zip(began, noticed, strict=True)]
        seen = named if kind == "sigstop" else noticed
        return [(b - a) * 1e3 for a, b in zip(struck, seen, strict=True)]


def _strike(folder: Path, sender: int, faults: int, struck: list[float], draw: random.Random) -> None:
    for life in range(faults):
        path = folder / str(life)
        while not path.exists():
            time.sleep(0.002)
        time.sleep(0.05 + 0.3 * draw.random())
        struck.append(time.monotonic())
        os.kill(int(path.read_text()), sender)


# ------------------------------------------------------------------ tables


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", action="append", choices=list(LAUNCHERS), help="a launcher; may be repeated"
    )
    parser.add_argument("--faults", type=int, default=20, help="of each kind")
    parser.add_argument(
        "--limit-s", type=float, default=60, help="no all-reduce so long after the kill: hung"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of is not None:
        be_a_rank(args.rank_of)
        return
    trials = []
    for number in range(args.rounds):
        for name in args.only or LAUNCHERS:
            trials.append(restart(name, args.limit_s))
            print(f"round {number + 1}: {json.dumps(trials[-1])}", file=sys.stderr, flush=True)
    kinds = ("sigkill", "exception", "sigstop") if args.faults else ()
    times = {kind: noticed(kind, args.faults, args.seed) for kind in kinds}
    told = {"restart": trials} | {f"{kind}_ms": _quantiles(found) for kind, found in times.items()}
    print(json.dumps(told, indent=1) if args.json else _table(trials, times))


def _quantiles(values: list[float]) -> dict[str, float]:
    """Of 20 values p95 is the second largest."""
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "p50": round(statistics.median(ordered), 1),
        "p95": round(ordered[max(0, -(-len(ordered) * 95 // 100) - 1)], 1),
    }


def _table(trials: list[dict[str, Any]], times: dict[str, list[float]]) -> str:
    lines = [f"{'':32} {'runs':>4} {'hung':>4} {'launch s':>9} {'restart s':>22}"] if trials else []
    for name in dict.fromkeys(trial["launcher"] for trial in trials):
        mine = [trial for trial in trials if trial["launcher"] == name]
        done = [trial["restart_s"] for trial in mine if trial["restart_s"] is not None]
        spread = f"{statistics.median(done):.3f} ({min(done):.3f}-{max(done):.3f})" if done else "-"
        launch = statistics.median(trial["launch_s"] for trial in mine)
        lines.append(f"{name:32} {len(mine):4} {len(mine) - len(done):4} {launch:9.2f} {spread:>22}")
    for kind, found in times.items():
        told = _quantiles(found)
        lines.append(
            f"{kind:10} noticed, {told['n']} times: p50 {told['p50']:.1f} ms, p95 {told['p95']:.1f} ms"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
