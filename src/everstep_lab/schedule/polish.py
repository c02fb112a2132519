"""Optional offline polish: OR-Tools CP-SAT improves a plan, and proves how far it is from the best.

The model is the folded step (see `compact`), or the one pipeline of a step in lockstep where that is better
or the step too large: one interval per op, no overlap per worker, the stash as a cumulative resource, the
makespan or the longest stage span to minimise. Hosts stay as planned, so what the solver proves holds for
these hosts. Microbatches with the same hosts go in turn, and the clock starts with stage 0's first op:
without the two, a hundred ops are too many to prove anything about.

The plan itself is the hint: without a complete feasible one the solver finds nothing above some 1,500 ops.
Times become integers first; the order found is then timed again with the true ones, so rounding cannot make
a plan invalid.

The solver is the extra `optimal` and loaded only here. Progress goes to a callback; bars belong to the
caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from everstep.errors import UserError
from everstep.schedule.best_order import ONLINE_EFFORT, THOROUGH_EFFORT, best_order, time_order, value_of
from everstep.schedule.bounds import lower_bound, stash_of_mode
from everstep.schedule.compact import UNLIMITED, Compact, compact
from everstep.schedule.instance import Instance
from everstep.schedule.lockstep import lockstep
from everstep.schedule.modes import MODES
from everstep.schedule.planner import answer, answer_in_step
from everstep.schedule.schedule import Planned
from everstep.schedule.timing import Timing

Progress = Callable[[float, float, float], None]  # best value so far, best bound so far, seconds
FINEST = 1_000
MOST_OPS = 20_000  # a model of more takes too long to build


def polish(
    instance: Instance, mode: str, *, seconds: float, workers: int = 8, progress: Progress | None = None
) -> Planned:
    """The best plan found within the time limit, never worse than `plan`'s; its bound may be the solver's.

    `workers` are the solver's threads. They search in different ways, so more of them than cores still help.
    """
    cp_model = _solver()
    caps = stash_of_mode(instance, mode)
    bound = lower_bound(instance, mode, caps)
    whole = compact(instance, fused=MODES[mode].fused, stash_cap=caps)
    effort = THOROUGH_EFFORT if whole.num_ops() <= MOST_OPS else ONLINE_EFFORT
    order, timing = best_order(whole, mode, bound, effort)
    in_step = lockstep(instance, mode, bound, effort, caps) if instance.dead else None
    worth = in_step is not None and value_of(in_step.timing, mode) < value_of(timing, mode) - 1e-12
    if in_step is not None and (worth or whole.num_ops() > MOST_OPS):
        # One pipeline stands for all. What is proved of it is not proved of the step.
        step = in_step.pipeline, in_step.order, in_step.timing
        order, timing, _ = _improve(cp_model, *step, mode, bound, seconds, workers, progress)
        planned = answer_in_step(instance, mode, replace(in_step, order=order, timing=timing), bound)
        return replace(planned, because=f"{planned.because[:-1]}; polished in lockstep.")
    if whole.num_ops() > MOST_OPS:
        planned = answer(instance, mode, whole, order, timing, bound)
        return replace(planned, because=f"{planned.because[:-1]}; too large a step to polish.")
    order, timing, proved = _improve(cp_model, whole, order, timing, mode, bound, seconds, workers, progress)
    planned = answer(instance, mode, whole, order, timing, max(bound, proved))
    hosts = "; the bound is for these hosts" if proved > bound * (1 + 1e-9) else ""
    return replace(planned, because=f"{planned.because[:-1]}; polished{hosts}.")


def _improve(
    cp_model: Any,
    problem: Compact,
    order: list[list[int]],
    timing: Timing,
    mode: str,
    bound: float,
    seconds: float,
    workers: int,
    progress: Progress | None,
) -> tuple[list[list[int]], Timing, float]:
    """A better order with its timing, if one is found, and what no order of this problem can beat."""
    value = value_of(timing, mode)
    if value <= bound * (1 + 1e-9):
        return order, timing, bound
    tick = _tick(problem)
    model, starts = _model(cp_model, problem, order, timing, MODES[mode].staggered, bound / tick, tick)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model, _callback(cp_model, progress, tick))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return order, timing, bound
    better = [sorted(codes, key=lambda code: (solver.value(starts[code]), code)) for codes in order]
    again = time_order(problem, better, mode)
    if value_of(again, mode) < value - 1e-9:
        order, timing = better, again
    # A bound on rounded times is a bound on the true ones only where nothing was rounded.
    return order, timing, solver.best_objective_bound * tick if _exact(problem, tick) else bound


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise UserError("polish needs OR-Tools; pip install ortools.") from None
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
    _in_turn(model, problem, starts, length)
    objective = model.new_int_var(int(bound + 1e-6), horizon, "")
    for stage in range(problem.stages):
        closing = round(problem.closing[stage] / tick)
        opens: Any = 0
        if staggered and stage > 0:  # the clock starts with stage 0's first op
            opens = model.new_int_var(0, horizon, "")
        for worker in range(stage, len(order), problem.stages):
            for code in order[worker]:
                if staggered and stage > 0:
                    model.add(starts[code] >= opens)
                model.add(starts[code] + length[code] + closing <= opens + objective)
    model.minimize(objective)
    return model, starts


def _in_turn(model: Any, problem: Compact, starts: dict[int, Any], length: dict[int, int]) -> None:
    """Microbatches with the same hosts at every stage are interchangeable: let them go in turn.

    No optimum is lost: name the n-th F, I and W of a stage, in time, those of the n-th microbatch. Inputs are
    still there (the n-th input came no later than the n-th start) and a stash only counts.
    """
    if any(problem.have_forward) or any(problem.have_input) or any(problem.have_weight):
        return
    alike: dict[tuple[int, ...], list[int]] = {}
    for first in range(0, len(problem.host), problem.stages):
        alike.setdefault(tuple(problem.host[first : first + problem.stages]), []).append(first)
    for firsts in alike.values():
        for one, next_one in pairwise(sorted(firsts, key=lambda u: problem.key[u])):
            for code in range(3 * one, 3 * (one + problem.stages)):
                if code in starts:
                    model.add(starts[code + 3 * (next_one - one)] >= starts[code] + length[code])


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
