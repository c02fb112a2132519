"""Tensor parallel workers that share a GPU, two of two shards, NCCL between the shards: step times by shards;
a shard is killed inside an all-reduce of its group, and training heals.

    python bench/gpu/shards.py
    python bench/gpu/shards.py --mps       under MPS, which is started and ended
    python bench/gpu/shards.py --mps --context    shards have parts of each row, and whole layers
    python bench/gpu/shards.py --only shards_2,clean,kills    some parts only
    python bench/gpu/shards.py --device cpu --preset gpt-tiny         a trial of the bench itself
    python bench/gpu/shards.py --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # where nothing can be installed
os.environ["PYTHONPATH"] = ":".join(filter(None, (f"{ROOT / 'src'}:{ROOT}", os.environ.get("PYTHONPATH"))))

from everstep.engine.telemetry.faults import parse_fault  # noqa: E402
from everstep.job.job import Job  # noqa: E402
from everstep.launch.local.outcome import Outcome  # noqa: E402
from everstep.launch.local.run import LocalTask  # noqa: E402
from everstep.node.fork_server import ForkServer  # noqa: E402
from harness.mps import mps  # noqa: E402
from harness.sweep import told  # noqa: E402

KILLS = {
    "follower, in an all-reduce of F": "stage=0,replica=1,step=6,op=F1,when=inside,shard=1",
    "leader, in an all-reduce of I": "stage=0,replica=0,step=6,op=I1,when=inside,shard=0",
    "follower, between ops": "stage=0,replica=0,step=7,op=W1,shard=1",
}
PARTS = ("shards_2", "sequence_2", "shards_1", "clean", "kills")
BEGAN = time.monotonic()


def say(*words: Any) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s", *words, file=sys.stderr, flush=True)


def job(given: argparse.Namespace, shards: int, replicas: int = 2, *, tied: bool = True) -> Job:
    return Job.from_dict(
        {
            "model": {"preset": given.preset, "tied": tied},
            "data": {"kind": "synthetic", "rows": 4, "sequence": given.sequence},
            "steps": given.steps,
            "replicas": replicas,
            "shards": shards,
            "context_parallel": given.context and shards > 1,
            "microbatches": given.microbatches,
            "precision": "bf16" if given.device == "cuda" else "fp32",
            "accumulate": given.accumulate,
            "device": given.device,
            "transport": given.transport,
        }
    )


def run(server: ForkServer, what: Job, limit: float, faults: tuple[str, ...] = ()) -> Outcome | None:
    """None: not at its end within the limit; how far it came is printed."""
    deadline = time.monotonic() + limit
    name = f"{what.replicas} x {what.shards} shards:"
    say(name, "starts")

    def watch(kind: str, task: Any) -> None:
        if kind == "step":
            say(name, "step", task.step, f"{task.seconds:.3f} s, loss {task.loss!r}")
        elif kind in ("incident", "raised"):
            say(name, kind, str(task)[:400])
        elif kind == "tick" and time.monotonic() > deadline:
            show_stacks()
            raise TimeoutError(told(task))

    try:
        task = LocalTask(what, fork_server=server, faults=tuple(map(parse_fault, faults)), watch=watch)
        return task.run()
    except TimeoutError as late:
        say(name, f"gave up after {limit:.0f} s:", late)
        return None


def show_stacks() -> None:
    """Of every process below this one, where a `sitecustomize` on PYTHONPATH has registered SIGUSR1."""
    if "EVERSTEP_BENCH_STACKS" in os.environ:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)
        time.sleep(1)


def step_ms(outcome: Outcome) -> float:
    rows = [row for step, row in outcome.by_step().items() if step > 4]
    return round(statistics.median(row.seconds for row in rows) * 1e3, 1)


def our_step(
    given: argparse.Namespace, server: ForkServer, shards: int, *, sequence: bool = False
) -> dict[str, Any]:
    """One replica. `sequence`: the shards split the sequence too."""
    what = replace(job(given, shards, replicas=1, tied=False), sequence_parallel=sequence)
    ended = run(server, what, given.limit)
    if ended is None or ended.failure:
        return {"failure": "no end" if ended is None else ended.failure}
    return {
        "step_ms": step_ms(ended),
        "first_loss": ended.by_step()[1].loss,
        "loss": ended.by_step()[given.steps].loss,
    }


def kills(given: argparse.Namespace, server: ForkServer, clean: Outcome) -> list[dict[str, Any]]:
    rows = []
    for name, fault in KILLS.items():
        healed = run(server, job(given, 2), given.limit, (fault,))
        if healed is None:
            rows.append({"kill": name, "losses_equal": False, "failure": "no end"})
            continue
        ours, theirs = healed.by_step(), clean.by_step()
        same = len(ours) == given.steps and all(ours[s].loss == theirs[s].loss for s in theirs)
        row: dict[str, Any] = {"kill": name, "losses_equal": same, "failure": healed.failure}
        for incident in healed.incidents:
            row |= {"what": incident.what}
            if incident.resumed_at is not None:
                since = incident.killed_at or incident.evidence_at
                row |= {"resumed_after_ms": round((incident.resumed_at - since) * 1e3, 1)}
        rows.append(row)
        say(row)
    return rows


def measure(given: argparse.Namespace) -> dict[str, Any]:
    server = ForkServer().start()
    server.warm_up()  # no run waits for imports, and is given up for them
    say("torch is loaded")
    found: dict[str, Any] = {}
    try:
        for part in given.only:
            if part.startswith("sequence") and given.context:
                continue  # one or the other
            if part.startswith(("shards", "sequence")):
                found[part] = our_step(given, server, int(part[-1]), sequence=part.startswith("sequence"))
            if part in found:
                say(part, found[part])
        if "clean" in given.only or "kills" in given.only:
            clean = run(server, job(given, 2), given.limit)
            if clean is None or clean.failure:
                found["failure"] = "no end" if clean is None else clean.failure
            else:
                found["clean_step_ms"] = step_ms(clean)
                say("clean", found["clean_step_ms"], "ms per step")
                found["kills"] = kills(given, server, clean) if "kills" in given.only else []
    finally:
        server.close()
    return found


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--mps", action="store_true")
    parser.add_argument("--context", action="store_true", help="shards have parts of each row")
    parser.add_argument("--transport", default="auto", help="between the two workers")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"of {','.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=float, default=45.0, help="seconds, of each run")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--preset", default="gpt-125m")
    parser.add_argument("--accumulate", default="strict")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.only = args.only or PARTS
    with mps(args.mps):
        found = measure(args)
    print(json.dumps(found, indent=None if args.json else 1))
    return 0 if "failure" not in found and all(row["losses_equal"] for row in found.get("kills", ())) else 1


if __name__ == "__main__":
    sys.exit(main())
