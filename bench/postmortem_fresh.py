"""Thirty further jobs and faults for `bench/postmortem.py`, written after the reader of dumps was finished.

    python bench/postmortem_fresh.py                 a line per run and a summary
    python bench/postmortem_fresh.py --only ring --json

Other communication than there: sharded optimizers (reduce-scatter, all-gather), rings of messages, experts
(all-to-all in groups), evaluation by rank 0, groups that overlap. Other faults: dying with an operation under
way, abort from another thread, a message that is never sent, two ranks that enter their groups in opposite
order, a slow rank that harms nothing, an exit that Python handlers see.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import postmortem
from postmortem import STEPS, TIMEOUT_S, WORK_S, Run, Scenario

JOBS = ("sharded", "ring", "experts", "evaluated", "overlapping")
FAULTS = {
    "raise, under way": "an exception after an operation was issued and before it was waited for",
    "abort": "SIGABRT from another thread, in the middle of a step",
    "system exit": "sys.exit(1) in the loop, and its dump is written",
    "unsent": "one message or operation is left out; it goes on to the next",
    "crossed": "it enters the operations of a step in the opposite order",
    "slow, harmless": "it takes five times as long as the others and harms nothing",
}


def strike(run: Run) -> None:
    import torch
    import torch.distributed as dist

    scenario, here = run.scenario, run.rank in run.scenario.struck
    if scenario.fault == "slow, harmless" and here:
        time.sleep(WORK_S * 5)
    if run.is_struck("raise, under way"):
        dist.all_reduce(torch.ones(3000), async_op=True)
        raise ValueError("planted")
    if run.is_struck("abort"):
        threading.Timer(WORK_S / 2, os.abort).start()
    if run.is_struck("system exit"):
        sys.exit(1)


def sharded(run: Run) -> None:
    """ZeRO's pattern: reduce-scatter of gradients, all-gather of weights."""
    import torch
    import torch.distributed as dist

    part, whole = torch.ones(100), torch.ones(100 * run.size)
    for run.step in range(STEPS):
        time.sleep(WORK_S)
        strike(run)
        ops: list[Callable[[], Any]] = [
            lambda: dist.reduce_scatter_tensor(part, whole),
            lambda: dist.all_gather_into_tensor(whole, part),
            lambda: dist.all_reduce(torch.ones(1)),
        ]
        in_turn(run, ops)


def ring(run: Run) -> None:
    """Messages round a ring, then the world."""
    import torch
    import torch.distributed as dist

    after, before = (run.rank + 1) % run.size, (run.rank - 1) % run.size
    for run.step in range(STEPS):
        time.sleep(WORK_S)
        strike(run)
        ops: list[Callable[[], Any]] = [
            lambda: wait([dist.isend(run.tensor, after), dist.irecv(torch.empty(1000), before)]),
            lambda: dist.all_reduce(torch.ones(10)),
        ]
        in_turn(run, ops)


def experts(run: Run) -> None:
    """All-to-all among two halves, data-parallel sums across them."""
    import torch
    import torch.distributed as dist

    half = max(2, run.size // 2)
    sets = [list(range(at, min(at + half, run.size))) for at in range(0, run.size, half)]
    groups = [(ranks, dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT_S))) for ranks in sets]
    ranks, mine = next((ranks, group) for ranks, group in groups if run.rank in ranks)
    for run.step in range(STEPS):
        time.sleep(WORK_S)
        strike(run)
        ops: list[Callable[[], Any]] = [
            lambda: dist.all_to_all_single(torch.empty(len(ranks)), torch.ones(len(ranks)), group=mine),
            lambda: dist.all_reduce(torch.ones(50), group=mine),
            lambda: dist.all_reduce(torch.ones(20)),
        ]
        in_turn(run, ops)


def evaluated(run: Run) -> None:
    """Every other step rank 0 tells all how it went."""
    import torch
    import torch.distributed as dist

    for run.step in range(STEPS):
        time.sleep(WORK_S)
        strike(run)
        ops: list[Callable[[], Any]] = [lambda: dist.all_reduce(torch.ones(500))]
        if run.step % 2:
            ops += [lambda: dist.broadcast_object_list([run.step], src=0), dist.barrier]
        in_turn(run, ops)


def overlapping(run: Run) -> None:
    """Neighbours in groups of two that overlap, as in sequence parallel attention, then the world."""
    import torch
    import torch.distributed as dist

    pairs = [(at, at + 1) for at in range(run.size - 1)]
    groups = [dist.new_group(list(pair), timeout=timedelta(seconds=TIMEOUT_S)) for pair in pairs]
    for run.step in range(STEPS):
        time.sleep(WORK_S)
        strike(run)
        ops: list[Callable[[], Any]] = [
            lambda group=group: dist.all_reduce(torch.ones(30), group=group)
            for pair, group in zip(pairs, groups, strict=True)
            if run.rank in pair
        ]
        in_turn(run, [*ops, lambda: dist.all_reduce(torch.ones(5))])


def in_turn(run: Run, ops: list[Callable[[], Any]]) -> None:
    if run.is_struck("crossed"):
        ops = ops[::-1]
    if run.is_struck("unsent"):
        ops = ops[1:]
    for op in ops:
        op()


def wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


RUNS = {
    "sharded": sharded,
    "ring": ring,
    "experts": experts,
    "evaluated": evaluated,
    "overlapping": overlapping,
}


def scenarios() -> list[Scenario]:
    """Thirty: every job with every fault, three to six ranks in turn."""
    return [
        Scenario(job=job, fault=fault, ranks=3 + (i + j) % 4)
        for i, job in enumerate(JOBS)
        for j, fault in enumerate(FAULTS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    postmortem.RUNS.update(RUNS)
    postmortem.warm_up()
    rows = []
    for number, scenario in enumerate(s for s in scenarios() if given.only in s.name):
        with tempfile.TemporaryDirectory() as scratch:
            folder = postmortem.folder_of(given.keep, scenario) if given.keep else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            port = 20000 + (os.getpid() * 7 + number * 3) % 30000
            if not postmortem.run_scenario(scenario, folder, port):
                print(f"--- {scenario.name}: the fault did not come about", file=sys.stderr)
                continue
            rows.append(postmortem.judge(scenario, folder))
        row = rows[-1]
        mark = "ok " if row["exact"] else "bad"
        print(f"{mark} {scenario.name:40} truth {row['truth']!s:8} accused {row['accused']}", file=sys.stderr)
    if given.json:
        print(json.dumps({"summary": postmortem.summary(rows), "rows": rows}))
        return
    for name, value in postmortem.summary(rows).items():
        print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
