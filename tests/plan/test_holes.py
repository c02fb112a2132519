"""Shapes with places left empty: a task uses any number of workers, fills places one by one, and says so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from everstep.protocol.ops import Worker
from everstep_lab.plan import Assignment, Cluster, PlanNode, SlotPlace
from everstep_lab.plan.curve import Curve, from_table
from everstep_lab.plan.hardware import gpu
from everstep_lab.plan.holes import num_moving, per_stage, ratio, with_holes
from everstep_lab.plan.models import model
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


def test_how_many_change_their_stage() -> None:
    assert num_moving([5, 8], np.array([13, 12, 10, 14, 16]), 2).tolist() == [2, 1, 0, 1, 0]
    assert num_moving([8, 8], np.array([16, 15, 9]), 2).tolist() == [0, 0, 0]


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
