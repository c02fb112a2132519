"""`assign`: the plan for a cluster as an event left it. The one function the coordinator calls.

situation   what each task lost, and where its nearest state is          task.py
periods     now, and after each repair under way, latest first           running.py
options     what each task could do, and what it is worth                options.py
split       the exact best choice for all tasks together                 capacity_split.py
placement   which slots; a shape without room is taken back              placement.py
reasons     what was gained and paid, when it has paid, what came second explain.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.errors import UserError
from everstep.plan.capacity_split import best_split
from everstep.plan.cluster import Assignment, Cluster
from everstep.plan.explain import Gain, RunnerUp, gains_of, reasons, runner_up_sentence
from everstep.plan.option import Horizon, TaskOption
from everstep.plan.options import Options, options
from everstep.plan.placement import Placement, Unplaceable, place
from everstep.plan.running import Period, periods
from everstep.plan.task import TaskSituation, TaskSpec, situation

MOST_RETRIES = 64
RUNNERS_CONSIDERED = 8  # tasks whose choice is taken away in turn to find what came second
LARGE = 20_000  # tasks x units; from here on only one is


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """How much each task gets, before places are chosen."""

    period: Period
    situations: Mapping[str, TaskSituation]
    options: Mapping[str, Options]
    choices: Mapping[str, TaskOption]

    @property
    def objective(self) -> float:
        return sum(choice.worth for choice in self.choices.values())


def assign(
    cluster: Cluster, tasks: Sequence[TaskSpec], now: Assignment, event: str = "", *, second: bool = True
) -> Plan:
    """The best plan for the cluster as it is *after* the event; `event` only says what happened.

    `now` is who sat where before: a place whose node is lost (or whose slot is bad) is a worker the task has
    lost. Tasks that finished are simply not among `tasks`; new ones have no places in `now`.

    >>> from everstep.plan import Assignment, Cluster, PlanNode, TaskSpec, assign, replicated
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
    gains = gains_of(decision.situations, decision.choices, placement, now)
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


def decide(cluster: Cluster, tasks: Sequence[TaskSpec], now: Assignment) -> Decision:
    """How much for whom. Periods are planned last to first, each knowing where the next one leads."""
    targets: Mapping[str, TaskOption] = {}
    found: Decision | None = None
    for period in reversed(periods(cluster)):
        situations = {t.name: situation(t, period.cluster, now) for t in tasks}
        every = {
            t.name: options(
                t,
                situations[t.name],
                period.cluster,
                Horizon(
                    running_s=period.running_s,
                    ends_by_repair=period.ends_by_repair,
                    target=targets.get(t.name),
                ),
            )
            for t in tasks
        }
        found = Decision(
            period=period, situations=situations, options=every, choices=_split(period.cluster, every)
        )
        targets = found.choices
    assert found is not None
    return found


def explained(cluster: Cluster, decision: Decision) -> str:
    """The decision's reason, before places are chosen."""
    gains = gains_of(decision.situations, decision.choices)
    return reasons(cluster, "", decision.period, decision.options, decision.choices, gains)[0]


def _split(cluster: Cluster, every: Mapping[str, Options]) -> dict[str, TaskOption]:
    split = best_split([(o.units, o.worth) for o in every.values()], cluster.capacity // cluster.unit)
    return {name: every[name].choice(units) for name, units in zip(every, split.units, strict=True)}


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
            decision = _without(cluster, decision, error.task) or decision
    raise UserError(
        "no placement was found for the best allocations; free some slots, or plan in whole nodes."
    )


def _without(cluster: Cluster, decision: Decision, task: str) -> Decision | None:
    fewer = decision.options[task].without(decision.choices[task].units)
    if fewer is None:
        return None
    every = {**decision.options, task: fewer}
    return Decision(
        period=decision.period,
        situations=decision.situations,
        options=every,
        choices=_split(decision.period.cluster, every),
    )


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
        other = _without(cluster, decision, name)
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
