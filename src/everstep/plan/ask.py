"""The coordinator's state as a question to the planner, and its answer as an event.

A running Everstep task can use any number of workers from one per stage up to its shape: places without a
worker are worked around, and its batch and its losses stay what they are. So its curve is the relative
throughput of its schedule with so many places empty, in units of one worker's work; what a worker does in
FLOP/s is the same for all tasks here, as they share the machines.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.node_states import NodeAdmin
from everstep.core.cluster.task import OVER, TaskState
from everstep.core.cluster.task import Task as RunningTask
from everstep.core.words.cluster_messages import AssignmentChosen
from everstep.core.words.ops import Worker
from everstep.core.words.shape import Shape
from everstep.plan.answer import assign
from everstep.plan.cluster import Assignment, Cluster, PlanNode, SlotPlace
from everstep.plan.curve import from_table
from everstep.plan.task import TaskSpec
from everstep.schedule.bounds import relative_throughput
from everstep.schedule.instance import Instance, uniform

TRANSITION_S = 2.0  # of a task of whose state nothing is known yet
AGREE_S = 0.2  # to stop between two ops, report ledgers and resume
PACE = 500e6  # bytes/s at which a worker takes over a state, until a move has been measured


def choose(coordinator: Coordinator, version: int, event: str) -> AssignmentChosen:
    """How many workers each task shall have, now that `event` has happened."""
    tasks = [t for t in coordinator.tasks.values() if t.state not in OVER and t.state is not TaskState.PAUSED]
    nodes = [
        PlanNode(name=node.name, slots=node.slots, lost=node.admin is not NodeAdmin.UP or not node.reachable)
        for node in coordinator.nodes.values()
    ]
    if not tasks or not any(not node.lost for node in nodes):
        return AssignmentChosen(version=version, workers={}, because="there is nothing to share out")
    now = Assignment(
        places={
            task.name: tuple(
                SlotPlace(seat.node, seat.slot) for seat in task.seats.values() if not seat.leaving
            )
            for task in tasks
            if task.seats
        }
    )
    plan = assign(Cluster(nodes=nodes), [_spec(task) for task in tasks], now, event, second=False)
    return AssignmentChosen(version=version, workers=plan.allocation, because=plan.because)


def worth(task: RunningTask, workers: int) -> float:
    """What so many workers bring to the sum the planner maximises, in one worker's work."""
    curve = _curve(task.shape)
    return task.weight * curve[min(workers, len(curve) - 1)]


def _spec(task: RunningTask) -> TaskSpec:
    return TaskSpec(
        name=task.name,
        curve=from_table(_curve(task.shape)),
        weight=task.weight,
        min_workers=task.shape.stages,
        transition_s=transition_s(task),
        must_run=True,
    )


def transition_s(task: RunningTask) -> float:
    """D_transition from real bytes: a worker that comes fetches a stage's state at the last move's pace.

    How large the states are is known from the copies in memory, which are files with a size.
    """
    kept = task.copies.states.get(task.copies.newest or 0)
    if kept is None:
        return TRANSITION_S
    largest = max(int(part["bytes"]) for copies in kept.copies.values() for part in copies.values())
    pace = PACE
    if fetched := task.copies.fetched:
        moved = fetched[max(fetched)]
        readers = max(1, kept.stages)  # at the least
        pace = max(1.0, (moved.bytes_here + moved.bytes_elsewhere) / readers / max(moved.seconds, 1e-3))
    return AGREE_S + largest / pace


@cache
def _curve(shape: Shape) -> tuple[float, ...]:
    """Throughput by workers, from 0, in workers' worth of work."""
    alike = uniform(replicas=shape.replicas, stages=shape.stages, value=1.0)
    healthy = Instance(
        replicas=shape.replicas,
        stages=shape.stages,
        microbatches=shape.microbatches,
        forward=alike,
        input_grad=alike,
        weight_grad=alike,
    )
    places = shape.replicas * shape.stages
    curve = [0.0] * (places + 1)
    for workers in range(shape.stages, places + 1):
        each, more = divmod(workers, shape.stages)
        dead = frozenset(
            Worker(k, s) for s in range(shape.stages) for k in range(each + (s < more), shape.replicas)
        )
        curve[workers] = places * relative_throughput(replace(healthy, dead=dead), "staggered")
    return tuple(curve)
