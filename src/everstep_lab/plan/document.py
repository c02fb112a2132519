"""Cluster files in, plans out: what `everstep plan` reads and prints.

    [cluster]
    nodes = 4                     node-0 to node-3; or [[node]] entries: name, slots, rack, bad_slots, lost,
    slots_per_node = 8            back_in ("2h"), failures_per_1000_days
    gpu = "A800"                  for tasks that name a model; so is stack
    whole_nodes = false
    failures_per_1000_node_days = 6.5      or running_s, the expected time to the next event
    transition_s = 60             one cost for every change; or [costs], see `transition.Costs`

    [[task]]
    name = "gpt"
    weight = 2.0
    min_workers = 4
    model = "gpt3-7b"             or throughput = [0, 1.0, 1.9, ...] by number of workers
    workers = 16                  if it runs already; its shape = [replicas, stages, shards] if that matters

Every mistake is one sentence that names the field and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from everstep.errors import UserError
from everstep.plan.cluster import Cluster, PlanNode
from everstep.plan.curve import Curve, from_table
from everstep.plan.task import TaskSpec
from everstep.plan.transition import Costs
from everstep.protocol.durations import duration
from everstep_lab.plan.assign import Plan
from everstep_lab.plan.events import PlanWorld
from everstep_lab.plan.hardware import Gpu, gpu
from everstep_lab.plan.models import model
from everstep_lab.plan.seating import seated, shape_in
from everstep_lab.plan.stacks import stack
from everstep_lab.plan.throughput import from_model

CLUSTER = {
    "nodes": int,
    "slots_per_node": int,
    "gpu": str,
    "stack": str,
    "whole_nodes": bool,
    "failures_per_1000_node_days": float,
    "running_s": float,
    "transition_s": float,
    "hysteresis": float,
}
NODE = {
    "name": str,
    "slots": int,
    "rack": str,
    "bad_slots": list,
    "lost": bool,
    "back_in": object,
    "failures_per_1000_days": float,
}
TASK = {
    "name": str,
    "weight": float,
    "min_workers": int,
    "max_workers": int,
    "model": str,
    "batch": int,
    "throughput": list,
    "workers": int,
    "shape": list,
    "places": list,
    "state_gb": float,
    "step_s": float,
    "transition_s": float,
    "must_run": bool,
    "expected": bool,
}
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list"}
MOST_NODES, MOST_SLOTS = 100_000, 1_024


def world_from(document: Mapping[str, Any]) -> PlanWorld:
    """The world a cluster file describes."""
    _known(document, {"cluster", "node", "task", "costs"}, "the file")
    about = _table(document, "cluster", CLUSTER)
    cluster = _cluster(about, document)
    entries = document.get("task", [])
    if not isinstance(entries, list) or not entries:
        raise UserError("the file has no [[task]]; add one with name, weight and model or throughput.")
    chip = gpu(about.get("gpu", "H100"))
    curves: dict[Any, Curve] = {}
    tasks = []
    for number, entry in enumerate(entries):
        _typed(entry, TASK, f"task {number + 1}")
        tasks.append(_task(entry, about, cluster, chip, curves))
    return PlanWorld(cluster, tasks, seated(cluster, entries, tasks))


def _cluster(about: Mapping[str, Any], document: Mapping[str, Any]) -> Cluster:
    listed = document.get("node", [])
    if not isinstance(listed, list):
        raise UserError("node must be a list of tables; write [[node]].")
    slots = about.get("slots_per_node", 8)
    if not 1 <= slots <= MOST_SLOTS:
        raise UserError(f"slots_per_node of [cluster] is {slots}; make it 1 to {MOST_SLOTS}.")
    count = about.get("nodes")
    if (count is None) == (not listed):
        raise UserError("say which nodes there are: nodes = N in [cluster], or [[node]] entries, not both.")
    if count is not None and not 1 <= count <= MOST_NODES:
        raise UserError(f"nodes of [cluster] is {count}; make it 1 to {MOST_NODES}.")
    if count is not None:
        nodes = [PlanNode(name=f"node-{i}", slots=slots) for i in range(count)]
    else:
        nodes = [_node(entry, number, slots) for number, entry in enumerate(listed)]
    if about.get("whole_nodes") and len({node.slots for node in nodes}) > 1:
        raise UserError("whole_nodes needs nodes of one size; give all [[node]] the same slots.")
    costs = _costs(document, about)
    rest = {key: about[key] for key in ("whole_nodes", "running_s", "hysteresis") if key in about}
    rate = about.get("failures_per_1000_node_days")
    for key in ("failures_per_1000_node_days", "running_s", "transition_s", "hysteresis"):
        if key in about and not (about[key] >= 0 and math.isfinite(about[key])):
            raise UserError(f"{key} of [cluster] is {about[key]:g}; make it 0 or more.")
    if about.get("running_s") == 0:
        raise UserError("running_s of [cluster] is 0; make it the seconds a plan is expected to hold.")
    return Cluster(
        nodes=nodes,
        costs=costs,
        **rest,
        **({"failures_per_1000_node_days": rate} if rate is not None else {}),
    )


def _node(entry: Any, number: int, slots: int) -> PlanNode:
    _typed(entry, NODE, f"node {number + 1}")
    name = entry.get("name", f"node-{number}")
    count = entry.get("slots", slots)
    if not 1 <= count <= MOST_SLOTS:
        raise UserError(f"slots of node {name!r} is {count}; make it 1 to {MOST_SLOTS}.")
    bad = entry.get("bad_slots", [])
    for slot in bad:
        if not isinstance(slot, int) or not 0 <= slot < count:
            raise UserError(f"bad_slots of node {name!r} has {slot!r}; its slots are 0 to {count - 1}.")
    back = entry.get("back_in")
    if entry.get("failures_per_1000_days", 0.0) < 0:
        raise UserError(f"failures_per_1000_days of node {name!r} is below 0; make it 0 or more.")
    return PlanNode(
        name=name,
        slots=count,
        rack=entry.get("rack"),
        bad_slots=frozenset(bad),
        lost=entry.get("lost", back is not None),
        back_in_s=None if back is None else duration(back, f"back_in of node {name!r}"),
        failures_per_1000_days=entry.get("failures_per_1000_days"),
    )


def _costs(document: Mapping[str, Any], about: Mapping[str, Any]) -> Costs:
    kinds = {field.name: bool if field.name == "memory_copies" else float for field in fields(Costs)}
    given = _table(document, "costs", kinds)
    for name, value in given.items():
        least = 1.0 if name.endswith("bandwidth") else 0.0
        if not isinstance(value, bool) and not value >= least:
            raise UserError(f"{name} of [costs] is {value:g}; make it {least:g} or more.")
    if "gpu" in about and "network_bandwidth" not in given:
        given = {**given, "network_bandwidth": 0.8 * gpu(about["gpu"]).network_bandwidth}
    if "transition_s" in about:
        given = {**given, "transition_s": about["transition_s"]}
    return Costs(**given)


def _task(
    entry: Mapping[str, Any], about: Mapping[str, Any], cluster: Cluster, chip: Gpu, curves: dict[Any, Curve]
) -> TaskSpec:
    name = entry.get("name")
    if not name:
        raise UserError("a [[task]] has no name; give it one.")
    slots = sum(node.slots for node in cluster.nodes)
    least = entry.get("min_workers", 1)
    if least > slots:
        raise UserError(
            f"min_workers of task {name!r} is {least}, more than the {slots} slots of the cluster; lower it."
        )
    for field in ("state_gb", "step_s", "transition_s", "batch"):
        if entry.get(field, 0) < 0:
            raise UserError(f"{field} of task {name!r} is {entry[field]:g}; make it 0 or more.")
    if ("model" in entry) == ("throughput" in entry):
        raise UserError(f"task {name!r} needs either model or throughput, one of the two.")
    if "model" in entry:
        spec = model(entry["model"])
        key = spec.name, entry.get("batch", spec.batch)
        if key[1] < 1:
            raise UserError(f"batch of task {name!r} is {key[1]}; make it at least 1.")
        if key not in curves:
            size = max(node.slots for node in cluster.nodes)
            curves[key] = from_model(
                replace(spec, batch=key[1]),
                chip,
                stack(about.get("stack", "megatron")),
                most=slots,
                slots_per_node=size,
            )
        curve = curves[key]
    else:
        curve = _measured(entry, name)
    return TaskSpec(
        name=name,
        curve=curve,
        weight=entry.get("weight", 1.0),
        min_workers=least,
        max_workers=entry.get("max_workers"),
        transition_s=entry.get("transition_s"),
        must_run=entry.get("must_run", False),
        expected=entry.get("expected", False),
    )


def _measured(entry: Mapping[str, Any], name: str) -> Curve:
    table = entry["throughput"]
    for value in table:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise UserError(f"throughput of task {name!r} has {value!r}; make all of it numbers, 0 or more.")
    if not table or table[0] != 0:
        raise UserError(
            f"throughput of task {name!r} must start with 0: its first number is for no worker at all."
        )
    if len(table) < 2:
        raise UserError(f"throughput of task {name!r} ends at 0 workers; add what 1, 2, ... workers achieve.")
    shape = shape_in(entry, name)
    return from_table(
        table,
        stages=shape.stages if shape else None,
        shards=shape.shards if shape else 1,
        state_bytes=entry.get("state_gb", 0.0) * 1e9,
        step_s=entry.get("step_s", 0.0),
        batch=entry.get("batch", 0),
    )


def _table(document: Mapping[str, Any], key: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    found = document.get(key, {})
    if not isinstance(found, dict):
        raise UserError(f"[{key}] must be a table.")
    _typed(found, kinds, f"[{key}]")
    return dict(found)


def _typed(entry: Any, kinds: Mapping[str, Any], where: str) -> None:
    if not isinstance(entry, dict):
        raise UserError(f"{where} must be a table of names and values.")
    _known(entry, set(kinds), where)
    for key, value in entry.items():
        kind = kinds[key]
        right = isinstance(value, int | float if kind is float else kind)
        if not right or (isinstance(value, bool) and kind in (int, float)):
            raise UserError(f"{key} of {where} is {value!r}; it must be {WORDS[kind]}.")
        if kind is float and not math.isfinite(value):
            raise UserError(f"{key} of {where} is {value!r}; it must be finite.")


def _known(entry: Mapping[str, Any], names: set[str], where: str) -> None:
    for key in entry:
        if key not in names:
            near = get_close_matches(key, sorted(names), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(names))}."
            raise UserError(f"{key} is not a key of {where}; {hint}")


def document_of(plan: Plan, event: str, planning_ms: float) -> dict[str, Any]:
    """What `everstep plan --json` prints."""
    return {
        "event": event,
        "allocation": plan.allocation,
        "objective": plan.objective,
        "waf_before": plan.waf_before,
        "waf_after": plan.waf_after,
        "planning_ms": planning_ms,
        "because": plan.because,
        "running_s": plan.running_s,
        "payback_s": plan.payback_s,
        "runner_up": plan.runner_up
        and {
            "allocation": dict(plan.runner_up.allocation),
            "choices": {name: kind.name.lower() for name, kind in plan.runner_up.choices.items()},
            "objective": plan.runner_up.objective,
            "behind": plan.runner_up.behind,
            "because": plan.runner_up.because,
        },
        "tasks": {
            name: {
                "choice": gain.kind.name.lower(),
                "workers_before": gain.workers_before,
                "workers": gain.workers_after,
                "shape_before": str(gain.shape_before) if gain.shape_before else None,
                "shape": str(gain.shape_after) if gain.shape_after else None,
                "throughput_before": gain.throughput_before,
                "throughput": gain.throughput_after,
                "lost_a_worker": gain.damaged,
                "transition_s": gain.transition_s,
                "state_from": str(gain.source),
                "moves": gain.moves,
                "taken_from": dict(gain.taken_from),
                "earns": gain.reward,
                "pays": gain.cost,
                "pays_on_the_way_back": gain.way_back,
            }
            for name, gain in plan.gains.items()
        },
        "assignment": {
            name: [None if spot is None else str(spot) for spot in places]
            for name, places in plan.assignment.places.items()
        },
        "warnings": list(plan.warnings),
    }
