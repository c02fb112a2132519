"""Answers for every single next event, thought of before: dispatch is a look-up.

Nodes that carry the same parts of the same tasks are alike: their loss calls for the same decision, which is
made once. What differs is who sits where, and that is worked out when a plan is asked for (`Ready.plan`).

The table holds for one world. Its owner calls `prepare` in idle moments, a few answers at a time, and
makes a new table when the world has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everstep.plan.answer import Decision, decide, explained
from everstep_lab.plan.assign import Plan, assign
from everstep_lab.plan.events import PlanWorld, after, next_events


@dataclass(frozen=True, slots=True)
class Ready:
    """An answer: how much each task gets and why; `plan` seats the workers too."""

    event: str
    decision: Decision
    because: str
    plan: Callable[[], Plan]

    @property
    def allocation(self) -> dict[str, int]:
        return {name: choice.workers for name, choice in self.decision.choices.items()}


class NextEvents:
    """The table for one world."""

    def __init__(self, world: PlanWorld) -> None:
        self.world = world
        self._likeness = _likeness(world)
        self._class_of = {event: self._class(event) for event in next_events(world)}
        self._ready: dict[str, tuple[Decision, str]] = {}

    @property
    def events(self) -> list[str]:
        return list(self._class_of)

    def num_decisions(self) -> int:
        """How many answers differ."""
        return len(set(self._class_of.values()))

    def prepare(self, most: int | None = None) -> int:
        """Think of up to `most` answers that are not ready; how many were thought of."""
        made = 0
        for event, key in self._class_of.items():
            if made == most:
                break
            if key not in self._ready:
                self._ready[key] = self._think(event)
                made += 1
        return made

    def look_up(self, event: str) -> Ready:
        """The answer to one of `events`; computed now if it is not in the table."""
        key = self._class_of[event] if event in self._class_of else self._class(event)
        if key not in self._ready:
            self._ready[key] = self._think(event)
        decision, because = self._ready[key]
        return Ready(event, decision, f"{event}: {because}", lambda: self._plan(event))

    def _think(self, event: str) -> tuple[Decision, str]:
        world = after(event, self.world)
        decision = decide(world.cluster, world.submitted(), world.now)
        return decision, explained(world.cluster, decision)

    def _plan(self, event: str) -> Plan:
        world = after(event, self.world)
        return assign(world.cluster, world.submitted(), world.now, event)

    def _class(self, event: str) -> str:
        verb, _, name = event.partition(" ")
        return f"lose {self._likeness[name]}" if verb == "lose" and name in self._likeness else event


def _likeness(world: PlanWorld) -> dict[str, str]:
    """Per node a word that is the same for nodes whose loss means the same."""
    parts: dict[str, list[str]] = {node.name: [] for node in world.cluster.nodes}
    for task in world.submitted():
        shape = world.now.shapes.get(task.name) or task.curve.shape(len(world.now.of(task.name)))
        for index, place in enumerate(world.now.of(task.name)):
            if place is None or place.node not in parts:
                continue
            group = "" if shape is None else f"/{index // shape.shards % shape.stages}"
            parts[place.node].append(f"{task.name}{group}")
    return {
        node.name: f"{len(world.cluster.offered(node))} {node.failures_per_1000_days} "
        + " ".join(sorted(parts[node.name]))
        for node in world.cluster.nodes
    }
