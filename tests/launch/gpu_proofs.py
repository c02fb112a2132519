"""What must hold on a GPU, each with real processes on one card: memory flat over hundreds of steps with
tensor parallel workers, evaluation beside recorded ops through two kills, eight replicas on one card.

    python -m tests.launch.gpu_proofs                      all
    python -m tests.launch.gpu_proofs flat eight --json    some, as one JSON document

Losses are compared to the bit with a failure-free run. Memory is what nvidia-smi counts for all processes on
the card, sampled once a second. `eight` runs under MPS, which is started for it and stopped again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # where nothing can be installed

from harness.mps import mps  # noqa: E402

LIMIT_S = 240.0

FLAT = """
steps = {steps}
shards = 2
device = "cuda"
precision = "bf16"
microbatches = 2
recompute = {recompute}
[model]
preset = "gpt-125m"
depth = 4
[data]
kind = "synthetic"
rows = 2
sequence = 512
"""
EVALUATED = """
steps = 24
replicas = 2
stages = 2
device = "cuda"
precision = "bf16"
microbatches = 4
[model]
preset = "gpt-125m"
depth = 4
[data]
kind = "synthetic"
rows = 2
sequence = 512
[evaluation]
every = 5
batches = 4
[evaluation.data]
kind = "synthetic"
rows = 2
sequence = 512
"""
EIGHT = """
steps = 12
replicas = 8
device = "cuda"
precision = "bf16"
transport = "nccl"
microbatches = 2
[model]
preset = "gpt-125m"
[data]
kind = "synthetic"
rows = 4
"""


def flat(recompute: bool = False, steps: int = 500) -> dict[str, Any]:
    """Two shards of one worker: what they hold after a tenth of the steps and at the end."""
    run = trained(FLAT.format(steps=steps, recompute=str(recompute).lower()))
    samples = run["memory"]
    early, late = samples[len(samples) // 4 :][:5], samples[-5:]
    grown = max(late, default=0) - max(early, default=0)
    return {
        "holds": run["steps"] == steps and grown <= 64 and len(samples) > 8,
        "steps": run["steps"],
        "MiB early": max(early, default=0),
        "MiB late": max(late, default=0),
        "error": run["error"],
    }


def evaluation() -> dict[str, Any]:
    clean = trained(EVALUATED)
    killed = trained(
        EVALUATED, "--kill", "stage=1,replica=0,step=12,op=I1", "--kill", "stage=0,replica=1,step=17"
    )
    equal = (
        bool(clean["losses"]) and clean["losses"] == killed["losses"] and clean["scores"] == killed["scores"]
    )
    return {
        "holds": equal and len(clean["scores"]) >= 4,
        "steps": killed["steps"],
        "evaluations": len(clean["scores"]),
        "incidents": killed["incidents"],
        "error": clean["error"] or killed["error"],
    }


def eight() -> dict[str, Any]:
    with mps():
        run = trained(EIGHT, environment=OVER_SOCKETS)
    return {
        "holds": run["steps"] == 12 and run["incidents"] == 0,
        "steps": run["steps"],
        "ms per step": run["step_ms"],
        "MiB per worker": max(run["each"], default=0),
        "MiB of all": max(run["memory"], default=0),
        "incidents": run["incidents"],
        "error": run["error"],
    }


OVER_SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
PROOFS: dict[str, Callable[[], dict[str, Any]]] = {
    "flat": flat,
    "flat-recompute": lambda: flat(recompute=True, steps=200),
    "evaluation": evaluation,
    "eight": eight,
}


def trained(job: str, *arguments: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """One run of `everstep train`, with the memory that it took."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(job)
        command = [
            sys.executable,
            "-m",
            "everstep.cli.main",
            "train",
            str(file),
            "--json",
            "--no-web",
            *arguments,
        ]
        known = os.environ | {"PYTHONPATH": str(ROOT / "src")} | (environment or {})
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            env=known,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        samples: list[list[int]] = []
        over = threading.Event()
        watch = threading.Thread(target=lambda: samples.extend(sampled(over)))
        watch.start()
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            err += f"\nstopped after {LIMIT_S:.0f} s"
        over.set()
        watch.join()
    document = json.loads(out) if out.strip().startswith("{") else {}
    return {
        "losses": document.get("losses", {}),
        "scores": document.get("evaluations", {}),
        "steps": len(document.get("losses", {})),
        "incidents": len(document.get("incidents", [])),
        "step_ms": document.get("healthy_step_ms"),
        "seconds": round(time.monotonic() - began, 1),
        "memory": [sum(each) for each in samples if each],
        "each": [max(each) for each in samples if each],
        "error": "" if document and process.returncode == 0 else (err or out)[-1500:],
    }


def sampled(over: threading.Event) -> Iterator[list[int]]:
    """MiB of every process on the card, once a second."""
    query = ["nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader,nounits"]
    while not over.wait(1.0):
        said = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
        yield [int(line) for line in said.split() if line.isdigit()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("proofs", nargs="*", metavar="PROOF", help=f"of {', '.join(PROOFS)}; all without one")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    if unknown := set(options.proofs) - set(PROOFS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(PROOFS)}")
    found = {}
    for name in options.proofs or PROOFS:
        found[name] = PROOFS[name]()
        if not options.json:
            shown = ", ".join(
                f"{key} {value}" for key, value in found[name].items() if key not in ("holds", "error")
            )
            print(f"{'ok  ' if found[name]['holds'] else 'FAIL'} {name}: {shown}", flush=True)
            if found[name]["error"]:
                print(found[name]["error"], flush=True)
    if options.json:
        print(json.dumps(found))
    return 0 if all(one["holds"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
