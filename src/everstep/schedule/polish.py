"""Optional offline polish: OR-Tools CP-SAT improves a plan, and proves how far it is from the best.

The model is the folded step (see `compact`): one interval per op, no overlap per worker, the stash as a
cumulative resource, the makespan or the longest stage span to minimise. Hosts stay as planned. The plan
itself is the hint: without a complete feasible one the solver finds nothing above some 1,500 ops. Times
become integers first; the order found is then timed again with the true ones, so rounding cannot make a
plan invalid.

The solver is the extra `optimal` and loaded only here. Progress goes to a callback; bars belong to the
caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from everstep.errors import UserError
from everstep.schedule.bounds import lower_bound, stash_of_mode
from everstep.schedule.compact import UNLIMITED, Compact, compact
from everstep.schedule.instance import Instance
from everstep.schedule.planner import answer
from everstep.schedule.schedule import FUSED_MODES, STAGGERED_MODES, Planned
from everstep.schedule.search import THOROUGH_EFFORT, best_order, time_order
from everstep.schedule.timing import Timing

Progress = Callable[[float, float, float], None]  # best value so far, best bound so far, seconds
FINEST = 1_000


def polish(
    instance: Instance, mode: str, *, seconds: float, workers: int = 2, progress: Progress | None = None
) -> Planned:
    """The best plan found within the time limit, never worse than `plan`'s; its bound may be the solver's."""
    cp_model = _solver()
    caps = stash_of_mode(instance, mode)
    problem = compact(instance, fused=mode in FUSED_MODES, stash_cap=caps)
    bound = lower_bound(instance, mode, caps)
    order, timing = best_order(problem, mode, bound, THOROUGH_EFFORT)
    staggered = mode in STAGGERED_MODES
    value = timing.period() if staggered else max(timing.ends)
    if value <= bound * (1 + 1e-9):
        return answer(instance, mode, problem, order, timing, bound)
    tick = _tick(problem)
    model, starts = _model(cp_model, problem, order, timing, staggered, bound / tick, tick)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model, _callback(cp_model, progress, tick))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        better = [sorted(codes, key=lambda code: (solver.value(starts[code]), code)) for codes in order]
        again = time_order(problem, better, mode)
        if (again.period() if staggered else max(again.ends)) < value - 1e-9:
            order, timing = better, again
        # A bound on rounded times is a bound on the true ones only where nothing was rounded.
        if _exact(problem, tick):
            bound = max(bound, solver.best_objective_bound * tick)
    planned = answer(instance, mode, problem, order, timing, bound)
    return replace(planned, because=f"{planned.because[:-1]}; polished.")


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise UserError("polish needs OR-Tools; install it with: pip install 'everstep[optimal]'.") from None
    return cp_model


def _durations(problem: Compact) -> set[float]:
    return {*problem.forward, *problem.backward, *problem.weight, *problem.closing, problem.hop} - {0.0}


def _exact(problem: Compact, tick: float) -> bool:
    return all(abs(d / tick - round(d / tick)) < 1e-6 for d in _durations(problem))


def _tick(problem: Compact) -> float:
    """The coarsest tick, of some natural ones, that expresses every time; else a fine one."""
    for parts in (1, 2, 4, 5, 8, 10, 20, 100):
        if _exact(problem, 1 / parts):
            return 1 / parts
    return max(_durations(problem), default=1.0) / FINEST


def _model(
    cp_model: Any,
    problem: Compact,
    order: list[list[int]],
    timing: Timing,
    staggered: bool,
    bound: float,
    tick: float,
) -> tuple[Any, dict[int, Any]]:
    model = cp_model.CpModel()
    begin = min(s[0] for s in timing.starts if s)
    horizon = int(2 * (max(timing.ends) - begin) / tick) + 10
    hop = round(problem.hop / tick)
    starts: dict[int, Any] = {}
    length: dict[int, int] = {}
    for worker, codes in enumerate(order):
        times = (problem.forward[worker], problem.backward[worker], problem.weight[worker])
        for code, hint in zip(codes, timing.starts[worker], strict=True):
            starts[code] = model.new_int_var(0, horizon, "")
            length[code] = round(times[code % 3] / tick)
            model.add_hint(starts[code], round((hint - begin) / tick))
        model.add_no_overlap([model.new_fixed_size_interval_var(starts[c], length[c], "") for c in codes])
        _stash(model, problem, worker, codes, starts, length, horizon)
    for code in starts:
        unit, kind = divmod(code, 3)
        stage = unit % problem.stages
        needs = []
        if kind == 0 and stage > 0:
            needs.append((code - 3, hop))
        if kind == 1:
            needs.append((code - 1, 0))
            if stage < problem.stages - 1:
                needs.append((code + 3, hop))
        if kind == 2:
            needs.append((code - 1, 0))
        for before, gap in needs:
            if before in starts:
                model.add(starts[code] >= starts[before] + length[before] + gap)
    objective = model.new_int_var(int(bound + 1e-6), horizon, "")
    for stage in range(problem.stages):
        closing = round(problem.closing[stage] / tick)
        opens: Any = 0
        if staggered:
            opens = model.new_int_var(0, horizon, "")
        for worker in range(stage, len(order), problem.stages):
            for code in order[worker]:
                if staggered:
                    model.add(starts[code] >= opens)
                model.add(starts[code] + length[code] + closing <= opens + objective)
    model.minimize(objective)
    return model, starts


def _stash(
    model: Any,
    problem: Compact,
    worker: int,
    codes: list[int],
    starts: dict[int, Any],
    length: dict[int, int],
    horizon: int,
) -> None:
    """Each microbatch takes a share of the room from its F to its I, and what is left of it until its W."""
    if problem.room[worker] == UNLIMITED:
        return
    unit_size = problem.room[worker] / FINEST if problem.takes[worker] != 1.0 else 1.0
    intervals, sizes = [], []

    def hold(begin: Any, end: Any, size: float) -> None:
        if size > 0:
            intervals.append(model.new_interval_var(begin, model.new_int_var(0, horizon, ""), end, ""))
            sizes.append(-int(-size // unit_size))

    late = 0.0 if problem.fused else problem.frees_late[worker]
    mine = set(codes)
    for code in codes:
        if code % 3 == 0 and code + 1 in mine:
            hold(starts[code], starts[code + 1] + length[code + 1], problem.takes[worker] - late)
            if code + 2 in mine:
                hold(starts[code], starts[code + 2] + length[code + 2], late)
    if intervals:
        model.add_cumulative(intervals, sizes, int(problem.room[worker] // unit_size))


def _callback(cp_model: Any, progress: Progress | None, tick: float) -> Any:
    class Report(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
        def on_solution_callback(self) -> None:
            if progress is not None:
                progress(self.objective_value * tick, self.best_objective_bound * tick, self.wall_time)

    return Report()
