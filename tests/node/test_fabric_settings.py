"""`everstep agent --fabric FILE`: which worker gets which flows and ports; real workers follow them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.errors import UserError
from everstep.node.fabric_settings import FabricSettings
from everstep.node.steer import steering_from
from everstep.protocol.messages import Sender
from everstep.protocol.ops import Worker
from harness import fabric_testbed
from harness.steered_training import fabric_file

DOCUMENT = fabric_file(fabric_testbed.Testbed(leaves=2, spines=4, rate_mbit=40.0))


def settings(node: str = "h1", slots: int = 2, **more) -> FabricSettings:
    return FabricSettings(DOCUMENT, node=node, ports=range(24000, 25000), slots=slots, **more)


def sender(replica: int, stage: int, task: str = "job") -> Sender:
    return Sender(task, Worker(replica, stage), 1)


def test_each_worker_gets_its_own_flows_and_ports_that_no_other_worker_of_the_node_has() -> None:
    first, second = settings().of(sender(0, 0), 0), settings().of(sender(0, 1), 1)
    assert first is not None
    assert second is not None
    assert first["worker_flows"] == ["job reduce 0.0 0-1"]
    assert second["worker_flows"] == ["job reduce 1.0 0-1"]
    assert (first["ports"], second["ports"]) == ([24000, 24499], [24500, 24999])


def test_workers_of_both_nodes_compute_the_same_plan_and_take_their_own_part_of_it() -> None:
    here = steering_from(settings("h1").of(sender(0, 0), 0))
    there = steering_from(settings("h2").of(sender(1, 0), 0))
    assert here.watch.routing.paths.tolist() == there.watch.routing.paths.tolist()
    assert list(here.ports.planned) == ["10.1.2.2"]
    assert list(there.ports.planned) == ["10.1.1.2"]


def test_a_replica_that_is_planned_elsewhere_takes_the_flows_of_its_stage_from_its_node() -> None:
    found = settings("h1").of(sender(1, 0), 0)
    assert found is not None
    assert found["worker_flows"] == ["job reduce 0.0 0-1"]


def test_a_task_that_the_file_does_not_name_is_not_steered() -> None:
    assert settings().of(sender(0, 0, "other"), 0) is None


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"node": "h9"}, "node 'h9' is not in testbed; its nodes are h1, h2."),
        ({"slots": 40}, "has 1000 ports for 40 slots; give at least 64 each."),
    ],
)
def test_a_mistake_is_one_sentence(wrong: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        settings(**wrong)


@pytest.mark.slow
def test_workers_of_agents_with_a_fabric_file_send_by_the_planned_spines_only() -> None:
    """Real agents and workers on two hosts of a network of namespaces; the cables count the bytes."""
    reason = fabric_testbed.why_not()
    if reason is not None:
        pytest.skip(reason)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "harness.steered_training", "--harm", "none", "--steps", "8", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
    )
    found = json.loads(done.stdout)
    sent = {int(spine): count for spine, count in found["spine_bytes"].items()}
    busy = {spine for spine, count in sent.items() if count > sum(sent.values()) / 5}
    assert found["finished"]
    assert len(found["planned_spines"]) == 2
    assert busy == set(found["planned_spines"]), found
