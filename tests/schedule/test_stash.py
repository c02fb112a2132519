"""Caps: what a worker holds grows with stages, not with microbatches, and costs no time."""

import pytest

from everstep.protocol.actions import BrokenStep, ComputePlan
from everstep.protocol.messages import TimesReported
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.schedule import Instance, per_stage, plan, uniform
from everstep.schedule.stash_limits import LONGER, StashRoom, capped, stash_cap
from everstep.schedule.task_scheduler import TaskScheduler


def instance(replicas: int, stages: int, microbatches: int, forward: tuple[float, ...] = ()) -> Instance:
    grid = per_stage(replicas=replicas, values=forward) if forward else None
    one = uniform(replicas=replicas, stages=stages, value=1.0)
    return Instance(
        replicas=replicas,
        stages=stages,
        microbatches=microbatches,
        forward=grid or one,
        input_grad=grid or one,
        weight_grad=grid or one,
        reduce=(0.5,) * stages,
        update=(0.3,) * stages,
        hop=0.05,
    )


def peak(made: Instance, mode: str = "staggered") -> int:
    planned = plan(made, mode)
    return max(planned.peak_stash[worker] for worker in made.workers())


@pytest.mark.parametrize("stages", [2, 4])
def test_the_peak_stash_does_not_grow_with_microbatches_and_the_period_is_as_short(stages: int) -> None:
    for microbatches in (8, 16, 32):
        free = instance(2, stages, microbatches)
        made = capped(free, "staggered", {})
        assert (
            peak(made) <= stash_cap(stages) < peak(free) == microbatches or stash_cap(stages) >= microbatches
        )
        assert plan(made, "staggered").value <= (1 + LONGER) * plan(free, "staggered").value


def test_after_a_death_the_cap_still_holds() -> None:
    desk = TaskScheduler(Shape(2, 2, 16), "staggered")
    dead = frozenset({Worker(0, 1)})
    answer = desk.answer(ComputePlan(epoch=2, dead=dead, broken={3: BrokenStep(dead, {})}, because=""))
    found = desk.in_force()
    assert found is not None
    planned, healthy = found
    assert healthy.stash_cap is not None
    assert max(planned.peak_stash[w] for w in healthy.workers() if w not in dead) <= stash_cap(2)
    for ops in (answer.steady, *answer.lists.values()):
        for worker in set(healthy.workers()) - dead:
            held = most = 0
            for op in ops[worker]:
                held += {"F": 1, "W": -1}.get(op.kind, 0)
                most = max(most, held)
            assert most <= stash_cap(2)


def test_a_stage_that_needs_more_to_hide_its_neighbours_gets_more() -> None:
    uneven = instance(1, 2, 64, forward=(1.0, 0.05))
    made = capped(uneven, "staggered", {})
    bound = plan(uneven, "staggered").value
    assert plan(made, "staggered").value <= (1 + 2 * LONGER) * bound


def test_measured_memory_lowers_the_cap_also_where_time_suffers() -> None:
    rooms = {Worker(0, 0): StashRoom(held=10.0, room=25.0), Worker(1, 0): StashRoom(held=10.0, room=95.0)}
    made = capped(instance(2, 4, 16), "staggered", rooms)
    assert made.stash_cap is not None
    assert made.stash_cap[Worker(1, 0)] == 2, "whoever of the stage has the least room decides"
    assert made.stash_cap[Worker(1, 1)] >= stash_cap(4)
    assert plan(made, "staggered").peak_stash[Worker(1, 0)] <= 2


def test_what_workers_report_reaches_the_schedule() -> None:
    desk = TaskScheduler(Shape(1, 2, 16), "staggered")
    question = ComputePlan(epoch=1, dead=frozenset(), broken={}, because="")
    desk.answer(question)
    times = {"F": 1.0, "I": 1.0, "W": 1.0}
    for stage in range(2):
        told = {**times, "held.F": 4.0, "held.W": 3.0, "room": 9.0}
        desk.learn(
            TimesReported(
                task="t", worker=Worker(0, stage), incarnation=1, step=1, times=told, ops={}, seconds=1.0
            )
        )
    desk.answer(question)
    found = desk.in_force()
    assert found is not None
    assert found[1].stash_cap == {Worker(0, 0): 2, Worker(0, 1): 2}


def test_a_worker_without_room_for_one_still_gets_one() -> None:
    assert StashRoom(held=10.0, room=3.0).most == 1
    assert StashRoom(held=10.0).most is None
