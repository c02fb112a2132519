"""Cluster-wide policies: Unicron as published, ours, and what no policy can reach.

Both plan with the real planner, on the same curves and the same costs of a change. Unicron
here is the planner with what its paper does not have taken away: it gives whole nodes, does not re-route,
and does not know when a repair will end. That is kind to Unicron: its one constant for every transition
is replaced by our costs, which know the task, the shapes and where the state is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from everstep_lab.plan import Assignment, Cluster, Costs, PlanNode, SlotPlace, TaskSpec, decide
from everstep_lab.plan.holes import per_stage
from everstep_lab.plan.option import OptionKind, TaskOption
from everstep_lab.plan.pipeline_orders import RESCHEDULED
from everstep_lab.plan.task_shape import Floats
from everstep_lab.study.failures import Failure, Seen
from everstep_lab.study.life import Life, StudyTask
from everstep_lab.study.policies import Policy, concave_hull, ratio_without
from everstep_lab.study.templates import upper_bound

RESTART_PROCESS_S = 60.0  # a process with CUDA, its state copied from a peer or from memory: our assumption
RECONNECT_S = 5.0
NEVER_S = 1e12  # no repair is promised
LARGE_NODES = 256  # above this only the next repair is foreseen


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a planned policy can do. Everstep has all of it; each can be taken away to see what it brings."""

    reroute: bool = True  # continue without the failed workers, no state moved
    stagger: bool = True  # staggered optimizer and decoupled backward while re-routed
    mid_step: bool = True  # the broken step goes on; else it is run again
    repair_aware: bool = True  # plans know when a node will be back; brings nothing that can be measured
    placement: bool = True  # slots, not whole nodes, are given to tasks
    fast_detection: bool = True  # progress of ops, not iteration times


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionTimes:
    """Seconds from a failure to its evidence, by detector; a hang is seen after some iterations."""

    exception_s: float
    exit_s: float
    silence_s: float
    hang_steps: float

    def of(self, seen: Seen, step_s: float) -> float:
        match seen:
            case Seen.EXCEPTION:
                return self.exception_s
            case Seen.EXIT:
                return self.exit_s
            case Seen.SILENCE:
                return self.silence_s
            case Seen.STATISTICS:
                return self.hang_steps * step_s


# Agents see an exception in 0.3 s, an exit in 1.8 s, a lost node in 5.6 s [U]; what only shows in the time of
# iterations after three of them.
UNICRON_TIMES = DetectionTimes(exception_s=0.3, exit_s=1.8, silence_s=5.6, hang_steps=3.0)
# Exits by pidfd and exceptions by hook in tens of milliseconds (`bench/heal.py`: 24 ms, 41 ms at the 95th
# percentile; 0.1 s here), a lost node by a second of silence (training continues 1.4 s
# after a node is gone; all of it counts as detection here), a hang by one op overdue, at most one iteration.
EVERSTEP_TIMES = DetectionTimes(exception_s=0.1, exit_s=0.1, silence_s=1.4, hang_steps=1.0)


