"""The alternatives of every task, each in the best plan of the whole cluster that contains it.

An alternative is a kind of option: continue, fill, another shape, fewer workers, pause. For each the others
are left out and the split is made again, so that an alternative which takes slots from others is charged for
what they lose. What it is behind is the difference of the two plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from everstep.plan.answer import Decision
from everstep.plan.capacity_split import best_split
from everstep.plan.option import OptionKind, TaskOption
from everstep.plan.task import TaskSituation
from everstep.protocol.durations import span
from everstep.protocol.messages import WeighedOption

MOST_TASKS = 16  # whose alternatives are weighed
LARGE = 20_000  # tasks x slots: from here on those of one task only
KINDS = (
    frozenset({OptionKind.KEEP, OptionKind.REROUTE}),
    frozenset({OptionKind.GROW}),
    frozenset({OptionKind.SPREAD}),
    frozenset({OptionKind.RESHAPE}),
    frozenset({OptionKind.DROP}),
    frozenset({OptionKind.START}),
    frozenset({OptionKind.STOP}),
)


def weigh(decision: Decision, names: Sequence[str] | None = None) -> tuple[WeighedOption, ...]:
    """The chosen option of each task first, then its alternatives, the best first."""
    found: list[WeighedOption] = []
    is_large = len(decision.choices) * decision.period.cluster.capacity > LARGE
    for name in list(decision.choices if names is None else names)[: 1 if is_large else MOST_TASKS]:
        chosen = decision.choices[name]
        rows = [_weighed(decision, decision, name)]
        rivals = [r for kinds in KINDS if (r := with_only(decision, name, kinds)) is not None]
        others = [r for r in rivals if not r.choices[name].same(chosen)]
        others.sort(key=lambda r: -r.objective)
        found += rows + [_weighed(decision, rival, name) for rival in others]
    return tuple(found)


def with_only(decision: Decision, name: str, kinds: frozenset[OptionKind]) -> Decision | None:
    """The best plan in which this task does something of these kinds."""
    fewer = decision.options[name].only(kinds)
    if fewer is None:
        return None
    every = {**decision.options, name: fewer}
    cluster = decision.period.cluster
    least = sum(int(options.units[0]) for options in every.values())
    if least > cluster.capacity // cluster.unit:
        return None
    split = best_split([(o.units, o.worth) for o in every.values()], cluster.capacity // cluster.unit)
    choices = {n: every[n].choice(units) for n, units in zip(every, split.units, strict=True)}
    return replace(decision, options=every, choices=choices)


def _weighed(best: Decision, other: Decision, name: str) -> WeighedOption:
    option, chosen = other.choices[name], other is best
    behind = 0.0 if chosen else best_worth(best) - best_worth(other)
    return WeighedOption(
        task=name,
        what=named(option, other.situations[name], best.period.repaired),
        workers=option.workers,
        shape="" if option.shape is None or not option.workers else compact(option),
        throughput=option.throughput,
        transition_s=option.transition_s,
        earns=option.reward,
        pays=option.cost + option.way_back,
        behind=behind,
        chosen=chosen,
        because=(_why_best(best, name) if chosen else _why_not(best, other, name)) + _timed(other, name),
    )


def _timed(decision: Decision, name: str) -> str:
    """Where the time of a change of shape is from, of a task that trains meanwhile."""
    task = decision.options[name].task
    if decision.choices[name].kind is not OptionKind.RESHAPE or not task.offers:
        return ""
    if decision.situations[name].rerouted <= 0:
        return ""
    return f" (change of shape: {span(task.times.reshape_s)}, {task.times.reshape_from})"


def best_worth(decision: Decision) -> float:
    """With what stopping a task that must run costs."""
    total = 0.0
    for name, choice in decision.choices.items():
        options = decision.options[name]
        at = int(options.units.searchsorted(choice.units))
        total += float(options.worth[at])
    return total


def compact(option: TaskOption) -> str:
    shape = option.shape
    assert shape is not None
    return f"{shape.replicas}x{shape.stages}" + (f"x{shape.shards}" if shape.shards > 1 else "")


def named(option: TaskOption, today: TaskSituation, repaired: tuple[str, ...] = ()) -> str:
    """What it does, in the words of people."""
    back = ""
    if repaired:
        back = f" until {', '.join(repaired[:3])} {'is' if len(repaired) == 1 else 'are'} back"
    match option.kind:
        case OptionKind.KEEP | OptionKind.REROUTE:
            places = 0 if today.shape is None else today.shape.groups if today.listed else today.shape.workers
            whole = today.shape is not None and option.workers >= places
            return "continue unchanged" if whole else f"continue with rerouting{back}"
        case OptionKind.GROW:
            missing = option.workers - today.live_workers
            return f"fill {missing} empty place{'s' if missing > 1 else ''}"
        case OptionKind.DROP:
            return f"continue with {_workers(option.workers)}"
        case OptionKind.SPREAD:
            return "move workers to the stages that lack most"
        case OptionKind.RESHAPE:
            return f"change shape to {compact(option)}"
        case OptionKind.START:
            return f"start on {_workers(option.workers)}"
        case OptionKind.STOP:
            return f"wait{back}" if back or not today.workers else "pause"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _why_best(best: Decision, name: str) -> str:
    option, over = best.choices[name], span(best.period.running_s)
    if option.kind in (OptionKind.KEEP, OptionKind.REROUTE):
        return f"no change would earn back its cost within {over}, the expected time to the next event"
    if option.kind is OptionKind.STOP:
        return "the slots earn more elsewhere, or there are not enough for one worker per stage"
    today = best.situations[name]
    gain = best.options[name].task.weight * (option.throughput - today.rerouted)
    if gain <= 0:
        return "its slots earn more in other tasks"
    paid = span((option.cost + option.way_back) / gain)
    return f"pays for itself after {paid}; expected to hold for {over}"


def _why_not(best: Decision, other: Decision, name: str) -> str:
    """Which term decided."""
    reward = _sum(other.choices, "reward") - _sum(best.choices, "reward")
    pays = sum(c.cost + c.way_back for c in other.choices.values())
    pays -= sum(c.cost + c.way_back for c in best.choices.values())
    stopped = [
        n
        for n, c in other.choices.items()
        if c.kind is OptionKind.STOP and best.choices[n].kind is not OptionKind.STOP
    ]
    if stopped:
        return f"{', '.join(stopped[:3])} would stop"
    if reward < 0:
        share = -reward / max(_sum(best.choices, "reward"), 1e-300)
        return f"all tasks together would train {share:.{1 if share < 0.095 else 0}%} slower" + (
            ", and it costs more" if pays > 0 else ""
        )
    if reward > 0:
        rate = reward / max(best.period.running_s, 1e-9)
        return (
            f"it would pay after {span(pays / rate)}, and the next event is expected in "
            f"{span(best.period.running_s)}"
        )
    return "it earns no more and costs more"


def _sum(choices: Mapping[str, TaskOption], name: str) -> float:
    return float(sum(getattr(choice, name) for choice in choices.values()))
