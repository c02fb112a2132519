"""The table of next events, and Unicron's mixes."""

from __future__ import annotations

import time

import pytest

from everstep.plan import Cluster
from everstep_lab.plan.assign import assign
from everstep_lab.plan.events import PlanWorld, after, next_events
from everstep_lab.plan.mixes import MIXES, share
from everstep_lab.plan.table import NextEvents
from tests.plan.worlds import nodes, pipeline, random_world, seated


def big_world() -> PlanWorld:
    tasks = [pipeline(f"t{i}", stages=2, replicas=8, weight=1 + i / 4) for i in range(4)]
    late = pipeline("late", stages=1, replicas=4, expected=True)
    world = seated(Cluster(nodes=nodes(16, 4)), tasks)
    return PlanWorld(world.cluster, [*tasks, late], world.now)


def test_the_answer_is_what_a_fresh_plan_would_say() -> None:
    for seed in range(25):
        world = random_world(seed)
        table = NextEvents(world)
        table.prepare()
        for event in table.events:
            hence = after(event, world)
            fresh = assign(hence.cluster, hence.submitted(), hence.now, event, second=False)
            ready = table.look_up(event)
            assert sum(c.worth for c in ready.decision.choices.values()) == pytest.approx(fresh.objective)
            assert ready.because.startswith(event)


def test_every_single_event_is_in_the_table() -> None:
    world = big_world()
    table = NextEvents(world)
    expected = {f"lose node-{i}" for i in range(16)} | {"join node-16", "submit late"}
    assert set(table.events) == expected | {f"finish t{i}" for i in range(4)}
    assert set(next_events(after("lose node-3", world))) >= {"join node-3"}


def test_nodes_that_are_alike_are_thought_of_once() -> None:
    table = NextEvents(big_world())
    assert table.num_decisions() < len(table.events)
    assert table.prepare(3) == 3
    table.prepare()
    assert table.prepare() == 0


def test_a_look_up_takes_less_than_a_millisecond() -> None:
    table = NextEvents(big_world())
    table.prepare()
    best = min(_look_ups(table) for _ in range(5))
    assert best < 1e-3


def _look_ups(table: NextEvents) -> float:
    began = time.process_time()
    for event in table.events:
        assert table.look_up(event).allocation
    return (time.process_time() - began) / len(table.events)


def test_a_ready_answer_seats_everybody() -> None:
    world = big_world()
    ready = NextEvents(world).look_up("lose node-5")
    plan = ready.plan()
    assert plan.allocation == ready.allocation
    assert all(p is None or p.node != "node-5" for places in plan.assignment.places.values() for p in places)


@pytest.mark.parametrize("mix", MIXES)
def test_no_rule_of_thumb_beats_the_plan(mix: str) -> None:
    *rules, free, all_run = share(mix)
    assert max(rule.waf for rule in rules) <= free.waf * (1 + 1e-9)
    assert all_run.waf <= free.waf * (1 + 1e-9)
    assert min(all_run.workers) > 0
    for row in (*rules, free, all_run):
        assert sum(row.workers) <= 128