class PlannedPolicy(Policy):
    """A plan for the whole cluster at every severe failure and every return."""

    in_memory = True

    def __init__(self, means: Means, times: DetectionTimes) -> None:
        self.means, self.times = means, times
        same_cut_s = Costs().join_s if means.reroute else Costs().groups_s
        self._costs = Costs(memory_copies=True, join_s=same_cut_s)

    def begin(self, life: Life) -> None:
        super().begin(life)
        self._owned = {task.name: list(task.nodes) for task in life.tasks}
        places, shapes = {}, {}
        for task in life.tasks:
            if task.shape is not None:
                slots = [SlotPlace(str(n), s) for n in task.nodes for s in range(life.slots)]
                places[task.name], shapes[task.name] = slots[: task.shape.workers], task.shape
        self.now = Assignment(places=places, shapes=shapes)

    # -------------------------------------------------------------- what happens

    def failed(self, life: Life, failure: Failure, task: StudyTask) -> None:
        raise AssertionError("a planned policy looks at all tasks of a node")

    def struck(self, life: Life, failure: Failure) -> None:
        """Who sits on the node suffers; others may be asked to move."""
        here = [t for t in life.tasks if self._indices(t, failure.node)]
        if failure.severity == 1:
            self._plan(life, here, failure)
            return
        for task in here[:1] if failure.severity == 2 else here:
            self._heal_in_place(life, task, failure)

    def returned(self, life: Life, node: int, task: StudyTask | None) -> None:
        self._plan(life, [], None)

    def _heal_in_place(self, life: Life, task: StudyTask, failure: Failure) -> None:
        """A reconnect, or one process restarted."""
        if task.waiting:
            return
        seen = self.times.of(failure.seen, task.step_s())
        if failure.severity == 3:
            task.stall(detection=seen, transition=RECONNECT_S)
            return
        one = self._indices(task, failure.node)[:1]
        ratio = ratio_without(self._as_scheduled(task), [*self._holes(task), *one]) if task.shape else 0.0
        again = self._again(task)
        if ratio <= 0:  # no other worker holds this stage: its state comes from another host's memory
            task.stall(detection=seen, transition=RESTART_PROCESS_S, replay=task.step_s())
        elif self.means.reroute:
            slower = RESTART_PROCESS_S * max(0.0, 1 - ratio * task.healthy / max(task.rate, 1e-9))
            task.stall(detection=seen, transition=Costs().reroute_s, replay=again + slower)
        else:
            task.stall(detection=seen, transition=RESTART_PROCESS_S, replay=again)

    def _again(self, task: StudyTask) -> float:
        """Work of the broken step that is done again: the dead worker's share, or all of it."""
        groups = task.shape.replicas if task.shape is not None else 1
        return task.step_s() * (1 / max(1, groups - 1) if self.means.mid_step else 0.5)

    # -------------------------------------------------------------- planning

    def _plan(self, life: Life, hit: Sequence[StudyTask], failure: Failure | None) -> None:
        cluster = self._cluster(life)
        specs = [self._spec(task) for task in life.tasks]
        decision = decide(cluster, specs, self.now)
        before = self.now
        self.now = self._seat(cluster, decision.choices)
        for task in life.tasks:
            choice = decision.choices[task.name]
            was_running = not task.waiting and task.rate > 0
            changed = choice.kind is not OptionKind.KEEP
            if task in hit and failure is not None:
                extra = 0.0 if self.means.mid_step else self._again(task)
                seen = self.times.of(failure.seen, task.step_s())
                task.stall(detection=seen, transition=choice.transition_s, replay=extra)
            elif changed and (was_running or choice.throughput > 0) and self._differs(before, task, choice):
                task.pause(choice.transition_s)
            task.rate = choice.throughput
            task.waiting = choice.throughput <= 0
            task.shape = choice.shape if choice.shape is not None else task.shape

    def _differs(self, before: Assignment, task: StudyTask, choice: TaskOption) -> bool:
        return choice.shape != before.shapes.get(task.name) or before.places.get(
            task.name
        ) != self.now.places.get(task.name)

    def _cluster(self, life: Life) -> Cluster:
        aware = self.means.repair_aware
        if aware and life.num_nodes > LARGE_NODES:  # a plan a second is what we can afford: the next one only
            first = min(life.away.values(), default=0.0)
            foreseen = {n for n, back in life.away.items() if back == first}
        else:
            foreseen = set(life.away) if aware else set()
        nodes = [
            PlanNode(
                name=str(n),
                slots=life.slots,
                lost=n in life.away,
                back_in_s=_back_in(life, n) if n in foreseen else None,
            )
            for n in range(life.num_nodes)
        ]
        return Cluster(
            nodes=nodes,
            whole_nodes=not self.means.placement and life.slots > 1,
            failures_per_1000_node_days=life.severe_per_1000_node_days,
            costs=self._costs,
        )

    def _spec(self, task: StudyTask) -> TaskSpec:
        scheduled = self._as_scheduled(task)
        return TaskSpec(
            name=task.name,
            curve=scheduled.curve,
            weight=task.weight,
            min_workers=task.min_workers,
            must_run=True,
        )

    def _as_scheduled(self, task: StudyTask) -> StudyTask:
        """Without staggering: a fused backward, and one optimizer step for all stages. Without re-routing:
        a lost worker's state comes from another host's memory, and the task is formed again.
        """
        schedule = RESCHEDULED if self.means.stagger else "unstaggered"
        curve, reroute = task.curve, self.means.reroute
        if curve.schedule != schedule or curve.replicated != reroute:
            task.curve = replace(curve, schedule=schedule, replicated=reroute)
        return task

    def _seat(self, cluster: Cluster, choices: Mapping[str, TaskOption]) -> Assignment:
        """Who stays, stays; others in the order of nodes. Counts are right, neighbours may not be."""
        lost = {n.name for n in cluster.nodes if n.lost}
        places: dict[str, list[SlotPlace | None]] = {}
        shapes = {}
        taken: set[SlotPlace] = set()
        for name, choice in choices.items():
            if choice.shape is None or choice.throughput <= 0:
                continue
            shapes[name] = choice.shape
            if choice.kind in (OptionKind.KEEP, OptionKind.REROUTE):
                places[name] = [None if p is None or p.node in lost else p for p in self.now.of(name)]
                taken.update(p for p in places[name] if p is not None)
        free = [
            p for n in cluster.nodes for s in cluster.offered(n) if (p := SlotPlace(n.name, s)) not in taken
        ]
        free.reverse()
        for name, shape in shapes.items():
            if name not in places:
                left = per_stage(choices[name].workers // shape.shards, shape.stages)
                places[name] = [None] * shape.workers
                for index in range(shape.workers):
                    stage = index // shape.shards % shape.stages
                    if index // (shape.shards * shape.stages) < left[stage] and free:
                        places[name][index] = free.pop()
        return Assignment(places=places, shapes=shapes)

    def _indices(self, task: StudyTask, node: int) -> list[int]:
        name = str(node)
        return [i for i, p in enumerate(self.now.of(task.name)) if p is not None and p.node == name]

    def _holes(self, task: StudyTask) -> list[int]:
        return [i for i, p in enumerate(self.now.of(task.name)) if p is None]


def unicron() -> PlannedPolicy:
    """The broken step is resumed, a process is restarted in place, a severe failure reconfigures the cluster
    by plan, in whole nodes.
    """
    return PlannedPolicy(
        Means(reroute=False, stagger=False, repair_aware=False, placement=False, fast_detection=False),
        UNICRON_TIMES,
    )


def everstep(means: Means | None = None) -> PlannedPolicy:
    """Work continues around the dead at once, and moves only where the plan says that it pays."""
    means = means or Means()
    return PlannedPolicy(means, EVERSTEP_TIMES if means.fast_detection else UNICRON_TIMES)


class Ideal(Policy):
    """What the healthy workers could earn at best, every moment, with nothing ever lost or moved.

    Unreachable, and an upper bound of every policy here: a number of workers brings what no whole shape, no
    shape with empty places and no pipelines of two depths exceed (`templates.upper_bound`); each task's curve
    is the concave hull of that, so that any number is as good as the mixtures of the good ones; and the split
    over tasks is the best one at any time.
    """

    def begin(self, life: Life) -> None:
        super().begin(life)
        self._best = hull_waf(life.tasks, life.num_nodes * life.slots)
        self._share(life)

    def failed(self, life: Life, failure: Failure, task: StudyTask) -> None:
        self._share(life)

    def returned(self, life: Life, node: int, task: StudyTask | None) -> None:
        self._share(life)

    def spare_lost(self, life: Life, failure: Failure) -> None:
        self._share(life)

    def _share(self, life: Life) -> None:
        scale = self._best[life.num_here() * life.slots] / life.healthy_waf()
        for task in life.tasks:
            task.rate = task.healthy * scale


def hull_waf(tasks: Sequence[StudyTask], most: int) -> Floats:
    """The best WAF of any number of workers: marginal gains of all concave hulls, largest first."""
    gains = np.concatenate(
        [task.weight * np.diff(concave_hull(upper_bound(task.curve)[: most + 1])) for task in tasks]
    )
    best = np.sort(gains)[::-1][:most]
    total = np.concatenate(([0.0], np.cumsum(np.maximum(best, 0.0))))
    return np.concatenate((total, np.full(max(0, most + 1 - len(total)), total[-1])))


def _back_in(life: Life, node: int) -> float | None:
    if node not in life.away:
        return None
    left = life.away[node] - life.now_s
    return max(1.0, left) if left < NEVER_S else None
