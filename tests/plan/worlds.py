"""Small worlds for tests, by hand and by seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from everstep_lab.plan import Assignment, Cluster, Costs, PlanNode, TaskSpec, from_table, replicated
from everstep_lab.plan.assign import assign
from tests.plan.events import PlanWorld, after


def nodes(count: int, slots: int, **more: object) -> list[PlanNode]:
    return [PlanNode(name=f"node-{i}", slots=slots, **more) for i in range(count)]  # type: ignore[arg-type]


def seated(cluster: Cluster, tasks: Sequence[TaskSpec]) -> PlanWorld:
    """The world after its first plan."""
    first = assign(cluster, tasks, Assignment(), second=False)
    return PlanWorld(cluster, tasks, first.assignment)


def table_task(name: str, table: Sequence[float], **more: object) -> TaskSpec:
    return TaskSpec(name=name, curve=from_table(table), **more)  # type: ignore[arg-type]


def pipeline(name: str, *, stages: int, replicas: int, state_bytes: float = 1e9, **more: object) -> TaskSpec:
    curve = replicated(stages=stages, per_replica=1.0, most_replicas=replicas, state_bytes=state_bytes)
    return TaskSpec(name=name, curve=curve, **more)  # type: ignore[arg-type]


def random_world(seed: int) -> PlanWorld:
    """Tables of any shape, weights, minima, one cost for every change; some tasks run, some wait; some node
    may be gone."""
    draw = random.Random(seed)
    count, slots = draw.randint(1, 3), draw.randint(1, 3)
    total = count * slots
    tasks = []
    for i in range(draw.randint(1, 4)):
        rising = draw.random() < 0.7
        steps = [draw.choice((0.0, 1.0, 2.0, draw.uniform(0, 5))) for _ in range(total)]
        table, level = [0.0], 0.0
        for step in steps:
            level = level + step if rising else step
            table.append(level)
        tasks.append(
            table_task(
                f"t{i}",
                table[: draw.randint(2, len(table))] if draw.random() < 0.3 else table,
                weight=draw.choice((0.5, 1.0, 2.0, draw.uniform(0.1, 3))),
                min_workers=draw.randint(1, 3),
                transition_s=draw.choice((0.0, 1.0, draw.uniform(0, 200))),
            )
        )
    cluster = Cluster(
        nodes=nodes(count, slots), running_s=draw.choice((10.0, 100.0, 1e4)), costs=Costs(transition_s=1.0)
    )
    running = [t for t in tasks if draw.random() < 0.7]
    kinder = [replace(t, min_workers=1, transition_s=0.0) for t in running]
    world = PlanWorld(cluster, tasks, assign(cluster, kinder, Assignment(), second=False).assignment)
    if draw.random() < 0.6:
        event = draw.choice([f"lose node-{draw.randrange(count)}", f"lose node-{draw.randrange(count)}:0"])
        world = after(event, world)
    return world
