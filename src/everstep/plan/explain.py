"""Why this plan: what every task gains and pays, when the moves have paid, and what came second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.plan.cluster import Assignment, Cluster
from everstep.plan.option import OptionKind, TaskOption
from everstep.plan.options import Options
from everstep.plan.placement import Placement
from everstep.plan.running import Period
from everstep.plan.task import TaskSituation
from everstep.plan.task_shape import ParallelShape
from everstep.plan.transition import StateSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """One task's part of a plan."""

    kind: OptionKind
    workers_before: int
    workers_after: int
    shape_before: ParallelShape | None
    shape_after: ParallelShape | None
    throughput_before: float
    throughput_after: float
    damaged: bool
    transition_s: float
    moves: int  # workers on slots the task did not have
    taken_from: Mapping[str, int]  # of those: how many another task had
    source: StateSource
    reward: float
    cost: float
    way_back: float

    @property
    def ratio(self) -> float:
        return self.throughput_after / self.throughput_before if self.throughput_before else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The best other plan, and why it lost."""

    allocation: Mapping[str, int]
    choices: Mapping[str, OptionKind]
    objective: float
    behind: float  # share of the objective
    because: str


def gains_of(
    situations: Mapping[str, TaskSituation],
    choices: Mapping[str, TaskOption],
    placement: Placement | None = None,
    now: Assignment | None = None,
) -> dict[str, Gain]:
    taken = _taken_from(placement, now) if placement and now else {}
    return {
        name: Gain(
            kind=choice.kind,
            workers_before=situations[name].workers,
            workers_after=choice.workers,
            shape_before=situations[name].shape,
            shape_after=choice.shape if choice.workers else None,
            throughput_before=situations[name].throughput,
            throughput_after=choice.throughput,
            damaged=situations[name].damaged,
            transition_s=choice.transition_s,
            moves=placement.moves.get(name, 0) if placement else 0,
            taken_from=taken.get(name, {}),
            source=situations[name].source,
            reward=choice.reward,
            cost=choice.cost,
            way_back=choice.way_back,
        )
        for name, choice in choices.items()
    }


def _taken_from(placement: Placement, now: Assignment) -> dict[str, Counter[str]]:
    movers = [name for name, count in placement.moves.items() if count]
    if not movers:
        return {}
    had = {spot: name for name, places in now.places.items() for spot in places if spot is not None}
    found = {}
    for name in movers:
        owners = [had.get(spot, name) for spot in placement.assignment.of(name) if spot is not None]
        found[name] = Counter(owner for owner in owners if owner != name)
    return found


def span(seconds: float) -> str:
    """A time for people: 45 s, 3.2 h, 6 d."""
    for size, word in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {word}"
    return f"{seconds:.3g} s"


def reasons(
    cluster: Cluster,
    event: str,
    period: Period,
    every: Mapping[str, Options],
    choices: Mapping[str, TaskOption],
    gains: Mapping[str, Gain],
    unpromised: Mapping[str, TaskOption] | None = None,
) -> tuple[str, float | None]:
    """The sentence for the log, and when the voluntary changes have paid for themselves.

    `unpromised` is what would have been chosen without promised repair times.
    """
    changed = [name for name, gain in gains.items() if gain.kind is not OptionKind.KEEP and _is_news(gain)]
    parts = [_explained(name, gains[name]) for name in changed[:6]]
    if len(changed) > 6:
        parts.append(f"{len(changed) - 6} more tasks change")
    if not changed:
        parts = ["nothing changes, because no move would earn back its cost"]
    elif len(changed) < len(gains):
        parts.append("the others keep what they have")
    payback_s = _payback(every, choices)
    if payback_s is not None:
        parts.append(f"the move has paid for itself after {span(payback_s)}")
    if period.repaired:
        back = ", ".join(period.repaired[:3]) + (" and others" if len(period.repaired) > 3 else "")
        due = min(n.back_in_s or 0.0 for n in cluster.nodes if n.name in period.repaired)
        parts.append(f"{back} should be back in {span(due)}{_otherwise(choices, unpromised)}")
    opening = f"{event}: " if event else ""
    return f"{opening}{'; '.join(parts)}.", payback_s


def _otherwise(choices: Mapping[str, TaskOption], unpromised: Mapping[str, TaskOption] | None) -> str:
    """What the promise of a repair has changed."""
    other = [
        f"{name} would {choice.kind.infinitive} ({choice.workers} workers)"
        for name, choice in (unpromised or {}).items()
        if not choice.same(choices[name])
    ]
    return f"; without that, {', '.join(other[:3])}" if other else ", which changes nothing now"


def _is_news(gain: Gain) -> bool:
    return gain.workers_before > 0 or gain.workers_after > 0


def _explained(name: str, gain: Gain) -> str:
    count = f"{gain.workers_before} → {gain.workers_after} workers"
    if gain.kind is OptionKind.START:
        shape = f", {gain.shape_after}" if gain.shape_after else ""
        return f"{name} starts on {gain.workers_after} workers{shape}"
    if gain.kind is OptionKind.STOP:
        return f"{name} stops ({count})"
    kept = f", {gain.ratio:.0%} of its throughput"
    shape = ""
    if gain.kind is OptionKind.RESHAPE and gain.shape_after is not None:
        shape = f" to {gain.shape_after}"
    state = (
        ""
        if gain.source is StateSource.LIVE or gain.kind is OptionKind.REROUTE
        else f", state from {gain.source}"
    )
    for owner, slots in list(gain.taken_from.items())[:2]:
        state += f", {slots} from {owner}"
    verb = gain.kind.verb
    if gain.damaged and gain.kind is OptionKind.GROW:
        verb = "replaces what it lost"
    return f"{name} {verb}{shape} ({count}{kept}{state})"


def _payback(every: Mapping[str, Options], choices: Mapping[str, TaskOption]) -> float | None:
    """Against the least that could be done: whole tasks stay as they are, damaged ones use what is left."""
    extra_cost = extra_rate = 0.0
    for name, choice in choices.items():
        least = least_change(every[name])
        if least.same(choice):
            continue
        weight = every[name].task.weight
        extra_cost += choice.cost - least.cost
        extra_rate += weight * (choice.throughput - least.throughput)
    if extra_rate <= 0 or extra_cost <= 0:
        return None
    return extra_cost / extra_rate


def least_change(options: Options) -> TaskOption:
    """What a task does without a plan."""
    today = options.situation
    if not today.workers:
        return options.choice(0)
    stay = options.layers[-1]
    for index in range(len(stay.units)):
        if OptionKind(int(stay.kind[index])) in (OptionKind.KEEP, OptionKind.REROUTE):
            return options.written_out(stay, index)
    return options.choice(0)


def _share(amount: float, choices: Mapping[str, TaskOption]) -> float:
    whole = sum(choice.reward for choice in choices.values())
    return amount / whole if whole else 0.0


def runner_up_sentence(
    best: Mapping[str, TaskOption], other: Mapping[str, TaskOption], period: Period
) -> RunnerUp:
    """Name what differs, and which term decided."""
    differ = [name for name in best if not best[name].same(other[name])]
    changes = []
    for name in differ[:3]:
        choice = other[name]
        changes.append(f"{name} {choice.kind.verb} ({choice.workers} workers)")
    more = f" and {len(differ) - 3} more differ" if len(differ) > 3 else ""
    objective = sum(choice.worth for choice in best.values())
    worth = sum(choice.worth for choice in other.values())
    reward = sum(other[n].reward - best[n].reward for n in differ)
    cost = sum(other[n].cost - best[n].cost for n in differ)
    back = sum(other[n].way_back - best[n].way_back for n in differ)
    over = max(period.running_s, 1e-9)
    slower = f"all tasks together, weighted, train {_share(-reward, best):.2%} slower"
    if reward < 0:
        why = slower
        if cost + back < 0:
            why += ", which its cheaper transition does not make up"
        elif cost + back > 0:
            why += ", and it costs more to reach"
    elif back > cost and back > 0:
        why = "it would have to be undone when the repair ends, before it has paid"
    else:
        rate = max(reward / over, 1e-300)
        why = (
            f"its transition costs more than it earns in the {span(over)} until the next event"
            if reward > 0
            else "it earns no more and costs more to reach"
        )
        if reward > 0:
            why += f" (it would pay after {span((cost + back) / rate)})"
    return RunnerUp(
        allocation={name: choice.workers for name, choice in other.items()},
        choices={name: choice.kind for name, choice in other.items()},
        objective=worth,
        behind=(objective - worth) / abs(objective) if objective else 0.0,
        because=f"{', '.join(changes)}{more}: {why}.",
    )
