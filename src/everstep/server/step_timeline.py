"""A step as it was planned and as it was run, on one axis of time.

Planned: the schedule in force, with the op times its planner believed. Measured: the newest step that every
worker has whole, from their recorders; ops are named by the schedule's order, which workers keep. A worker
whose number of ops is another (the step was interrupted, or planned again) is shown without names. Workers on
several machines are shown by their machines' clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.protocol.ops import Worker, parse_worker
from everstep.schedule.task_scheduler import TaskScheduler

MAX_WORKERS = 128
Measured = Mapping[str, Mapping[str, list[list[int]]]]  # by worker, by step: start and end in nanoseconds


def document(scheduler: TaskScheduler | None, measured: Measured) -> dict[str, Any]:
    planned = scheduler.in_force() if scheduler is not None else None
    steps = [set(map(int, by_step)) for by_step in measured.values()]
    common = set.intersection(*steps) if steps else set()
    step = max(common, default=None)
    names: dict[Worker, list[str]] = {}
    made: dict[str, Any] = {
        "step": step,
        "planned": [],
        "measured": [],
        "planned_s": None,
        "measured_s": None,
    }
    if scheduler is not None and planned is not None:
        profile = scheduler.profile
        made |= {"mode": scheduler.mode, "eager_updates": profile.eager(), "hop_s": planned[1].hop}
    if planned is not None and len(planned[0].schedule.ops) <= MAX_WORKERS:
        plan, instance = planned
        names = {worker: list(map(str, ops)) for worker, ops in plan.schedule.ops.items()}
        rows = [(str(t.worker), str(t.op), t.start, t.end) for t in plan.timeline(instance.time)]
        made |= {"planned": rows, "planned_s": plan.value}
    if step is not None and len(measured) <= MAX_WORKERS:
        lists = {worker: by_step[str(step)] for worker, by_step in measured.items()}
        first = min(op[0] for ops in lists.values() for op in ops)
        rows = []
        for worker, ops in lists.items():
            called = names.get(parse_worker(worker), [])
            for index, (begun, ended) in enumerate(ops):
                name = called[index] if len(called) == len(ops) else ""
                rows.append((worker, name, (begun - first) / 1e9, (ended - first) / 1e9))
        made |= {"measured": rows, "measured_s": max(row[3] for row in rows)}
    return made


def traced(scheduler: TaskScheduler | None, answers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By worker: its ops with their names, where the schedule in force has as many, and its parcels."""
    planned = scheduler.in_force() if scheduler is not None else None
    names = {} if planned is None else {str(w): list(map(str, o)) for w, o in planned[0].schedule.ops.items()}
    rows = []
    for node, answer in answers.items():
        for worker, found in answer.items() if isinstance(answer, dict) else ():
            if not isinstance(found, dict) or "ops" not in found:
                continue
            by_step: dict[int, list[list[int]]] = {}
            for step, begun, ended in found["ops"]:
                by_step.setdefault(step, []).append([begun, ended])
            ops = []
            for step, spans in by_step.items():
                called = names.get(worker, [])
                for index, span in enumerate(sorted(spans)):
                    ops.append([step, called[index] if len(called) == len(spans) else "", *span])
            rows.append(found | {"worker": worker, "node": node, "ops": ops})
    return rows
