"""What is allocated on the GPU at the peak of a step, by the line of code that asked for it.

    python bench/gpu/peak.py '{"accumulate": "strict32", "graphs": "never"}' '{"accumulate": "strict32"}'

One worker alone (`harness.one_worker`), one JSON line per case. What CUDA graphs keep for themselves is not
part of torch's count: it is the size of their memory pools, less what is allocated there.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also when run by path

import torch

from bench.memory import job_of
from everstep.engine import device as devices
from harness.quick_weights import quick_weights

BASE = {
    "preset": "gpt-1b",
    "options": {"depth": 3},
    "rows": 8,
    "sequence": 2048,
    "precision": "bf16",
    "replicas": 1,
    "stages": 1,
    "stage": 0,
    "microbatches": 4,
    "device": "cuda",
    "cap": None,
    "eager": False,
    "accumulate": "strict32",
}
LEAST = 8 << 20  # bytes of a line that is shown


def pools() -> dict[str, list[int]]:
    """Of each pool of graphs: its bytes, and what is allocated in it."""
    found: dict[str, list[int]] = {}
    for segment in torch.cuda.memory_snapshot():
        pool = tuple(segment["segment_pool_id"])
        if pool != (0, 0):
            both = found.setdefault(str(pool), [0, 0])
            both[0] += segment["total_size"]
            both[1] += segment["allocated_size"]
    return found


def case(given: dict[str, Any], *, steps: int, history: bool) -> dict[str, Any]:
    from everstep.engine.layers.model import partition
    from everstep.engine.prepare.figures import layer_figures, recompute_of, settings_of, stage_figures
    from everstep.engine.prepare.program import Program
    from everstep.schedule import footprint
    from harness.one_worker import OneWorker

    began = time.monotonic()
    cuda = given["device"] != "cpu"
    base = torch.cuda.memory_allocated() if cuda else 0
    job = job_of(given)
    worker = OneWorker(job, given["stage"], cap=given["cap"])
    promoted: list[list[str]] = []
    names, reduce = list(worker.stage.slots), worker.reduce

    def watched(step: int) -> float:
        worker.stage.sums.settle()
        promoted.append([f"{names[index]} {level}" for index, level in worker.stage.sums._promoted])
        return reduce(step)

    worker.reduce = watched  # type: ignore[method-assign]
    built = time.monotonic() - began
    rows, at_peak = [], {}
    for step in range(1, steps + 1):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if history and cuda:
            torch.cuda.memory._record_memory_history(max_entries=400_000, context="alloc", stacks="python")
        was = torch.cuda.memory_allocated() if cuda else 0
        worker.step(step)
        if not cuda:
            continue
        torch.cuda.synchronize()
        if history:
            at_peak = largest(torch.cuda.memory._snapshot())
            torch.cuda.memory._record_memory_history(enabled=None)
        found = pools()
        rows.append(
            {
                "before": was - base,
                "after": torch.cuda.memory_allocated() - base,
                "peak": torch.cuda.max_memory_allocated() - base,
                "reserved": torch.cuda.max_memory_reserved(),
                "pools": [whole for whole, _ in found.values()],
                "idle": sum(whole - used for whole, used in found.values()),
            }
        )
    program = Program.of(job)
    layers = layer_figures(program.model, program.data.batch(1, 0), job.precision, job.device)
    figures = stage_figures(
        layers, partition(program.model, job.stages)[given["stage"]], recompute=recompute_of(job)
    )
    items = footprint.items(figures, settings_of(job), stash=worker.peak_stash, hosted=job.microbatches)
    return {
        **{name: value for name, value in given.items() if BASE.get(name) != value},
        "parameters": worker.stage.size,
        "held": [figures.held_forward, figures.held_weight, figures.inside, figures.sent],
        "measured_held": worker.stage.held_bytes,
        "peak_stash": worker.peak_stash,
        "model": {item.name: item.device for item in items if item.device},
        "model_peak": footprint.with_recordings(items),
        "promoted": promoted,
        "steps": rows,
        "at_peak": at_peak,
        "seconds": [round(built, 1), round(time.monotonic() - began, 1)],
    }


def largest(snapshot: dict[str, Any]) -> dict[str, int]:
    """Bytes at the peak of what was allocated since the history began, by line of code."""
    live: dict[int, tuple[int, str]] = {}
    now = most = 0
    best: dict[int, tuple[int, str]] = {}
    for event in snapshot["device_traces"][0]:
        address = event["addr"]
        if event["action"] == "alloc":
            live[address] = (event["size"], _line(event["frames"]))
            now += event["size"]
        elif event["action"] == "free_completed":
            now -= live.pop(address, (event["size"], ""))[0]
        if now > most + LEAST:
            most, best = now, live.copy()
    found: Counter[str] = Counter()
    for size, line in best.values():
        found[line] += size
    return {line: size for line, size in found.most_common(30) if size >= LEAST}


def _line(frames: list[dict[str, Any]]) -> str:
    own = [f for f in frames if "everstep" in f["filename"] or "harness" in f["filename"]]
    return " < ".join(f"{Path(f['filename']).stem}:{f['line']} {f['name']}" for f in own[:3])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=["{}"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=float, default=60.0, help="no case begins after so many seconds")
    parser.add_argument("--drawn", action="store_true", help="first weights as in a real run: slower")
    parser.add_argument("--history", action="store_true", help="by line of code, in the last step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.drawn:
        quick_weights()
    if any(json.loads(given).get("device", "cuda") != "cpu" for given in args.cases):
        devices.exact(torch.device("cuda"))
    began = time.monotonic()
    for given in args.cases:
        if time.monotonic() - began < args.limit:
            found = case({**BASE, **json.loads(given)}, steps=args.steps, history=args.history)
            print(json.dumps(found), flush=True)
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
