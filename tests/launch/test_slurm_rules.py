"""What follows from what Slurm says, as claims on `decide`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.launch.slurm import node_rules
from everstep.launch.slurm.slurm_keeper import LOOK_MOST_S, LOOKS_PER_S, TURN_S, look_every_s
from everstep.launch.slurm.slurm_text import SlurmJob, SlurmNode

UP = node_rules.AllocatedNode(state="up", connected=True)
GONE = node_rules.AllocatedNode(state="gone", connected=False)
DRAINING = node_rules.AllocatedNode(state="draining", connected=True)


def node(name: str, *states: str, reason: str = "") -> SlurmNode:
    return SlurmNode(name=name, states=frozenset(states or ("ALLOCATED",)), reason=reason)


def view(*changed: SlurmNode, **more: object) -> node_rules.View:
    """Four nodes, all well but for the `changed`."""
    names = ("n1", "n2", "n3", "n4")
    nodes = {name: node(name) for name in names} | {each.name: each for each in changed}
    fine = node_rules.View(
        wanted=4,
        job=SlurmJob(number="7", state="RUNNING", nodes=names, batch_host="n1"),
        nodes=nodes,
        members=dict.fromkeys(names, UP),
    )
    return replace(fine, **more)  # type: ignore[arg-type]


def spare(number: str, state: str, *nodes: str) -> SlurmJob:
    return SlurmJob(number=number, state=state, nodes=nodes)


def test_while_all_is_well_nothing_is_done() -> None:
    assert node_rules.decide(view()) == []


@pytest.mark.parametrize("state", ["DRAIN", "FAIL", "REBOOT_REQUESTED"])
def test_a_node_that_slurm_wants_back_is_drained_and_another_is_asked_for(state: str) -> None:
    drain, ask = node_rules.decide(view(node("n2", "ALLOCATED", state, reason="bad fan")))
    assert drain == node_rules.DrainNode(
        node="n2", because=f"Slurm wants it back: {'+'.join(sorted(['ALLOCATED', state]))} (bad fan)"
    )
    assert ask == node_rules.AskForNodes(count=1, because="3 of 4 nodes can be used")


def test_a_node_is_drained_once() -> None:
    members = dict.fromkeys(("n1", "n3", "n4"), UP) | {"n2": DRAINING}
    seen = view(node("n2", "ALLOCATED", "DRAIN"), members=members, spares=[spare("8", "PENDING")])
    assert node_rules.decide(seen) == []


def test_a_node_that_is_usable_again_is_readmitted_if_we_drained_it() -> None:
    members = dict.fromkeys(("n1", "n3", "n4"), UP) | {"n2": DRAINING}
    (readmit,) = node_rules.decide(view(members=members, drained=frozenset({"n2"})))
    assert isinstance(readmit, node_rules.ReadmitNode)
    assert node_rules.decide(view(members=members)) == [], "a person drained it"


def test_a_request_that_still_waits_is_given_back_when_nobody_is_missing() -> None:
    assert node_rules.decide(view(spares=[spare("8", "PENDING")])) == [
        node_rules.GiveBack(job="8", because="4 of 4 nodes can be used")
    ]
    assert node_rules.decide(view(spares=[spare("8", "RUNNING", "n5")])) == [], "who trains already stays"


def test_a_node_taken_out_of_the_job_is_asked_for_once() -> None:
    job = SlurmJob(number="7", state="RUNNING", nodes=("n2", "n3", "n4"), batch_host="n1")
    members = dict.fromkeys(("n2", "n3", "n4"), UP) | {"n1": GONE}
    missing = view(node("n1", "DOWN", "NOT_RESPONDING"), job=job, members=members)
    assert node_rules.decide(missing) == [node_rules.AskForNodes(count=1, because="3 of 4 nodes can be used")]
    assert node_rules.decide(replace(missing, spares=[spare("8", "PENDING")])) == []
    assert node_rules.decide(replace(missing, spares=[spare("8", "RUNNING", "n1")], nodes=view().nodes)) == []


def test_a_dead_node_is_replaced_before_slurm_has_given_it_up() -> None:
    silent = view(node("n3", "ALLOCATED", "NOT_RESPONDING"), members=dict(view().members) | {"n3": GONE})
    assert [type(action) for action in node_rules.decide(silent)] == [node_rules.AskForNodes]
    heard = view(node("n3", "ALLOCATED", "NOT_RESPONDING"))
    assert node_rules.decide(heard) == [], "only its slurmd is away: its workers train"


def test_a_node_that_slurm_says_is_down_while_its_agent_speaks_is_drained() -> None:
    drain, _ = node_rules.decide(view(node("n3", "DOWN", reason="Not responding")))
    assert drain == node_rules.DrainNode(
        node="n3", because="Slurm ends what runs there: DOWN (Not responding)"
    )


def test_a_node_of_the_job_without_an_agent_gets_its_keeper_again() -> None:
    members = dict(view().members) | {"n3": GONE}
    assert node_rules.decide(view(members=members, away_s={"n3": 10.0})) == []
    (start,) = node_rules.decide(view(members=members, away_s={"n3": 16.0}))
    assert isinstance(start, node_rules.StartKeeper)
    assert start.node == "n3"


def test_spares_that_cannot_start_are_not_asked_for_for_ever() -> None:
    job = SlurmJob(number="7", state="RUNNING", nodes=("n1", "n2"))
    short = view(job=job)
    assert node_rules.decide(short) == [node_rules.AskForNodes(count=2, because="2 of 4 nodes can be used")]
    assert node_rules.decide(replace(short, asked_s_ago=3.0)) == []
    (last,) = node_rules.decide(replace(short, asked=79))
    assert isinstance(last, node_rules.AskForNodes)
    assert last.count == 1
    assert node_rules.decide(replace(short, asked=80)) == []


def test_a_spare_asks_for_the_kind_of_node_the_job_has() -> None:
    job = SlurmJob(
        number="7",
        state="RUNNING",
        partition="gpu",
        account="lab",
        qos="long",
        tres_per_node="gres:gpu:8",
        features="h100",
        time_limit="7-00:00:00",
    )
    assert node_rules.like(job) == [
        *("--partition=gpu", "--account=lab", "--qos=long", "--constraint=h100", "--time=7-00:00:00"),
        "--gres=gpu:8",
    ]
    assert node_rules.like(SlurmJob(number="7", state="RUNNING")) == []


def test_slots_are_the_gpus_or_the_cpus_of_the_job_on_this_node() -> None:
    assert node_rules.slots_of({"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "96"}) == 8
    assert node_rules.slots_of({"SLURM_CPUS_ON_NODE": "96"}) == 96
    assert node_rules.slots_of({}) == 0


def test_many_keepers_look_at_the_shared_folder_no_more_often_than_a_few() -> None:
    """Each opened a file twice per second."""
    assert look_every_s(4) == TURN_S
    assert look_every_s(400) == 400 / LOOKS_PER_S
    assert look_every_s(100_000) == LOOK_MOST_S
