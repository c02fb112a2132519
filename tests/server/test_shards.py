"""Workers with shards on a cluster of real agents: slots of one node, a follower's death, a drain, two
tasks.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cluster import Cluster, small_job

pytestmark = pytest.mark.slow
STEPS = 12


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes: two with room for two shards, one with a single slot."""
    with Cluster(tmp_path, eager=True) as running:
        running.start_coordinator()
        for name, slots in (("a", 2), ("b", 2), ("c", 1)):
            running.start_agent(name, slots=slots)
        running.nodes_up(3)
        yield running


def clean_losses(cluster: Cluster, job: dict) -> dict[int, float]:
    cluster.submit(job, "clean")
    assert cluster.finished("clean", within_s=200)["state"] == "finished"
    return cluster.losses("clean")


def test_a_followers_death_on_a_cluster_leaves_the_losses_of_a_clean_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = small_job(tmp_path, steps=STEPS, replicas=2, stages=1, shards=2)
    clean = clean_losses(cluster, job)
    cluster.submit(job, faults=["stage=0,replica=1,step=4,op=I1,when=inside,shard=1"])
    told = cluster.finished(within_s=200)
    assert told["state"] == "finished"
    assert cluster.losses() == clean
    (incident,) = [one for one in cluster.incidents() if one["task"] == "job"]
    assert "lost its shard 1 (killed by SIGKILL)" in str(incident)


def test_the_shards_of_a_worker_have_slots_of_one_node_and_a_drain_moves_them_together(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = small_job(tmp_path, steps=400, replicas=1, stages=1, shards=2, memory_interval=1)
    cluster.submit(job)
    cluster.step_reached(3, within_s=120)
    nodes = {seat["node"] for seat in cluster.task()["seats"]}
    assert nodes <= {"a", "b"}, "the node with one slot has no room for two shards"
    cluster.client.post("/v1/nodes/a/drain", {"force": True})
    cluster.until(
        lambda: [seat["node"] for seat in cluster.task()["seats"]] == ["b"], "b has it all", within_s=120
    )
    before = cluster.task()["step"]
    cluster.step_reached(before + 2, within_s=120)
    assert cluster.task()["state"] == "running"


def test_two_tasks_with_shards_share_nodes_and_not_slots(cluster: Cluster, tmp_path: Path) -> None:
    job = small_job(tmp_path, steps=STEPS, replicas=1, stages=1, shards=2)
    clean = clean_losses(cluster, job)
    for name in ("one", "two"):
        cluster.submit(job, name)
    for name in ("one", "two"):
        assert cluster.finished(name, within_s=200)["state"] == "finished"
        assert cluster.losses(name) == clean


def test_a_node_that_comes_back_with_one_gpu_less_has_its_task_continue_with_fewer_shards(
    tmp_path: Path,
) -> None:
    """One worker of two shards on a node of two slots, which dies and returns with one. Two shards have no
    place any more; the planner lets one take over the state of both.
    """
    job = small_job(tmp_path, steps=STEPS, replicas=1, stages=1, shards=2, min_shards=1)
    job |= {"checkpoint": {"folder": "kept", "interval": 1}}
    with Cluster(tmp_path, eager=True) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("a", slots=2)
        cluster.nodes_up(1)
        cluster.submit(job)
        cluster.step_reached(5, within_s=120)
        cluster.signal_node("a", signal.SIGKILL)
        cluster.agents.pop("a").wait()
        cluster.start_agent("a", slots=1)
        assert cluster.finished(within_s=240)["state"] == "finished", cluster.logs()[-3000:]
        losses = cluster.losses()
        alone = clean_losses(cluster, small_job(tmp_path, steps=STEPS, replicas=1, stages=1))
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert max(abs(losses[step] - alone[step]) / alone[step] for step in losses) < 1e-6
