"""A routing: every flow has a path. What each link then has to carry, and how long the slowest takes.

A link's `load` is in seconds: the bytes it carries in a step over what it can carry. Phases of one task take
turns, so a link counts the task's heaviest phase; tasks are not in step with each other, so it adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from everstep_fabric.fairness import max_min
from everstep_fabric.flows import Flow
from everstep_fabric.topology import Floats, Ints, Path, Topology

BITS = 8.0 / 1e9  # bytes to Gbit
DEAD = 1e12  # seconds per Gbit on a dead link: worse than anything, and still a number


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Flows and the path each one takes, with what follows: the load of every link."""

    topology: Topology
    flows: tuple[Flow, ...]
    paths: Ints  # one row a flow, padded with -1
    because: str = ""
    moved: tuple[str, ...] = ()  # names of the flows that changed their path against the routing before

    def path(self, number: int) -> Path:
        return tuple(int(link) for link in self.paths[number] if link >= 0)

    @cached_property
    def by_name(self) -> Mapping[str, Path]:
        return {flow.name: self.path(number) for number, flow in enumerate(self.flows)}

    @cached_property
    def gbit(self) -> Floats:
        return np.array([flow.bytes for flow in self.flows]) * BITS

    @cached_property
    def load(self) -> Floats:
        """Seconds of each link in a step of all tasks."""
        per_task: dict[str, Floats] = {}
        for (task, _), members in _by_phase(self.flows).items():
            sums = self._link_sums(members)
            per_task[task] = np.maximum(per_task[task], sums) if task in per_task else sums
        total = sum(per_task.values(), start=np.zeros(len(self.topology.links)))
        return np.where(total > 0, total * seconds_per_gbit(self.topology), 0.0)

    @property
    def worst_load(self) -> float:
        return float(self.load.max(initial=0.0))

    @cached_property
    def rates(self) -> Floats:
        """Gbit/s of each flow if all send at once, each for itself; 0 on a dead path."""
        return max_min(self.paths, self.topology.capacity)

    def _link_sums(self, members: Sequence[int]) -> Floats:
        rows = self.paths[members]
        real = rows >= 0
        weights = np.repeat(self.gbit[members], rows.shape[1])[real.ravel()]
        sums = np.bincount(rows[real], weights=weights, minlength=len(self.topology.links))
        return sums.astype(np.float64)


def _by_phase(flows: Sequence[Flow]) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for number, flow in enumerate(flows):
        found.setdefault((flow.task, flow.phase), []).append(number)
    return found


def seconds_per_gbit(topology: Topology) -> Floats:
    capacity = topology.capacity
    return np.where(capacity > 0, 1.0 / np.maximum(capacity, 1e-12), DEAD)
