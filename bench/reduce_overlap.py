"""How much of the reduce runs while some stage still computes the backward of the same step?

    python bench/reduce_overlap.py                                gpt-1m, 2 replicas x 1, 2 and 4 stages
    python bench/reduce_overlap.py --device cuda --preset gpt-350m --shapes 2x2 --transport nccl --json
    python bench/reduce_overlap.py --piece-mib 0 1             nothing sent ahead, then pieces of 1 MiB

Read from the rings that workers write anyway. A stage's reduce lasts from the moment the last of its workers
sends its first part, or a piece of it, to the last chunk of the sum that one of them receives; the backward
of a step lasts until the last worker of the task sends the end of its first part. What of the former lies
before the end of the latter is hidden. `ahead` is the share of the bytes that was sent in pieces.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # where nothing can be installed

from everstep.diagnose.record import Log
from everstep.diagnose.ring import KINDS, read_ring
from everstep.engine.layers.model import Model
from everstep.engine.worker import parts_ahead
from everstep.job.job import Job
from everstep.job.presets import MODELS
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.parcels import ParcelKind
from harness.quick_weights import quick_gpt, quick_job

WHAT = {what: number for number, what in enumerate(ParcelKind)}
SEND, RECV = KINDS.index("send"), KINDS.index("recv")


def moments(log: Log, kind: int, what: ParcelKind, step: int) -> list[int]:
    """When the parcels of this kind were sent or received."""
    chosen = (log.kind == kind) & (log.seq >> 24 == step) & ((log.seq >> 16) & 0xFF == WHAT[what])
    return [int(at) for at in log.ended_ns[chosen]]


def ends_of_parts(log: Log, step: int) -> tuple[list[int], float]:
    """When each of its parts was sent to the end, and the share of bytes that had gone before."""
    chosen = (log.kind == SEND) & (log.seq >> 24 == step) & ((log.seq >> 16) & 0xFF == WHAT[ParcelKind.PART])
    ends: dict[int, tuple[int, int]] = {}
    total = 0
    for seq, at, count in zip(log.seq[chosen], log.ended_ns[chosen], log.bytes[chosen], strict=True):
        total += int(count)
        ends[int(seq)] = max(ends.get(int(seq), (0, 0)), (int(at), int(count)))
    last = sum(count for _, count in ends.values())
    return [at for at, _ in ends.values()], 1 - last / total if total else 0.0


def hidden(logs: dict[int, list[Log]], step: int) -> list[tuple[float, float, float]] | None:
    """By stage: seconds of its reduce, those of them that are hidden, and what was sent ahead."""
    first = {
        stage: [min(moments(log, SEND, ParcelKind.PART, step), default=0) for log in of_stage]
        for stage, of_stage in logs.items()
    }
    last = {
        stage: [max(moments(log, RECV, ParcelKind.SUM, step), default=0) for log in of_stage]
        for stage, of_stage in logs.items()
    }
    if not all(all(row) for table in (first, last) for row in table.values()):
        return None  # not all of the step is in every ring
    parts = {stage: [ends_of_parts(log, step) for log in of_stage] for stage, of_stage in logs.items()}
    backward_ends = max(min(ends) for row in parts.values() for ends, _ in row)
    found = []
    for stage in sorted(logs):
        begins, ends = max(first[stage]), max(last[stage])
        ahead = statistics.mean(share for _, share in parts[stage])
        found.append(((ends - begins) / 1e9, max(0, min(ends, backward_ends) - begins) / 1e9, ahead))
    return found


def with_pieces(name: str, mib: float) -> Model:
    """For a job: `model.build`. Called in the worker, which sends ahead in pieces of this size; 0: none."""
    parts_ahead.PIECE = dict.fromkeys(parts_ahead.PIECE, int(mib * 2**20) or 1 << 50)
    return quick_gpt(name)


def measure(server: ForkServer, given: argparse.Namespace, shape: str, mib: float | None) -> dict[str, Any]:
    replicas, stages = map(int, shape.split("x"))
    size = {} if mib is None else {"mib": mib}
    model = quick_job(given.preset, {}, given.rows, MODELS[given.preset].shape.context)
    build = "harness.quick_weights:quick_gpt" if mib is None else "bench.reduce_overlap:with_pieces"
    job = Job.from_dict(
        {
            **model,
            "model": {"build": build, "name": given.preset, **size},
            "steps": given.steps,
            "replicas": replicas,
            "stages": stages,
            "microbatches": given.microbatches,
            "precision": "bf16" if given.device == "cuda" else "fp32",
            "accumulate": given.accumulate,
            "device": given.device,
            "transport": given.transport,
        }
    )
    rings: dict[str, bytes] = {}
    step_s: list[float] = []
    began = time.monotonic()

    def watch(kind: str, what: Any) -> None:
        if kind == "step":
            step_s.append(what.seconds)
            print(f"  step {what.step} {what.seconds:.3f} s, loss {what.loss}", file=sys.stderr, flush=True)
            if what.step == given.steps - 1:
                for worker, process in task.processes.items():
                    path = process.beacon.path
                    rings[str(worker)] = path.with_name(f"{path.name}.ring").read_bytes()
        elif kind == "tick" and time.monotonic() - began > given.limit:
            raise RuntimeError(f"{len(step_s)} steps in {given.limit:.0f} s")

    task = LocalTask(job, fork_server=server, watch=watch)
    outcome = task.run()
    if outcome.failure is not None:
        raise RuntimeError(outcome.failure)
    logs: dict[int, list[Log]] = {}
    for worker, content in rings.items():
        logs.setdefault(int(worker.split(":")[1]), []).append(read_ring(worker, content).log)
    rows = [row for step in range(4, given.steps - 2) if (row := hidden(logs, step)) is not None]
    by_stage = [
        {
            "reduce_ms": round(1e3 * statistics.median(row[stage][0] for row in rows), 1),
            "hidden": round(statistics.median(row[stage][1] / row[stage][0] for row in rows), 3),
            "hidden_ms": round(1e3 * statistics.median(row[stage][1] for row in rows), 1),
            "ahead": round(statistics.median(row[stage][2] for row in rows), 3),
        }
        for stage in range(stages)
    ]
    return {
        "shape": shape,
        **({} if mib is None else {"piece_mib": mib}),
        "steps": len(rows),
        "step_ms": round(1e3 * statistics.median(step_s[3:]), 1),
        "by_stage": by_stage,
    }


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--preset", default="gpt-1m")
    parser.add_argument("--shapes", default="2x1,2x2,2x4")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4, help="that each replica brings to a step")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--accumulate", default="strict")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds, of each run")
    parser.add_argument(
        "--piece-mib", type=float, nargs="*", default=[None], help="in turn; 0: nothing ahead"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    server = ForkServer().start()
    rows = []
    try:
        for shape, mib in itertools.product(given.shapes.split(","), given.piece_mib):
            rows.append(measure(server, given, shape, mib))
            print(json.dumps(rows[-1]), file=sys.stderr if given.json else sys.stdout, flush=True)
    finally:
        server.close()
    if given.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
