"""`plan`: the best step a set of survivors can run.

    hosts      who runs what, balanced by speed                              hosts.py
    fold       replicas that are alike become one                            compact.py
    dispatch   list scheduling, once for each of a few habits                dispatch.py
    time       the order's makespan, or its period when it repeats           timing.py
    bound      how short any schedule could be, hence the gap                bounds.py

The number of habits tried depends on the size of the folded step, never on a clock: the same instance gives
the same schedule on every machine, so every survivor could compute it for itself. Rejected: a time limit
(two machines would disagree), random restarts (twenty of them gain less than the second habit; see
docs/schedules.md).
"""

from __future__ import annotations

from dataclasses import replace

from everstep.core.ops import Op, Worker
from everstep.errors import UserError
from everstep.schedule.bounds import lower_bound, stash_of_mode
from everstep.schedule.compact import Compact, compact
from everstep.schedule.dispatch import HABITS, dispatch
from everstep.schedule.instance import Instance
from everstep.schedule.schedule import (
    FUSED_MODES,
    MODES,
    STAGGERED_MODES,
    LazyByWorker,
    Planned,
    Schedule,
    closing_ops,
)
from everstep.schedule.timing import Timing, run, steady

ONLINE_EFFORT = 13_000  # ops dispatched, over all habits tried: about 40 ms
THOROUGH_EFFORT = 10_000_000
GOOD_ENOUGH = 1e-3


def plan(instance: Instance, mode: str = "reroute", *, effort: int = ONLINE_EFFORT) -> Planned:
    """Order the ops that are not done.

    `1f1b` and `reroute` fuse the backward, the others split it; `staggered` and `zero-bubble` minimise the
    period, the others the makespan. `1f1b` and `zero-bubble` are meant as references with nobody dead, but
    any instance gets a valid schedule in any mode.
    """
    if mode not in MODES:
        raise UserError(f"mode {mode!r} is not one of {', '.join(MODES)}.")
    caps = stash_of_mode(instance, mode)
    problem = compact(instance, fused=mode in FUSED_MODES, stash_cap=caps)
    bound = lower_bound(instance, mode, caps)
    order, timing = best_order(problem, mode, bound, effort)
    return answer(instance, mode, problem, order, timing, bound)


def best_order(problem: Compact, mode: str, bound: float, effort: int) -> tuple[list[list[int]], Timing]:
    """The best of a few habits; one at least, and no more once the bound is met."""
    best: tuple[float, list[list[int]], Timing] | None = None
    cost = max(1, problem.num_ops())
    for tried, habit in enumerate(HABITS):
        if best is not None and (cost * (tried + 1) > effort or best[0] <= bound * (1 + GOOD_ENOUGH)):
            break
        order = dispatch(problem, habit, bound)
        timing = time_order(problem, order, mode)
        value = timing.period() if mode in STAGGERED_MODES else max(timing.ends)
        if best is None or value < best[0] - 1e-12:
            best = value, order, timing
    assert best is not None
    return best[1], best[2]


def time_order(problem: Compact, order: list[list[int]], mode: str) -> Timing:
    first = run(problem, order, [0.0] * problem.stages)
    return steady(problem, order, first) if mode in STAGGERED_MODES else first


def answer(
    instance: Instance, mode: str, problem: Compact, order: list[list[int]], timing: Timing, bound: float
) -> Planned:
    """Unfold a compact order into a plan; ops and start times are written out when they are read."""
    workers = instance.workers
    stages = problem.stages
    origin = min((s[0] for s in timing.starts if s), default=min(timing.released))

    def folded(worker: Worker) -> int:
        return problem.stands_for[worker.replica] * stages + worker.stage

    def ops_of(worker: Worker) -> tuple[Op, ...]:
        ops = tuple(problem.op(code, worker.replica) for code in order[folded(worker)])
        return ops + closing_ops(worker.stage)

    def starts_of(worker: Worker) -> tuple[float, ...]:
        reduce = timing.ends[worker.stage] - instance.closing(worker.stage)
        update = reduce + (instance.reduce[worker.stage] if instance.reduce else 0.0)
        return tuple(t - origin for t in (*timing.starts[folded(worker)], reduce, update))

    def stash_of(worker: Worker) -> int:
        return _peak_stash(problem, order[folded(worker)], folded(worker))

    makespan = timing.makespan()
    period = timing.period() if mode in STAGGERED_MODES else makespan
    planned = Planned(
        mode=mode,
        schedule=Schedule(LazyByWorker(workers, ops_of)),
        period=period,
        makespan=makespan,
        lower_bound=bound,
        starts=LazyByWorker(workers, starts_of),
        peak_stash=LazyByWorker(workers, stash_of),
        rerouted=len(problem.moved),
        rerouted_bytes=_crossing_bytes(instance, problem),
    )
    return replace(planned, because=_because(instance, planned))


def _peak_stash(problem: Compact, codes: list[int], worker: int) -> int:
    """Most microbatches held at once, those done before we started included."""
    have_input, have_weight = problem.have_input, problem.have_weight
    held = sum(
        1
        for unit, host in enumerate(problem.host)
        if host == worker and not have_weight[unit] and problem.have_forward[unit]
    )
    peak = held
    for code in codes:
        unit, kind = divmod(code, 3)
        if kind == 0:
            peak = max(peak, held + 1)
            held += not have_input[unit]
        else:
            held -= kind == 2 or problem.fused or bool(have_weight[unit])
    return peak


def _crossing_bytes(instance: Instance, problem: Compact) -> float:
    """Boundary bytes, both ways, between different replicas."""
    if not instance.boundary:
        return 0.0
    total = 0.0
    for home, number in {(home, number) for home, number, _ in problem.moved}:
        path = [problem.moved.get((home, number, s), home) for s in range(instance.stages)]
        total += sum(2 * instance.boundary[s] for s in range(instance.stages - 1) if path[s] != path[s + 1])
    return total


def _because(instance: Instance, planned: Planned) -> str:
    who = (
        f"{len(instance.dead)} dead, {planned.rerouted} microbatch-stages re-routed"
        if instance.dead
        else "nobody dead"
    )
    return (
        f"{planned.mode}: {planned.value:g} with {who}; no schedule can beat {planned.lower_bound:g}, "
        f"so at most {planned.gap:.1%} is lost."
    )
