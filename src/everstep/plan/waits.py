"""Which changes of shape wait, and how long.

A change of shape stops the whole task, and whether it pays depends on when the next event comes, which is not
known. So it is made once staying has cost as much as the change would: whatever comes next, no more than
twice the least possible is lost, and no constant says when.

    wish      a change of shape is the best option of a task that trains
    missed    what staying has cost since then (`core.cluster.wishes`)
    settled   enough steps of the task's own shape are measured: before that, a model is compared with a model

What a change costs and what staying costs are the whole cluster's: a task may shrink for others.

A task that cannot train as it is (a stage has no worker) waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from everstep.core.cluster.task import Task
from everstep.plan.answer import Decision
from everstep.plan.measured import Measurements
from everstep.plan.option import OptionKind, TaskOption
from everstep.plan.weigh import KINDS, with_only
from everstep.protocol.shape import Shape

STAY = frozenset().union(*(kinds for kinds in KINDS if OptionKind.RESHAPE not in kinds)) - {OptionKind.STOP}


@dataclass(slots=True, kw_only=True)
class HeldBack:
    """The decision as it is carried out now, and the changes of shape it leaves for later."""

    carried_out: Decision
    waits: dict[str, float] = field(default_factory=dict)  # seconds, by task
    wishes: dict[str, Shape] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)  # what staying costs per second

    @property
    def review_s(self) -> float | None:
        return min(self.waits.values()) if self.waits else None

    def sentence(self) -> str:
        if not self.waits:
            return ""
        name = min(self.waits, key=lambda n: self.waits[n])
        return (
            f" {name} takes the shape {' x '.join(str(self.wishes[name]).split('x'))} in "
            f"{self.waits[name]:.1f} s if nothing else happens: then staying has cost as much as the change."
        )


def held_back(
    tasks: Mapping[str, Task], decision: Decision, measured: Measurements, about: str, now: float
) -> HeldBack:
    """`about`: the circumstances."""
    found = HeldBack(carried_out=decision)
    moving = {name for name in decision.choices if _moves(decision, name)}
    for name in sorted(moving):
        choice = found.carried_out.choices[name]
        if not _moves(found.carried_out, name) or (stay := _stay(found.carried_out, name, moving)) is None:
            continue
        task, shape = tasks[name], in_cut(tasks[name].shape, choice)
        rate = _earned(found.carried_out) - _earned(stay)
        missed = 0.0 if task.wish is None else task.wish.missed_at(now, shape, about)
        wait_s = (_paid(found.carried_out) - _paid(stay) - missed) / rate if rate > 0 else 0.0
        wait_s = max(wait_s, measured.of(name).settles_in_s(task.shape, choice.transition_s))
        if wait_s > 0:
            found.carried_out, found.waits[name] = stay, wait_s
            found.wishes[name], found.losses[name] = shape, max(0.0, rate)
    return found


def _moves(decision: Decision, name: str) -> bool:
    """It would take another shape, and trains as it is."""
    is_reshape = decision.choices[name].kind is OptionKind.RESHAPE
    return is_reshape and decision.situations[name].rerouted > 0


def _stay(decision: Decision, name: str, moving: Set[str]) -> Decision | None:
    """The best plan in which this task keeps its shape. No other one takes a shape in its place: that would
    be a second-best change, which has no wait of its own.
    """
    found = with_only(decision, name, STAY)
    while found is not None:
        others = [other for other in found.choices if other not in moving and _moves(found, other)]
        if not others:
            return found
        found = with_only(found, others[0], STAY)
    return None


def _earned(decision: Decision) -> float:
    """Per second."""
    return sum(decision.options[n].task.weight * c.throughput for n, c in decision.choices.items())


def _paid(decision: Decision) -> float:
    return sum(choice.cost + choice.way_back for choice in decision.choices.values())


def in_cut(shape: Shape, choice: TaskOption) -> Shape:
    """The shape of the choice, with the task's own batch."""
    if choice.shape is None:
        return shape
    return shape.cut(choice.shape.replicas, choice.shape.stages, choice.shape.shards)
