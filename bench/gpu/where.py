"""Where a step's time goes on the GPU: kernels by group, and the gaps in which the device waits for the host.

    python bench/gpu/where.py                                  gpt-1b: strict sums, the compiled plain loop
    python bench/gpu/where.py --jobs '{"accumulate": "fp32"}' '{}' --no-plain
    python bench/gpu/where.py --preset gpt-350m --microbatches 8 --json

Everstep's worker is a real one, in its own process: the profiler is switched on in it between two updates.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also when run by path
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from everstep.engine.layers.model import Model
from everstep.job.job import Job
from everstep.job.presets import MODELS
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer

LIMIT_S = 100.0
# The first that matches.
GROUPS = {
    "attention": r"sdpa|fmha|flash|attention|query_grads|cudnn_generated",
    "matrix products": r"nvjet|gemm|cutlass|xmma|cublas|splitK",
    "strict sums": r"^add$|^mean$|^add_|^mean_",
    "optimizer": r"Adam|adam",
    "compiled regions": r"^triton",
    "copies": r"emcpy|emset|copy",
}


def group_of(name: str) -> str:
    return next((group for group, words in GROUPS.items() if re.search(words, name)), "others")


def told(events: list[tuple[str, int, int]], steps: int) -> dict[str, Any]:
    """`events`: kernels, with first and last nanosecond; of so many steps."""
    events.sort(key=lambda event: event[1])
    by_group: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(list)
    gaps: list[tuple[float, str, str]] = []
    until, before, busy = events[0][1], "", 0
    for name, start, end in events:
        took = (end - start) / 1e6
        by_group[group_of(name)] += took / steps
        by_name[name].append(took)
        if start > until:
            gaps.append(((start - until) / 1e6, before[:50], name[:50]))
        busy += max(0, end - max(start, until))
        if end >= until:
            until, before = end, name
    span = (until - events[0][1]) / 1e6
    largest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:40]
    counted = [gap for gap, *_ in gaps]
    return {
        "span_ms": round(span / steps, 2),
        "busy_ms": round(busy / 1e6 / steps, 2),
        "idle_ms": round((span - busy / 1e6) / steps, 2),
        "idle_in_gaps_over_50us_ms": round(sum(gap for gap in counted if gap > 0.05) / steps, 2),
        "groups_ms": {name: round(ms, 2) for name, ms in sorted(by_group.items(), key=lambda i: -i[1])},
        "gaps_ms": [(round(ms, 3), a, b) for ms, a, b in sorted(gaps, reverse=True)[:24]],
        "kernels_ms": [(name[:110], len(each), round(sum(each) / steps, 2)) for name, each in largest],
    }


class Watch:
    """The kernels between two moments."""

    def begin(self) -> None:
        import torch  # not before: a process that has touched CUDA cannot be forked

        kinds = torch.profiler.ProfilerActivity
        self._on_gpu = torch.cuda.is_available()
        self._profile = torch.profiler.profile(activities=[kinds.CUDA if self._on_gpu else kinds.CPU])
        self._profile.start()

    def end(self) -> list[tuple[str, int, int]]:
        import torch

        if self._on_gpu:
            torch.cuda.synchronize()
        self._profile.stop()
        results = self._profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        return [
            (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
            for event in results
            if event.duration_ns()
            and event.device_type() == getattr(torch.autograd.DeviceType, "CUDA" if self._on_gpu else "CPU")
        ]


def watched_gpt(name: str, first: int, steps: int, into: str) -> Model:
    """For a job: `model.build`. Called in the worker: from now on it profiles itself."""
    from everstep.engine.worker.work_items import WorkItems
    from harness.quick_weights import quick_gpt

    update, watch, times = WorkItems._update, Watch(), [time.monotonic()]

    def watched(self: WorkItems, task: Any) -> None:
        update(self, task)
        times.append(time.monotonic())
        if task.step == first - 1:
            watch.begin()
        elif task.step == first - 1 + steps:
            found = told(watch.end(), steps)
            found["host_step_ms"] = [round(1e3 * (b - a), 1) for a, b in pairwise(times)]
            Path(into).write_text(json.dumps(found))

    if not getattr(WorkItems, "is_watched", False):
        WorkItems._update = watched  # type: ignore[method-assign,assignment]
        WorkItems.is_watched = True  # type: ignore[attr-defined]
    return quick_gpt(name)


def ours(args: argparse.Namespace, server: ForkServer, given: dict[str, Any]) -> dict[str, Any]:
    shape = MODELS[args.preset].shape
    with tempfile.TemporaryDirectory() as folder:
        into = f"{folder}/found.json"
        data = {"vocab": shape.vocab, "lines": args.rows, "length": shape.context}
        job = Job.from_dict(
            {
                "model": {
                    "build": "bench.gpu.where:watched_gpt",
                    "name": args.preset,
                    "first": args.warmup + 1,
                    "steps": args.watched,
                    "into": into,
                },
                "data": {"build": "harness.quick_weights:quick_tokens", **data},
                "steps": args.warmup + args.watched + 4,
                "replicas": 1,
                "stages": 1,
                "microbatches": args.microbatches,
                "precision": "bf16" if args.device == "cuda" else "fp32",
                "device": args.device,
                "compile": args.device == "cuda",
                "optimizer": {"decay": "constant"},
                **given,
            }
        )
        seconds: list[float] = []
        began = time.monotonic()

        def watch(kind: str, what: Any) -> None:
            if kind == "step":
                seconds.append(what.seconds)
            elif kind == "tick" and time.monotonic() - began > LIMIT_S:
                raise RuntimeError(f"{len(seconds)} steps in {LIMIT_S:.0f} s")

        outcome = LocalTask(job, fork_server=server, watch=watch).run()
        if outcome.failure is not None:
            raise RuntimeError(outcome.failure)
        after = seconds[args.warmup + args.watched + 1 :] or seconds[-1:]
        return {"step_s": round(statistics.median(after), 4), **json.loads(Path(into).read_text())}


def plain(args: argparse.Namespace) -> dict[str, Any]:
    from bench.gpu.steps import plain_loop

    watch = Watch()
    found: dict[str, Any] = {}

    def after(step: int) -> None:
        if step == args.warmup:
            watch.begin()
        elif step == args.warmup + args.watched:
            found.update(told(watch.end(), args.watched))

    spec = {
        "preset": args.preset,
        "rows": args.rows,
        "microbatches": args.microbatches,
        "steps": args.warmup + args.watched + 4,
        "compile": True,
    }
    times = plain_loop(spec, after)["times"]
    return {"step_s": round(statistics.median(times[args.warmup + args.watched + 1 :]), 4), **found}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--preset", default="gpt-1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--watched", type=int, default=2, help="steps that are profiled")
    parser.add_argument("--jobs", nargs="*", default=["{}"], help="keys of the job, as JSON")
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--only-plain", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def say(what: str, find: Callable[[], dict[str, Any]]) -> None:
        try:
            rows.append({"what": what, **find()})
        except RuntimeError as error:
            rows.append({"what": what, "failed": str(error)[-400:]})
        if not args.json:
            print(json.dumps(rows[-1]), flush=True)

    if args.only_plain:
        say("plain loop, compiled", lambda: plain(args))
    else:
        server = ForkServer().start()
        try:
            for text in args.jobs:
                say(f"everstep 1x1 {text}", lambda text=text: ours(args, server, json.loads(text)))  # type: ignore[misc]
        finally:
            server.close()
        if not args.no_plain:
            say("plain loop, compiled", lambda: plain(args))
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    main()
