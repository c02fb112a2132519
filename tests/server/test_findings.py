"""Pictures of a diagnosis, from the facts that core and diagnose give; what the planner would do."""

from __future__ import annotations

import pytest

from everstep.core.cluster.coordinator import Coordinator
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.incidents import Incident
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.shape import Shape
from everstep.server import outlook, views
from tests.core.fake_cluster import FakeCluster
from tests.diagnose.test_watch import SLOW, slow_between, story


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


def test_who_waits_points_to_who_would_send_and_the_hung_one_is_suspected() -> None:
    machine, seats = running()
    start_all(machine, seats)
    gradient = Parcel(ParcelKind.GRADIENT, 1, 3, 0, Microbatch(1, 2))
    part = Parcel(ParcelKind.PART, 1, 3, 1, None, 0, 1, 0)
    told(machine, seats[Worker(1, 0)], overdue(Worker(1, 0), str(gradient)))
    told(machine, seats[Worker(0, 1)], overdue(Worker(0, 1), str(part)))
    told(machine, seats[Worker(1, 1)], overdue(Worker(1, 1), "1F1.2", stopped=True))
    found = views.picture(only_incident(machine))
    assert found["suspects"][0] == "worker 1:1"
    waits = {wait["waiter"]: wait for wait in found["waits"]}
    assert waits["1:0"]["for"] == "1:1", "a gradient comes from the next stage"
    assert waits["0:1"]["for"] == "1:1", "a part comes from a peer of the stage"
    assert waits["1:0"]["seconds"] == 2.5
    assert len(found["ruled_out"]) == 2


def test_a_slow_verdict_gives_the_pace_of_everybody() -> None:
    machine, seats = running()
    start_all(machine, seats)
    ((_, verdict),) = story(slow_between(20, 40, 2.0), steps=40)
    assert isinstance(verdict, msg.SlownessFound)
    slow = msg.SlownessFound(**{f: getattr(verdict, f) for f in verdict.__slots__})  # of task "t" already
    machine.handle(slow, 1.0)
    found = views.picture(only_incident(machine))
    assert found["paces"][str(SLOW)] == pytest.approx(2.0, rel=0.1)
    others = {worker: pace for worker, pace in found["paces"].items() if worker != str(SLOW)}
    assert set(others) == {"0:0", "0:1", "1:1"}
    assert all(0.8 < pace < 1.2 for pace in others.values())
    assert found["ops"]
    assert all(row["took_ms"] > 1.4 * row["usual_ms"] for row in found["ops"])


def test_an_incident_without_a_diagnosis_has_nothing_to_draw() -> None:
    machine, seats = running()
    start_all(machine, seats)
    exited = ev.WorkerExited(worker=Worker(0, 0), incarnation=1, reason="killed by SIGKILL")
    told(machine, seats[Worker(0, 0)], msg.TaskEvent(task="t", event=exited))
    found = views.picture(only_incident(machine))
    assert (found["waits"], found["paces"], found["ops"]) == ([], {}, [])
    assert found["suspects"] == ["worker 0:0", f"node {seats[Worker(0, 0)]}"]


def test_the_planner_says_what_it_would_do_without_the_fullest_node_and_decides_nothing() -> None:
    machine, seats = running(nodes=3)
    start_all(machine, seats)
    before = {worker: (seat.node, seat.slot) for worker, seat in machine.tasks["t"].seats.items()}
    (lost,) = outlook.foresee(machine)
    assert lost["if"].startswith("node node-")
    assert lost["then"] == [{"task": "t", "before": 4, "after": 4}], "there is a spare node"
    assert before == {worker: (seat.node, seat.slot) for worker, seat in machine.tasks["t"].seats.items()}
    assert all(node.state == "up" for node in machine.nodes.values())


def test_without_a_spare_it_would_go_on_with_fewer_and_a_new_node_would_fill_the_places() -> None:
    machine, seats = running(nodes=2)
    start_all(machine, seats)
    (lost,) = outlook.foresee(machine)
    assert lost["then"] == [{"task": "t", "before": 4, "after": 2}]
    machine.handle(msg.NodeFellSilent(node="node-1", silent_s=1.0), 2.0)
    machine.handle(msg.NodeLeft(node="node-1"), 3.0)
    assert len(machine.tasks["t"].seats) == 2
    joined = outlook.foresee(machine)[-1]
    assert joined["if"] == "a node with 2 slots joins"
    assert joined["then"] == [{"task": "t", "before": 2, "after": 4}]


def test_waf_falls_with_a_death_and_full_stays() -> None:
    machine, seats = running(nodes=2)
    start_all(machine, seats)
    now, full = outlook.waf(machine)
    assert now == full > 0
    exited = ev.WorkerExited(worker=Worker(0, 0), incarnation=1, reason="killed by SIGKILL")
    told(machine, seats[Worker(0, 0)], msg.TaskEvent(task="t", event=exited))
    less, same = outlook.waf(machine)
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
