"""Where the tasks of a cluster file run before anything happens: their places, named or found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everstep.errors import UserError
from everstep.plan.cluster import Assignment, Cluster, SlotPlace
from everstep.plan.option import OptionKind, TaskOption
from everstep.plan.task import TaskSpec
from everstep.plan.task_shape import ParallelShape
from everstep_lab.plan.placement import Unplaceable, place


def shape_in(entry: Mapping[str, Any], name: str) -> ParallelShape | None:
    given = entry.get("shape")
    if given is None:
        return None
    if not 1 <= len(given) <= 3 or not all(isinstance(x, int) and x >= 1 for x in given):
        raise UserError(f"shape of task {name!r} is {given!r}; write [replicas, stages] or add shards.")
    return ParallelShape(*given)


def seated(cluster: Cluster, entries: list[Any], tasks: list[TaskSpec]) -> Assignment:
    """Where the running tasks were before anything in the file was lost."""
    healthy = [replace(n, lost=False, bad_slots=frozenset()) for n in cluster.nodes]
    whole = replace(cluster, nodes=healthy)
    choices: dict[str, TaskOption] = {}
    named: dict[str, list[SlotPlace]] = {}
    shapes: dict[str, ParallelShape] = {}
    left = whole.capacity
    for entry, task in zip(entries, tasks, strict=True):
        if task.name in choices or task.name in named:
            raise UserError(f"task {task.name!r} is named twice; give every task its own name.")
        shape = shape_in(entry, task.name)
        if "places" in entry:
            named[task.name] = [_place(whole, text, task.name) for text in entry["places"]]
        count = len(named.get(task.name, ())) or entry.get("workers", shape.workers if shape else 0)
        if count != entry.get("workers", count):
            raise UserError(
                f"task {task.name!r} has {count} places and {entry['workers']} workers; make them agree."
            )
        if count < 0:
            raise UserError(f"workers of task {task.name!r} is {count}; make it 0 or more.")
        left -= count
        if left < 0:
            raise UserError(
                f"workers of task {task.name!r} is {count}, more than are left of the "
                f"{whole.capacity} slots; lower it."
            )
        if task.expected and count:
            raise UserError(f"task {task.name!r} is expected, yet has workers; remove one of the two.")
        if shape is not None and count not in (0, shape.workers):
            raise UserError(f"task {task.name!r} has {count} workers and the shape {shape}; make them agree.")
        shape = _completed(shape or task.curve.shape(count), task)
        if count and shape is not None:
            shapes[task.name] = shape
        if count and task.name not in named:
            choices[task.name] = _as_choice(count, shape, whole.unit)
    seen: set[SlotPlace] = set()
    for name, spots in named.items():
        for spot in spots:
            if spot in seen:
                raise UserError(f"places of task {name!r} has {spot}, which is taken; one slot, one worker.")
            seen.add(spot)
    taken = Assignment(places=named, shapes={n: s for n, s in shapes.items() if n in named})
    kept = {n: _as_choice(len(p), shapes.get(n), whole.unit, OptionKind.KEEP) for n, p in named.items()}
    try:
        placed = place(whole, taken, {**kept, **choices}).assignment
    except Unplaceable as error:
        raise UserError(
            f"the workers of task {error.task!r} find no room in their shape; name its places, or its shape."
        ) from None
    return Assignment(places=placed.places, shapes=shapes)


def _completed(shape: ParallelShape | None, task: TaskSpec) -> ParallelShape | None:
    """With the microbatch and recomputation the model would use in it."""
    if shape is None:
        return None
    cut = task.curve.like(shape)
    known = cut is not None and shape.replicas < len(cut.throughput)
    return cut.shape(shape.replicas) if cut is not None and known else shape


def _as_choice(
    count: int, shape: ParallelShape | None, unit: int, kind: OptionKind = OptionKind.START
) -> TaskOption:
    return TaskOption(
        kind=kind, units=-(-count // unit), workers=count, shape=shape, throughput=0.0, transition_s=0.0
    )


def _place(cluster: Cluster, text: Any, task: str) -> SlotPlace:
    node, _, slot = str(text).rpartition(":")
    if not node or not slot.isdigit():
        raise UserError(f"places of task {task!r} has {text!r}; write node-0:3.")
    spot = SlotPlace(node, int(slot))
    if spot.slot >= cluster.node(node).slots:
        raise UserError(f"places of task {task!r} has {text!r}, a slot {node} does not have.")
    return spot
