"""Which changes of shape wait, and how long.

A change of shape stops the whole task, and whether it pays depends on when the next event comes, which is not
known. So it is made once staying has cost as much as the change would: whatever comes next, no more than
twice the least possible is lost, and no constant says when.

    wish      a change of shape is the best option of a task that trains
    missed    what staying has cost since the first such wish, at the rate of its time; not since the newest:
              two shapes that are equally good take turns with the noise of the machine
    settled   enough steps of the task's own shape are measured: before that, a model is compared with a model

A task that cannot train as it is (a stage has no worker) waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from everstep.core.cluster.task import WishedShape
from everstep.core.words.shape import Shape
from everstep.plan.answer import Decision
from everstep.plan.measured import Measurements
from everstep.plan.option import OptionKind, TaskOption
from everstep.plan.weigh import KINDS, with_only

STAY = frozenset().union(*(kinds for kinds in KINDS if OptionKind.RESHAPE not in kinds)) - {OptionKind.STOP}


class WishingTask(Protocol):
    @property
    def shape(self) -> Shape: ...

    @property
    def wish(self) -> WishedShape | None: ...


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
    tasks: Mapping[str, WishingTask], decision: Decision, measured: Measurements, now: float
) -> HeldBack:
    found = HeldBack(carried_out=decision)
    for name, choice in decision.choices.items():
        if choice.kind is not OptionKind.RESHAPE or not decision.situations[name].rerouted:
            continue
        stay = with_only(found.carried_out, name, STAY)
        if stay is None:
            continue
        task, known = tasks[name], measured.of(name)
        rate = decision.options[name].task.weight * (choice.throughput - stay.choices[name].throughput)
        missed = 0.0 if task.wish is None else task.wish.missed_at(now)
        wait_s = (choice.cost + choice.way_back - missed) / rate if rate > 0 else 0.0
        wait_s = max(wait_s, known.settles_in_s(task.shape, choice.transition_s))
        if wait_s > 0:
            found.carried_out, found.waits[name] = stay, wait_s
            found.wishes[name], found.losses[name] = in_cut(task.shape, choice), max(0.0, rate)
    return found


def in_cut(shape: Shape, choice: TaskOption) -> Shape:
    """The shape of the choice, with the task's own batch."""
    if choice.shape is None:
        return shape
    return shape.cut(choice.shape.replicas, choice.shape.stages, choice.shape.shards)
