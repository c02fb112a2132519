"""What may happen to a cluster next, and the world it leaves.

lose node-3             a node dies; `lose node-3 for 2h` if its repair is promised, `lose node-3:5` one slot
join node-9             a node comes (back); `join node-9 with 8 slots` if it is new
finish gpt              a task ends
submit gpt              a task that the file calls `expected` is submitted
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep.errors import UserError
from everstep.protocol.durations import duration
from everstep_lab.plan.cluster import Assignment, Cluster, PlanNode
from everstep_lab.plan.task import TaskSpec


@dataclass(frozen=True, slots=True)
class PlanWorld:
    """All a plan depends on."""

    cluster: Cluster
    tasks: Sequence[TaskSpec]
    now: Assignment

    def submitted(self) -> list[TaskSpec]:
        return [task for task in self.tasks if not task.expected]


def after(event: str, world: PlanWorld) -> PlanWorld:
    """The world once the event has happened."""
    words = event.split()
    match words:
        case ["lose", name]:
            return _lose(world, name, None)
        case ["lose", name, "for", *time] if time:
            return _lose(world, name, duration(" ".join(time), "the time after 'for'"))
        case ["join", name]:
            return _join(world, name, None)
        case ["join", name, "with", count, "slots"] if count.isdigit() and int(count) > 0:
            return _join(world, name, int(count))
        case ["finish", name]:
            return _finish(world, name)
        case ["submit", name]:
            return _submit(world, name)
    raise UserError(
        f"the event {event!r} is not valid; write 'lose node-3', 'lose node-3 for 2h', 'lose node-3:5', "
        "'join node-9 with 8 slots', 'finish TASK' or 'submit TASK'."
    )


def _lose(world: PlanWorld, name: str, back_in_s: float | None) -> PlanWorld:
    node_name, colon, slot = name.partition(":")
    node = world.cluster.node(node_name)
    if node.lost:
        raise UserError(f"node {node_name!r} is lost already; name one that is up.")
    if not colon:
        return _with_node(world, replace(node, lost=True, back_in_s=back_in_s))
    if back_in_s is not None:
        raise UserError(f"{name!r} is one slot; a repair time is for whole nodes, so leave out 'for'.")
    if not slot.isdigit() or int(slot) >= node.slots:
        raise UserError(f"{name!r} is not a slot; {node_name} has slots 0 to {node.slots - 1}.")
    return _with_node(world, replace(node, bad_slots=node.bad_slots | {int(slot)}))


def _join(world: PlanWorld, name: str, slots: int | None) -> PlanWorld:
    known = {node.name: node for node in world.cluster.nodes}
    if name in known:
        node = known[name]
        if not node.lost and not node.bad_slots:
            raise UserError(f"node {name!r} is there already; name one that is lost, or a new one.")
        return _with_node(
            world, replace(node, lost=False, back_in_s=None, bad_slots=frozenset(), slots=slots or node.slots)
        )
    usual = max((node.slots for node in world.cluster.nodes), default=8)
    nodes = [*world.cluster.nodes, PlanNode(name=name, slots=slots or usual)]
    return replace(world, cluster=replace(world.cluster, nodes=nodes))


def _with_node(world: PlanWorld, changed: PlanNode) -> PlanWorld:
    nodes = [changed if node.name == changed.name else node for node in world.cluster.nodes]
    return replace(world, cluster=replace(world.cluster, nodes=nodes))


def _finish(world: PlanWorld, name: str) -> PlanWorld:
    _known(name, [task.name for task in world.submitted()])
    places = {task: places for task, places in world.now.places.items() if task != name}
    shapes = {task: shape for task, shape in world.now.shapes.items() if task != name}
    return replace(
        world,
        tasks=[task for task in world.tasks if task.name != name],
        now=Assignment(places=places, shapes=shapes),
    )


def _submit(world: PlanWorld, name: str) -> PlanWorld:
    _known(name, [task.name for task in world.tasks if task.expected])
    return replace(
        world, tasks=[replace(task, expected=False) if task.name == name else task for task in world.tasks]
    )


def _known(name: str, names: list[str]) -> None:
    if name not in names:
        have = ", ".join(names) or "none"
        raise UserError(f"there is no such task {name!r}; the tasks it could be are: {have}.")


def next_events(world: PlanWorld) -> list[str]:
    """Every single event that can come next: each node lost or back, a new node, each task done or new."""
    lost = [f"lose {node.name}" for node in world.cluster.nodes if not node.lost]
    back = [f"join {node.name}" for node in world.cluster.nodes if node.lost]
    number = len(world.cluster.nodes)
    names = {node.name for node in world.cluster.nodes}
    while f"node-{number}" in names:
        number += 1
    done = [f"finish {task.name}" for task in world.submitted()]
    new = [f"submit {task.name}" for task in world.tasks if task.expected]
    return [*lost, *back, f"join node-{number}", *done, *new]
