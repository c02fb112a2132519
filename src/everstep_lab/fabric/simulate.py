"""Steps of tasks in time on a fabric that changes: phases in turn, rates shared fairly, links failing.

A task computes, then runs its phases in their order, then starts its next step. All its flows of a phase
are under way at once; a group (a ring) ends when its longest flow has ended. Between two moments at which
anything starts, ends, fails or is re-routed, rates are constant: so time goes from moment to moment.

    change at t ──► `switches` answer at once (a dead link's flows are hashed elsewhere, or stand still)
                ──► t + notice_s: `reroute` answers (a new plan)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from everstep.errors import UserError
from everstep.fabric.fairness import LinkUsage, max_min
from everstep.fabric.flows import Endpoint
from everstep.fabric.routing import Routing
from everstep.fabric.topology import Floats, Topology
from everstep_lab.fabric.traffic_task import TrafficTask

PHASES = ("pipeline", "reduce")
_NOW = 1e-12
Reroute = Callable[[Topology, Routing], Routing]


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricChange:
    """From `at_s` on these links have this fraction of their capacity."""

    at_s: float
    condition: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    task: str
    number: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowOutcome:
    steps: tuple[Step, ...]
    reroutes: tuple[tuple[float, str], ...]  # when, and why
    end_s: float
    stalled: tuple[str, ...] = ()  # tasks that could not continue

    def step_seconds(self, task: str) -> list[float]:
        return [step.seconds for step in self.steps if step.task == task]


@dataclass(slots=True)
class _Running:
    task: TrafficTask
    step: int = 0
    start_s: float = 0.0
    phase: int = -1  # -1: computing
    computes_until_s: float = 0.0
    groups: dict[str, int] = field(default_factory=dict)  # of the phase: those not done


def simulate(
    routing: Routing,
    tasks: Sequence[TrafficTask],
    *,
    num_steps: int,
    changes: Sequence[FabricChange] = (),
    switches: Reroute | None = None,
    reroute: Reroute | None = None,
    notice_s: float = 0.0,
    max_moments: int = 1_000_000,
) -> FlowOutcome:
    """Run every task for `num_steps` steps. Without `switches` and `reroute`, flows stay where they are."""
    if num_steps < 1:
        raise UserError(f"steps is {num_steps}; simulate at least 1.")
    answers = _Answers(switches=switches, reroute=reroute, notice_s=notice_s)
    return _World(routing, tasks, num_steps, changes, answers).run(max_moments)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    switches: Reroute | None
    reroute: Reroute | None
    notice_s: float


class _World:
    def __init__(
        self,
        routing: Routing,
        tasks: Sequence[TrafficTask],
        num_steps: int,
        changes: Sequence[FabricChange],
        answers: _Answers,
    ) -> None:
        self.now = 0.0
        self.routing, self.num_steps, self.answers = routing, num_steps, answers
        self.changes = sorted(changes, key=lambda c: c.at_s)
        self.due: list[float] = []  # when reroute will have answered
        self.running = [_Running(task) for task in tasks]
        self.steps: list[Step] = []
        self.reroutes: list[tuple[float, str]] = []
        groups = list(dict.fromkeys(flow.group for flow in routing.flows))
        self.group_number = {name: number for number, name in enumerate(groups)}
        self.group_of = np.array([self.group_number[f.group] for f in routing.flows], dtype=np.int64)
        self.size = np.zeros(len(groups))
        np.maximum.at(self.size, self.group_of, routing.gbit)
        self.phase_groups: dict[tuple[str, str], set[int]] = {}
        for flow in routing.flows:
            self.phase_groups.setdefault((flow.task, flow.phase), set()).add(self.group_number[flow.group])
        self.ceiling = self._ceiling()
        self.left = np.zeros(len(groups))
        self.active = np.zeros(len(groups), dtype=bool)

    def run(self, max_moments: int) -> FlowOutcome:
        for running in self.running:
            self._begin_step(running)
        for _ in range(max_moments):
            self._settle()
            if all(running.step > self.num_steps for running in self.running):
                return self._outcome()
            rates = self._rates()
            moment = self._next_moment(rates)
            if moment is None:
                return self._outcome()
            self.left[self.active] -= rates[self.active] * (moment - self.now)
            self.now = moment
            self._apply_changes()
        raise UserError(f"simulation: {max_moments} moments were not enough; simulate fewer steps.")

    # ------------------------------------------------------------------ rates and moments

    def _rates(self) -> Floats:
        flows = np.flatnonzero(self.active[self.group_of])
        share = self.routing.gbit[flows] / self.size[self.group_of[flows]]
        usage = LinkUsage.of(self.routing.paths[flows], self.group_of[flows], share, len(self.size))
        return max_min(usage, self.routing.topology.capacity, np.where(self.active, self.ceiling, 0.0))

    def _ceiling(self) -> Floats:
        """What a group's flow can be fed with: its NIC's rate over the flows that leave it together."""
        most = np.full(len(self.size), np.inf)
        per_edge: dict[tuple[int, Endpoint, Endpoint], int] = {}
        for number, flow in enumerate(self.routing.flows):
            key = int(self.group_of[number]), flow.source, flow.target
            per_edge[key] = per_edge.get(key, 0) + 1
        for (group, source, _), count in per_edge.items():
            node = self.routing.topology.by_node[source[0]]
            if node.nic_gbps is not None:
                most[group] = min(most[group], node.nic_gbps / count)
        return most

    def _next_moment(self, rates: Floats) -> float | None:
        moments = [change.at_s for change in self.changes[:1]] + self.due[:1]
        moments += [r.computes_until_s for r in self.running if r.phase == -1 and r.step <= self.num_steps]
        moving = self.active & (rates > 0)
        if moving.any():
            moments.append(self.now + float((self.left[moving] / rates[moving]).min()))
        return max(self.now, min(moments)) if moments else None

    def _apply_changes(self) -> None:
        while self.changes and self.changes[0].at_s <= self.now + _NOW:
            topology = self.routing.topology.with_condition(self.changes.pop(0).condition)
            self.routing = _on(topology, self.routing)
            if self.answers.switches is not None:
                self.routing = self.answers.switches(topology, self.routing)
            if self.answers.reroute is not None:
                self.due.append(self.now + self.answers.notice_s)
        while self.due and self.due[0] <= self.now + _NOW:
            self.due.pop(0)
            assert self.answers.reroute is not None
            self.routing = self.answers.reroute(self.routing.topology, self.routing)
            self.reroutes.append((self.now, self.routing.because))

    # ------------------------------------------------------------------ tasks

    def _settle(self) -> None:
        """End what has ended, begin what follows, until nothing more happens at this moment."""
        done = self.active & (self.left <= 1e-9 * np.maximum(self.size, 1e-9))
        self.active &= ~done
        again = True
        while again:
            again = False
            for running in self.running:
                if running.step <= self.num_steps and self._is_over(running):
                    self._advance(running)
                    again = True

    def _is_over(self, running: _Running) -> bool:
        if running.phase == -1:
            return running.computes_until_s <= self.now + _NOW
        members = self.phase_groups.get((running.task.name, PHASES[running.phase]), set())
        return not any(self.active[group] for group in members)

    def _advance(self, running: _Running) -> None:
        running.phase += 1
        if running.phase < len(PHASES):
            for group in self.phase_groups.get((running.task.name, PHASES[running.phase]), set()):
                self.left[group], self.active[group] = self.size[group], True
            return
        self.steps.append(
            Step(task=running.task.name, number=running.step, start_s=running.start_s, end_s=self.now)
        )
        self._begin_step(running)

    def _begin_step(self, running: _Running) -> None:
        running.step += 1
        running.phase, running.start_s = -1, self.now
        running.computes_until_s = self.now + running.task.compute_s

    def _outcome(self) -> FlowOutcome:
        return FlowOutcome(
            steps=tuple(self.steps),
            reroutes=tuple(self.reroutes),
            end_s=self.now,
            stalled=tuple(r.task.name for r in self.running if r.step <= self.num_steps),
        )


def _on(topology: Topology, routing: Routing) -> Routing:
    return Routing(topology=topology, flows=routing.flows, paths=routing.paths, because=routing.because)
