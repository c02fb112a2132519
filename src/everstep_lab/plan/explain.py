"""Why this plan: what every task gains and pays, and when the moves have paid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.protocol.durations import span
from everstep_lab.plan.cluster import Cluster
from everstep_lab.plan.option import OptionKind, TaskOption
from everstep_lab.plan.options import Options
from everstep_lab.plan.running import Period
from everstep_lab.plan.task import TaskSituation
from everstep_lab.plan.task_shape import ParallelShape
from everstep_lab.plan.transition import StateSource


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
    source: StateSource
    reward: float
    cost: float
    way_back: float
    moves: int = 0  # workers on slots the task did not have, once places are chosen
    taken_from: Mapping[str, int] = field(default_factory=dict)  # of those: how many another task had

    @property
    def ratio(self) -> float:
        return self.throughput_after / self.throughput_before if self.throughput_before else 0.0


def gains_of(situations: Mapping[str, TaskSituation], choices: Mapping[str, TaskOption]) -> dict[str, Gain]:
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
            source=situations[name].source,
            reward=choice.reward,
            cost=choice.cost,
            way_back=choice.way_back,
        )
        for name, choice in choices.items()
    }


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
        if not gain.throughput_before:  # a stage has none, or there are fewer than its user wants
            return f"{name} has too few workers ({gain.workers_before}), and others may take their slots"
        return f"{name} stops ({count})"
    kept = f", {gain.ratio:.0%} of its throughput" if gain.throughput_before else ""
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
