"""Scripted situations, each a file to read: what is chosen is what an exhaustive search with the same costs
finds, and what a person would expect.

The search is written here again, from the formula in docs/planner.md and from nothing in `everstep.plan` but
the throughput of each option: every task, every shape, every number of workers, every combination.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everstep.plan import (
    Assignment,
    Cluster,
    ParallelShape,
    PlanNode,
    SlotPlace,
    TaskSpec,
    decide,
    from_table,
)
from everstep.plan.answer import Decision
from everstep.plan.measured import TaskMeasurements
from everstep.plan.offers import ChangeTimes
from everstep.plan.shapes import offered
from everstep.plan.weigh import named, weigh
from everstep.protocol.shape import Shape

FILES = sorted((Path(__file__).parent / "situations").glob("*.toml"))


@dataclass
class Situation:
    nodes: list[PlanNode]
    tasks: list[TaskSpec]
    on: dict[str, list[str]]  # names of nodes, in worker order; "": an empty place
    shapes: dict[str, ParallelShape]
    running_s: float
    expect: dict[str, str]

    def decide(self) -> Decision:
        places = {
            name: tuple(SlotPlace(node, 0) if node else None for node in nodes)
            for name, nodes in self.on.items()
            if nodes
        }
        cluster = Cluster(nodes=self.nodes, running_s=self.running_s)
        return decide(cluster, self.tasks, Assignment(places=places, shapes=self.shapes))


def read(path: Path) -> Situation:
    file = tomllib.loads(path.read_text(encoding="utf-8"))
    nodes = [PlanNode(**{**node, "lost": node.get("lost", "back_in_s" in node)}) for node in file["node"]]
    return Situation(
        nodes=nodes,
        tasks=[_task(entry, len(nodes)) for entry in file["task"]],
        on={entry["name"]: entry["on"] for entry in file["task"]},
        shapes={entry["name"]: ParallelShape(*entry["shape"]) for entry in file["task"] if entry["on"]},
        running_s=file["running_s"],
        expect=file["expect"],
    )


def _task(entry: dict[str, Any], slots: int) -> TaskSpec:
    replicas, stages = entry["shape"]
    shape = Shape(replicas, stages, entry["batch"] // replicas)
    least, most = entry.get("stages", (0, 0))
    cuts = range(least, most + 1) if most else None
    return TaskSpec(
        name=entry["name"],
        curve=from_table([0.0, 1.0]),
        weight=entry["weight"],
        max_workers=entry.get("max_workers"),
        must_run=True,
        offers=offered(shape, cuts, slots, TaskMeasurements(), {}),
        times=ChangeTimes(**entry["times"]),
    )


# ------------------------------------------------------------------ the search, written again


@dataclass(frozen=True)
class Way:
    """A shape with some workers; no shape: the task does not train."""

    shape: ParallelShape | None
    workers: int
    rate: float


@dataclass(frozen=True)
class Today:
    way: Way
    is_hurt: bool
    trains: bool
    rate_before: float


def ways(task: TaskSpec, slots: int) -> list[Way]:
    found = [Way(None, 0, 0.0)]
    for offer in task.offers:
        top = min(slots, offer.shape.workers, task.max_workers or slots)
        found += [
            Way(offer.shape, count, offer.throughput[count]) for count in range(offer.shape.stages, top + 1)
        ]
    return found


def today_of(at: Situation, task: TaskSpec, lost: set[str]) -> Today:
    on, shape = at.on[task.name], at.shapes.get(task.name)
    if not on or shape is None:
        return Today(Way(None, 0, 0.0), False, False, 0.0)
    rates = next(offer.throughput for offer in task.offers if offer.shape == shape)
    live = [index for index, node in enumerate(on) if node and node not in lost]
    covered = {index % shape.stages for index in live} == set(range(shape.stages))
    before = sum(bool(node) for node in on)
    rate = rates[len(live)] if covered else 0.0
    return Today(Way(shape, len(live), rate), len(live) < before, covered, rates[before])


def seconds(task: TaskSpec, today: Today, way: Way) -> float:
    """From today to this."""
    times, hurt_s = task.times, task.times.agree_s if today.is_hurt else 0.0
    if way.shape is None:
        return times.agree_s if today.rate_before > 0 else 0.0
    if not today.trains:
        return times.restore_s
    if way.shape != today.way.shape:
        return times.reshape_s + hurt_s
    if way.workers <= today.way.workers:
        return hurt_s + (times.agree_s if way.workers < today.way.workers else 0.0)
    return hurt_s + times.agree_s + times.copy_s * max(0.0, (way.rate - today.way.rate) / today.rate_before)


def seconds_back(task: TaskSpec, today: Today, way: Way, later: Way) -> float:
    """From this to what the task will want after a repair."""
    times = task.times
    if later.shape is None:
        return 0.0
    if way.shape is None:
        return times.reshape_s if today.trains else times.restore_s
    if way.shape != later.shape:
        return times.reshape_s
    if way.workers >= later.workers:
        return times.agree_s if way.workers > later.workers else 0.0
    return times.agree_s + times.copy_s * (later.rate - way.rate) / later.rate


def search(at: Situation) -> tuple[float, dict[str, Way]]:
    """The best combination: after the last repair first, then with that in mind before it."""
    lost = {node.name for node in at.nodes if node.lost}
    repairs = sorted({node.back_in_s for node in at.nodes if node.back_in_s is not None})
    assert len(repairs) <= 1, "one repair at a time in these files"
    later: dict[str, Way] = {}
    if repairs:
        away = {node.name for node in at.nodes if node.lost and node.back_in_s is None}
        later = _best(at, away, at.running_s, 0.0, {})[1]
        survives = math.exp(-repairs[0] / at.running_s)
        return _best(at, lost, at.running_s * (1 - survives), survives, later)
    return _best(at, lost, at.running_s, 0.0, {})


def _best(
    at: Situation, lost: set[str], running_s: float, repaired: float, later: dict[str, Way]
) -> tuple[float, dict[str, Way]]:
    slots = sum(node.slots for node in at.nodes if node.name not in lost)
    menus: Sequence[list[Way]] = [ways(task, slots) for task in at.tasks]
    todays = [today_of(at, task, lost) for task in at.tasks]
    best: tuple[float, dict[str, Way]] = (-math.inf, {})
    for combination in itertools.product(*menus):
        if sum(way.workers for way in combination) > slots:
            continue
        total = 0.0
        for task, today, way in zip(at.tasks, todays, combination, strict=True):
            missed = today.rate_before if today.rate_before > 0 else way.rate
            worth = way.rate * running_s - missed * seconds(task, today, way)
            if task.name in later:
                target = later[task.name]
                worth -= repaired * target.rate * seconds_back(task, today, way, target)
            if way.shape is None:
                worth -= 1e4 * max(max(offer.throughput) for offer in task.offers) * running_s
            total += task.weight * worth
        if total > best[0] + 1e-9 * abs(total):
            best = total, dict(zip([t.name for t in at.tasks], combination, strict=True))
    return best


def test_there_are_ten_situations() -> None:
    assert len(FILES) >= 10


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_choice_is_the_best_of_all_combinations_and_the_expected_one(path: Path) -> None:
    at = read(path)
    decision = at.decide()
    found, combination = search(at)
    chosen = {o.task: o for o in weigh(decision) if o.chosen}
    worth = sum(
        float(options.worth[int(options.units.searchsorted(decision.choices[name].units))])
        for name, options in decision.options.items()
    )
    assert worth == pytest.approx(found, rel=1e-9)
    for name, way in combination.items():
        choice = decision.choices[name]
        assert (choice.workers, choice.throughput) == (way.workers, pytest.approx(way.rate))
        told = named(choice, decision.situations[name], decision.period.repaired)
        assert told == chosen[name].what == at.expect[name]


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_every_alternative_is_behind_and_says_why(path: Path) -> None:
    weighed = weigh(read(path).decide())
    for option in weighed:
        assert option.because
        assert option.chosen or option.behind >= -1e-9 * abs(option.earns)
    others = len(weighed) - sum(option.chosen for option in weighed)
    assert others or path.stem == "06_memory_too_small", "there is something to compare with"
