"""Instances and plans as JSON documents: what `everstep schedule` reads and prints.

    {"replicas": 3, "stages": 4, "microbatches": 6,
     "forward": 1.0,                     a number, one per stage, or one row per replica; so are
     "input_grad": [1, 1, 1.2, 1],       input_grad and weight_grad
     "weight_grad": 1.0,
     "hop": 0.0, "reduce": 0.5, "update": [0.1, 0.1, 0.1, 0.1],
     "stash_cap": 4,                     or null, one per stage, or {"0:1": 3, ...}; so is memory (bytes)
     "memory": null, "held_forward": 2e9, "held_weight": 1e9, "boundary": 5e7,
     "dead": ["1:2"],
     "done": {"0.3@1": [2, "F"]}}        microbatch 0.3 at stage 1: replica 2 hosts it and has run F

Every mistake is one sentence that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from everstep.errors import UserError
from everstep.protocol.ops import Kind, Microbatch, Worker, parse_worker
from everstep.schedule.instance import Done, Grid, Instance
from everstep.schedule.schedule import Planned
from everstep_lab.schedule.normalize import Choice

N = TypeVar("N", int, float)
FIELDS = frozenset(
    {
        "replicas",
        "stages",
        "microbatches",
        "forward",
        "input_grad",
        "weight_grad",
        "hop",
        "reduce",
        "update",
        "stash_cap",
        "memory",
        "held_forward",
        "held_weight",
        "boundary",
        "dead",
        "done",
    }
)


def instance_from(document: Any) -> Instance:
    """An instance from a parsed JSON document."""
    if not isinstance(document, dict):
        raise UserError("the instance must be a JSON object with replicas, stages, microbatches and times.")
    unknown = sorted(set(document) - FIELDS)
    if unknown:
        raise UserError(
            f"the instance has an unknown field {unknown[0]!r}; the fields are {', '.join(sorted(FIELDS))}."
        )
    replicas, stages, count = (_whole(document, name) for name in ("replicas", "stages", "microbatches"))
    return Instance(
        replicas=replicas,
        stages=stages,
        microbatches=count,
        forward=_grid(document, "forward", replicas, stages),
        input_grad=_grid(document, "input_grad", replicas, stages),
        weight_grad=_grid(document, "weight_grad", replicas, stages),
        hop=_number("hop", document.get("hop", 0.0)),
        reduce=_row(document, "reduce", stages),
        update=_row(document, "update", stages),
        stash_cap=_by_worker(document, "stash_cap", replicas, stages, lambda name, x: int(_number(name, x))),
        memory=_by_worker(document, "memory", replicas, stages, _number),
        held_forward=_row(document, "held_forward", stages),
        held_weight=_row(document, "held_weight", stages),
        boundary=_row(document, "boundary", stages),
        dead=frozenset(parse_worker(str(x)) for x in document.get("dead") or ()),
        done=_done(document),
    )


def document_of(
    instance: Instance, planned: Planned, *, planning_ms: float, fault_free: Mapping[str, float]
) -> dict[str, Any]:
    """What `everstep schedule --json` prints."""
    ops = [
        {
            "worker": [t.worker.replica, t.worker.stage],
            "kind": str(t.op.kind),
            "microbatch": [t.op.microbatch.home, t.op.microbatch.number],
            "start": t.start,
            "end": t.end,
        }
        for t in planned.timeline(instance.time)
        if t.op.microbatch is not None
    ]
    closing = {
        t.worker.stage: {"stage": t.worker.stage, "reduced": t.start, "updated": t.end}
        for t in planned.timeline(instance.time)
        if t.op.kind is Kind.U
    }
    return {
        "mode": planned.mode,
        "period": planned.period,
        "makespan": planned.makespan,
        "lower_bound": planned.lower_bound,
        "gap": planned.gap,
        **fault_free,
        "planning_ms": planning_ms,
        "peak_stash": {str(w): planned.peak_stash[w] for w in sorted(planned.peak_stash)},
        "rerouted": planned.rerouted,
        "rerouted_bytes": planned.rerouted_bytes,
        "because": planned.because,
        "ops": ops,
        "closing": [closing[s] for s in sorted(closing)],
    }


def choice_document(choice: Choice) -> dict[str, Any]:
    """One point of failure normalization's frontier."""
    return {
        "failures": list(choice.failures),
        "lower_bound": choice.bound,
        "state_bytes": choice.state_bytes,
        "moves": [
            {"worker": str(m.worker), "becomes": str(m.becomes), "state_bytes": m.state_bytes}
            for m in choice.moves
        ],
        "dead": sorted(map(str, choice.dead)),
    }


def _whole(document: dict[str, Any], name: str) -> int:
    value = document.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name} of the instance is {value!r}; make it a whole number.")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value < 0:
        raise UserError(f"{name} of the instance is {value!r}; make it a number that is not negative.")
    return float(value)


def _row(document: dict[str, Any], name: str, stages: int) -> tuple[float, ...]:
    value = document.get(name)
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(_number(name, x) for x in value)
    return (_number(name, value),) * stages


def _grid(document: dict[str, Any], name: str, replicas: int, stages: int) -> Grid:
    value = document.get(name)
    if value is None:
        raise UserError(f"{name} is missing; give a time, one per stage, or one row per replica.")
    if isinstance(value, list) and value and isinstance(value[0], list):
        return tuple(tuple(_number(name, x) for x in row) for row in value)
    return (_row(document, name, stages),) * replicas


def _by_worker(
    document: dict[str, Any], name: str, replicas: int, stages: int, read: Callable[[str, Any], N]
) -> dict[Worker, N] | None:
    value = document.get(name)
    if value is None:
        return None
    if isinstance(value, dict):
        return {parse_worker(str(key)): read(name, x) for key, x in value.items()}
    per_stage = value if isinstance(value, list) else [value] * stages
    if len(per_stage) != stages:
        raise UserError(f"{name} of the instance must give one number per stage ({stages}).")
    return {Worker(k, s): read(name, per_stage[s]) for k in range(replicas) for s in range(stages)}


def _done(document: dict[str, Any]) -> dict[tuple[Microbatch, int], Done]:
    found = {}
    for key, value in (document.get("done") or {}).items():
        try:
            batch, stage = str(key).split("@")
            home, number = batch.split(".")
            host, kinds = value
            found[Microbatch(int(home), int(number)), int(stage)] = Done(int(host), str(kinds))
        except (ValueError, TypeError):
            raise UserError(f'done has {key!r}: {value!r}; write "0.3@1": [host, "FI"].') from None
    return found
