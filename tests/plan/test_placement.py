"""Which workers: shards in a node, replicas apart, few moves, racks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from everstep_lab.plan import Assignment, Cluster, ParallelShape, PlanNode, SlotPlace, TaskSpec, replicated
from everstep_lab.plan.assign import assign
from tests.plan.events import PlanWorld, after
from tests.plan.worlds import nodes, pipeline, seated


def sharded(name: str, *, stages: int, shards: int, replicas: int, weight: float = 1.0) -> TaskSpec:
    curve = replicated(stages=stages, shards=shards, per_replica=1.0, most_replicas=replicas, state_bytes=1e9)
    return TaskSpec(name=name, curve=curve, weight=weight)


def groups(now: Assignment, name: str) -> dict[tuple[int, int], list[SlotPlace]]:
    shape, places = now.shapes[name], now.of(name)
    found: dict[tuple[int, int], list[SlotPlace]] = {}
    for i, place in enumerate(places):
        if place is not None:
            group = i // shape.shards
            found.setdefault((group // shape.stages, group % shape.stages), []).append(place)
    return found


def assert_well_placed(cluster: Cluster, now: Assignment) -> None:
    taken = [place for places in now.places.values() for place in places if place is not None]
    assert len(taken) == len(set(taken))
    assert all(cluster.is_usable(place) for place in taken)
    for name in now.places:
        for members in groups(now, name).values() if name in now.shapes else ():
            assert len({place.node for place in members}) == 1, f"{name}: shards in two nodes"


def replicas_on_one_node(now: Assignment, name: str) -> bool:
    """Some stage has all its replicas, two at least, on one node."""
    by_stage: dict[int, list[str]] = {}
    for (_, stage), members in groups(now, name).items():
        by_stage.setdefault(stage, []).append(members[0].node)
    return any(len(found) > 1 and len(set(found)) == 1 for found in by_stage.values())


@pytest.mark.parametrize("seed", range(40))
def test_any_sequence_of_events_leaves_everybody_well_placed(seed: int) -> None:
    draw = random.Random(seed)
    cluster = Cluster(nodes=nodes(draw.randint(3, 8), draw.choice((2, 4, 8))))
    tasks = [
        sharded(
            f"t{i}",
            stages=draw.choice((1, 2, 3)),
            shards=draw.choice((1, 1, 2)),
            replicas=draw.randint(1, 4),
            weight=draw.uniform(0.5, 2),
        )
        for i in range(draw.randint(1, 4))
    ]
    world = seated(cluster, tasks)
    for _ in range(6):
        living = [node.name for node in world.cluster.nodes if not node.lost]
        lost = [node.name for node in world.cluster.nodes if node.lost]
        events = (
            [f"lose {n}" for n in living[1:]] + [f"lose {n}:0" for n in living] + [f"join {n}" for n in lost]
        )
        world = after(draw.choice(events), world)
        plan = assign(world.cluster, world.submitted(), world.now, second=False)
        assert_well_placed(world.cluster, plan.assignment)
        for name, gain in plan.gains.items():
            assert plan.assignment.workers(name) == gain.workers_after
        world = PlanWorld(world.cluster, world.tasks, plan.assignment)


@pytest.mark.parametrize(("replicas", "stages", "shards"), [(2, 4, 1), (4, 2, 2), (8, 1, 1), (2, 1, 8)])
def test_one_nodes_loss_never_takes_a_stages_last_copy(replicas: int, stages: int, shards: int) -> None:
    task = sharded("gpt", stages=stages, shards=shards, replicas=replicas)
    world = seated(Cluster(nodes=nodes(4, 8)), [task])
    assert world.now.workers("gpt") == replicas * stages * shards
    assert not replicas_on_one_node(world.now, "gpt")
    for name in {place.node for place in world.now.of("gpt") if place is not None}:
        hurt = after(f"lose {name}", world)
        plan = assign(hurt.cluster, hurt.submitted(), hurt.now, second=False)
        assert str(plan.gains["gpt"].source) == "a live replica"


def test_where_there_is_only_one_node_it_warns() -> None:
    plan = assign(Cluster(nodes=nodes(1, 4)), [pipeline("gpt", stages=2, replicas=2)], Assignment())
    assert plan.warnings
    assert "last copy" in plan.warnings[0]


def test_racks_are_failure_domains() -> None:
    machines = [PlanNode(name=f"node-{i}", slots=2, rack=f"rack-{i // 4}") for i in range(8)]
    world = seated(Cluster(nodes=machines), [pipeline("gpt", stages=2, replicas=4)])
    rack = {node.name: node.rack for node in machines}
    for stage in range(2):
        used = Counter(rack[m[0].node] for (_, s), m in groups(world.now, "gpt").items() if s == stage)
        assert max(used.values()) <= 2


def test_whoever_stays_stays_where_it_is() -> None:
    """A lost node moves its own workers and nobody else's."""
    a, b = pipeline("a", stages=2, replicas=2), pipeline("b", stages=2, replicas=2)
    world = seated(Cluster(nodes=nodes(6, 2)), [a, b])
    victim = next(place.node for place in world.now.of("a") if place is not None)
    hurt = after(f"lose {victim}", world)
    plan = assign(hurt.cluster, hurt.submitted(), hurt.now, second=False)
    for name in ("a", "b"):
        for old, new in zip(world.now.of(name), plan.assignment.of(name), strict=True):
            assert old == new or (old is not None and old.node == victim)


def test_whole_nodes_are_never_shared() -> None:
    cluster = Cluster(nodes=nodes(6, 4), whole_nodes=True)
    tasks = [pipeline("a", stages=2, replicas=5), pipeline("b", stages=3, replicas=3, weight=1.5)]
    world = seated(cluster, tasks)
    owners: dict[str, set[str]] = {}
    for name, places in world.now.places.items():
        for place in places:
            assert place is not None
            owners.setdefault(place.node, set()).add(name)
    assert all(len(names) == 1 for names in owners.values())


def test_a_partly_bad_node_still_gives_its_good_slots() -> None:
    bad = PlanNode(name="node-0", slots=4, bad_slots=frozenset({2}))
    task = pipeline("gpt", stages=1, replicas=3)
    plan = assign(Cluster(nodes=[bad]), [task], Assignment())
    assert plan.allocation == {"gpt": 3}
    whole = assign(Cluster(nodes=[bad], whole_nodes=True), [task], Assignment())
    assert whole.allocation == {"gpt": 0}


def test_a_shape_without_room_is_taken_back() -> None:
    """Slots enough, but no node with room for a group of four: another plan, not a crash."""
    narrow = [PlanNode(name=f"node-{i}", slots=2) for i in range(4)]
    wide = sharded("wide", stages=1, shards=4, replicas=2)
    plan = assign(Cluster(nodes=narrow), [wide], Assignment())
    assert plan.allocation == {"wide": 0}


def test_assignments_that_contradict_themselves_are_refused() -> None:
    task = pipeline("gpt", stages=2, replicas=2)
    now = Assignment(places={"gpt": [SlotPlace("node-0", 0)]}, shapes={"gpt": ParallelShape(2, 2)})
    with pytest.raises(Exception, match="must agree"):
        assign(Cluster(nodes=nodes(2, 2)), [task], now)
