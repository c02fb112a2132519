"""`assign`: a whole plan for a cluster as an event left it: how much each task gets (`everstep.plan.decide`),
on which slots, what it gains and what came second. A shape without room is taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from everstep.errors import UserError
from everstep.protocol.durations import span
from everstep_lab.plan.answer import Decision, decide, split
from everstep_lab.plan.cluster import Assignment, Cluster
from everstep_lab.plan.explain import Gain, gains_of, reasons
from everstep_lab.plan.option import NEVER, OptionKind, TaskOption
from everstep_lab.plan.options import Options
from everstep_lab.plan.placement import Placement, Unplaceable, place
from everstep_lab.plan.running import Period
from everstep_lab.plan.task import TaskSpec

MOST_RETRIES = 64
RUNNERS_CONSIDERED = 8  # tasks whose choice is taken away in turn to find what came second
LARGE = 20_000  # tasks x units; from here on only one is


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """The best other plan, and why it lost."""

    allocation: Mapping[str, int]
    choices: Mapping[str, OptionKind]
    objective: float
    behind: float  # share of the objective
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who sits where from now on, and why."""

    assignment: Assignment
    objective: float
    gains: Mapping[str, Gain]
    because: str
    waf_before: float
    waf_after: float
    running_s: float
    runner_up: RunnerUp | None = None
    payback_s: float | None = None  # when the voluntary changes have paid for themselves
    warnings: tuple[str, ...] = ()

    @property
    def allocation(self) -> dict[str, int]:
        return {name: gain.workers_after for name, gain in self.gains.items()}


def assign(
    cluster: Cluster, tasks: Sequence[TaskSpec], now: Assignment, event: str = "", *, second: bool = True
) -> Plan:
    """The best plan for the cluster as it is *after* the event; `event` only says what happened.

    `now` is who sat where before: a place whose node is lost (or whose slot is bad) is a worker the task has
    lost. Tasks that finished are simply not among `tasks`; new ones have no places in `now`.

    >>> from everstep_lab.plan import Assignment, Cluster, PlanNode, TaskSpec, replicated
    >>> from everstep_lab.plan.assign import assign
    >>> nodes = [PlanNode(name=f"node-{i}", slots=2) for i in range(3)]
    >>> curve = replicated(stages=1, per_replica=1.0, most_replicas=4)
    >>> heavy = TaskSpec(name="heavy", weight=2.0, min_workers=2, curve=curve)
    >>> light = TaskSpec(name="light", weight=1.0, min_workers=1, curve=curve)
    >>> first = assign(Cluster(nodes=nodes), [heavy, light], Assignment(), "two tasks were submitted")
    >>> first.allocation
    {'heavy': 4, 'light': 2}
    >>> gone = first.assignment.of("heavy")[0].node
    >>> left = [PlanNode(name=n.name, slots=2, lost=n.name == gone) for n in nodes]
    >>> after = assign(Cluster(nodes=left), [heavy, light], first.assignment, f"lost {gone}")
    >>> sum(after.allocation.values()), after.allocation["heavy"]
    (4, 4)

    `after.assignment.places["heavy"]` are its places in worker order; a `None` is a dead worker that its
    peers work around. `after.because` is the sentence to log.
    """
    _check(tasks, now)
    decision = decide(cluster, tasks, now)
    decision, placement = _placed(cluster, now, decision)
    taken = _taken_from(placement, now)
    gains = {
        name: replace(gain, moves=placement.moves.get(name, 0), taken_from=taken.get(name, {}))
        for name, gain in gains_of(decision.situations, decision.choices).items()
    }
    rival = _runner_up(cluster, decision) if second else None
    unpromised = decide(_unpromised(cluster), tasks, now).choices if decision.period.repaired else None
    text, payback_s = reasons(
        cluster, event, decision.period, decision.options, decision.choices, gains, unpromised
    )
    return Plan(
        assignment=placement.assignment,
        objective=decision.objective,
        gains=gains,
        because=text,
        waf_before=sum(t.weight * decision.situations[t.name].throughput for t in tasks),
        waf_after=sum(t.weight * decision.choices[t.name].throughput for t in tasks),
        running_s=decision.period.running_s,
        runner_up=rival,
        payback_s=payback_s,
        warnings=placement.warnings,
    )


def _placed(cluster: Cluster, now: Assignment, decision: Decision) -> tuple[Decision, Placement]:
    """Seat the decision; a task whose shape finds no room chooses again without it."""
    shapes = {
        **{name: s.shape for name, s in decision.situations.items() if s.shape is not None},
        **now.shapes,
    }
    known = Assignment(places=now.places, shapes=shapes)
    for _ in range(MOST_RETRIES):
        try:
            return decision, place(cluster, known, decision.choices)
        except Unplaceable as error:
            decision = _without(decision, error.task) or decision
    raise UserError(
        "no placement was found for the best allocations; free some slots, or plan in whole nodes."
    )


def _without(decision: Decision, task: str) -> Decision | None:
    fewer = _less(decision.options[task], decision.choices[task].units)
    if fewer is None:
        return None
    every = {**decision.options, task: fewer}
    return Decision(
        period=decision.period,
        situations=decision.situations,
        options=every,
        choices=split(decision.period.cluster, every),
    )


def _less(options: Options, units: int) -> Options | None:
    """The same options less the best one of so many units, in whichever layers it stands."""
    chosen = options.choice(units)
    layers = []
    for layer in options.layers:
        worth = layer.worth.copy()
        for index in np.flatnonzero(layer.units == units):
            if options.written_out(layer, int(index)).same(chosen):
                worth[index] = NEVER
        layers.append(replace(layer, worth=worth))
    if not any((layer.worth > NEVER).any() for layer in layers):
        return None
    return Options(options.task, options.situation, options.horizon, tuple(layers))


def _runner_up(cluster: Cluster, decision: Decision) -> RunnerUp | None:
    """The best plan in which some task that matters chooses otherwise."""
    names = sorted(
        decision.choices,
        key=lambda n: (
            not decision.situations[n].damaged,
            decision.choices[n].workers == decision.situations[n].workers,
        ),
    )
    best: Decision | None = None
    large = len(names) * cluster.capacity // cluster.unit > LARGE
    for name in names[: 1 if large else RUNNERS_CONSIDERED]:
        other = _without(decision, name)
        if other is not None and (best is None or other.objective > best.objective):
            best = other
    return None if best is None else runner_up_sentence(decision.choices, best.choices, decision.period)


def _unpromised(cluster: Cluster) -> Cluster:
    """The same cluster without promised repair times."""
    return replace(cluster, nodes=[replace(node, back_in_s=None) for node in cluster.nodes])


def _check(tasks: Sequence[TaskSpec], now: Assignment) -> None:
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"task {name!r} is named twice; give every task its own name.")
    seen: dict[object, str] = {}
    for name in names:
        for spot in now.of(name):
            if spot is not None and seen.setdefault(spot, name) != name:
                raise UserError(f"{spot} belongs to both {seen[spot]!r} and {name!r}; one slot, one worker.")


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
