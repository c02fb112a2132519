"""`decide`: how much each task of a study gets in a cluster as an event left it.

situation   what each task lost, and where its nearest state is          task.py
periods     now, and after each repair under way, latest first           running.py
options     what each task could do, and what it is worth                options.py
split       the exact best choice for all tasks together                 everstep.plan.split
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.plan.split import best_split
from everstep_lab.plan.cluster import Assignment, Cluster
from everstep_lab.plan.option import Horizon, TaskOption
from everstep_lab.plan.options import Options, options
from everstep_lab.plan.running import Period, periods
from everstep_lab.plan.task import TaskSituation, TaskSpec, situation


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
            period=period, situations=situations, options=every, choices=split(period.cluster, every)
        )
        targets = found.choices
    assert found is not None
    return found


def split(cluster: Cluster, every: Mapping[str, Options]) -> dict[str, TaskOption]:
    """The best choice for all tasks together, by the coordinator's own program."""
    best = best_split([(o.units, o.worth) for o in every.values()], cluster.capacity // cluster.unit)
    return {
        name: options.choice(int(options.units[index]))
        for (name, options), index in zip(every.items(), best, strict=True)
    }
