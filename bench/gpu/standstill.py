"""Starts the same run over NCCL again and again, and shows what every thread does when one stands still.

    python bench/gpu/standstill.py --mps                    8 x 1 of gpt-125m, strict sums, for eight minutes
    python bench/gpu/standstill.py --mps --env CUDA_MODULE_LOADING=EAGER --runs 10
    python bench/gpu/standstill.py --mps --job '{"accumulate": "fp32"}' '{"graphs": "never"}'
    python bench/gpu/standstill.py --mps --env CUDA_DEVICE_MAX_CONNECTIONS=2
    python bench/gpu/standstill.py --mps --loads --runs 1 --steps 20    which kernels are loaded after step 1?

Each `--job` is a column, and all take turns. A worker that is in one step (neither first nor last) for
longer than `--late` seconds writes the stacks of its threads, what its lanes wait for, and whether the device
takes a new kernel; they are printed with what was said of that run. A lane's transfer is interrupted after
three seconds (`net/lanes.py`), and its data sent again.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # where nothing can be installed


class Watched:
    """Data that starts a clock with the first microbatch of a step."""

    def __init__(
        self,
        vocab: int,
        sequence: int,
        rows: int,
        late_s: float,
        last_step: int,
        folder: str,
        is_cuda: bool,
        loads: bool,
    ) -> None:
        from everstep.engine.datasets.data import Synthetic

        self._data = Synthetic(vocab=vocab, sequence=sequence, rows=rows)
        self._late_s, self._last_step, self._step, self._is_cuda = late_s, last_step, 0, is_cuda
        self._more_later: threading.Timer | None = None
        self._profile: Any = None
        self._loads = loads
        self._file = Path(folder, f"{os.getpid()}.txt").open("w")  # noqa: SIM115  open as long as the process

    def _tell_more(self) -> None:
        """What is on its way, and for how long the device has been in it; NCCL's threads, which have no stack
        of Python's; and whether the device takes anything new.
        """
        from everstep.net.lanes import Lanes

        def tell(text: str) -> None:
            print(f"  {text}", file=self._file, flush=True)

        for lanes in [one for one in gc.get_objects() if isinstance(one, Lanes)]:
            for lane in [lane for lane in list(lanes._wired) if lane.moving or lane.held]:
                since = lane.wire.waits_since()
                on_device = "" if since is None else f", on the device for {time.monotonic() - since:.2f} s"
                what = "moves" if lane.moving else "waits for its turn"
                tell(f"{lane.name} {'to' if lane.sends else 'from'} {lane.peer.port} {what}{on_device}")
        for task in sorted(Path("/proc/self/task").iterdir(), key=lambda one: int(one.name)):
            with contextlib.suppress(OSError):
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                name, waits_in = ((task / what).read_text().strip() for what in ("comm", "wchan"))
                tell(f"thread {task.name} {name}: {state} in {waits_in}")
        if self._is_cuda:
            import torch

            tell(f"the computation is over: {torch.cuda.default_stream().query()}")
            with torch.cuda.stream(torch.cuda.Stream()):
                began = time.monotonic()
                number = torch.ones(1, device="cuda")
                tell(f"a new kernel was launched within {time.monotonic() - began:.3f} s")
                there = number.item()
                tell(f"it was over within {time.monotonic() - began:.3f} s: {there}")

    def _tell_loads(self) -> None:
        """What was loaded from step 2 on, while lanes were used."""
        import torch

        if self._step == 2:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()
        elif self._step == self._last_step:
            self._profile.stop()
            with tempfile.NamedTemporaryFile(suffix=".json") as trace:
                self._profile.export_chrome_trace(trace.name)
                events = json.loads(Path(trace.name).read_text())["traceEvents"]
            for line in loaded(events):
                print(line, file=self._file, flush=True)

    def batch(self, step: int, microbatch: int) -> Any:
        if step != self._step:
            self._step = step
            if self._loads:
                self._tell_loads()
            print(f"step {step}", file=self._file, flush=True)
            faulthandler.cancel_dump_traceback_later()
            if self._more_later is not None:
                self._more_later.cancel()
            if 1 < step < self._last_step:
                faulthandler.dump_traceback_later(self._late_s, file=self._file)
                self._more_later = threading.Timer(self._late_s + 0.2, self._tell_more)
                self._more_later.daemon = True
                self._more_later.start()
        return self._data.batch(step, microbatch)


def loaded(events: list[dict[str, Any]]) -> Iterator[str]:
    """Of a trace: each kernel that was loaded, found by the launch in which that was done."""
    timed = [event for event in events if event.get("ph") == "X"]
    kernels = {one["args"]["correlation"]: one["name"] for one in timed if one.get("cat") == "kernel"}
    launches = [one for one in timed if one.get("cat") in ("cuda_runtime", "cuda_driver")]
    found = [one for one in timed if "Loading" in one["name"]]
    yield f"loaded: {len(found)} of {len(launches)} calls"
    for load in found:
        at = load["ts"] + load["dur"] / 2
        around = [one for one in launches if one["ts"] <= at <= one["ts"] + one["dur"]]
        names = {kernels.get(one["args"].get("correlation"), one["name"]) for one in around}
        yield f"loaded: {(at - timed[0]['ts']) / 1e6:.3f} s: {load['name']} for {' or '.join(sorted(names))}"


def texts(**options: Any) -> Watched:
    """As workers build it."""
    return Watched(**options)


def one_run(given: argparse.Namespace, changes: dict[str, Any], server: Any) -> Iterator[str]:
    from everstep.job.job import Job
    from everstep.job.presets import shape
    from everstep.launch.local.run import LocalTask

    replicas, stages = map(int, given.shape.split("x"))
    form = shape(given.preset)
    with tempfile.TemporaryDirectory() as folder:
        options = {"vocab": form.vocab, "sequence": form.context, "rows": given.rows}
        job = {
            "base": str(Path(__file__).parent),
            "model": {"preset": given.preset},
            "data": {
                "build": "standstill:texts",
                "options": {
                    **options,
                    "late_s": given.late,
                    "last_step": given.steps,
                    "folder": folder,
                    "is_cuda": given.device == "cuda",
                    "loads": given.loads,
                },
            },
            "steps": given.steps,
            "replicas": replicas,
            "stages": stages,
            "microbatches": given.microbatches // replicas,
            "optimizer": {"decay": "constant"},
        }
        if given.device == "cuda":
            job |= {"precision": "bf16", "device": "cuda", "transport": "nccl"}
        times: list[str] = []
        watch: Callable[[str, Any], None] = lambda kind, what: (  # noqa: E731
            times.append(f"{what.seconds:.2f}") if kind == "step" else None
        )
        outcome = LocalTask(Job.from_dict({**job, **changes}), fork_server=server, watch=watch).run()
        stacks = {file.stem: file.read_text() for file in sorted(Path(folder).iterdir())}
        late = [process for process, text in stacks.items() if "Thread" in text]
        stood = bool(outcome.incidents or late)
        yield f"{'stood still' if stood else 'went on'}, seconds per step: {' '.join(times)}"
        for incident in outcome.incidents:
            evidence = "; ".join(f"{one.at:.1f} {one.source}: {one.text[:300]}" for one in incident.evidence)
            yield f"  incident: {incident.workers} in step {incident.step}; {incident.label}; {evidence}"
        for process, text in stacks.items():
            yield from (f"{process} {line}" for line in text.splitlines() if line.startswith("loaded:"))
        for process in late:
            yield f"--- process {process}\n{stacks[process]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt-125m")
    parser.add_argument("--shape", default="8x1")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16, help="of the whole step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=480.0, help="no run begins after so many")
    parser.add_argument("--late", type=float, default=2.5, metavar="SECONDS")
    parser.add_argument("--job", nargs="*", default=["{}"], help="keys of the job, as JSON; several: in turn")
    parser.add_argument("--env", nargs="*", default=[], help="NAME=VALUE, for all workers")
    parser.add_argument("--loads", action="store_true", help="tell which kernels are loaded after step 1")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mps", action="store_true", help="start MPS, and stop it at the end")
    given = parser.parse_args()
    if given.loads and given.device == "cpu":
        parser.error("--loads tells what a GPU loads: leave out --device cpu")
    os.environ.update(one.split("=", 1) for one in given.env)

    from everstep.node.fork_server import ForkServer
    from harness.mps import mps

    began, still = time.monotonic(), dict.fromkeys(given.job, 0)
    with mps(given.mps), closing(ForkServer().start()) as server:
        for number in range(given.runs * len(given.job)):
            changes = given.job[number % len(given.job)]
            if time.monotonic() - began > given.seconds:
                break
            for line in one_run(given, json.loads(changes), server):
                still[changes] += line.startswith("stood still")
                print(f"{changes} {line}", flush=True)
    print(f"stood still: {still}")
    return 1 if any(still.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
