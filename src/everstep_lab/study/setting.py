"""Clusters and tasks by name: what a study is about, with throughput from `everstep_lab.plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from everstep.errors import UserError
from everstep_lab.plan.curve import Curve, SameCut
from everstep_lab.plan.hardware import gpu
from everstep_lab.plan.mixes import MIXES
from everstep_lab.plan.models import model
from everstep_lab.plan.stacks import stack
from everstep_lab.plan.throughput import from_model
from everstep_lab.study.planned import LARGE_NODES
from everstep_lab.study.study import Setup, TaskSetup

DEFAULT_MIX = "3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One task as people write it: a model, its weight."""

    model: str
    weight: float = 1.0
    name: str = ""


def of_mix(number: str) -> list[Asked]:
    """Six tasks in the manner of Unicron's cases; see `everstep_lab.plan.mixes`."""
    for title, (models, weights) in MIXES.items():
        if title.startswith(f"{number}:"):
            return [Asked(model=m, weight=w) for m, w in zip(models, weights, strict=True)]
    raise UserError(f"mix {number!r} is not one of {', '.join(title[0] for title in MIXES)}.")


def parse_task(text: str) -> Asked:
    """`gpt3-7b` or `gpt3-7b:1.4`."""
    name, _, weight = text.partition(":")
    try:
        return Asked(model=name, weight=float(weight) if weight else 1.0)
    except ValueError:
        raise UserError(f"task {text!r}: the weight after the colon is not a number.") from None


def build(
    asked: Sequence[Asked], *, nodes: int, slots: int, gpu_name: str, stack_name: str, spares: int = 0
) -> Setup:
    """Curves for every model, over all the workers there are."""
    if not asked:
        raise UserError("a study needs at least one task, such as gpt3-7b:1.0.")
    large = nodes > LARGE_NODES and slots > 1  # then a node is planned as one worker
    tasks = []
    for i, one in enumerate(asked):
        curve = _curve(one.model, gpu_name, stack_name, nodes * slots, slots)
        if large:
            curve = by_node(curve, slots)
        tasks.append(TaskSetup(name=one.name or f"{i} {one.model}", curve=curve, weight=one.weight))
    return Setup(slots=1 if large else slots, tasks=tasks, spares=spares)


@lru_cache(maxsize=64)
def _curve(model_name: str, gpu_name: str, stack_name: str, most: int, slots: int) -> Curve:
    """Every replica holds a whole copy of the state: policies that live from peers' states need that."""
    chosen = replace(stack(stack_name), zero_1=False)
    curve = from_model(model(model_name), gpu(gpu_name), chosen, most=most, slots_per_node=slots)
    if not curve.throughput.any():
        raise UserError(f"model {model_name!r} does not fit on {most} {gpu_name}; give the study more nodes.")
    return curve


def by_node(curve: Curve, slots: int) -> Curve:
    """The same curve with a node as the worker: only cuts whose shards fill a node."""
    whole = [cut for cut in curve.cuts if cut.shards == slots]
    if not whole:
        raise UserError(f"no shape of this model puts a group of {slots} shards on a node; use fewer nodes.")
    most = curve.most // slots
    best, cut_of = np.zeros(most + 1), np.full(most + 1, -1, dtype=np.int64)
    cuts: list[SameCut] = []
    for cut in whole:
        replicas = np.flatnonzero(cut.throughput[: most // cut.stages + 1])
        nodes = replicas * cut.stages
        better = cut.throughput[replicas] > best[nodes]
        best[nodes[better]] = cut.throughput[replicas[better]]
        cut_of[nodes[better]] = len(cuts)
        cuts.append(replace(cut, shards=1))
    return Curve(
        throughput=best,
        cut_of=cut_of,
        cuts=tuple(cuts),
        state_bytes=curve.state_bytes,
        work_per_step=curve.work_per_step,
        batch=curve.batch,
        schedule=curve.schedule,
        replicated=curve.replicated,
        _index={(cut.stages, cut.shards): i for i, cut in enumerate(cuts)},
    )
