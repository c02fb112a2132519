"""What a coordinator keeps is bounded, however long it runs; a replay forgets the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.core.cluster import retention
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.snapshot import digest, freeze, thaw
from everstep.protocol import messages as msg
from everstep.protocol.incidents import MOST_EVIDENCE, Evidence, IncidentLog
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.server.record import KEPT_ROWS_OVER, ClusterRecord
from tests.support.fake_cluster import FakeCluster

BOUND = 8


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST_TASKS_OVER", "MOST_NODES_GONE", "MOST_CLOSED"):
        monkeypatch.setattr(retention, name, BOUND)
    monkeypatch.setattr(retention, "EVERY", 4)


def finish(cluster: FakeCluster, name: str) -> None:
    cluster.submit(name, Shape(1, 2, 1), steps=2)
    cluster.exits(Worker(0, 1), "killed by SIGKILL", name)  # an incident that closes when training resumes
    cluster.seal(name)
    cluster.seal(name)
    assert cluster.coordinator.tasks[name].state == "finished"


def size(coordinator: Coordinator) -> int:
    return len(json.dumps(freeze(coordinator)))


def test_many_tasks_incidents_and_nodes_leave_a_state_of_bounded_size() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    sizes = []
    for number in range(60):
        finish(cluster, f"t{number}")
        cluster.join(f"spot-{number}", 1)
        cluster.hear(msg.NodeLeft(node=f"spot-{number}"))
        sizes.append(size(cluster.coordinator))
    machine = cluster.coordinator
    assert BOUND <= len(machine.tasks) <= 2 * BOUND
    assert "t59" in machine.tasks
    assert "t0" not in machine.tasks
    assert BOUND <= len(machine.log.incidents) <= 2 * BOUND
    assert machine.log.incidents[-1].number == 60 == len(machine.log.incidents) + machine.log.forgotten.count
    assert 2 + BOUND <= len(machine.nodes) <= 2 + 2 * BOUND
    assert "spot-59" in machine.nodes
    assert not any(name not in machine.tasks for node in machine.nodes.values() for name in node.opened)
    assert max(sizes[30:]) <= 1.2 * max(sizes[10:30]), "the snapshot grows with the cluster's age"


def test_what_is_forgotten_is_the_same_after_a_replay_and_after_a_snapshot() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    for number in range(20):
        finish(cluster, f"t{number}")
    machine, again = cluster.coordinator, Coordinator()
    thaw(again, json.loads(json.dumps(freeze(machine))))
    assert digest(again) == digest(machine)
    assert again.log.forgotten == machine.log.forgotten
    assert again.log.forgotten.count > 0


def test_a_task_that_ran_for_long_is_still_there_when_it_ends() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    cluster.submit("long", Shape(1, 2, 1), steps=2)
    for number in range(3 * BOUND):
        finish(cluster, f"t{number}")
    cluster.seal("long")
    cluster.seal("long")
    for _ in range(8):
        cluster.hear(msg.TimePassed())
    assert cluster.coordinator.tasks["long"].state == "finished"


def test_a_drained_node_that_is_gone_is_forgotten_last() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "lemon": 1})
    cluster.hear(msg.DrainRequested(node="lemon"))
    cluster.hear(msg.NodeLeft(node="lemon"))
    for number in range(3 * BOUND):
        cluster.join(f"spot-{number}", 1)
        cluster.hear(msg.NodeLeft(node=f"spot-{number}"))
    assert "lemon" in cluster.coordinator.nodes
    assert "spot-0" not in cluster.coordinator.nodes


def test_nodes_that_were_forgotten_come_back_without_an_incident_and_are_sent_orders_that_count() -> None:
    """A mass loss: each agent that came back was one that disagreed with the journal."""
    cluster = FakeCluster(nodes={"a": 1})
    cluster.hear(msg.JournalBegun(journal="j", version="1", because="it is new"))
    names = [f"n{number}" for number in range(3 * BOUND)]
    for name in names:
        cluster.join(name, 1)
    done = cluster.coordinator.nodes["n0"].sent
    assert done > 0
    for name in names:
        cluster.hear(msg.NodeLeft(node=name))
    for _ in range(8):
        cluster.hear(msg.TimePassed())
    assert "n0" not in cluster.coordinator.nodes
    back = msg.NodeJoined(node="n0", boot="n0-1", slots=1, host="h", journal="j", done=done)
    found = cluster.coordinator.handle(back, cluster.now + 1.0)
    orders = [one for one in found if isinstance(one, msg.Dispatch)]
    assert [order.number for order in orders] == list(range(done + 1, done + 1 + len(orders)))
    assert orders
    assert cluster.coordinator.log.incidents == []


def test_open_incidents_stay_and_counts_only_rise() -> None:
    log = IncidentLog()
    for number in range(40):
        incident = log.new(task="t", workers=[], what="?", step=0, now=float(number))
        if number != 3:
            incident.close(number + 0.5, "it worked")
        log.forget_closed(BOUND)
    assert [i.number for i in log.open_ones()] == [4]
    assert len(log.incidents) + log.forgotten.count == 40
    assert len(log.incidents) == BOUND + 1
    assert log.forgotten.recoveries == {"0.5": 31}
    assert log.forgotten.verdicts == {"none none": 31}


def test_the_evidence_of_one_incident_is_bounded_and_its_beginning_stays() -> None:
    incident = IncidentLog().new(task="t", workers=[], what="?", step=0, now=0.0)
    for number in range(5 * MOST_EVIDENCE):
        incident.add(Evidence(at=float(number), source="link", text=str(number)))
    texts = [evidence.text for evidence in incident.evidence]
    assert len(texts) == MOST_EVIDENCE
    assert texts[0] == "0"
    assert texts[-1] == str(5 * MOST_EVIDENCE - 1)


def test_the_rows_of_tasks_that_are_over_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from everstep.server import record as module

    assert KEPT_ROWS_OVER >= 10_000
    monkeypatch.setattr(module, "KEPT_ROWS_OVER", 12)
    monkeypatch.setattr(module, "LEAST_ROWS_OVER", 1)
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    record = ClusterRecord(say=lambda line: None)
    record.begin(cluster.coordinator, record.hearts, 0, None)
    shown = cluster.handled

    def both(one: object) -> None:
        shown(one)  # type: ignore[arg-type]
        record.handled(one)  # type: ignore[arg-type]

    monkeypatch.setattr(cluster, "handled", both)
    for number in range(4 * BOUND):
        finish(cluster, f"t{number}")
    assert len(record.steps) <= 2 * BOUND
    assert set(record.steps) <= set(cluster.coordinator.tasks)
    rows = [len(steps.rows) for steps in record.steps.values()]
    assert sum(rows) <= 12 + 1
    assert rows[-1] == 2
