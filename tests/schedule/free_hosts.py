"""CP-SAT on a small step with free hosts: it chooses who runs what and when, without the planner."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from everstep.schedule import Instance, Worker


def solve(instance: Instance, *, staggered: bool, seconds: float, most: float) -> tuple[float, float]:
    """The best value found, up to a makespan of `most`, and what was proved that nothing beats. Times must be
    whole numbers."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    horizon = int(most) + 1
    opens = [model.new_int_var(0, horizon, "") for _ in range(instance.stages)]
    closes = [model.new_int_var(0, horizon, "") for _ in range(instance.stages)]
    on_worker: dict[Worker, list[Any]] = {w: [] for w in instance.workers()}
    held: dict[Worker, list[Any]] = {w: [] for w in instance.workers()}
    firsts: list[Any] = []
    for _ in instance.homes():
        places = [_place(model, instance, s, horizon, on_worker, held) for s in range(instance.stages)]
        firsts.append(places[0][0][0])
        for s, (first, _, last) in enumerate(places):
            model.add(opens[s] <= first[0])
            model.add(closes[s] >= last)
        for above, below in pairwise(places):
            model.add(below[0][0] >= above[0][1] + int(instance.hop))
            model.add(above[1][0] >= below[1][1] + int(instance.hop))
    for one, other in pairwise(firsts):  # microbatches are alike: the solver need not try them in any order
        model.add(one <= other)
    for worker, intervals in on_worker.items():
        model.add_no_overlap(intervals)
        if instance.stash_cap is not None and worker in instance.stash_cap:
            model.add_cumulative(held[worker], [1] * len(held[worker]), instance.stash_cap[worker])
    value = model.new_int_var(0, 2 * horizon, "")
    for s in range(instance.stages):
        model.add(value >= closes[s] + int(instance.closing(s)) - (opens[s] if staggered else 0))
    model.minimize(value)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    found = solver.objective_value if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else float("inf")
    return found, solver.best_objective_bound


def _place(
    model: Any,
    instance: Instance,
    stage: int,
    horizon: int,
    on_worker: dict[Worker, list[Any]],
    held: dict[Worker, list[Any]],
) -> tuple[tuple[Any, Any], tuple[Any, Any], Any]:
    """One microbatch at one stage: (start, end) of its F and of its I, and the end of its last op."""
    times = [model.new_int_var(0, horizon, "") for _ in range(6)]
    f_start, f_end, i_start, i_end, w_start, w_end = times
    chosen = []
    for k in instance.live(stage):
        here = model.new_bool_var("")
        chosen.append(here)
        forward, backward, weight = (
            int(grid[k][stage]) for grid in (instance.forward, instance.input_grad, instance.weight_grad)
        )
        worker = Worker(k, stage)
        ops = [(f_start, forward, f_end), (i_start, backward, i_end), (w_start, weight, w_end)]
        on_worker[worker] += [model.new_optional_interval_var(*op, here, "") for op in ops]
        span = model.new_int_var(0, horizon, "")
        held[worker].append(model.new_optional_interval_var(f_start, span, w_end, here, ""))
    model.add_exactly_one(chosen)
    model.add(i_start >= f_end)
    model.add(w_start >= i_end)
    return (f_start, f_end), (i_start, i_end), w_end
