"""Scripted situations, each a file to read: what is chosen is what an exhaustive search with the same costs
finds, and what a person would expect.

The search is written here again, from the formula in docs/planner.md and from nothing in `everstep.plan` but
the throughput of each shape: every task, every shape, every number of workers, every combination.
"""

from __future__ import annotations

import itertools
import math
import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everstep.plan.change_times import ChangeTimes
from everstep.plan.explain import named, sentence, weighed
from everstep.plan.measured import TaskMeasurements
from everstep.plan.options import Kind, TaskAsked, Today, decide
from everstep.plan.split import best_split
from everstep.plan.throughput import TaskSpeed, Way
from everstep.protocol.shape import Shape

FILES = sorted((Path(__file__).parent / "situations").glob("*.toml"))


@dataclass
class Situation:
    tasks: list[TaskAsked]
    slots: int
    running_s: float
    expect: dict[str, str]


def read(path: Path) -> Situation:
    file = tomllib.loads(path.read_text(encoding="utf-8"))
    up = {node["name"]: node["slots"] for node in file["node"] if not node.get("lost")}
    return Situation(
        tasks=[_task(entry, set(up), len(file["node"])) for entry in file["task"]],
        slots=sum(up.values()),
        running_s=file["running_s"],
        expect=file["expect"],
    )


