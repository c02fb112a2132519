"""Tensor parallel workers on GPUs: four MIG instances as two workers of two shards, NCCL between the shards;
a shard is killed inside an all-reduce of its group, and training heals.

    python bench/gpu/shards.py             root, a GPU that can be cut; cuts it, and makes it whole again
    python bench/gpu/shards.py --whole     no cut: all shards share the GPU; also step times by shards,
                                           beside torch's own tensor parallel on the same GPU
    python bench/gpu/shards.py --whole --mps    the same under MPS, which is started and ended
    python bench/gpu/shards.py --json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # where nothing can be installed
os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"

from everstep.engine.faults import parse_fault  # noqa: E402
from everstep.engine.job import Job, ModelSpec  # noqa: E402
from everstep.launch.local.outcome import Outcome  # noqa: E402
from everstep.launch.local.run import LocalTask  # noqa: E402
from everstep.node.fork_server import ForkServer  # noqa: E402
from harness.sweep import told  # noqa: E402

STEPS = 12
LIMIT_S = 45.0
UNTIED = ModelSpec(preset="gpt-125m", options={"tied": False})
KILLS = {
    "follower, in an all-reduce of F": "stage=0,replica=1,step=6,op=F1,when=inside,shard=1",
    "leader, in an all-reduce of I": "stage=0,replica=0,step=6,op=I2,when=inside,shard=0",
    "follower, between ops": "stage=0,replica=0,step=7,op=W1,shard=1",
}


def job(shards: int, replicas: int = 2) -> Job:
    return Job.from_dict(
        {
            "model": {"preset": "gpt-125m"},
            "data": {"kind": "synthetic", "rows": 4, "sequence": 512},
            "steps": STEPS,
            "replicas": replicas,
            "shards": shards,
            "microbatches": 4,
            "precision": "bf16",
            "device": "cuda",
        }
    )


def run(server: ForkServer, what: Job, faults: tuple[str, ...] = ()) -> Outcome:
    deadline, began = time.monotonic() + LIMIT_S, time.monotonic()

    def watch(kind: str, task: Any) -> None:
        if kind == "step":
            print(
                f"{what.shards} shards: step {task.step}",
                time.monotonic() - began,
                file=sys.stderr,
                flush=True,
            )
        if kind == "tick" and time.monotonic() > deadline:
            raise TimeoutError(told(task))

    return LocalTask(what, fork_server=server, faults=tuple(map(parse_fault, faults)), watch=watch).run()


def step_ms(outcome: Outcome) -> float:
    rows = [row for step, row in outcome.by_step().items() if step > 4]
    return statistics.median(row.seconds for row in rows) * 1e3


def torch_step(shards: int) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "bench/gpu/torch_shards.py"), "--shards", str(shards), "--json"]
    ran = subprocess.run(
        [*command, "--steps", str(STEPS)], stdout=subprocess.PIPE, text=True, check=False, timeout=100
    )
    lines = ran.stdout.splitlines()
    answer: dict[str, Any] = json.loads(lines[-1]) if lines else {"failure": f"exit code {ran.returncode}"}
    return answer


def compare_steps(server: ForkServer, found: dict[str, Any]) -> None:
    """The time of a step by shards, beside torch's."""
    for shards in (1, 2):
        found[f"torch_{shards}"] = torch_step(shards)
        print(found[f"torch_{shards}"], file=sys.stderr, flush=True)
        one = run(server, replace(job(shards, replicas=1), model=UNTIED))
        found[f"shards_{shards}"] = {"step_ms": step_ms(one), "loss": one.by_step()[STEPS].loss}
        print(found[f"shards_{shards}"], file=sys.stderr, flush=True)


def measure(whole: bool, transport: str) -> dict[str, Any]:
    server = ForkServer().start()
    found: dict[str, Any] = {"kills": []}
    try:
        if whole:
            compare_steps(server, found)
        pair = replace(job(2), transport=transport)  # type: ignore[arg-type]
        clean = run(server, pair)
        found |= {"clean_step_ms": step_ms(clean), "failure": clean.failure}
        print(found, file=sys.stderr, flush=True)
        for name, fault in KILLS.items():
            healed = run(server, pair, (fault,))
            ours, theirs = healed.by_step(), clean.by_step()
            same = len(ours) == STEPS and all(ours[s].loss == theirs[s].loss for s in theirs)
            row: dict[str, Any] = {"kill": name, "losses_equal": same, "failure": healed.failure}
            for incident in healed.incidents:
                row |= {"what": incident.what}
                if incident.resumed_at is not None:
                    since = incident.killed_at or incident.evidence_at
                    row |= {"resumed_after_ms": round((incident.resumed_at - since) * 1e3, 1)}
            found["kills"].append(row)
            print(row, file=sys.stderr, flush=True)
    finally:
        server.close()
    return found


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--mps", action="store_true", help="with --whole")
    parser.add_argument("--transport", default="auto", help="between the two workers")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.mps:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that MPS is ended
    cut = ["nvidia-smi -mig 1", "nvidia-smi mig -cgi 15,15,15,15 -C"]
    mend = ["nvidia-smi mig -dci", "nvidia-smi mig -dgi", "nvidia-smi -mig 0"]
    try:
        for command in () if args.whole else cut:
            subprocess.run(command.split(), check=True, stdout=subprocess.DEVNULL)
            time.sleep(1)
        found = measure(args.whole, args.transport)
    finally:
        if args.mps:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)
        for command in () if args.whole else mend:
            subprocess.run(command.split(), check=False, stdout=subprocess.DEVNULL)
    print(json.dumps(found, indent=None if args.json else 1))
    return 0 if all(row["losses_equal"] for row in found["kills"]) else 1


if __name__ == "__main__":
    sys.exit(main())
