"""What a damaged task does, and when: re-route, fill, drop, reshape, take, stop."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from everstep.protocol.ops import Worker
from everstep.schedule import Instance, plan, uniform
from everstep_lab.plan import Assignment, Cluster, Costs, TaskSpec, decide, from_table, replicated
from everstep_lab.plan.assign import assign
from everstep_lab.plan.explain import least_change
from everstep_lab.plan.option import OptionKind
from everstep_lab.plan.reroute import throughput_ratio
from everstep_lab.plan.task_shape import ParallelShape
from everstep_lab.plan.transition import StateSource
from tests.plan.events import PlanWorld, after
from tests.plan.worlds import nodes, pipeline, random_world, seated, table_task


def planned(world: PlanWorld, event: str = ""):
    if event:
        world = after(event, world)
    return assign(world.cluster, world.submitted(), world.now, event)


def full_house(**cluster: object) -> PlanWorld:
    """Four nodes of three slots, one task of three replicas and four stages, 1F1B, on all of them."""
    curve = replicated(stages=4, per_replica=1.0, most_replicas=3, batch=18, schedule="1f1b")
    task = TaskSpec(name="gpt", curve=curve)
    return seated(Cluster(nodes=nodes(4, 3), **cluster), [task])  # type: ignore[arg-type]


def test_without_a_spare_it_keeps_its_shape_and_re_routes() -> None:
    world = full_house()
    plan = planned(world, "lose node-1:0")
    gain = plan.gains["gpt"]
    assert gain.kind is OptionKind.REROUTE
    assert plan.allocation == {"gpt": 11}
    assert plan.assignment.of("gpt").count(None) == 1
    assert gain.throughput_after > 2.0  # dropping the replica would leave two of three
    assert "re-routes" in plan.because


def test_re_routed_throughput_is_the_schedulers() -> None:
    one = uniform(replicas=4, stages=2, value=1.0)
    whole = Instance(replicas=4, stages=2, microbatches=8, forward=one, input_grad=one, weight_grad=one)
    broken = replace(whole, dead=frozenset({Worker(0, 1)}))
    ratio = throughput_ratio(ParallelShape(4, 2), broken.dead, batch=0, schedule="staggered")
    assert ratio == pytest.approx(plan(whole, "staggered").value / plan(broken, "staggered").value)
    everybody = frozenset(Worker(k, 1) for k in range(4))
    assert throughput_ratio(ParallelShape(4, 2), everybody, batch=0, schedule="staggered") == 0.0


def test_a_spare_fills_the_hole() -> None:
    task = pipeline("gpt", stages=2, replicas=3)
    world = seated(Cluster(nodes=nodes(4, 2)), [task])
    home = next(place for place in world.now.of("gpt") if place is not None)
    plan = planned(world, f"lose {home.node}")
    gain = plan.gains["gpt"]
    assert gain.kind is OptionKind.GROW
    assert gain.throughput_after == gain.throughput_before
    assert gain.moves == sum(p is not None and p.node == home.node for p in world.now.of("gpt"))
    assert "replaces what it lost" in plan.because


def test_a_heavy_task_takes_from_a_light_one() -> None:
    heavy = pipeline("heavy", stages=1, replicas=4, weight=3.0)
    light = pipeline("light", stages=1, replicas=4, weight=1.0)
    world = seated(Cluster(nodes=nodes(3, 2)), [heavy, light])
    assert planned(world).allocation == {"heavy": 4, "light": 2}
    lost = next(p.node for p in world.now.of("heavy") if p is not None)
    plan = planned(world, f"lose {lost}")
    assert plan.allocation["heavy"] == 4
    assert plan.payback_s is not None
    assert dict(plan.gains["heavy"].taken_from) == {"light": 2}
    assert "2 from light" in plan.because


def test_a_task_below_its_minimum_stops_and_gives_everything_away() -> None:
    tight = pipeline("tight", stages=2, replicas=2, min_workers=4)
    other = pipeline("other", stages=1, replicas=4, weight=5.0)
    world = seated(Cluster(nodes=nodes(4, 2)), [tight, other])
    assert world.now.workers("tight") == 4
    lost = next(p.node for p in world.now.of("tight") if p is not None)
    plan = planned(world, f"lose {lost}")
    assert plan.gains["tight"].kind is OptionKind.STOP
    assert plan.allocation["other"] == 4


def test_must_run_outweighs_any_weight() -> None:
    light = table_task("light", [0, 1, 2], weight=0.001, must_run=True)
    heavy = table_task("heavy", [0, 1, 2], weight=9.0)
    plan = assign(Cluster(nodes=nodes(1, 2)), [light, heavy], Assignment())
    assert plan.allocation == {"light": 1, "heavy": 1}


def test_without_bubbles_dropping_the_replica_is_as_good_and_frees_its_workers() -> None:
    """Against a schedule that has no bubbles, re-routing gains nothing over three replicas of four."""
    world = seated(Cluster(nodes=nodes(4, 2)), [pipeline("gpt", stages=2, replicas=4)])
    gain = planned(world, "lose node-1:0").gains["gpt"]
    assert gain.kind is OptionKind.DROP
    assert (gain.workers_after, gain.throughput_after) == (6, 3.0)
    assert gain.moves == 0


def reshaping_world(back_in: str | None) -> PlanWorld:
    """A task at 6 of 8 workers would reshape for more throughput, but moving its state takes minutes."""
    table = [0.0] * 9
    table[8], table[7], table[6], table[4] = 8.0, 7.8, 7.6, 4.0
    curve = from_table(table, stages=4, state_bytes=4e12, step_s=10.0, batch=4)
    task = TaskSpec(name="gpt", curve=replace(curve, schedule="1f1b"))
    world = seated(Cluster(nodes=nodes(8, 1), costs=Costs(network_bandwidth=1e9)), [task])
    return after("lose node-3" + (f" for {back_in}" if back_in else ""), world)


def test_a_node_back_soon_and_a_node_back_late_call_for_different_plans() -> None:
    soon, late = planned(reshaping_world("1h")), planned(reshaping_world("1w"))
    never = planned(reshaping_world(None))
    assert soon.gains["gpt"].kind is OptionKind.REROUTE
    assert late.gains["gpt"].kind is OptionKind.RESHAPE
    assert never.allocation == late.allocation
    assert soon.running_s < 3601
    assert "should be back in" in soon.because
    assert "without that, gpt would change shape" in soon.because


def test_the_way_back_is_charged() -> None:
    late = planned(reshaping_world("1w")).gains["gpt"]
    assert late.way_back > 0


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_is_undone_before_it_pays(seed: int) -> None:
    """Under a promised repair: what a plan does beyond the least possible either pays before the repair is
    expected, or is where its tasks will want to be after it."""
    draw = random.Random(seed)
    tasks = [
        pipeline(
            f"t{i}",
            stages=draw.choice((1, 2, 4)),
            replicas=draw.randint(2, 6),
            weight=draw.uniform(0.5, 3),
            state_bytes=draw.choice((1e9, 1e12)),
        )
        for i in range(draw.randint(2, 4))
    ]
    world = seated(Cluster(nodes=nodes(8, 2)), tasks)
    lost = draw.randrange(8)
    world = after(f"lose node-{lost} for {draw.choice((5, 30, 120, 3600))}s", world)
    decision = decide(world.cluster, world.submitted(), world.now)
    least = {name: least_change(options) for name, options in decision.options.items()}
    plan = planned(world)
    more_way_back = sum(decision.choices[n].way_back - least[n].way_back for n in least)
    if plan.payback_s is not None and more_way_back >= 0:
        assert plan.payback_s <= plan.running_s


def test_a_change_that_only_just_pays_is_not_made_under_hysteresis() -> None:
    task = table_task("t", [0, 1.0, 1.02], transition_s=100.0)
    cluster = Cluster(nodes=nodes(1, 2), running_s=6000.0)
    now = assign(replace(cluster, nodes=nodes(1, 1)), [task], Assignment()).assignment
    assert assign(cluster, [task], now).allocation == {"t": 2}
    assert assign(replace(cluster, hysteresis=1.5), [task], now).allocation == {"t": 1}


def test_planning_again_changes_nothing() -> None:
    """No flapping: from a plan's own result, the plan is to stay."""
    for seed in range(60):
        world = random_world(seed)
        first = assign(world.cluster, world.submitted(), world.now, second=False)
        again = assign(world.cluster, world.submitted(), first.assignment, second=False)
        gained = again.objective - sum(gain.reward for gain in first.gains.values())
        assert again.allocation == first.allocation or gained > 0, seed


