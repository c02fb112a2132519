"""What a real Slurm (22.05, Debian 12) has printed, understood. The texts are in `slurm/`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import PeerError
from everstep.launch.slurm.slurm_text import NodeUse, SlurmNode, expand, parse_jobs, parse_nodes

PRINTED = Path(__file__).parent / "slurm"


def printed(name: str) -> str:
    return (PRINTED / f"{name}.txt").read_text()


def test_a_drained_node_and_a_failing_one_are_leaving_and_say_why() -> None:
    nodes = parse_nodes(printed("nodes-drained-and-failing"))
    assert {name: node.use for name, node in nodes.items()} == {
        "n1": NodeUse.USABLE,
        "n2": NodeUse.LEAVING,
        "n3": NodeUse.LEAVING,
        "n4": NodeUse.USABLE,
    }
    assert nodes["n3"].described == "ALLOCATED+FAIL (ECC errors)"
    assert nodes["n3"].address == "127.0.0.13"


def test_a_reason_that_reads_like_a_state_is_no_state() -> None:
    node = parse_nodes(printed("nodes-drained-and-failing"))["n2"]
    assert node.states == {"ALLOCATED", "DRAIN"}
    assert node.reason == "bad fan"  # cut where it pretends to be a field; the state comes before it


def test_a_node_that_does_not_answer_is_unclear_and_then_lost() -> None:
    assert parse_nodes(printed("nodes-not-responding"))["n1"].use is NodeUse.UNCLEAR
    assert parse_nodes(printed("nodes-down"))["n1"].use is NodeUse.LOST


def test_a_job_that_lost_its_first_node_runs_on_without_its_batch_script() -> None:
    before = {job.number: job for job in parse_jobs(printed("jobs-running"))}
    after = {job.number: job for job in parse_jobs(printed("jobs-first-node-lost"))}
    assert before["1"].nodes == ("n1", "n2", "n3")
    assert before["1"].has_batch_script
    assert after["1"].runs
    assert after["1"].nodes == ("n2", "n3")
    assert not after["1"].has_batch_script


def test_a_waiting_job_has_no_nodes_and_nothing_is_taken_from_its_name() -> None:
    jobs = {job.number: job for job in parse_jobs(printed("jobs-running"))}
    assert jobs["3"].waits
    assert jobs["3"].nodes == ()
    assert jobs["2"].time_limit == "30:00"
    assert jobs["2"].runs, "its name holds separators and another state"


def test_what_is_no_answer_of_squeue_is_refused() -> None:
    with pytest.raises(PeerError, match="squeue"):
        parse_jobs("slurm_load_jobs error: Unable to contact slurm controller")


@pytest.mark.parametrize(
    ("state", "use"),
    [
        ("IDLE", NodeUse.USABLE),
        ("MIXED+PLANNED", NodeUse.USABLE),
        ("ALLOCATED+COMPLETING", NodeUse.USABLE),
        ("ALLOCATED+MAINTENANCE", NodeUse.USABLE),
        ("ALLOCATED*", NodeUse.UNCLEAR),
        ("UNKNOWN", NodeUse.UNCLEAR),
        ("MIXED+REBOOT_REQUESTED", NodeUse.LEAVING),
        ("IDLE+DRAIN", NodeUse.LEAVING),
        ("DOWN*+DRAIN", NodeUse.LOST),
        ("IDLE+POWERED_DOWN", NodeUse.LOST),
        ("", NodeUse.UNCLEAR),
    ],
)
def test_every_state_has_a_use(state: str, use: NodeUse) -> None:
    assert parse_nodes(f"NodeName=n1 State={state} Weight=1")["n1"].use is use


def test_a_host_list_is_expanded_in_order() -> None:
    assert expand("n[1-3,07-09],login,r[1-2]c[8-9]-x") == [
        *("n1", "n2", "n3", "n07", "n08", "n09", "login"),
        *("r1c8-x", "r1c9-x", "r2c8-x", "r2c9-x"),
    ]
    assert expand("") == []


@pytest.mark.parametrize("text", ["n[1-x]", "n[]", "n[-3]", "n[0-9999999]"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(PeerError):
        expand(text)


@settings(deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=20, unique=True), st.integers(1, 4))
def test_names_survive_being_written_as_a_host_list(numbers: list[int], width: int) -> None:
    names = [f"node{number:0{width}d}" for number in numbers]
    assert expand(f"node[{','.join(f'{number:0{width}d}' for number in numbers)}]") == names
    assert expand(",".join(names)) == names


def test_a_node_that_slurm_says_nothing_of_is_unclear() -> None:
    assert SlurmNode(name="x", states=frozenset()).use is NodeUse.UNCLEAR