def _task(entry: dict[str, Any], up: set[str], slots: int) -> TaskAsked:
    replicas, stages = entry["shape"]
    shape = Shape(replicas, stages, entry["batch"] // replicas)
    least, most = entry.get("stages", (0, 0))
    live = [0] * stages
    for index, node in enumerate(entry["on"]):
        live[index % stages] += node in up
    speed = TaskSpeed(shape, TaskMeasurements(), {})
    ways = [speed.own(live), *speed.others(range(least, most + 1) if most else None, (), slots)]
    return TaskAsked(
        name=entry["name"],
        ways=ways,
        times=ChangeTimes(**entry["times"]),
        today=Today(shape, sum(live), speed.now(live)) if any(live) else None,
        evened=float(speed.own(live, evened=True).throughput[sum(live)]),
        weight=entry["weight"],
        most=entry.get("max_workers"),
    )


# ------------------------------------------------------------------ the search, written again


@dataclass(frozen=True)
class Choice:
    workers: int
    rate: float
    worth: float


def menu(task: TaskAsked, slots: int, running_s: float) -> list[Choice]:
    today, times = task.today, task.times
    now = today.throughput if today is not None else 0.0
    top = max((float(way.throughput.max()) for way in task.ways), default=0.0)
    stop_s = times.agree_s if now > 0 else 0.0
    found = [Choice(0, 0.0, -task.weight * (now * stop_s + 1e4 * top * running_s))]

    def add(workers: int, rate: float, seconds: float) -> None:
        missed = now if now > 0 else rate
        found.append(Choice(workers, rate, task.weight * (rate * running_s - missed * seconds)))

    most = task.most or slots
    if today is not None and now > 0 and task.least <= today.workers <= most:
        add(today.workers, now, 0.0)
        if task.evened > now:
            add(today.workers, task.evened, times.agree_s + times.copy_s)
    for way in task.ways:
        for workers in range(task.least, min(slots, most, len(way.throughput) - 1) + 1):
            rate = float(way.throughput[workers])
            if rate <= 0:
                continue
            if today is None or now <= 0:
                add(workers, rate, times.restore_s)
            elif way.shape != today.shape:
                add(workers, rate, times.reshape_s)
            elif workers < today.workers:
                add(workers, rate, times.agree_s)
            elif workers > today.workers:
                add(workers, rate, times.agree_s + times.copy_s * max(0.0, rate / now - 1))
    return found


def search(at: Situation) -> float:
    best = -math.inf
    for combination in itertools.product(*(menu(task, at.slots, at.running_s) for task in at.tasks)):
        if sum(choice.workers for choice in combination) <= at.slots:
            best = max(best, sum(choice.worth for choice in combination))
    return best


def worth(at: Situation) -> float:
    decision = decide(at.tasks, at.slots, at.running_s)
    return sum(
        float(options.worth[int(options.units.searchsorted(decision.choices[name].units))])
        for name, options in decision.options.items()
    )


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_choice_is_the_best_of_all_combinations_and_the_expected_one(path: Path) -> None:
    at = read(path)
    assert worth(at) == pytest.approx(search(at), rel=1e-9)
    decision = decide(at.tasks, at.slots, at.running_s)
    for task in at.tasks:
        assert named(task, decision.choices[task.name]) == at.expect[task.name]
    assert sentence(decision).endswith(".")


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_every_alternative_is_behind_and_says_why(path: Path) -> None:
    at = read(path)
    rows = weighed(decide(at.tasks, at.slots, at.running_s))
    assert {row.task for row in rows if row.chosen} == {task.name for task in at.tasks}
    assert all(row.because and row.behind >= 0 for row in rows)


def drawn(draw: random.Random) -> Situation:
    """A small cluster of tasks that train, do not train, or have not begun, of any shapes."""
    tasks, slots = [], draw.randint(1, 6)
    for number in range(draw.randint(1, 3)):
        shapes = [
            Shape(draw.randint(1, 3), draw.randint(1, 2), draw.randint(1, 4))
            for _ in range(draw.randint(1, 3))
        ]
        ways = []
        for shape in dict.fromkeys(shapes):
            rates = np.array(
                [draw.choice((0.0, draw.random() * 4)) for _ in range(shape.replicas * shape.stages + 1)]
            )
            rates[: shape.stages] = 0.0
            ways.append(Way(shape, rates))
        shape = ways[0].shape
        workers = draw.randint(1, shape.replicas * shape.stages)
        now = draw.choice((0.0, draw.random() * 3))
        least = draw.randint(1, 2)
        tasks.append(
            TaskAsked(
                name=str(number),
                ways=ways,
                times=ChangeTimes(
                    agree_s=draw.random(),
                    copy_s=draw.random() * 3,
                    reshape_s=draw.random() * 9,
                    restore_s=draw.random() * 30,
                ),
                today=draw.choice((None, Today(shape, workers, now))),
                evened=draw.choice((0.0, now * 1.2)),
                weight=draw.choice((0.5, 1.0, 3.0)),
                least=least,
                most=draw.choice((None, None, least + draw.randint(0, 2))),
            )
        )
    return Situation(tasks=tasks, slots=slots, running_s=draw.choice((5.0, 60.0, 1e5)), expect={})


def test_plans_of_random_clusters_are_as_good_as_brute_force() -> None:
    draw = random.Random(7)
    for _ in range(1000):
        at = drawn(draw)
        assert worth(at) == pytest.approx(search(at), rel=1e-9)
        weighed(decide(at.tasks, at.slots, at.running_s))


def test_the_split_is_exact_also_where_worth_falls_with_more_units() -> None:
    draw = random.Random(3)
    for _ in range(500):
        capacity = draw.randint(0, 9)
        tasks = []
        for _ in range(draw.randint(1, 4)):
            units = np.array([0, *sorted(draw.sample(range(1, 12), draw.randint(0, 6)))])
            tasks.append((units, np.array([draw.uniform(-5, 5) for _ in units])))
        picked = best_split(tasks, capacity)
        assert sum(int(u[i]) for (u, _), i in zip(tasks, picked, strict=True)) <= capacity
        best = max(
            sum(float(w[i]) for (_, w), i in zip(tasks, at, strict=True))
            for at in itertools.product(*(range(len(u)) for u, _ in tasks))
            if sum(int(u[i]) for (u, _), i in zip(tasks, at, strict=True)) <= capacity
        )
        assert sum(float(w[i]) for (_, w), i in zip(tasks, picked, strict=True)) == pytest.approx(best)


@pytest.mark.parametrize("live", [(4, 6), (5, 5), (2, 3)])
def test_to_keep_what_it_has_is_always_offered_to_a_task_that_trains(live: Sequence[int]) -> None:
    """With a number of workers that is no whole shape, today's throughput was taken for 0: a change was free,
    and to keep the workers was never offered.
    """
    speed = TaskSpeed(Shape(6, 2, 4), TaskMeasurements(), {})
    asked = TaskAsked(
        name="t",
        ways=[speed.own(live), *speed.others(range(1, 5), (), 12)],
        times=ChangeTimes(agree_s=0.2, copy_s=2.0, reshape_s=1e6, restore_s=30.0),
        today=Today(Shape(6, 2, 4), sum(live), speed.now(live)),
    )
    choice = decide([asked], sum(live), 3600.0).choices["t"]
    assert choice.kind is Kind.KEEP
    assert choice.throughput == speed.now(live) > 0
    alone = replace(asked, times=replace(asked.times, reshape_s=0.0))
    assert decide([alone], sum(live), 3600.0).choices["t"].pays >= 0
