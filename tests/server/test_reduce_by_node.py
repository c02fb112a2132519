"""Several replicas of a stage on each of two nodes: real processes, a node is an address of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.node.fork_server import ForkServer
from harness.cluster import Cluster, paced_job
from tests.server.test_cluster import losses_of_one_worker

STEPS = 12
DEATHS = [
    "stage=0,replica=1,step=4,op=R,when=gathering",
    "stage=0,replica=3,step=8,op=R,when=sending",
]
HOSTS = {"a": "127.0.0.2", "b": "127.0.0.3"}


@pytest.mark.parametrize(
    ("more", "deaths"),
    [
        ({}, DEATHS),
        pytest.param({"optimizer": {"shard": True}}, DEATHS[:1], marks=pytest.mark.slow, id="sharded"),
        pytest.param({"transport": "tcp"}, DEATHS, marks=pytest.mark.slow, id="tcp"),
        pytest.param({"shards": 2}, DEATHS, marks=pytest.mark.slow, id="tensor parallel"),
    ],
)
def test_gatherers_die_and_the_losses_are_those_of_one_worker(
    tmp_path: Path, fork_server: ForkServer, more: dict[str, Any], deaths: list[str]
) -> None:
    """The deaths strike only where parts are gathered."""
    job = paced_job(tmp_path, steps=STEPS, rest_s=0.01, replicas=4, stages=1, microbatches=2, **more)
    with Cluster(tmp_path, eager=True) as cluster:
        cluster.start_coordinator()
        for node, host in HOSTS.items():
            cluster.start_agent(node, slots=2 * more.get("shards", 1), host=host)
        cluster.nodes_up(2)
        if {"shards", "accumulate"} & more.keys():  # other bits than those of one worker with strict sums
            cluster.submit(job, "clean")
            assert cluster.finished("clean", within_s=200)["state"] == "finished"
            clean = cluster.losses("clean")
        else:
            clean = losses_of_one_worker(tmp_path, STEPS, fork_server)
        cluster.submit(job, faults=deaths)
        told = cluster.finished(within_s=200)
        assert told["state"] == "finished", told["because"]
        assert cluster.losses() == clean
        assert told["microbatches"]["issued"] == told["microbatches"]["committed"]
        of_job = [incident for incident in cluster.incidents() if incident["task"] == "job"]
        assert sorted(one["workers"][0] for one in of_job) == ["1:0", "3:0"][: len(deaths)]
