"""A cluster of real processes: a coordinator, agents, four workers, and everything dies once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from everstep.job.job import Job
from everstep.launch.local.api import run_job
from everstep.node.fork_server import ForkServer
from harness.cluster import Cluster, paced_job, replayed

STEPS = 40


def losses_of_one_worker(folder: Path, steps: int, fork_server: ForkServer) -> dict[int, float]:
    job = paced_job(folder, steps=steps, rest_s=0, replicas=1, stages=1, microbatches=8)
    outcome = run_job(Job.from_dict(job), fork_server=fork_server)
    return {step: row.loss for step, row in outcome.by_step().items()}


def kill_a_worker_and_the_coordinator(cluster: Cluster, nodes: int) -> None:
    cluster.step_reached(2)
    os.kill(cluster.workers()["0:1"]["pid"], signal.SIGKILL)
    cluster.until(lambda: cluster.incidents()[0]["closed_at"], "the first incident closes")
    cluster.kill_coordinator()  # training goes on without it
    cluster.start_coordinator()
    cluster.nodes_up(nodes)
    assert len(cluster.incidents()) == 1
    cluster.all_members()


def ends_as(cluster: Cluster, clean: dict[int, float]) -> None:
    """Nothing is lost and nothing done twice, and the journal gives the same state again."""
    told = cluster.finished()
    assert told["state"] == "finished", told["because"]
    assert {row["step"]: row["loss"] for row in told["rows"]} == clean
    assert told["microbatches"]["issued"] == told["microbatches"]["committed"]
    assert all(incident["closed_at"] for incident in cluster.incidents())
    before = cluster.settled()
    cluster.kill_coordinator()
    assert replayed(cluster.folder / "state-first", before[0]) == before


def test_training_survives_a_worker_and_its_coordinator(tmp_path: Path, fork_server: ForkServer) -> None:
    clean = losses_of_one_worker(tmp_path, 20, fork_server)
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("a", slots=4)
        cluster.nodes_up(1)
        cluster.submit(paced_job(tmp_path, steps=20))
        kill_a_worker_and_the_coordinator(cluster, nodes=1)
        ends_as(cluster, clean)


# By default hangs of real workers are in `tests/launch`, and deaths of nodes in the storms of `tests/lab`.
@pytest.mark.slow
def test_training_survives_its_workers_its_coordinator_and_a_node(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    clean = losses_of_one_worker(tmp_path, STEPS, fork_server)
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        for node in "ab":
            cluster.start_agent(node, slots=2)
        cluster.nodes_up(2)
        cluster.submit(paced_job(tmp_path, steps=STEPS))
        kill_a_worker_and_the_coordinator(cluster, nodes=2)

        os.kill(cluster.workers()["1:0"]["pid"], signal.SIGSTOP)  # a worker hangs
        hung = cluster.until(lambda: cluster.incidents()[1], "the hang is noticed")
        assert hung["workers"] == ["1:0"]
        assert hung["verdict"]["kind"] == "task hang"
        cluster.until(lambda: cluster.incidents()[1]["closed_at"], "the second incident closes")

        cluster.all_members()
        cluster.signal_node("b", signal.SIGKILL)  # a node dies, with its agent
        cluster.until(lambda: cluster.incidents()[2]["closed_at"], "the third incident closes")
        cluster.start_agent("b", slots=2)  # and comes back
        ends_as(cluster, clean)
