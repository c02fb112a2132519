"""A fuzz of everything that accepts something from outside: no crash, no HTTP 500, no growth.

    python -m tests.attacks.fuzz                     100,000 inputs, seed 1
    python -m tests.attacks.fuzz --inputs 1000 --seed 7 --json
    python -m tests.attacks.fuzz --seed fresh        inputs that no run has seen

Targets are in `fuzz_targets.py` beside this file: the coordinator's machine, an agent's machine, the lines
between workers and agents, frames between workers, every route of the API, the WebSocket of agents, the
server of states in memory, records of communication. Memory is that of the process that serves and asks.
"""

from __future__ import annotations

import argparse
import gc
import json
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.cluster import Cluster
from tests.attacks import fuzz_targets as targets

TOKEN = "fuzz"
SHARES = {  # of all inputs
    "coordinator": 0.25,
    "agent": 0.15,
    "worker_lines": 0.15,
    "worker_frames": 0.09,
    "memory": 0.05,
    "records": 0.05,
    "rings": 0.01,
    "api": 0.15,
    "agent_line": 0.10,
}


def run(inputs: int, seed: int) -> list[dict[str, Any]]:
    rows = []
    for target in targets.PURE:
        count = max(10, int(inputs * SHARES[target.__name__]))
        target(seed, count // 20)  # caches fill
        rows.append(measured(lambda target=target, count=count: target(seed, count), targets.resident_mib))
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), token=TOKEN) as cluster:
        rows += served(cluster, inputs, seed)
    return rows


def served(cluster: Cluster, inputs: int, seed: int) -> list[dict[str, Any]]:
    """Against a coordinator of its own process, with the task and the node that inputs name."""
    address = cluster.start_coordinator()
    cluster.submit(targets.JOB, "t")
    process = cluster.coordinators["first"]
    rows = []
    for target in (targets.api, targets.agent_line):
        count = max(10, int(inputs * SHARES[target.__name__]))
        target(seed, count // 20, address, TOKEN)
        row = measured(lambda t=target, n=count: t(seed, n, address, TOKEN), lambda: resident_of(process))
        if process.poll() is not None or not targets.still_there(address):
            row["failures"].append("the coordinator does not answer any more")
        log = (cluster.folder / "coordinator-first.log").read_text()
        if "was not understood" in log:
            row["failures"].append(log[log.index("was not understood") - 60 :][:600])
        rows.append(row)
    return rows


def measured(fuzz: Any, mib: Any) -> dict[str, Any]:
    gc.collect()
    before, began = mib(), time.monotonic()
    report = fuzz()
    gc.collect()
    return {
        "target": report.target,
        "inputs": report.inputs,
        "refused": report.refused,
        "failures": report.failures,
        "seconds": round(time.monotonic() - began, 1),
        "grown_mib": round(mib() - before, 1),
    }


def resident_of(process: subprocess.Popen[bytes]) -> float:
    words = Path(f"/proc/{process.pid}/statm").read_text().split()
    return int(words[1]) * 4096 / (1 << 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", default="1", help="a number, or fresh: one that no run has seen")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    seed = secrets.randbits(31) if arguments.seed == "fresh" else int(arguments.seed)
    print(f"seed {seed}", file=sys.stderr)
    rows = run(arguments.inputs, seed)
    if arguments.json:
        print(json.dumps(rows))
    else:
        print(f"{'target':14} {'inputs':>8} {'refused':>8} {'failures':>8} {'seconds':>8} {'grown MiB':>9}")
        for row in rows:
            failed = len(row["failures"])
            numbers = (
                f"{row['inputs']:8} {row['refused']:8} {failed:8} {row['seconds']:8} {row['grown_mib']:9}"
            )
            print(f"{row['target']:14} {numbers}")
        print(f"{'all':14} {sum(row['inputs'] for row in rows):8}")
    for row in rows:
        for failure in row["failures"][:5]:
            print(f"{row['target']}: {failure}", file=sys.stderr)
    return 1 if any(row["failures"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
