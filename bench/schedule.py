"""Figures of the scheduler, each made by a command and printed as text:

    python bench/schedule.py optima     the 3 x 4 x 6 example against its proved optima
    python bench/schedule.py suite      gap over 48 instances, staggered and decoupled
    python bench/schedule.py uneven     gap over 80 odd instances: slow workers, uneven stages, many dead
    python bench/schedule.py slow       gap over 60 small steps with slow workers; --seed for others
    python bench/schedule.py bounds     what CP-SAT proves where the gap is above 5 %
    python bench/schedule.py times      planning time, and its growth with the number of replicas
    python bench/schedule.py policies   against fault-free baselines, shrinking and redundancy
    python bench/schedule.py scale      throughput at 256 to 1,536 workers with 1, 5 and 10 % of them dead

`suite --effort N` spends N dispatched ops an instance (the default is what `plan` spends online). `--json`
prints the rows as one document instead of the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from everstep.protocol.shape import Fold
from everstep.schedule import Instance, Worker, per_stage, plan, same_cap, uniform
from everstep.schedule.best_order import ONLINE_EFFORT
from everstep.schedule.task_scheduler import plan_with_speeds
from everstep_lab.schedule.compare import compare
from everstep_lab.schedule.normalize import normalize
from everstep_lab.schedule.polish import polish

OPTIMA = {"reroute": (29, 30, 33, 36), "decoupled": (27, 28, 29, 30), "staggered": (27, 27, 27, 27)}


LOOSE = 0.05
Row = dict[str, Any]
Say = Callable[[str], object]


class Case(NamedTuple):
    name: str
    instance: Instance


def unit_example(stage: int) -> Instance:
    one = uniform(replicas=3, stages=4, value=1.0)
    return Instance(
        replicas=3,
        stages=4,
        microbatches=6,
        forward=one,
        input_grad=one,
        weight_grad=one,
        dead=frozenset({Worker(1, stage)}),
    )


def even(replicas: int, stages: int, count: int, *, cap: int | None, dead: frozenset[Worker]) -> Instance:
    """Times 10, 11, 9, hop 1: near enough to each other that nothing hides, far enough that nothing ties."""
    return Instance(
        replicas=replicas,
        stages=stages,
        microbatches=count,
        hop=1.0,
        dead=dead,
        forward=uniform(replicas=replicas, stages=stages, value=10.0),
        input_grad=uniform(replicas=replicas, stages=stages, value=11.0),
        weight_grad=uniform(replicas=replicas, stages=stages, value=9.0),
        stash_cap=None if cap is None else same_cap(replicas=replicas, stages=stages, cap=cap),
    )


def scattered(replicas: int, stages: int, deaths: int, draw: random.Random) -> frozenset[Worker]:
    """Deaths that leave every stage somebody."""
    dead: set[Worker] = set()
    while len(dead) < deaths:
        worker = Worker(draw.randrange(replicas), draw.randrange(stages))
        if sum(w.stage == worker.stage for w in dead) < replicas - 1:
            dead.add(worker)
    return frozenset(dead)


def suite(caps: str = "peak") -> list[Case]:
    """48 instances: shapes x stash caps x even or uneven stage times, 1 to 10 % dead, hop > 0; one seed.

    Caps go from 1F1B's own to twice that: `peak` gives every worker 1F1B's peak (stage 0's, P), `falling`
    gives stage s what 1F1B holds there (P - s), which leaves the last stages no room to put a W off.
    """
    draw = random.Random(3)
    shapes = (
        (4, 2, 8),
        (4, 4, 16),
        (4, 8, 32),
        (4, 16, 128),
        (8, 4, 32),
        (8, 4, 64),
        (8, 8, 32),
        (8, 8, 128),
        (8, 32, 64),
        (12, 6, 48),
        (16, 4, 64),
        (16, 64, 32),
    )
    cases = []
    for number, (stages, replicas, count) in enumerate(shapes):
        for variant in range(4):
            factor = (1.0, 1.25, 1.5, 2.0)[(number + variant) % 4]
            workers = stages * replicas
            deaths = max(1, round(workers * draw.choice((0.01, 0.03, 0.06, 0.1))))
            dead = scattered(replicas, stages, min(deaths, max(1, workers // 10)), draw)
            cap = int(factor * stages)
            instance = even(replicas, stages, count, cap=cap, dead=dead)
            kind = "even"
            if variant % 2:
                kind = "uneven"
                spread = [draw.uniform(0.8, 1.2) for _ in range(stages)]
                instance = Instance(
                    replicas=replicas,
                    stages=stages,
                    microbatches=count,
                    hop=1.0,
                    dead=dead,
                    forward=per_stage(replicas=replicas, values=tuple(round(10 * x, 1) for x in spread)),
                    input_grad=per_stage(replicas=replicas, values=tuple(round(11 * x, 1) for x in spread)),
                    weight_grad=per_stage(replicas=replicas, values=tuple(round(9 * x, 1) for x in spread)),
                    stash_cap=instance.stash_cap,
                )
            if caps == "falling":
                falling = {
                    Worker(k, s): max(1, int(factor * (stages - s)))
                    for k in range(replicas)
                    for s in range(stages)
                }
                instance = replace(instance, stash_cap=falling)
            cases.append(
                Case(
                    f"{stages:2d} x {replicas:2d} x {count:3d}, {len(dead):2d} dead, cap {cap:2d}, {kind}",
                    instance,
                )
            )
    return cases


SORTS = ("slow workers", "uneven stages", "many dead", "one live per stage")


def uneven_suite() -> list[Case]:
    """80 small and middling instances whose workers differ, 20 of each sort; one seed per instance."""
    return [Case(SORTS[seed % 4], uneven_instance(seed)) for seed in range(80)]


def uneven_instance(seed: int) -> Instance:
    draw = random.Random(seed)
    sort = SORTS[seed % 4]
    shapes = (
        (2, 2, 4), (3, 3, 4), (4, 2, 8), (4, 4, 8), (4, 8, 16),
        (6, 3, 12), (8, 4, 16), (2, 8, 8), (8, 2, 24), (5, 5, 10),
    )  # fmt: skip
    stages, replicas, count = draw.choice(shapes)
    spread = [
        draw.uniform(0.5, 2.0) if sort == "uneven stages" or draw.random() < 0.3 else 1.0
        for _ in range(stages)
    ]
    speed = [
        [
            draw.choice((1, 1, 1, 1.5, 2, 3, 4))
            if sort == "slow workers"
            else draw.choice((1.5, 2, 3))
            if draw.random() < 0.1
            else 1.0
            for _ in range(stages)
        ]
        for _ in range(replicas)
    ]

    def grid(base: float) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(round(base * spread[s] * speed[k][s], 2) for s in range(stages)) for k in range(replicas)
        )

    dead = _deaths(sort, replicas, stages, draw)
    cap = draw.choice((None, stages, int(1.5 * stages), 2 * stages))
    return Instance(
        replicas=replicas,
        stages=stages,
        microbatches=count,
        forward=grid(10),
        input_grad=grid(11),
        weight_grad=grid(9),
        hop=draw.choice((0.0, 1.0, 4.0)),
        dead=frozenset(dead),
        stash_cap=None if cap is None else same_cap(replicas=replicas, stages=stages, cap=cap),
        reduce=tuple(draw.choice((0.0, 5.0)) for _ in range(stages)),
    )


def _deaths(sort: str, replicas: int, stages: int, draw: random.Random) -> set[Worker]:
    dead: set[Worker] = set()
    if sort == "one live per stage":
        for s in range(stages):
            keep = draw.randrange(replicas)
            if draw.random() < 0.7:
                dead |= {Worker(k, s) for k in range(replicas) if k != keep}
    elif sort == "many dead":
        for _ in range(int(stages * replicas * draw.choice((0.3, 0.5)))):
            worker = Worker(draw.randrange(replicas), draw.randrange(stages))
            if sum(w.stage == worker.stage for w in dead | {worker}) < replicas:
                dead.add(worker)
    elif draw.random() < 0.5:
        dead.add(Worker(draw.randrange(replicas), draw.randrange(stages)))
    return dead


def run_uneven(args: argparse.Namespace, say: Say) -> list[Row]:
    rows: list[Row] = []
    for mode in ("staggered", "decoupled", "reroute"):
        for number, case in enumerate(uneven_suite()):
            began = time.process_time()
            planned = plan(case.instance, mode, effort=args.effort)
            spent = (time.process_time() - began) * 1e3
            rows.append(
                {"case": case.name, "number": number, "mode": mode, "gap": planned.gap, "cpu_ms": spent}
            )
    say("| mode | sort | instances | mean gap | worst | above 5 % | ms, middle | ms, longest |")
    say("|---|---|---|---|---|---|---|---|")
    for mode in ("staggered", "decoupled", "reroute"):
        for sort in (*SORTS, "all"):
            some = [r for r in rows if r["mode"] == mode and sort in (r["case"], "all")]
            gaps, spent = [r["gap"] for r in some], [r["cpu_ms"] for r in some]
            above = sum(gap > LOOSE for gap in gaps)
            say(
                f"| {mode} | {sort} | {len(some)} | {statistics.mean(gaps):.2%} | {max(gaps):.1%} | {above} "
                f"| {statistics.median(spent):.0f} | {max(spent):.0f} |"
            )
    return rows


def slow_instance(seed: int) -> tuple[Instance, frozenset[Worker]]:
    """One or two workers 1.5 to 4 times slower, in half of the seeds another one dead; every third time each
    worker runs two parts of the model.
    """
    draw = random.Random(seed)
    replicas, stages = draw.choice((2, 2, 3, 4)), draw.choice((2, 3, 3, 4))
    count, hop, virtual = draw.choice((2, 2, 4, 6, 8)), draw.choice((0.0, 1.0)), 2 if seed % 3 == 2 else 1
    everyone = [Worker(k, s) for k in range(replicas) for s in range(stages)]
    struck = draw.sample(everyone, 3)
    slow = dict.fromkeys(struck[: draw.choice((1, 1, 2))], draw.choice((1.5, 2.0, 3.0, 4.0)))
    dead = struck[2:] if draw.random() < 0.5 else []
    fold = Fold(stages, virtual, True)
    parts = range(fold.parts)

    def grid(base: float) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(base / virtual * slow.get(Worker(k, fold.stage(p)), 1.0) for p in parts)
            for k in range(replicas)
        )

    made = Instance(
        replicas=replicas,
        stages=fold.parts,
        microbatches=count,
        forward=grid(10.0),
        input_grad=grid(11.0),
        weight_grad=grid(9.0),
        hop=hop,
        dead=frozenset(dead),
        virtual=virtual,
        turns=True,
    )
    return made, frozenset(slow)


def run_slow(args: argparse.Namespace, say: Say) -> list[Row]:
    rows: list[Row] = []
    for seed in range(args.seed, args.seed + 60):
        instance, slow = slow_instance(seed)
        for mode in ("staggered", "decoupled"):
            planned = plan_with_speeds(instance, mode, slow=slow)
            shape = f"{instance.replicas} x {instance.fold.stages} x {instance.microbatches}"
            rows.append({"seed": seed, "mode": mode, "virtual": instance.virtual, "gap": planned.gap})
            rows[-1] |= {"shape": shape, "value": planned.value, "bound": planned.lower_bound}
    say("| mode | parts | instances | mean gap | worst | seed, shape of the worst | above 3 % |")
    say("|---|---|---|---|---|---|---|")
    for mode in ("staggered", "decoupled"):
        for virtual in (1, 2):
            some = [r for r in rows if r["mode"] == mode and r["virtual"] == virtual]
            worst = max(some, key=lambda row: row["gap"])
            say(
                f"| {mode} | {virtual} | {len(some)} | {statistics.mean(r['gap'] for r in some):.2%} "
                f"| {worst['gap']:.1%} | {worst['seed']}, {worst['shape']} "
                f"| {sum(r['gap'] > 0.03 for r in some)} |"
            )
    return rows


def run_optima(args: argparse.Namespace, say: Say) -> list[Row]:
    rows: list[Row] = []
    say("one death at stage           0    1    2    3")
    for mode, best in OPTIMA.items():
        online = [plan(unit_example(s), mode).value for s in range(4)]
        exact = [polish(unit_example(s), mode, seconds=args.seconds) for s in range(4)]
        say(f"{mode:10s} proved optimum  " + " ".join(f"{x:4d}" for x in best))
        say(f"{'':10s} online          " + " ".join(f"{x:4g}" for x in online))
        polished, bounds = [p.value for p in exact], [p.lower_bound for p in exact]
        say(
            f"{'':10s} polished        "
            + " ".join(f"{x:4g}" for x in polished)
            + "   bound "
            + " ".join(f"{x:g}" for x in bounds)
        )
        rows.append(
            {"mode": mode, "optima": list(best), "online": online, "polished": polished, "bound": bounds}
        )
    fault_free = plan(unit_example(0).fault_free(), "1f1b").value
    say(f"fault-free 1F1B            {fault_free:4g}")
    return [*rows, {"mode": "1f1b", "fault_free": fault_free}]


def run_suite(args: argparse.Namespace, say: Say) -> list[Row]:
    rows: list[Row] = []
    say(f"{'stages x replicas x microbatches':44s} {'staggered':>26s} {'decoupled':>26s}")
    for case in suite(args.caps):
        cells = []
        for mode in ("staggered", "decoupled"):
            began = time.process_time()
            planned = plan(case.instance, mode, effort=args.effort)
            spent = (time.process_time() - began) * 1e3
            rows.append(
                {"case": case.name, "mode": mode, "value": planned.value, "gap": planned.gap, "cpu_ms": spent}
            )
            cells.append(f"{planned.value:8.1f} {planned.gap:6.2%} {spent:6.0f} ms")
        say(f"{case.name:44s} " + "   ".join(cells))
    for mode in ("staggered", "decoupled"):
        gaps = [row["gap"] for row in rows if row["mode"] == mode]
        say(f"{mode}: {len(gaps)} instances, mean gap {statistics.mean(gaps):.2%}, worst {max(gaps):.2%}")
    return rows


def run_bounds(args: argparse.Namespace, say: Say) -> list[Row]:
    """The same instance with fewer microbatches is small enough for proofs, and as tight."""
    rows: list[Row] = []
    say(f"{'':44s} {'plan':>8s} {'bound':>8s} {'gap':>7s} {'CP-SAT':>8s} {'proved':>8s} {'gap':>7s}")
    for case in (*suite("peak"), *suite("falling")):
        if plan(case.instance, "staggered").gap <= LOOSE:
            continue
        for count in (3, 4, 5, 6, case.instance.microbatches):
            instance = replace(case.instance, microbatches=count)
            planned = plan(instance, "staggered")
            solved = polish(instance, "staggered", seconds=args.seconds)
            proved_gap = planned.value / solved.lower_bound - 1
            rows.append(
                {
                    "case": case.name,
                    "microbatches": count,
                    "value": planned.value,
                    "bound": planned.lower_bound,
                    "gap": planned.gap,
                    "cp_sat_value": solved.value,
                    "cp_sat_bound": solved.lower_bound,
                    "cp_sat_gap": proved_gap,
                }
            )
            say(
                f"{case.name if count == 3 else '':38s} x {count:3d} {planned.value:8.1f} "
                f"{planned.lower_bound:8.1f} {planned.gap:7.2%} {solved.value:8.1f} "
                f"{solved.lower_bound:8.1f} {proved_gap:7.2%}"
            )
    return rows


def run_times(args: argparse.Namespace, say: Say) -> list[Row]:
    rows: list[Row] = []
    three = frozenset({Worker(1, 2), Worker(3, 4), Worker(5, 6)})
    ten = frozenset(Worker(3 * i, i) for i in range(10))
    for name, instance in (
        ("8 x 8 x 32, 3 dead", even(8, 8, 32, cap=16, dead=three)),
        ("16 x 64 x 64, 10 dead", even(64, 16, 64, cap=32, dead=ten)),
    ):
        for mode in ("reroute", "decoupled", "staggered"):
            best = best_of(args.runs, lambda i=instance, m=mode: plan(i, m))
            rows.append({"case": name, "mode": mode, "cpu_ms": best * 1e3})
            say(f"{name:22s} {mode:10s} {best * 1e3:7.1f} ms")
    say("growth with replicas: 8 stages, 32 microbatches, 3 dead, staggered")
    first = None
    for replicas in (8, 16, 32, 64, 128, 256):
        instance = even(replicas, 8, 32, cap=16, dead=three)
        best = best_of(args.runs, lambda i=instance: plan(i, "staggered"))
        first = first or best
        rows.append({"replicas": replicas, "mode": "staggered", "cpu_ms": best * 1e3, "growth": best / first})
        say(f"{replicas:4d} replicas {best * 1e3:7.1f} ms   x{best / first:.2f} (linear: x{replicas // 8})")
    return rows


def best_of(runs: int, work: Callable[[], object]) -> float:
    """Least of a few, seconds of this process: what the planner costs when nobody else wants the machine."""
    spent = []
    for _ in range(runs):
        gc.collect()
        began = time.process_time()
        work()
        spent.append(time.process_time() - began)
    return min(spent)


def run_policies(_: argparse.Namespace, say: Say) -> list[Row]:
    found: list[Row] = []
    say("| instance | policy | step | vs fault-free 1F1B | vs fault-free zero bubble |")
    say("|---|---|---|---|---|")
    one, three = frozenset({Worker(1, 2)}), frozenset({Worker(1, 2), Worker(3, 4), Worker(5, 6)})
    six = frozenset(Worker(4 * i, i) for i in range(6))
    cases = (
        ("3 x 4 x 6, 1 dead, unit times, no cap", unit_example(2)),
        ("8 x 4 x 16, 1 dead, cap 8", even(8, 4, 16, cap=8, dead=one)),
        ("8 x 8 x 32, 3 dead, cap 16", even(8, 8, 32, cap=16, dead=three)),
        ("32 x 8 x 32, 6 dead, cap 16", even(32, 8, 32, cap=16, dead=six)),
    )
    for name, instance in cases:
        rows = compare(instance)
        for number, row in enumerate(rows):
            step = "stopped" if row.step is None else f"{row.step:g}"
            versus = [row.relative(rows[i].step or 1) for i in (0, 1)]
            found.append({"case": name, "policy": row.policy, "step": row.step, "relative": versus})
            label = "" if number else name
            say(f"| {label} | {row.policy} | {step} | {versus[0]:.3f} | {versus[1]:.3f} |")
    return found


def run_scale(_: argparse.Namespace, say: Say) -> list[Row]:
    """ReCycle's question: throughput at 256 to 1,536 GPUs, beside the share of them that is alive."""
    found: list[Row] = []
    say("| workers | dead | alive | of fault-free, failures as they fell | moved | of 1F1B |")
    say("|---|---|---|---|---|---|")
    for replicas, stages in ((32, 8), (64, 8), (64, 16), (96, 16)):
        healthy = even(replicas, stages, 2 * stages, cap=2 * stages, dead=frozenset())
        base, plain = plan(healthy, "staggered").value, plan(healthy, "1f1b").value
        for share in (0.01, 0.05, 0.1):
            everyone = replicas * stages
            dead = scattered(replicas, stages, round(share * everyone), random.Random(everyone))
            moved = normalize(replace(healthy, dead=dead), "staggered")[-1].dead
            there, here = (base / plan(replace(healthy, dead=d), "staggered").value for d in (dead, moved))
            row = {"workers": everyone, "dead": len(dead), "alive": 1 - len(dead) / everyone}
            row |= {"where they fell": there, "moved": here, "of 1F1B": here * plain / base}
            found.append(row)
            numbers = " | ".join(f"{value:.3f}" for value in list(row.values())[2:])
            say(f"| {replicas} x {stages} | {len(dead)} | {numbers} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=tuple(COMMANDS))
    parser.add_argument("--effort", type=int, default=ONLINE_EFFORT)
    parser.add_argument("--seed", type=int, default=0, help="of the first of `slow`")
    parser.add_argument("--caps", choices=("peak", "falling"), default="peak")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of one polish")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = COMMANDS[args.what](args, (lambda _: None) if args.json else partial(print, flush=True))
    if args.json:
        print(json.dumps(rows))


COMMANDS = {
    "optima": run_optima,
    "suite": run_suite,
    "uneven": run_uneven,
    "slow": run_slow,
    "bounds": run_bounds,
    "times": run_times,
    "policies": run_policies,
    "scale": run_scale,
}

if __name__ == "__main__":
    main()
