"""Slots are devices: MIG cuts a GPU into four, one agent offers them, two tasks train, a worker is killed.

    python bench/gpu/slots.py            root, a GPU that can be cut; cuts it, and makes it whole again
    python bench/gpu/slots.py --whole    leaves the GPU as it is: one slot, two tasks, the second one waits
    python bench/gpu/slots.py --json

`nvidia-smi` is the witness of which process computes on which device. The losses of both tasks are compared
with runs of the same jobs without a kill.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # where nothing can be installed

from everstep.node import slot_devices  # noqa: E402
from harness.cluster import Cluster  # noqa: E402

STEPS = 60


def job(seed: int, replicas: int = 2) -> dict[str, Any]:
    return {
        "model": {"preset": "gpt-10m"},
        "data": {"kind": "synthetic", "rows": 4},
        "steps": STEPS,
        "replicas": replicas,
        "stages": 1,
        "microbatches": 4,
        "precision": "bf16",
        "device": "cuda",
        "seed": seed,
        "base": ".",
    }


def witnessed() -> dict[int, str]:
    """By process: the MIG instance it computes on, as nvidia-smi's table has it (GPU, GI, CI, pid)."""
    table = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^\|\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s+C", table, re.M)
    return {int(pid): f"GPU {gpu} GI {gi} CI {ci}" for gpu, gi, ci, pid in rows}


def both(cluster: Cluster, names: tuple[str, str], kill: bool) -> dict[str, Any]:
    for seed, name in enumerate(names):
        cluster.submit(job(seed), name=name)
    for name in names:
        cluster.until(lambda name=name: cluster.task(name)["step"] >= 5, f"{name} trains")
    pids = {f"{name} {w}": row["pid"] for name in names for w, row in cluster.workers(name).items()}
    seen = witnessed()
    found: dict[str, Any] = {"where": {who: seen.get(pid, "not seen") for who, pid in pids.items()}}
    if kill:
        victim = f"{names[0]} 0:0"
        os.kill(pids[victim], signal.SIGKILL)
        found["killed"] = victim
    for name in names:
        ended = f"{name} ends"
        cluster.until(lambda name=name: cluster.task(name)["state"] == "finished", ended, within_s=200)
    found["losses"] = {name: cluster.losses(name) for name in names}
    return found


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder, Cluster(Path(folder)) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("node", slots=len(slot_devices.found()))
        cluster.nodes_up(1)
        clean = both(cluster, ("clean-a", "clean-b"), kill=False)
        healed = both(cluster, ("a", "b"), kill=True)
        incidents = cluster.incidents()
    same = all(
        clean["losses"][f"clean-{name}"] == healed["losses"][name] and len(healed["losses"][name]) == STEPS
        for name in ("a", "b")
    )
    return {
        "devices": [device.uuid for device in slot_devices.found()],
        "where": healed["where"],
        "one_process_per_device": len(set(healed["where"].values())) == 4,
        "killed": healed["killed"],
        "incidents": [incident["what"] for incident in incidents],
        "losses_equal_the_clean_run": same,
    }


def on_gpus() -> dict[int, str]:
    """By process: the GPU it computes on."""
    asked = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    rows = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    return {int(pid): uuid for pid, _, uuid in (row.partition(", ") for row in rows)}


def measure_whole() -> dict[str, Any]:
    """One agent that offers the GPUs it finds, and one task more than there are."""
    devices = [device.uuid for device in slot_devices.found()]
    names = [f"task-{number}" for number in range(len(devices) + 1)]
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder, Cluster(Path(folder)) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("node", slots=len(devices))
        cluster.nodes_up(1)
        for seed, name in enumerate(names):
            cluster.submit(job(seed, replicas=1), name=name)
        first, last = names[0], names[-1]
        cluster.step_reached(5, first)
        states = {name: cluster.task(name) for name in names}
        pids = {name: row["pid"] for name in names for row in cluster.workers(name).values() if row["pid"]}
        seen = on_gpus()
        for name in names:
            cluster.finished(name)
        steps = {name: len(cluster.losses(name)) for name in names}
    return {
        "devices": devices,
        "where": {name: seen.get(pid, "not seen") for name, pid in pids.items()},
        "processes_on_gpus": len(seen),
        "while_the_first_trains": {name: task["state"] for name, task in states.items()},
        "why_the_last_waits": states[last].get("because"),
        "steps": steps,
        "ok": len(pids) == len(devices) and all(count == STEPS for count in steps.values()),
    }


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--whole", action="store_true", help="change nothing: whole GPUs as slots")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.whole:
        found = measure_whole()
        print(json.dumps(found, indent=None if args.json else 1))
        return 0 if found["ok"] else 1
    cut = ["nvidia-smi -mig 1", "nvidia-smi mig -cgi 15,15,15,15 -C"]
    whole = ["nvidia-smi mig -dci", "nvidia-smi mig -dgi", "nvidia-smi -mig 0"]
    try:
        for command in cut:
            subprocess.run(command.split(), check=True, stdout=subprocess.DEVNULL)
        time.sleep(2)
        found = measure()
    finally:
        for command in whole:
            subprocess.run(command.split(), check=False, stdout=subprocess.DEVNULL)
    print(json.dumps(found, indent=None if args.json else 1))
    return 0 if found["losses_equal_the_clean_run"] and found["one_process_per_device"] else 1


if __name__ == "__main__":
    sys.exit(main())
