"""A cluster's life as a fluid: between two events every task makes progress at a rate, or stands still.

    failure ─► detection ─► transition ─► replay ─► running, perhaps slower (sub-healthy) ─► repair ...
               nothing       nothing      work that  less than when
               happens       happens      was done   all was well

What a task loses is counted in its own healthy rate, by kind, so that the kinds add up to what is missing
from a life without faults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everstep_lab.plan import Curve
from everstep_lab.plan.task_shape import ParallelShape

KINDS = ("detection", "transition", "replay", "waiting", "sub-healthy", "overhead")


@dataclass(slots=True, kw_only=True)
class StudyTask:
    """One training job in a study."""

    name: str
    curve: Curve
    weight: float = 1.0
    min_workers: int = 1
    nodes: list[int] = field(default_factory=list)  # that it owns, also while one of them is away
    shape: ParallelShape | None = None
    healthy: float = 0.0  # FLOP/s on its first allocation
    rate: float = 0.0  # FLOP/s while it runs
    overhead: float = 0.0  # share of the rate that a policy spends while nothing fails
    waiting: bool = False
    on_disk_alone: bool = False  # no node was left: its state is in no memory
    stalls: list[tuple[str, float]] = field(default_factory=list)
    done: float = 0.0  # FLOPs that count
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    running_s: float = 0.0
    decided_now: float = 0.0  # seconds of the last pause, if no time has passed since

    def step_s(self) -> float:
        """Seconds of a step at the healthy rate."""
        return self.curve.step_s(self.healthy) or 10.0

    def stall(self, **seconds: float) -> None:
        """Stand still: first until the trouble is seen, then for the change, then for work done again.

        A second trouble before the first is over starts the first two again; replay still owed stays owed.
        """
        owed = sum(s for kind, s in self.stalls if kind == "replay")
        order = [(kind, seconds[kind]) for kind in ("detection", "transition") if seconds.get(kind)]
        replay = seconds.get("replay", 0.0) + owed
        self.stalls = order + ([("replay", replay)] if replay > 0 else [])
        self.decided_now = 0.0

    def owe(self, replay_s: float) -> None:
        """Work to be done again, after whatever is under way."""
        if replay_s > 0:
            self.stalls.append(("replay", replay_s))
            self.decided_now = 0.0

    def pause(self, seconds: float) -> None:
        """A change made on purpose: one more transition, after whatever is under way. Changes decided at the
        same moment (several nodes join at once) are one, as long as the longest of them.
        """
        if seconds <= self.decided_now:
            return
        if self.decided_now:
            self.stalls.pop()
        self.stalls.append(("transition", seconds))
        self.decided_now = seconds

    def advance(self, dt: float) -> None:
        left = dt
        self.decided_now = 0.0
        while left > 0 and self.stalls and not self.waiting:
            kind, seconds = self.stalls[0]
            spent = min(left, seconds)
            self.lost[kind] += spent * self.healthy
            left -= spent
            if spent >= seconds:
                self.stalls.pop(0)
            else:
                self.stalls[0] = (kind, seconds - spent)
        if left <= 0:
            return
        if self.waiting:
            self.lost["waiting"] += left * self.healthy
            return
        useful = self.rate * (1 - self.overhead)
        self.done += useful * left
        self.running_s += left
        self.lost["overhead"] += (self.rate - useful) * left
        self.lost["sub-healthy"] += (self.healthy - self.rate) * left

    def useful_now(self) -> float:
        return 0.0 if self.waiting or self.stalls else self.rate * (1 - self.overhead)


@dataclass(slots=True, kw_only=True)
class Life:
    """The cluster as policies see and change it."""

    slots: int
    num_nodes: int
    tasks: Sequence[StudyTask]
    severe_per_1000_node_days: float
    now_s: float = 0.0
    away: dict[int, float] = field(default_factory=dict)  # node -> when it is back
    owner: dict[int, StudyTask] = field(default_factory=dict)
    spares: list[int] = field(default_factory=list)

    def advance(self, to_s: float) -> None:
        dt = to_s - self.now_s
        if dt > 0:
            for task in self.tasks:
                task.advance(dt)
            self.now_s = to_s

    def give(self, task: StudyTask, nodes: Sequence[int]) -> None:
        task.nodes = list(nodes)
        for node in nodes:
            self.owner[node] = task

    def here(self, task: StudyTask) -> list[int]:
        """Its nodes that are not away."""
        return [node for node in task.nodes if node not in self.away]

    def num_here(self) -> int:
        return self.num_nodes - len(self.away)

    def waf(self) -> float:
        return sum(task.weight * task.useful_now() for task in self.tasks)

    def healthy_waf(self) -> float:
        return sum(task.weight * task.healthy for task in self.tasks)


def lost_by_kind(tasks: Sequence[StudyTask]) -> Mapping[str, float]:
    """Weighted, over all tasks."""
    return {kind: sum(t.weight * t.lost[kind] for t in tasks) for kind in KINDS}
