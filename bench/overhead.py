"""What Everstep costs while nothing fails: steps/s beside the same training written with torch alone.

    python bench/overhead.py                            2 replicas x 2 stages, gpt-1m and gpt-10m, on the CPU
    python bench/overhead.py --single                   one worker against a plain loop, on the CPU
    python bench/overhead.py --single --device cuda --preset gpt-1b --rows 8

Contestants take turns in one run (A B C A B C ...), so that whatever else the machine does meets all of
them; a ratio is made of neighbours, and the table gives its median and its range. On a machine that others
use too, look at the CPU time per step, of all processes of a run together, and its ratio instead. Same model,
data, optimizer (fused AdamW, fp32 masters), clip by global norm, microbatches, processes and threads; the
losses agree. Warm-up steps do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from everstep.job.presets import flops_per_token, shape
from everstep.node.fork_server import ALLOCATOR

BASELINE = Path(__file__).with_name("baseline.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The training that every contestant runs."""

    preset: str
    rows: int
    steps: int
    warmup: int
    replicas: int = 1
    stages: int = 1
    microbatches: int = 4
    threads: int = 1
    device: str = "cpu"
    precision: str = "fp32"
    reduce: str = "flat"
    stagger: str = "auto"
    clip: float = 1.0
    lr: float = 3e-4
    seed: int = 0

    @property
    def flops_per_step(self) -> float:
        form = shape(self.preset)
        return flops_per_token(form) * form.context * self.rows * self.microbatches * self.replicas


@dataclass(slots=True)
class Result:
    steps_per_s: float
    cpu_s_per_step: float  # of all processes together
    losses: list[float]


Contestant = Callable[[Trial], Result]

# ------------------------------------------------------------------ the contestants


def everstep(accumulate: str) -> Contestant:
    """Everstep in a process of its own, as the baselines are."""

    def run(trial: Trial) -> Result:
        spec = json.dumps(asdict(trial) | {"accumulate": accumulate})
        return _result(trial, [_spawn(trial, [__file__, "--everstep", spec], {})])

    return run


def baseline(mode: str, **environment: str) -> Contestant:
    def run(trial: Trial) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            common = asdict(trial) | {"mode": mode, "meet": f"{folder}/meet"}
            specs = [json.dumps(common | {"rank": rank}) for rank in range(trial.replicas * trial.stages)]
            return _result(trial, [_spawn(trial, [str(BASELINE), spec], environment) for spec in specs])

    return run


