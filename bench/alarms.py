"""Runs in which no number is wrong: does a vote, a NaN or a spike raise an alarm? And what do votes cost?

    python bench/alarms.py                                      2,000 steps over the models of bench/models.py
    python bench/alarms.py --steps 50000 --side-by-side 8       on 16 cores
    python bench/alarms.py --only llama,mixtral --votes sampled --steps 500
    python bench/alarms.py --device cuda --steps 5000
    python bench/alarms.py --cost --rounds 7                    votes off and sampled in turns, beside 1 %

Each model runs with 2 x 2, 3 x 1 or 2 x 1 workers, every contribution is computed twice (`--votes`), states
are compared at each checkpoint, and a spike of the loss is looked at. An alarm is an incident with evidence
of votes or of a suspicious step. Other incidents are listed: on a busy machine a worker may be called slow.

`--cost`: each round trains the same with votes off, then sampled at the default limit of 1 %; `ratio` is the
time of all steps after the warm-up, sampled over off, the median of the rounds and their range. `cpu` is the
same of the CPU time of all processes, which a busy machine changes less.
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
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec, OptimizerSpec, VerifySpec
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from harness.tiny_models import TINY

SHAPES = ((2, 2), (3, 1), (2, 1))
SAVE_EVERY = 50
LONGEST = 1000  # steps of one run
WARMUP = 20


def one_run(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """In this process: one model, some steps."""
    warnings.filterwarnings("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    replicas, stages = map(int, given.shape.split("x"))
    with tempfile.TemporaryDirectory(prefix="everstep-alarms-") as folder:
        base = Path(folder) / "base"
        config = transformers.AutoConfig.for_model(name, **TINY[name][0])
        torch.manual_seed(given.seed)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
        job = Job(
            model=ModelSpec(hf=str(base)),
            data=DataSpec(build="masked_tokens:MaskedTokens"),
            optimizer=OptimizerSpec(lr=1e-3, warmup=10, clip=1.0),
            checkpoint=CheckpointSpec(folder=str(Path(folder) / "run"), interval=SAVE_EVERY, keep=1),
            verify=VerifySpec(votes=given.votes, spike="tell"),
            steps=given.steps,
            replicas=replicas,
            stages=stages,
            microbatches=2,
            device=given.device,
            base=str(Path(__file__).resolve().parents[1] / "harness"),
        )
        server = ForkServer(preload=("everstep.engine.hf.model",)).start()
        try:
            began = time.monotonic()
            outcome = LocalTask(job, fork_server=server).run()
        finally:
            server.close()
    incidents = [
        {"what": i.what, "verdict": i.verdict.kind if i.verdict else "", "of_verify": _is_of_verify(i)}
        for i in outcome.incidents
    ]
    steps = len(outcome.by_step())
    seconds = round(time.monotonic() - began, 1)
    return {"steps": steps, "incidents": incidents, "failure": outcome.failure, "seconds": seconds}


def _is_of_verify(incident: Any) -> bool:
    kinds = ("wrong numbers", "damaged tensor", "nondeterministic code", "loss spike", "non-finite gradient")
    kind = incident.verdict.kind if incident.verdict else ""
    return kind in kinds or any(evidence.source == "votes" for evidence in incident.evidence)


def alarms(given: argparse.Namespace) -> dict[str, Any]:
    names = [name for name in TINY if any(part in name for part in given.only.split(","))]
    each = -(-given.steps // len(names))
    runs: list[tuple[str, int, str, int]] = []
    shapes = cycle(SHAPES)
    for name in names:
        for number, first in enumerate(range(0, each, LONGEST)):
            replicas, stages = next(shapes)
            runs.append((name, min(LONGEST, each - first), f"{replicas}x{stages}", given.seed + number))
    rows: list[dict[str, Any]] = []

    def run(one: tuple[str, int, str, int]) -> None:
        name, steps, shape, seed = one
        words = ["--one", name, "--steps", str(steps), "--shape", shape, "--seed", str(seed)]
        words += ["--votes", given.votes, "--device", given.device]
        done = subprocess.run(
            [sys.executable, __file__, *words],
            capture_output=True,
            text=True,
            env=_environment(),
            check=False,
        )
        try:
            row = json.loads(done.stdout)
        except ValueError:
            row = {"steps": 0, "incidents": [], "failure": done.stderr[-400:], "seconds": 0.0}
        rows.append({"model": name, "shape": shape, "seed": seed, **row})
        counted = sum(each["steps"] for each in rows)
        print(
            f"{counted:7} steps  {name:14} {shape} {row['steps']:5} steps in {row['seconds']:.0f} s  "
            f"{row['failure'] or [i['what'] for i in row['incidents']] or 'no incident'}",
            file=sys.stderr,
            flush=True,
        )

    with ThreadPoolExecutor(given.side_by_side) as pool:
        list(pool.map(run, runs))
    found = [{"model": row["model"], **i} for row in rows for i in row["incidents"]]
    false_alarms = [one for one in found if one["of_verify"]]
    failures = [{"model": row["model"], "failure": row["failure"]} for row in rows if row["failure"]]
    steps = sum(row["steps"] for row in rows)
    return {
        "votes": given.votes,
        "device": given.device,
        "models": len(names),
        "steps": steps,
        "false_alarms": false_alarms,
        "other_incidents": [one for one in found if not one["of_verify"]],
        "failures": failures,
        "ok": not false_alarms and not failures and steps >= given.steps,
    }


def _environment() -> dict[str, str]:
    here = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), here)))}


def cost(given: argparse.Namespace) -> dict[str, Any]:
    """Votes off and sampled, in turns in one process, so that the machine's moods meet both."""
    server = ForkServer().start()
    rounds: list[dict[str, float]] = []
    try:
        for number in range(given.rounds):
            row: dict[str, float] = {}
            for votes in ("off", "sampled") if number % 2 == 0 else ("sampled", "off"):
                row |= {f"{votes} {key}": value for key, value in _timed(votes, server, given).items()}
            row["ratio"] = row["sampled step_s"] / row["off step_s"]
            row["cpu"] = row["sampled cpu_s"] / row["off cpu_s"]
            rounds.append({key: round(value, 5) for key, value in row.items()})
            print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    finally:
        server.close()
    every, count = VerifySpec(votes="sampled").period(given.microbatches)
    table: dict[str, Any] = {"rounds": rounds, "vote_every": every, "microbatches_voted": count}
    for key in ("ratio", "cpu"):
        values = [row[key] for row in rounds]
        table[key] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {**table, "limit": VerifySpec().cost, "ok": True}


