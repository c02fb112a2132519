"""`plan`: the best step a set of survivors can run.

    bound      how short any schedule could be, hence the gap                bounds.py
    hosts      who runs what, with more or less patience for slow workers    hosts.py
    fold       replicas that are alike become one                            compact.py
    dispatch   list scheduling, once for each of a few habits                dispatch.py
    time       the order's makespan, or its period when it repeats           timing.py

How many habits are tried depends on the size of the folded step, never on a clock: the same instance gives
the same schedule on every machine, so every survivor could compute it for itself. Rejected: a time limit
(two machines would disagree), random restarts (twenty of them gain less than the second habit), other hosts
by trial (half a per cent of a step with a slow worker, for four times the planning; see docs/schedules.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from everstep.errors import InternalError
from everstep.protocol.ops import Kind, Op, Worker
from everstep.schedule.bounds import lower_bound
from everstep.schedule.compact import Compact, compact
from everstep.schedule.dispatch import HABITS, dispatch
from everstep.schedule.hosts import PATIENCE, Place, choose_hosts
from everstep.schedule.instance import Instance
from everstep.schedule.modes import MODES, STAGGERED
from everstep.schedule.schedule import (
    LazyByWorker,
    Planned,
    Schedule,
    closing_ops,
)
from everstep.schedule.timing import Timing, run, steady

EFFORT = 13_000  # ops dispatched, over all habits tried: about 40 ms
GOOD_ENOUGH = 1e-3  # over the bound


def plan(instance: Instance, mode: str = STAGGERED, *, effort: int = EFFORT) -> Planned:
    """Order the ops that are not done. `modes` says what each mode minimises."""
    assert mode in MODES, mode
    bound = lower_bound(instance, mode)
    problems = [compact(instance, moved) for moved in _hosts(instance)]
    best: tuple[float, Compact, list[list[int]], Timing] | None = None
    spent = 0
    for habit, problem in product(HABITS, problems):
        cost = problem.num_ops()
        if best is not None and (spent + cost > effort or best[0] <= bound * (1 + GOOD_ENOUGH)):
            break
        spent += cost
        order = dispatch(problem, habit, bound)
        timing, value = judged(problem, order, mode)
        if best is None or value < best[0] - 1e-12:
            best = value, problem, order, timing
    assert best is not None
    if math.isinf(best[0]):
        raise InternalError(f"no order of all {problems[0].num_ops()} ops was found in mode {mode}")
    return _answer(instance, mode, *best[1:], bound)


def _hosts(instance: Instance) -> list[dict[Place, int]]:
    """Who hosts what, in ways that differ: one, where no worker is slow."""
    found: list[dict[Place, int]] = []
    for patience in PATIENCE:
        if (moved := choose_hosts(instance, patience=patience)) not in found:
            found.append(moved)
    return found


def judged(problem: Compact, order: list[list[int]], mode: str) -> tuple[Timing, float]:
    """Its times, and what the mode minimises. An order that is not whole would be the shortest of all."""
    timing = run(problem, order, [0.0] * problem.stages)
    if mode == STAGGERED:
        timing = steady(problem, order, timing)
    if sum(map(len, order)) < problem.num_ops():
        return timing, math.inf
    return timing, timing.period() if mode == STAGGERED else max(timing.ends)


def _answer(
    instance: Instance, mode: str, problem: Compact, order: list[list[int]], timing: Timing, bound: float
) -> Planned:
    """Unfold a compact order into a plan; ops and start times are written out when they are read."""
    origin = min(timing.opens())

    def folded(worker: Worker) -> int:
        return problem.stands_for[worker.replica] * problem.stages + worker.stage

    def ops_of(worker: Worker) -> tuple[Op, ...]:
        mine = (problem.op(code, worker.replica) for code in order[folded(worker)])
        return (*mine, *closing_ops(worker.stage))

    def starts_of(worker: Worker) -> tuple[float, ...]:
        starts: Sequence[float] = timing.starts[folded(worker)]
        reduce = timing.ends[worker.stage] - instance.closing(worker.stage)
        update = reduce + (instance.reduce[worker.stage] if instance.reduce else 0.0)
        return tuple(t - origin for t in (*starts, reduce, update))

    makespan = timing.makespan()
    planned = Planned(
        mode=mode,
        schedule=Schedule(LazyByWorker(instance.workers, ops_of)),
        period=timing.period() if mode == STAGGERED else makespan,
        makespan=makespan,
        lower_bound=bound,
        starts=LazyByWorker(instance.workers, starts_of),
        peak_stash=LazyByWorker(instance.workers, lambda w: _peak_stash(instance, w, ops_of(w))),
        rerouted=len(problem.moved),
    )
    return replace(planned, because=_because(instance, planned))


def _peak_stash(instance: Instance, worker: Worker, ops: tuple[Op, ...]) -> int:
    """Most microbatches held at once, those done before we started included."""
    held = sum(
        done.host == worker.replica and stage == worker.stage and "F" in done.kinds and "W" not in done.kinds
        for (_, stage), done in instance.done.items()
    )
    peak = held
    for op in ops:
        if op.microbatch is None:
            continue
        done = instance.kinds_done(op.microbatch, op.stage)
        if op.kind is Kind.F:
            peak = max(peak, held + 1)
            held += "I" not in done
        else:
            held -= op.kind is Kind.W or "W" in done
    return peak


def _because(instance: Instance, planned: Planned) -> str:
    who = (
        f"{len(instance.dead)} dead, {planned.rerouted} microbatch-stages re-routed"
        if instance.dead
        else "no failures"
    )
    return (
        f"{planned.mode}: {planned.value:g} with {who}; no schedule can beat {planned.lower_bound:g}, "
        f"so at most {planned.gap:.1%} is lost."
    )
