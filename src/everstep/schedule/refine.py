"""Other hosts, where the ones chosen by quota leave a gap: workers of different speed, few survivors.

Quotas balance the work of each stage by itself. They do not see that a microbatch on a slow worker holds a
place in the stash of all stages above for longer, nor that a slow worker that is just busy enough is late for
everyone below. So the answer is improved by trial:

    start      the quotas with more or less patience for slow workers: they keep their own microbatches up to
               the busiest time of any stage, up to four fifths of it, or up to their own stage's; and, if
               that is not enough, hosts by pulling
    move       in the stages with the longest span, give a microbatch of the worker that ends last to the
               one with the least work; or exchange two between workers of different speed
    keep       the first that is better; if none is, try two changes at once, until the effort is spent

The effort is counted in ops that are dispatched, never in seconds: the same instance gives the same plan on
every machine. Rejected: annealing (it needs ten times the trials for the same gap), an exchange of whole
paths (most of its candidates were the same as a move in the busiest stage).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from everstep.protocol.ops import Worker
from everstep.schedule.best_order import GOOD_ENOUGH, judged
from everstep.schedule.compact import Compact, compact
from everstep.schedule.dispatch import HABITS, Habit, dispatch
from everstep.schedule.folded import FOLDED_HABITS, FoldedHabit, dispatch_folded
from everstep.schedule.hosts import Place, choose_hosts, work_time
from everstep.schedule.instance import Instance
from everstep.schedule.modes import MODES
from everstep.schedule.pull import pulled_hosts
from everstep.schedule.timing import Timing

PATIENCE = (1.0, 0.8, 0.0)  # of the busiest time of any stage: what slow workers may keep of their own
SOME_HABITS = (HABITS[0], HABITS[1], HABITS[4], HABITS[6])
ENDS_LAST, HAS_LEAST = 3, 3  # workers of a stage that are looked at
TRIAL = 200  # a trial costs as much as so many ops, besides its own
NEAR = 0.02  # the gap at which pulling, which moves far more, is not tried
Hosts = dict[Place, int]


@dataclass(frozen=True, slots=True)
class Attempt:
    """Hosts, and the best order found for them."""

    value: float
    moved: Hosts
    habit: Habit | FoldedHabit
    problem: Compact
    order: list[list[int]]
    timing: Timing


@dataclass(slots=True)
class _Search:
    instance: Instance
    mode: str
    bound: float
    caps: Sequence[int] | None
    effort: int

    def try_out(self, moved: Hosts, habits: Sequence[Habit | FoldedHabit]) -> Attempt:
        problem = compact(self.instance, fused=MODES[self.mode].fused, stash_cap=self.caps, moved=moved)
        best: Attempt | None = None
        for habit in habits:
            self.effort -= problem.num_ops() + TRIAL
            if isinstance(habit, FoldedHabit):
                order = dispatch_folded(problem, habit)
            else:
                order = dispatch(problem, habit, self.bound)
            timing, value = judged(problem, order, self.mode)
            if best is None or value < best.value - 1e-9:
                best = Attempt(value, moved, habit, problem, order, timing)
            if self.is_good(best) or self.effort <= 0:
                break
        assert best is not None
        return best

    def is_good(self, trial: Attempt) -> bool:
        return trial.value <= self.bound * (1 + GOOD_ENOUGH)


def refine(instance: Instance, mode: str, bound: float, caps: Sequence[int] | None, effort: int) -> Attempt:
    """The best hosts found by trial, with their order."""
    search = _Search(instance, mode, bound, caps, effort)
    best: Attempt | None = None
    tried: set[frozenset[tuple[Place, int]]] = set()
    folded = instance.virtual > 1  # pulling knows one part per worker
    habits: Sequence[Habit | FoldedHabit] = FOLDED_HABITS if folded else HABITS
    for patience in PATIENCE if folded else (*PATIENCE, None):
        if patience is None and best is not None and best.value <= bound * (1 + NEAR):
            break
        moved = choose_hosts(instance, patience=patience) if patience is not None else pulled_hosts(instance)
        key = frozenset((moved or {}).items())
        if moved is None or key in tried:
            continue
        tried.add(key)
        trial = search.try_out(moved, habits if best is None or folded else SOME_HABITS)
        if best is None or trial.value < best.value - 1e-9:
            best = trial
        if search.is_good(best) or search.effort <= 0:
            return best
    assert best is not None
    while search.effort > 0 and not search.is_good(best):
        better = _first_better(search, best, tried)
        if better is None:
            again = search.try_out(best.moved, habits)
            if again.value >= best.value - 1e-9:
                break
            better = again
        best = better
    return best


def _first_better(search: _Search, best: Attempt, tried: set[frozenset[tuple[Place, int]]]) -> Attempt | None:
    hosts = {
        (home, number, stage): best.moved.get((home, number, stage), home)
        for home, number in search.instance.homes()
        for stage in range(search.instance.stages)
    }
    changes = _candidates(search.instance, best, hosts)
    for change in chain(changes, _twos(changes)):
        if search.effort <= 0:
            return None
        moved = {place: host for place, host in (hosts | change).items() if host != place[0]}
        key = frozenset(moved.items())
        if key in tried:
            continue
        tried.add(key)
        trial = search.try_out(moved, (best.habit,))
        if trial.value < best.value - 1e-9:
            return trial
    return None


def _candidates(instance: Instance, best: Attempt, hosts: Hosts) -> list[Hosts]:
    """Changes to try, the likelier first."""
    timing, at = best.timing, [instance.fold.stage(part) for part in range(instance.stages)]
    longest = sorted(range(instance.stages), key=lambda s: timing.released[at[s]] - timing.ends[at[s]])
    on_worker: dict[Worker, list[Place]] = {}  # by part
    busy: dict[Worker, float] = {}
    for place, host in sorted(hosts.items(), key=lambda each: (each[0][1], each[0][0])):
        on_worker.setdefault(Worker(host, place[2]), []).append(place)
        worker = Worker(host, at[place[2]])
        busy[worker] = busy.get(worker, 0.0) + work_time(instance, Worker(host, place[2]))
    ends = _ends(best)
    found: list[tuple[float, Hosts]] = []
    for rank, stage in enumerate(longest):
        live = instance.live(stage)
        work = {k: work_time(instance, Worker(k, stage)) for k in live}
        load = {k: busy.get(Worker(k, at[stage]), 0.0) + work[k] for k in live}
        last = sorted(live, key=lambda k: -ends.get((best.problem.stands_for[k], at[stage]), 0.0))[:ENDS_LAST]
        for one, source in enumerate(last):
            mine = on_worker.get(Worker(source, stage), [])
            least = sorted((k for k in live if k != source), key=lambda k: load[k])[:HAS_LEAST]
            for other, target in enumerate(least if mine else ()):
                theirs = on_worker.get(Worker(target, stage), [])
                for number, place in enumerate(_some(mine)):
                    found.append((rank + one + other + 0.5 * number, {place: target}))
                if theirs and work[source] != work[target]:
                    for number, (place, back) in enumerate(_pairs(mine, theirs)):
                        exchange = {place: target, back: source}
                        found.append((rank + one + other + 1 + 0.5 * number, exchange))
    return [change for _, change in sorted(found, key=lambda each: each[0])]


def _twos(changes: list[Hosts]) -> Iterator[Hosts]:
    """Two changes at once, where no single one helps: the likelier first."""
    for together in range(1, 2 * len(changes) - 2):
        for one in range(max(0, together - len(changes) + 1), (together + 1) // 2):
            yield changes[one] | changes[together - one]


def _ends(trial: Attempt) -> dict[tuple[int, int], float]:
    """When each folded worker's last op ends, by (folded replica, stage)."""
    problem = trial.problem
    times = (problem.forward, problem.backward, problem.weight)
    return {
        divmod(worker, len(problem.closing)): trial.timing.starts[worker][-1]
        + times[codes[-1] % 3][problem.host[codes[-1] // 3]]
        for worker, codes in enumerate(trial.order)
        if codes
    }


def _some(places: list[Place]) -> Iterator[Place]:
    count = len(places)
    return iter(dict.fromkeys(places[at] for at in (-1, count // 2, 0, count // 4, 3 * count // 4)))


def _pairs(mine: list[Place], theirs: list[Place]) -> list[tuple[Place, Place]]:
    middle = mine[len(mine) // 2], theirs[len(theirs) // 2]
    return [(mine[-1], theirs[0]), (mine[0], theirs[-1]), middle]
