"""CP-SAT on a small step with free hosts: it chooses who runs what and when. Nothing of the planner is used."""

from __future__ import annotations

from typing import Any

from everstep.schedule import Instance, Worker

SCALE = 100  # times become integers; rounded down, so that no solution is lost


def solve(
    instance: Instance, *, fused: bool, staggered: bool, seconds: float, hint: float = 0.0
) -> tuple[float, float]:
    """The best value found, and what the solver proved that nothing beats."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    scaled = lambda x: int(x * SCALE + 1e-9)  # noqa: E731
    hop = scaled(instance.hop)
    horizon = scaled(hint or _serial(instance))
    batches = list(instance.homes())
    on_worker: dict[Worker, list[Any]] = {w: [] for w in instance.workers()}
    held: dict[Worker, list[Any]] = {w: [] for w in instance.workers()}
    opens = [model.new_int_var(0, horizon, f"open {s}") for s in range(instance.stages)]
    closes = [model.new_int_var(0, horizon, f"close {s}") for s in range(instance.stages)]
    for number, _ in enumerate(batches):
        sent, back = None, None
        ends_of_input = []
        for s in range(instance.stages):
            f_start, f_end, i_start, i_end, w_start, w_end = (
                model.new_int_var(0, horizon, f"{name} {number} {s}")
                for name in ("fs", "fe", "is", "ie", "ws", "we")
            )
            chosen = []
            for k in instance.live(s):
                here = model.new_bool_var(f"{number} {s} on {k}")
                chosen.append(here)
                f, i, w = (
                    scaled(grid[k][s])
                    for grid in (instance.forward, instance.input_grad, instance.weight_grad)
                )
                if fused:
                    i, w = scaled(instance.input_grad[k][s] + instance.weight_grad[k][s]), 0
                worker = Worker(k, s)
                on_worker[worker] += [
                    model.new_optional_interval_var(f_start, f, f_end, here, ""),
                    model.new_optional_interval_var(i_start, i, i_end, here, ""),
                ]
                if not fused:
                    on_worker[worker].append(model.new_optional_interval_var(w_start, w, w_end, here, ""))
                else:
                    model.add(w_end == i_end).only_enforce_if(here)
                held_for = model.new_int_var(0, horizon, "")
                held[worker].append(model.new_optional_interval_var(f_start, held_for, w_end, here, ""))
            model.add_exactly_one(chosen)
            model.add(i_start >= f_end)
            if not fused:
                model.add(w_start >= i_end)
            else:
                model.add(w_start == i_end)
            if sent is not None:
                model.add(f_start >= sent + hop)
            sent = f_end
            model.add(opens[s] <= f_start)
            model.add(closes[s] >= w_end)
            ends_of_input.append((i_start, i_end))
        for (above, _), (_, below) in zip(ends_of_input, ends_of_input[1:], strict=False):
            model.add(above >= below + hop)
        del back
    for worker, intervals in on_worker.items():
        model.add_no_overlap(intervals)
        if instance.stash_cap is not None and worker in instance.stash_cap:
            model.add_cumulative(held[worker], [1] * len(held[worker]), instance.stash_cap[worker])
    value = model.new_int_var(0, horizon * 2, "value")
    for s in range(instance.stages):
        closing = scaled(instance.closing(s))
        model.add(value >= closes[s] + closing - (opens[s] if staggered else 0))
    model.minimize(value)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return float("inf"), solver.best_objective_bound / SCALE
    return solver.objective_value / SCALE, solver.best_objective_bound / SCALE


def _serial(instance: Instance) -> float:
    """All of it on the slowest workers, one op after the other."""
    slowest = sum(
        max(grid[k][s] for k in instance.live(s))
        for grid in (instance.forward, instance.input_grad, instance.weight_grad)
        for s in range(instance.stages)
    )
    return (slowest + 2 * instance.hop * instance.stages) * instance.replicas * instance.microbatches
