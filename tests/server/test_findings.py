"""Whom an incident suspects, and what achieved work is worth."""

from __future__ import annotations

import pytest

from everstep.core.cluster.coordinator import Coordinator
from everstep.plan.measured import Measurements
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.incidents import Incident
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.shape import Shape
from everstep.server import views
from everstep.server.metrics import waf
from tests.support.fake_cluster import FakeCluster


def running(*, nodes: int = 2, slots: int = 2) -> tuple[Coordinator, dict[Worker, str]]:
    """A task of 2 x 2 that trains, and where its workers sit."""
    machine = Coordinator(planned=False)
    for number in range(nodes):
        name = f"node-{number}"
        machine.handle(msg.NodeJoined(node=name, boot="1", slots=slots, host="127.0.0.1"), 0.0)
    submitted = msg.TaskSubmitted(task="t", job={}, shape=Shape(2, 2, 4), steps=9, secret="s")
    machine.handle(submitted, 0.0)
    return machine, {worker: seat.node for worker, seat in machine.tasks["t"].seats.items()}


def told(machine: Coordinator, node: str, report: msg.NodeReport) -> None:
    number = machine.nodes[node].heard + 1
    said = report.event if isinstance(report, msg.TaskEvent) else report
    sender = msg.Sender("t", said.worker, machine.tasks["t"].seats[said.worker].incarnation)  # type: ignore[union-attr]
    machine.handle(msg.FromNode(node=node, boot="1", number=number, report=report, sender=sender), 1.0)


def start_all(machine: Coordinator, seats: dict[Worker, str]) -> None:
    for worker, node in seats.items():
        incarnation = machine.tasks["t"].seats[worker].incarnation
        started = ev.WorkerStarted(worker=worker, incarnation=incarnation, address=("127.0.0.1", 1))
        told(machine, node, msg.TaskEvent(task="t", event=started))


def overdue(worker: Worker, doing: str, *, stopped: bool = False) -> msg.OpOverdue:
    return msg.OpOverdue(
        task="t",
        worker=worker,
        incarnation=1,
        doing=doing,
        busy=stopped,
        stopped=stopped,
        elapsed_s=2.5,
        expected_s=0.1,
        step=3,
    )


def only_incident(machine: Coordinator) -> Incident:
    (one,) = machine.log.incidents
    return one


def test_the_hung_worker_is_suspected_and_those_who_wait_for_it_are_ruled_out() -> None:
    machine, seats = running()
    start_all(machine, seats)
    gradient = Parcel(ParcelKind.GRADIENT, 1, 3, 0, Microbatch(1, 2))
    part = Parcel(ParcelKind.PART, 1, 3, 1, None, 0, 1, 0)
    told(machine, seats[Worker(1, 0)], overdue(Worker(1, 0), str(gradient)))
    told(machine, seats[Worker(0, 1)], overdue(Worker(0, 1), str(part)))
    told(machine, seats[Worker(1, 1)], overdue(Worker(1, 1), "1F1.2", stopped=True))
    found = views.finding(only_incident(machine))
    assert found["suspects"][0] == "worker 1:1"
    assert len(found["ruled_out"]) == 2


def test_a_worker_that_has_ended_and_its_node_are_suspected() -> None:
    machine, seats = running()
    start_all(machine, seats)
    exited = ev.WorkerExited(worker=Worker(0, 0), incarnation=1, reason="killed by SIGKILL")
    told(machine, seats[Worker(0, 0)], msg.TaskEvent(task="t", event=exited))
    found = views.finding(only_incident(machine))
    assert found["suspects"] == ["worker 0:0", f"node {seats[Worker(0, 0)]}"]


def test_waf_falls_with_a_death_and_full_stays() -> None:
    machine, seats = running(nodes=2)
    start_all(machine, seats)
    now, full = waf(machine, Measurements())
    assert now == full > 0
    exited = ev.WorkerExited(worker=Worker(0, 0), incarnation=1, reason="killed by SIGKILL")
    told(machine, seats[Worker(0, 0)], msg.TaskEvent(task="t", event=exited))
    less, same = waf(machine, Measurements())
    assert less < now
    assert same == full


@pytest.mark.parametrize(
    ("copied", "says"),
    [
        (None, "back at the initial state: 3 steps are done again"),
        (2, "back at step 2, from the memory of nodes: 1 step is done again"),
        (3, "back at step 3, from the memory of nodes: no step is lost"),
    ],
)
def test_an_incident_says_what_was_lost_with_the_last_worker_of_a_stage(
    copied: int | None, says: str
) -> None:
    """It said that the rest of the step was rescheduled, as if nothing was lost."""
    cluster = FakeCluster(nodes={"a": 1, "b": 1, "c": 1}, memory_port=7)
    cluster.submit(shape=Shape(1, 2, 2))
    for step in (1, 2, 3):
        cluster.seal()
        if step == copied:
            cluster.copy_to_memory(step)
    cluster.exits(Worker(0, 1), "killed by SIGKILL")
    incident = cluster.coordinator.log.incidents[-1]
    assert incident.restored_from == (copied or 0)
    assert [text for _, text in views._timeline(incident, False)][:1] == [
        f"{says}, in epoch {incident.epoch}"
    ]
