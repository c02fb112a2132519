"""`plan`: the best step a set of survivors can run.

    bound      how short any schedule could be, hence the gap                bounds.py
    lockstep   all replicas in the order of one pipeline                     lockstep.py
    hosts      else: who runs what, balanced by speed                        hosts.py
    fold       replicas that are alike become one                            compact.py
    dispatch   list scheduling, once for each of a few habits                dispatch.py, search.py
    time       the order's makespan, or its period when it repeats           timing.py
    refine     where a gap is left and workers differ: other hosts           refine.py

The number of habits tried depends on the size of the folded step, never on a clock: the same instance gives
the same schedule on every machine, so every survivor could compute it for itself. Rejected: a time limit
(two machines would disagree), random restarts (twenty of them gain less than the second habit; see
docs/schedules.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from everstep.errors import UserError
from everstep.protocol.ops import Kind, Op, Worker
from everstep.schedule.best_order import GOOD_ENOUGH, ONLINE_EFFORT, best_order
from everstep.schedule.bounds import lower_bound, stash_of_mode
from everstep.schedule.compact import Compact, compact
from everstep.schedule.hosts import Place, is_uneven
from everstep.schedule.instance import Instance
from everstep.schedule.lockstep import Lockstep, lockstep
from everstep.schedule.modes import MODES
from everstep.schedule.refine import TRIAL, refine
from everstep.schedule.schedule import (
    LazyByWorker,
    Planned,
    Schedule,
    closing_ops,
)
from everstep.schedule.timing import Timing

LOCKSTEP_SHARE = 4  # a fourth of the effort is lockstep's, which needs little; in a large step it is cheap
LONG_SEARCH = 5  # times the effort: list scheduling of a step this large takes a fifth of a second
NOT_WORTH_A_LONG_SEARCH = 0.02  # the gap it is not begun for
WORTH_TRIALS_UNEVEN, WORTH_TRIALS = 0.01, 0.04  # the gap from which other hosts are tried
REFINE_SHARE = 4  # times the effort: other hosts are tried only in small steps
MOST_TRIALS = 80  # and more, the larger the gap


def plan(instance: Instance, mode: str = "reroute", *, effort: int = ONLINE_EFFORT) -> Planned:
    """Order the ops that are not done.

    `modes.MODES` says what each mode minimises. References are meant for instances without failures, but any
    instance gets a valid schedule in any mode.
    """
    if mode not in MODES:
        raise UserError(f"mode {mode!r} is not one of {', '.join(MODES)}.")
    caps = stash_of_mode(instance, mode)
    bound = lower_bound(instance, mode, caps)
    num_ops = 3 * instance.replicas * instance.stages * instance.microbatches
    share = effort // LOCKSTEP_SHARE

    def in_step(effort: int) -> Planned | None:
        found = lockstep(instance, mode, bound, effort, caps) if instance.dead else None
        return answer_in_step(instance, mode, found, bound) if found else None

    def dispatched() -> Planned:
        problem = compact(instance, fused=MODES[mode].fused, stash_cap=caps)
        order, timing = best_order(problem, mode, bound, effort - share)
        return answer(instance, mode, problem, order, timing, bound)

    def refined(found: Planned) -> Planned:
        """With other hosts, by trial, if that is worth it and affordable."""
        limit = WORTH_TRIALS_UNEVEN if is_uneven(instance) else WORTH_TRIALS
        if instance.done or found.gap <= limit or num_ops > effort:
            return found
        trials = MOST_TRIALS * max(1.0, found.gap / WORTH_TRIALS) * (num_ops + TRIAL)
        trial = refine(instance, mode, bound, caps, min(REFINE_SHARE * effort, int(trials)))
        if trial.value >= found.value - 1e-12:
            return found
        return answer(instance, mode, trial.problem, trial.order, trial.timing, bound)

    # The likelier one first: where it is good enough, the other need not be tried.
    if num_ops <= effort:
        first = dispatched()
        second = in_step(share) if first.gap > GOOD_ENOUGH else None
        best = second if second is not None and second.value < first.value - 1e-12 else first
        return refined(best)
    else:
        quick = in_step(effort)
        limit = NOT_WORTH_A_LONG_SEARCH if num_ops > LONG_SEARCH * effort else GOOD_ENOUGH
        if quick is not None and quick.gap <= limit:
            return quick
        first, second = dispatched(), quick
    return second if second is not None and second.value < first.value - 1e-12 else first


def answer(
    instance: Instance, mode: str, problem: Compact, order: list[list[int]], timing: Timing, bound: float
) -> Planned:
    """Unfold a compact order into a plan; ops and start times are written out when they are read."""
    of_workers = len(problem.closing)

    def folded(worker: Worker) -> int:
        return problem.stands_for[worker.replica] * of_workers + worker.stage

    def ops_of(worker: Worker) -> tuple[Op, ...]:
        return tuple(problem.op(code, worker.replica) for code in order[folded(worker)])

    def starts_of(worker: Worker) -> Sequence[float]:
        return timing.starts[folded(worker)]

    return _planned(instance, mode, timing, bound, problem.moved, ops_of, starts_of)


def answer_in_step(instance: Instance, mode: str, in_step: Lockstep, bound: float) -> Planned:
    """A plan from a step in lockstep."""
    return _planned(instance, mode, in_step.timing, bound, in_step.moved, in_step.ops_of, in_step.starts_of)


def _planned(
    instance: Instance,
    mode: str,
    timing: Timing,
    bound: float,
    moved: dict[Place, int],
    ops_of: Callable[[Worker], tuple[Op, ...]],
    starts_of: Callable[[Worker], Sequence[float]],
) -> Planned:
    origin = min(timing.opens())

    def all_ops_of(worker: Worker) -> tuple[Op, ...]:
        return ops_of(worker) + closing_ops(worker.stage)

    def all_starts_of(worker: Worker) -> tuple[float, ...]:
        reduce = timing.ends[worker.stage] - instance.closing(worker.stage)
        update = reduce + (instance.reduce[worker.stage] if instance.reduce else 0.0)
        return tuple(t - origin for t in (*starts_of(worker), reduce, update))

    makespan = timing.makespan()
    planned = Planned(
        mode=mode,
        schedule=Schedule(LazyByWorker(instance.workers, all_ops_of)),
        period=timing.period() if MODES[mode].staggered else makespan,
        makespan=makespan,
        lower_bound=bound,
        starts=LazyByWorker(instance.workers, all_starts_of),
        peak_stash=LazyByWorker(instance.workers, lambda w: _peak_stash(instance, w, ops_of(w))),
        rerouted=len(moved),
        rerouted_bytes=_crossing_bytes(instance, moved),
    )
    return replace(planned, because=_because(instance, planned))


def _peak_stash(instance: Instance, worker: Worker, ops: tuple[Op, ...]) -> int:
    """Most microbatches held at once, those done before we started included."""
    held = sum(
        done.host == worker.replica
        and instance.fold.stage(part) == worker.stage
        and "F" in done.kinds
        and "W" not in done.kinds
        for (_, part), done in instance.done.items()
    )
    peak = held
    for op in ops:
        assert op.microbatch is not None
        done = instance.kinds_done(op.microbatch, op.stage)
        if op.kind is Kind.F:
            peak = max(peak, held + 1)
            held += "I" not in done
        else:
            held -= op.kind in (Kind.W, Kind.B) or "W" in done
    return peak


def _crossing_bytes(instance: Instance, moved: dict[Place, int]) -> float:
    """Boundary bytes, both ways, between different replicas."""
    if not instance.boundary:
        return 0.0
    total = 0.0
    for home, number in {(home, number) for home, number, _ in moved}:
        path = [moved.get((home, number, s), home) for s in range(instance.stages)]
        total += sum(2 * instance.boundary[s] for s in range(instance.stages - 1) if path[s] != path[s + 1])
    return total


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
