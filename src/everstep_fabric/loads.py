"""What every link carries while flows are put onto it and taken off, and what one more would cost.

A link's cost is its load in seconds times the weight of the most important task on it: a task of weight 2
with a link to itself is as content as one of weight 1 that shares. Loads as in `routing`: of each task its
heaviest phase, added over tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from everstep_fabric.flows import Flow
from everstep_fabric.routing import BITS, seconds_per_gbit
from everstep_fabric.topology import Floats, Ints, Topology


class Loads:
    def __init__(self, topology: Topology, flows: Sequence[Flow]) -> None:
        self.num_links = len(topology.links)
        self.slowness = seconds_per_gbit(topology)
        phases = {key: n for n, key in enumerate(dict.fromkeys((f.task, f.phase) for f in flows))}
        tasks = {key: n for n, key in enumerate(dict.fromkeys(f.task for f in flows))}
        ranks = {weight: n for n, weight in enumerate(sorted({f.weight for f in flows}))}
        self.gbit = [flow.bytes * BITS for flow in flows]
        lightest = min(ranks, default=1.0)  # counts as 1, so that a cost is never below its load
        self._weights = np.array([weight / lightest for weight in sorted(ranks)] or [1.0])
        self._phase_of = [phases[f.task, f.phase] for f in flows]
        self._task_of = [tasks[f.task] for f in flows]
        self._rank_of = [ranks[f.weight] for f in flows]
        self._phases_of_task: list[list[int]] = [[] for _ in tasks]
        for (task, _), number in phases.items():
            self._phases_of_task[tasks[task]].append(number)
        self._by_phase = np.zeros((len(phases), self.num_links + 1))  # the last column is padding's
        self._by_task = np.zeros((len(tasks), self.num_links + 1))
        self.total = np.zeros(self.num_links + 1)
        self._present = np.zeros((len(ranks) or 1, self.num_links + 1), dtype=np.int64)
        self._weight = np.zeros(self.num_links + 1)
        self._slow = np.append(self.slowness, 0.0)

    def cost(self) -> Floats:
        return np.asarray((self._weight * self.total * self._slow)[:-1])

    def cost_at(self, links: Ints) -> Floats:
        return np.asarray(self._weight[links] * self.total[links] * self._slow[links])

    def cost_with(self, flow: int, links: Ints) -> Floats:
        """Cost of each of these links if the flow were on it, too; any shape."""
        task, phase = self._task_of[flow], self._phase_of[flow]
        peak = self._by_task[task, links]
        more = np.maximum(self._by_phase[phase, links] + self.gbit[flow], peak) - peak
        weight = np.maximum(self._weight[links], self._weights[self._rank_of[flow]])
        return np.asarray(weight * (self.total[links] + more) * self._slow[links])

    def phase_with(self, flow: int, links: Ints) -> Floats:
        """The load of the flow's own phase alone: what decides where the cost does not."""
        own = self._by_phase[self._phase_of[flow], links] + self.gbit[flow]
        return np.asarray(own * self._slow[links])

    def put(self, flow: int, path: Ints) -> None:
        self._change(flow, path, self.gbit[flow], 1)

    def take(self, flow: int, path: Ints) -> None:
        self._change(flow, path, -self.gbit[flow], -1)

    def put_many(self, flows: Sequence[int], paths: Ints) -> None:
        """All at once; one row of links a flow, padded with -1."""
        each = paths.shape[1]
        numbers = np.asarray(flows, dtype=np.int64)
        at = np.where(paths >= 0, paths, self.num_links).ravel()
        gbit = np.repeat(np.array(self.gbit)[numbers], each)
        np.add.at(self._by_phase, (np.repeat(np.array(self._phase_of)[numbers], each), at), gbit)
        np.add.at(self._present, (np.repeat(np.array(self._rank_of)[numbers], each), at), 1)
        self._by_phase[:, -1] = 0
        self._present[:, -1] = 0
        for task, rows in enumerate(self._phases_of_task):
            self._by_task[task] = self._by_phase[rows].max(axis=0)
        self.total = self._by_task.sum(axis=0)
        self._weight = self._heaviest(self._present)

    def _change(self, flow: int, path: Ints, gbit: float, count: int) -> None:
        task = self._task_of[flow]
        self._by_phase[self._phase_of[flow], path] += gbit
        before = self._by_task[task, path]
        rows = self._phases_of_task[task]
        own = self._by_phase[rows][:, path] if len(rows) > 1 else self._by_phase[rows[0], path][None]
        peak = own.max(axis=0)
        self._by_task[task, path] = peak
        self.total[path] += peak - before
        self._present[self._rank_of[flow], path] += count
        self._weight[path] = self._heaviest(self._present[:, path])

    def _heaviest(self, present: Ints) -> Floats:
        """Weight of the most important task on each link, 0 where there is none."""
        if len(present) == 1:
            return np.where(present[0] > 0, self._weights[0], 0.0)
        top = len(present) - 1 - np.argmax(present[::-1] > 0, axis=0)
        return np.where(present.any(axis=0), self._weights[top], 0.0)
