"""A cluster of real processes: a coordinator, two agents, four workers, and everything dies once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from everstep.job.job import Job
from everstep.launch.local.api import run_job
from everstep.node.fork_server import ForkServer
from harness.cluster import Cluster, replayed, small_job

STEPS = 40


def test_training_survives_its_workers_its_coordinator_and_a_node(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    one_worker = small_job(tmp_path, steps=STEPS, replicas=1, stages=1, microbatches=8)  # the same bits
    outcome = run_job(Job.from_dict(one_worker), fork_server=fork_server)
    clean = {step: row.loss for step, row in outcome.by_step().items()}
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        for node in "ab":
            cluster.start_agent(node, slots=2)
        cluster.nodes_up(2)
        cluster.submit(small_job(tmp_path, steps=STEPS))
        cluster.step_reached(2)

        os.kill(cluster.workers()["0:1"]["pid"], signal.SIGKILL)  # a worker dies
        cluster.until(lambda: cluster.incidents()[0]["closed_at"], "the first incident closes")

        cluster.kill_coordinator()  # the coordinator dies; training goes on without it
        cluster.start_coordinator()
        cluster.nodes_up(2)
        assert len(cluster.incidents()) == 1
        cluster.all_members()

        os.kill(cluster.workers()["1:0"]["pid"], signal.SIGSTOP)  # a worker hangs
        hung = cluster.until(lambda: cluster.incidents()[1], "the hang is noticed")
        assert hung["workers"] == ["1:0"]
        assert hung["verdict"]["kind"] == "task hang"
        cluster.until(lambda: cluster.incidents()[1]["closed_at"], "the second incident closes")

        cluster.all_members()
        cluster.signal_node("b", signal.SIGKILL)  # a node dies, with its agent
        cluster.until(lambda: cluster.incidents()[2]["closed_at"], "the third incident closes")
        cluster.start_agent("b", slots=2)  # and comes back

        told = cluster.finished()
        assert told["state"] == "finished", told["because"]
        assert {row["step"]: row["loss"] for row in told["rows"]} == clean
        assert told["microbatches"]["issued"] == told["microbatches"]["committed"]
        assert all(incident["closed_at"] for incident in cluster.incidents())
        before = cluster.settled()
        cluster.kill_coordinator()
    assert replayed(tmp_path / "state-first", before[0]) == before