def _timed(votes: str, server: ForkServer, given: argparse.Namespace) -> dict[str, float]:
    job = Job(
        model=ModelSpec(preset=given.preset),
        data=DataSpec(kind="synthetic", rows=given.rows),
        steps=given.steps,
        replicas=2,
        stages=given.stages,
        microbatches=given.microbatches,
        device=given.device,
        verify=VerifySpec(votes=votes),  # type: ignore[arg-type]
    )
    moments: dict[int, tuple[float, float]] = {}

    def watch(kind: str, what: Any) -> None:
        if kind == "step" and what.step in (WARMUP, given.steps):
            moments[what.step] = (what.at, _cpu_s())

    outcome = LocalTask(job, fork_server=server, watch=watch).run()
    if outcome.failure:
        raise RuntimeError(outcome.failure)
    (began, cpu_began), (ended, cpu_ended) = moments[WARMUP], moments[given.steps]
    steps = given.steps - WARMUP
    return {"step_s": (ended - began) / steps, "cpu_s": (cpu_ended - cpu_began) / steps}


def _cpu_s() -> float:
    """Of this process and all below it."""
    import psutil

    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--steps", type=int, help="in all (2,000); with --cost per run (220)")
    parser.add_argument("--only", default="", help="parts of architectures' names, by commas")
    parser.add_argument("--votes", choices=["every", "sampled"], default="every")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--side-by-side", type=int, default=1, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", action="store_true", help="what sampled votes cost")
    parser.add_argument("--rounds", type=int, default=5, help="for --cost")
    parser.add_argument("--preset", default="gpt-1m", help="for --cost")
    parser.add_argument("--rows", type=int, default=4, help="for --cost: rows per microbatch")
    parser.add_argument("--stages", type=int, default=1, help="for --cost")
    parser.add_argument("--microbatches", type=int, default=4, help="for --cost: per replica")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--shape", default="2x2", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args()
    given.steps = given.steps or (220 if given.cost else 2000)
    if given.cost and given.steps <= 2 * WARMUP:
        parser.error(f"--steps is {given.steps}; with --cost give more than {2 * WARMUP}.")
    if given.only and not any(part in name for name in TINY for part in given.only.split(",")):
        parser.error(f"--only {given.only} names no model; choose parts of {', '.join(TINY)}.")
    if given.one:
        print(json.dumps(one_run(given.one, given)))
        return 0
    found = cost(given) if given.cost else alarms(given)
    if given.json:
        print(json.dumps(found, indent=1))
    elif given.cost:
        ratio, cpu = found["ratio"], found["cpu"]
        print(
            f"votes sampled at {found['limit']:.0%} (every {found['vote_every']} steps) over off: time "
            f"{ratio['median'] - 1:+.2%} ({ratio['least'] - 1:+.2%} to {ratio['most'] - 1:+.2%}), CPU "
            f"{cpu['median'] - 1:+.2%} ({cpu['least'] - 1:+.2%} to {cpu['most'] - 1:+.2%})"
        )
    else:
        print(
            f"{found['steps']} steps of {found['models']} models, votes {found['votes']}: "
            f"{len(found['false_alarms'])} false alarms, {len(found['other_incidents'])} other incidents, "
            f"{len(found['failures'])} runs failed"
        )
        for one in (*found["false_alarms"], *found["other_incidents"], *found["failures"]):
            print(f"  {one}")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
