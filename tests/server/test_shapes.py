"""Agents and workers as real processes: a task moves to another shape while a node dies, and a stage that is
lost with its node comes back from another node's memory.
"""

import signal
from pathlib import Path

import pytest

from harness.cluster import Cluster, small_job

pytestmark = pytest.mark.slow
STEPS = 16


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    with Cluster(tmp_path, eager=True) as started:
        started.start_coordinator()
        for node in "abcdef":
            started.start_agent(node, slots=1)
        started.nodes_up(6)
        yield started


def run_clean(cluster: Cluster, job: dict) -> dict[int, float]:
    cluster.submit(job, "clean")
    assert cluster.finished("clean")["state"] == "finished"
    return cluster.losses("clean")


def test_a_node_that_dies_while_its_task_takes_another_shape(cluster: Cluster, tmp_path: Path) -> None:
    job = small_job(tmp_path, steps=STEPS, memory_interval=1)
    clean = run_clean(cluster, job)
    cluster.submit(job)
    cluster.step_reached(4)
    victim = cluster.task()["seats"][-1]["node"]
    cluster.client.post("/v1/tasks/job/reshape", {"replicas": 1, "stages": 3})
    cluster.signal_node(victim, signal.SIGKILL)
    told = cluster.finished()
    assert told["state"] == "finished"
    assert (told["shape"]["replicas"], told["shape"]["stages"]) == (1, 3)
    assert cluster.losses() == clean


@pytest.mark.parametrize(("asked", "at", "back"), [({"memory_interval": 1}, 8, 5), ({}, 13, 10)])
def test_a_stage_lost_with_its_node_comes_back_from_another_node_s_memory(
    cluster: Cluster, tmp_path: Path, asked: dict, at: int, back: int
) -> None:
    """Also if the job does not ask for copies: by default there is one every 10 steps."""
    job = small_job(tmp_path, steps=STEPS, replicas=1, **asked)
    clean = run_clean(cluster, job)
    cluster.submit(job)
    cluster.step_reached(at)
    seat = next(seat for seat in cluster.task()["seats"] if seat["worker"] == "0:1")
    cluster.signal_node(seat["node"], signal.SIGKILL)
    assert cluster.finished()["state"] == "finished"
    assert cluster.losses() == clean
    incident = next(one for one in cluster.incidents() if one["task"] == "job")
    assert incident["restored_where"] == "the memory of nodes"
    assert incident["restored_from"] >= back


def test_sharded_states_move_to_another_shape_while_a_node_dies(cluster: Cluster, tmp_path: Path) -> None:
    job = small_job(tmp_path, steps=STEPS, replicas=2, memory_interval=1, optimizer={"shard": True})
    clean = run_clean(cluster, job)
    cluster.submit(job)
    cluster.step_reached(4)
    victim = cluster.task()["seats"][-1]["node"]
    cluster.client.post("/v1/tasks/job/reshape", {"replicas": 4, "stages": 1})
    cluster.signal_node(victim, signal.SIGKILL)
    told = cluster.finished()
    assert told["state"] == "finished"
    assert (told["shape"]["replicas"], told["shape"]["stages"]) == (4, 1)
    assert cluster.losses() == clean


def test_sharded_states_whose_holders_are_lost_come_back_from_other_nodes_memory(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Owner and guard of a chunk die with their nodes: only copies on other nodes are left."""
    job = small_job(tmp_path, steps=STEPS, replicas=4, stages=1, memory_interval=1, optimizer={"shard": True})
    clean = run_clean(cluster, job)
    cluster.submit(job)
    cluster.step_reached(8)
    seats = {seat["worker"]: seat["node"] for seat in cluster.task()["seats"]}  # in a shape it has chosen
    for node in [node for worker, node in sorted(seats.items()) if worker.endswith(":0")][:2]:
        cluster.signal_node(node, signal.SIGKILL)
    assert cluster.finished()["state"] == "finished"
    assert cluster.losses() == clean


def test_a_shape_that_cannot_be_is_refused_in_a_sentence(cluster: Cluster, tmp_path: Path) -> None:
    cluster.submit(small_job(tmp_path, steps=200))
    for shape, sentence in (
        ({"replicas": 3, "stages": 2}, "3 replicas cannot share evenly"),
        ({"replicas": 1, "stages": 9}, "the model has 6 layers"),
        ({"replicas": "1", "stages": 2}, "give whole numbers"),
        ({"replicas": 1, "stages": 2, "shards": 3}, "shards is 3, which does not divide model.heads 4"),
        ({"replicas": 1, "stages": 2, "shards": 4}, "4 slots of one node per stage"),
    ):
        with pytest.raises(Exception, match=sentence):
            cluster.client.post("/v1/tasks/job/reshape", shape)
    assert cluster.task()["state"] == "running"
