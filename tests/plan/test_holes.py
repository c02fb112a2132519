"""Shapes with places left empty: a task uses any number of workers, fills places one by one, and says so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from everstep.protocol.ops import Worker
from everstep_lab.plan import Assignment, Cluster, PlanNode, SlotPlace, TaskSpec
from everstep_lab.plan.assign import assign
from everstep_lab.plan.curve import Curve, from_table
from everstep_lab.plan.hardware import gpu
from everstep_lab.plan.holes import num_moving, per_stage, ratio, with_holes
from everstep_lab.plan.models import model
from everstep_lab.plan.option import OptionKind
from everstep_lab.plan.reroute import throughput_ratio
from everstep_lab.plan.stacks import stack
from everstep_lab.plan.task_shape import ParallelShape, StepShares
from everstep_lab.plan.throughput import PlannedCut, from_model, step_time

BATCH = 64


def curve(stages: int = 1, most: int = 8) -> Curve:
    """Whole shapes of 4 and 8 replicas only, each worker as good as any."""
    table = [float(w) if w in (4 * stages, 8 * stages) else 0.0 for w in range(most * stages + 1)]
    made = from_table(table, stages=stages, step_s=1.0, batch=BATCH, state_bytes=1e9)
    return replace(made, schedule="staggered")


def cluster(slots: int, *lost: int) -> Cluster:
    return Cluster(nodes=[PlanNode(name=f"n{i}", slots=1, lost=i in lost) for i in range(slots)])


def sitting(stages: int, replicas: int, *empty: int) -> Assignment:
    shape = ParallelShape(replicas, stages)
    places = [None if i in empty else SlotPlace(f"n{i}", 0) for i in range(shape.workers)]
    return Assignment(places={"t": places}, shapes={"t": shape})


def test_seven_workers_run_as_eight_with_one_place_empty() -> None:
    found = with_holes(curve())
    assert found.replicas[7] == 8
    assert found.throughput[7] == pytest.approx(8 * 8 / 10), "64 microbatches on seven: ten for the busiest"
    assert found.throughput[8] == found.throughput[0] == 0, "whole shapes are not its business"
    assert with_holes(curve()).throughput[3] == pytest.approx(4 * 16 / 22)


def test_throughput_is_the_schedulers_for_places_spread_evenly() -> None:
    made = curve(stages=3)
    for groups in (20, 22, 23):
        live = per_stage(groups, 3)
        assert sum(live) == groups
        assert max(live) - min(live) <= 1
        dead = frozenset(Worker(k, s) for s, n in enumerate(live) for k in range(n, 8))
        wanted = throughput_ratio(ParallelShape(8, 3), dead, batch=BATCH, schedule="staggered")
        assert ratio(made, made.cuts[0], 8, groups) == wanted


def test_what_comes_once_per_step_is_not_done_more_often_by_fewer() -> None:
    """Half of a step is reduction and update: with half of the workers only the other half takes longer."""
    shape, dead = ParallelShape(8, 1), frozenset(Worker(k, 0) for k in range(4))
    alone = throughput_ratio(shape, dead, batch=BATCH, schedule="staggered")
    assert alone == pytest.approx(0.5)
    half = throughput_ratio(shape, dead, batch=BATCH, schedule="staggered", shares=StepShares(per_step=0.5))
    assert half == pytest.approx(1 / (0.5 / 0.5 + 0.5))


def test_a_cut_of_a_model_says_which_share_of_its_step_comes_once() -> None:
    made = from_model(model("gpt3-1.3b"), gpu("A800"), stack("megatron-2022"), most=32, slots_per_node=1)
    cut = made.cuts[0]
    shape = cut.shape(32)
    whole = step_time(
        model("gpt3-1.3b"),
        gpu("A800"),
        stack("megatron-2022"),
        PlannedCut(stages=1, shards=1, microbatch=shape.microbatch, recompute=shape.recompute),
        np.array([32.0]),
        slots_per_node=1,
    )
    wanted = float((whole.reduce + whole.update)[0] / whole.total[0])
    assert 0.05 < wanted < 0.5
    assert made.shares(shape).per_step == pytest.approx(wanted)
    assert ratio(made, cut, 32, 31) > 16 / 17, "one of 32 is missing: 17 microbatches instead of 16"


def test_a_node_that_comes_fills_one_of_three_empty_places() -> None:
    """Not all three can be filled; before, the newcomer stayed idle."""
    plan = assign(cluster(6), [TaskSpec(name="t", curve=curve())], sitting(1, 8, 5, 6, 7), "join n5")
    gain = plan.gains["t"]
    assert (gain.kind, gain.workers_after) == (OptionKind.GROW, 6)
    assert gain.shape_after == ParallelShape(8, 1)
    places = plan.assignment.places["t"]
    assert len(places) == 8
    assert sum(place is not None for place in places) == 6
    assert set(places[:5]) == {SlotPlace(f"n{i}", 0) for i in range(5)}, "who was there stays in its place"


def test_a_task_can_start_on_any_number_of_workers() -> None:
    plan = assign(cluster(7), [TaskSpec(name="t", curve=curve())], Assignment(), "submitted")
    assert plan.allocation == {"t": 7}
    assert [p is None for p in plan.assignment.places["t"]].count(True) == 1


def test_uneven_losses_are_spread_by_workers_that_change_their_stage() -> None:
    """Stage 0 lost three of eight, stage 1 none: six and six are as fast as seven and six."""
    lost = (0, 2, 4)
    spec = TaskSpec(name="t", curve=curve(stages=2))
    plan = assign(cluster(16, *lost), [spec], sitting(2, 8), "lost three")
    gain = plan.gains["t"]
    assert gain.workers_after == 12
    places = plan.assignment.places["t"]
    per = [sum(places[2 * r + s] is not None for r in range(8)) for s in range(2)]
    assert per == [6, 6]
    whole = spec.curve.of_shape(ParallelShape(8, 2))
    assert gain.throughput_after == pytest.approx(whole * 8 / 11), (
        "64 on six is eleven; left at five, thirteen"
    )


def test_how_many_change_their_stage() -> None:
    assert num_moving([5, 8], np.array([13, 12, 10, 14, 16]), 2).tolist() == [2, 1, 0, 1, 0]
    assert num_moving([8, 8], np.array([16, 15, 9]), 2).tolist() == [0, 0, 0]


def test_a_task_whose_states_are_in_one_place_only_has_no_empty_places() -> None:
    alone = replace(curve(), replicated=False)
    plan = assign(cluster(7), [TaskSpec(name="t", curve=alone)], Assignment(), "submitted")
    assert plan.allocation == {"t": 4}


def test_a_bubble_that_is_in_the_whole_step_is_charged_once() -> None:
    """1F1B of two stages with 64 microbatches: 192 of work, 3 of bubble. With a place empty, 69 microbatches
    are left for the busiest and our order fills the bubble but for one forward, in the memory of 1F1B.
    """
    shape, dead = ParallelShape(16, 2), frozenset({Worker(0, 0)})
    shares = StepShares(bubble=3 / 195)
    found = throughput_ratio(shape, dead, batch=1024, schedule="rescheduled", shares=shares)
    assert found == pytest.approx(195 / 208)
    waits = throughput_ratio(shape, dead, batch=1024, schedule="unstaggered", shares=shares)
    assert waits == pytest.approx(195 / 208), "the bubble is filled with weight gradients"
    most = throughput_ratio(ParallelShape(64, 2), dead, batch=128, schedule="rescheduled", shares=shares)
    assert most <= 1
