"""The ops of a step as workers' recorders have them, named by the schedule's order, which workers keep. A
worker whose number of ops is another (the step was interrupted, or planned again) is shown without names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.schedule.task_scheduler import TaskScheduler


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