def test_zero_1_cannot_re_route_and_restores_from_disk() -> None:
    task = pipeline("gpt", stages=2, replicas=4)
    split = replace(task, curve=replace(task.curve, replicated=False))
    world = seated(Cluster(nodes=nodes(4, 2)), [split])
    gain = planned(world, "lose node-1:0").gains["gpt"]
    assert gain.kind is not OptionKind.REROUTE
    assert gain.source is StateSource.DISK
    assert gain.transition_s > 900  # half of what lies between two checkpoints
    near = replace(world, cluster=replace(world.cluster, costs=Costs(memory_copies=True)))
    assert planned(near, "lose node-1:0").gains["gpt"].transition_s < 60


def test_all_replicas_of_a_stage_gone_means_the_checkpoint() -> None:
    task = pipeline("gpt", stages=2, replicas=1)
    world = seated(Cluster(nodes=nodes(3, 1)), [task])
    lost = world.now.of("gpt")[0]
    assert lost is not None
    gain = planned(world, f"lose {lost.node}").gains["gpt"]
    assert gain.source is StateSource.DISK
    assert "the checkpoint on disk" in planned(world, f"lose {lost.node}").because


def test_a_hole_is_remembered_until_it_is_filled() -> None:
    world = full_house()
    first = planned(world, "lose node-1:0")
    broken = after("lose node-1:0", world)
    still = assign(broken.cluster, broken.submitted(), first.assignment)
    assert still.gains["gpt"].kind is OptionKind.KEEP
    assert still.waf_before == pytest.approx(first.waf_after)
    mended = after("join node-1", PlanWorld(broken.cluster, broken.tasks, first.assignment))
    back = assign(mended.cluster, mended.submitted(), mended.now)
    assert back.allocation == {"gpt": 12}
    assert back.gains["gpt"].moves == 1


def test_every_plan_names_a_runner_up_and_why_it_lost() -> None:
    plan = planned(full_house(), "lose node-1:0")
    assert plan.runner_up is not None
    assert plan.runner_up.objective <= plan.objective
    assert "gpt" in plan.runner_up.because
    assert dict(plan.runner_up.choices) != {name: gain.kind for name, gain in plan.gains.items()}


def test_the_runner_up_is_second_best_on_small_worlds() -> None:
    """Taking away the best choice of each task in turn finds the best other plan."""
    for seed in range(40):
        world = random_world(seed)
        plan = assign(world.cluster, world.submitted(), world.now)
        if plan.runner_up is not None:
            assert plan.runner_up.objective <= plan.objective + 1e-9 * abs(plan.objective)
            kinds = {name: (gain.kind, gain.workers_after) for name, gain in plan.gains.items()}
            rival = {name: (plan.runner_up.choices[name], plan.runner_up.allocation[name]) for name in kinds}
            assert rival != kinds