def _spawn(trial: Trial, argv: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    # Before torch is imported: some of its matrix products ignore torch.set_num_threads.
    env = {**os.environ, **environment, "OMP_NUM_THREADS": str(trial.threads)}
    return subprocess.Popen(
        [sys.executable, *argv], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _result(trial: Trial, processes: list[subprocess.Popen[str]]) -> Result:
    told = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=900)
            if process.returncode:
                raise SystemExit(f"a contestant failed:\n{err[-4000:]}")
            told.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    first, last = trial.warmup - 1, trial.steps - 1  # indices of the last warm-up step and of the last step
    ends = [diary["at"] for diary in told]
    seconds = max(at[last] for at in ends) - max(at[first] for at in ends)
    cpu = sum(diary["cpu"][last] - diary["cpu"][first] for diary in told)
    by_step = zip(*(diary["loss"] for diary in told if diary["loss"]), strict=True)
    losses = [statistics.fmean(step) for step in by_step]
    return Result((last - first) / seconds, cpu / (last - first), losses)


def be_everstep(spec: dict[str, Any]) -> None:
    """Train once with Everstep; print what a baseline prints."""
    from everstep.job.job import DataSpec, Job, ModelSpec, OptimizerSpec
    from everstep.launch.local.run import LocalTask
    from everstep.node.fork_server import ForkServer

    optimizer = {name: spec[name] for name in ("lr", "clip", "stagger")}
    same = (
        "accumulate",
        "steps",
        "replicas",
        "stages",
        "microbatches",
        "precision",
        "seed",
        "device",
        "threads",
    )
    job = Job(
        model=ModelSpec(preset=spec["preset"]),
        data=DataSpec(kind="synthetic", rows=spec["rows"]),
        optimizer=OptimizerSpec(decay="constant", **optimizer),
        **{name: spec[name] for name in same},
    )
    cpu: list[float] = []

    def watch(kind: str, what: Any) -> None:
        if kind == "step":
            workers = sum(_cpu_seconds(process.child.pid) for process in task.processes.values())
            cpu.append(time.process_time() + workers)

    fork_server = ForkServer(threads=job.threads).start()
    try:
        task = LocalTask(job, fork_server=fork_server, watch=watch)
        outcome = task.run()
    finally:
        fork_server.close()
    if outcome.failure or outcome.incidents:
        raise SystemExit(outcome.failure or f"incidents in a run without faults: {outcome.incidents}")
    rows = outcome.rows
    print(json.dumps({"at": [row.at for row in rows], "cpu": cpu, "loss": [row.loss for row in rows]}))


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended between two steps' reports: only after the last step
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------ taking turns


def take_turns(trial: Trial, contestants: dict[str, Contestant], turns: int) -> dict[str, list[Result]]:
    results: dict[str, list[Result]] = {name: [] for name in contestants}
    for turn in range(turns):
        for name, run in contestants.items():
            started = time.monotonic()
            result = run(trial)
            results[name].append(result)
            took = f"{result.steps_per_s:.3f} steps/s ({time.monotonic() - started:.0f} s)"
            print(f"  {trial.preset} turn {turn + 1}/{turns} {name}: {took}", file=sys.stderr, flush=True)
    return results


def summary(trial: Trial, results: dict[str, list[Result]], reference: str) -> dict[str, Any]:
    """Medians; ratios of neighbours in time."""
    rows = []
    for name, own in results.items():
        pairs = list(zip(own, results[reference], strict=True))
        ratios = [a.steps_per_s / b.steps_per_s for a, b in pairs]
        cpu_ratio = statistics.median(a.cpu_s_per_step / b.cpu_s_per_step for a, b in pairs)
        speed = statistics.median(r.steps_per_s for r in own)
        rows.append(
            {
                "name": name,
                "steps_per_s": speed,
                "steps_per_s_all": [r.steps_per_s for r in own],
                "cpu_ms_per_step": 1e3 * statistics.median(r.cpu_s_per_step for r in own),
                "cpu_ratio": cpu_ratio,
                "tflops": speed * trial.flops_per_step / 1e12,
                "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
                "last_loss": own[-1].losses[-1],
            }
        )
    turns = len(results[reference])
    return {"trial": asdict(trial), "reference": reference, "turns": turns, "contestants": rows}


def table(found: dict[str, Any]) -> str:
    trial = found["trial"]
    head = (
        f"{trial['preset']}, {trial['replicas']} replicas x {trial['stages']} stages, "
        f"{trial['microbatches']} microbatches of {trial['rows']} rows per replica, {trial['precision']}, "
        f"{trial['threads']} thread(s) per worker, {trial['device']}; "
        f"{found['turns']} turns of {trial['steps'] - trial['warmup']} steps"
    )
    cpu = f"{'CPU ms/step':>12} {'ratio':>6}"
    columns = f"{'steps/s':>9} {'ratio':>7} {'range':>15} {cpu} {'TFLOP/s':>9} {'loss':>9}"
    lines = [head, f"{'':34} {columns}"]
    for row in found["contestants"]:
        ratio = row["ratio"]
        spread = f"{ratio['min']:.3f} - {ratio['max']:.3f}"
        lines.append(
            f"{row['name']:34} {row['steps_per_s']:9.3f} {ratio['median']:7.3f} {spread:>15} "
            f"{row['cpu_ms_per_step']:12.1f} {row['cpu_ratio']:6.3f} "
            f"{row['tflops']:9.4f} {row['last_loss']:9.6f}"
        )
    return "\n".join(lines)


# ------------------------------------------------------------------ the two comparisons


def pipelines(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for preset in args.preset or ["gpt-1m", "gpt-10m"]:
        trial = _trial(args, preset, replicas=args.replicas, stages=args.stages)
        name = f"torch 1F1B + {trial.reduce}"
        contestants = {
            name: baseline("pipeline"),
            "the same, allocator as ours": baseline("pipeline", **ALLOCATOR),
            "everstep, sums in fp32": everstep("fp32"),
            "everstep, strict sums (default)": everstep("strict"),
        }
        if args.reduce == "both":
            contestants = {
                "torch 1F1B + flat": _with(baseline("pipeline"), reduce="flat"),
                "torch 1F1B + ddp": _with(baseline("pipeline"), reduce="ddp"),
            }
            name = "torch 1F1B + flat"
        found.append(summary(trial, take_turns(trial, contestants, args.turns), name))
    return found


def single(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for preset in args.preset or ["gpt-1m"]:
        trial = _trial(args, preset, replicas=1, stages=1)
        contestants = {
            "torch, a plain loop": baseline("loop"),
            "the same, allocator as ours": baseline("loop", **ALLOCATOR),
            "everstep, sums in fp32": everstep("fp32"),
            "everstep, strict sums": everstep("strict"),
        }
        if trial.device != "cpu":
            del contestants["the same, allocator as ours"]  # it is the CPU's
        found.append(summary(trial, take_turns(trial, contestants, args.turns), "torch, a plain loop"))
    return found


def _with(run: Contestant, **changes: Any) -> Contestant:
    return lambda trial: run(replace(trial, **changes))


def _trial(args: argparse.Namespace, preset: str, *, replicas: int, stages: int) -> Trial:
    gpu = args.device.startswith("cuda")
    quick = gpu or preset in ("gpt-tiny", "gpt-1m")
    steps = args.steps or (40 if quick else 8)
    warmup = args.warmup or max(3, steps // 5)
    same = {name: getattr(args, name) for name in ("microbatches", "threads", "device", "stagger", "reduce")}
    return Trial(
        preset=preset,
        rows=args.rows or (4 if quick else 1),
        steps=steps + warmup,
        warmup=warmup,
        replicas=replicas,
        stages=stages,
        precision=args.precision or ("bf16" if gpu else "fp32"),
        **same,
    )


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--single", action="store_true", help="one worker against a plain loop")
    parser.add_argument("--preset", action="append", help="a GPT of everstep.job.presets; may be repeated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default: fp32 on cpu, bf16 on cuda")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4, help="of each replica")
    parser.add_argument("--rows", type=int, help="sequences in a microbatch; default 4, 1 if that is slow")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--steps", type=int, help="measured in each turn; default 40, 8 if that is slow")
    parser.add_argument("--warmup", type=int, help="steps before those; default a fifth as many")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--stagger", choices=["auto", "always", "never"], default="auto")
    parser.add_argument(
        "--reduce",
        choices=["flat", "ddp", "both"],
        default="flat",
        help="the baseline's data parallelism; both: compare the two with each other",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--everstep", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.everstep:
        be_everstep(json.loads(args.everstep))
        return
    found = single(args) if args.single else pipelines(args)
    print(json.dumps(found, indent=1) if args.json else "\n\n".join(map(table, found)))


if __name__ == "__main__":
    main()
