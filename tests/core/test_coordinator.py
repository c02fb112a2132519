"""The coordinator on `handle`: events in, orders out, told as claims."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.node_states import NodeState
from everstep.core.cluster.snapshot import digest, freeze, thaw
from everstep.core.cluster.task import TaskState
from everstep.core.faults.severity import ErrorKind, known
from everstep.core.task.recovery import Recovery
from everstep.core.task.states import Copied, Member, Running
from everstep.drive import thinking
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.actions import Action
from everstep.protocol.incidents import SlotsLost
from everstep.protocol.moment import Moment
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.protocol.work import EpochFacts
from everstep.schedule.task_scheduler import TaskScheduler
from tests.support.fake_cluster import FakeCluster

W00, W01, W10, W11 = Worker(0, 0), Worker(0, 1), Worker(1, 0), Worker(1, 1)


def running(**more: object) -> FakeCluster:
    cluster = FakeCluster(**more)  # type: ignore[arg-type]
    cluster.submit()
    cluster.seal()
    return cluster


@pytest.mark.parametrize(("members", "newcomer"), [("", "40 bits"), ("40 bits", "")], ids=["newer", "older"])
def test_a_worker_whose_version_sums_otherwise_takes_no_part(members: str, newcomer: str) -> None:
    """In the middle of an upgrade. The task had trained with wrong gradients, and only a log said so."""
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2})
    cluster.crew.sums = dict.fromkeys("abc", members)
    cluster.submit()
    cluster.seal()
    lost = Worker(1, 1)
    stays = {
        worker: actor.incarnation for (_, worker), actor in cluster.crew.actors.items() if worker != lost
    }
    cluster.crew.sums = dict.fromkeys("abc", newcomer)
    cluster.exits(lost, "killed by SIGKILL")
    for number in range(30):
        cluster.wait(5)
        if number % 10 == 0:
            cluster.seal()
        assert ("t", lost) not in cluster.crew.actors, "it is ended as soon as it says how it sums"
    task = cluster.coordinator.tasks["t"]
    assert task.state is TaskState.RUNNING
    assert {worker: actor.incarnation for (_, worker), actor in cluster.crew.actors.items()} == stays
    assert {node.state for node in cluster.coordinator.nodes.values()} == {NodeState.UP}
    assert not any(node.isolated_slots for node in cluster.coordinator.nodes.values())
    (told,) = [one for one in cluster.coordinator.log.incidents if "sums gradients of this job" in one.what]
    assert told.verdict is not None
    assert told.verdict.kind == "mixed versions"
    assert not told.closed, "its place is empty"


USES, DOES_NOT = (ev.UsesKernels(device="one GPU", without=without) for without in ((), ("fast",)))


def test_workers_on_other_devices_need_not_use_the_same_kernels() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2})
    cluster.crew.kernels = USES
    cluster.submit()
    cluster.seal()
    cluster.crew.kernels = ev.UsesKernels(device="another GPU", without=("fast",))
    cluster.exits(Worker(1, 1), "killed by SIGKILL")
    cluster.wait(5)
    assert ("t", Worker(1, 1)) in cluster.crew.actors


@pytest.mark.parametrize(("members", "newcomer"), [(USES, DOES_NOT), (DOES_NOT, USES)])
def test_a_worker_that_uses_other_kernels_takes_no_part_until_a_new_process_uses_the_same(
    members: ev.UsesKernels, newcomer: ev.UsesKernels
) -> None:
    """Its microbatches would have other bits: only a line of a log said so."""
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2})
    cluster.crew.kernels = members
    cluster.submit()
    cluster.seal()
    lost = Worker(1, 1)
    cluster.crew.kernels = newcomer
    cluster.exits(lost, "killed by SIGKILL")
    cluster.wait(5)
    assert ("t", lost) not in cluster.crew.actors
    (told,) = [one for one in cluster.coordinator.log.incidents if "same fast kernels" in one.what]
    assert told.verdict is not None
    assert told.verdict.kind == "mixed versions"
    assert {node.state for node in cluster.coordinator.nodes.values()} == {NodeState.UP}
    cluster.crew.kernels = members
    for _ in range(4):
        cluster.wait(5)
        cluster.seal()
    assert ("t", lost) in cluster.crew.actors
    assert all(incident.closed for incident in cluster.coordinator.log.incidents)


def test_a_worker_of_the_right_version_ends_the_incident_of_one_that_was_not() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2})
    cluster.submit()
    cluster.seal()
    cluster.crew.sums = dict.fromkeys("abc", "40 bits")
    cluster.exits(Worker(1, 1), "killed by SIGKILL")
    cluster.wait(1)
    assert ("t", Worker(1, 1)) not in cluster.crew.actors
    cluster.crew.sums = {}
    for _ in range(4):
        cluster.wait(5)
        cluster.seal()
    assert ("t", Worker(1, 1)) in cluster.crew.actors
    assert all(incident.closed for incident in cluster.coordinator.log.incidents)


def test_a_stage_that_lost_all_its_workers_may_begin_again_with_another_version() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2})
    cluster.crew.sums = dict.fromkeys("abc", "")
    cluster.crew.on_disk = 1
    cluster.submit()
    cluster.seal()
    cluster.crew.sums = dict.fromkeys("abc", "40 bits")
    for worker in (Worker(0, 1), Worker(1, 1)):
        cluster.exits(worker, "killed by SIGKILL")
    for _ in range(4):
        cluster.wait(5)
    assert {worker for _, worker in cluster.crew.actors} == set(Shape(2, 2, 1).workers())
    cluster.seal()
    assert all(incident.closed for incident in cluster.coordinator.log.incidents)


def node_of(cluster: FakeCluster, worker: Worker, task: str = "t") -> str:
    return cluster.coordinator.tasks[task].seats[worker].node


def test_a_task_is_placed_so_that_no_node_holds_all_replicas_of_a_stage() -> None:
    cluster = running()
    for stage in (0, 1):
        assert node_of(cluster, Worker(0, stage)) != node_of(cluster, Worker(1, stage))


def test_a_dead_worker_comes_back_on_its_node_and_the_incident_closes() -> None:
    cluster = running()
    node = node_of(cluster, W01)
    cluster.exits(W01, "killed by SIGKILL")
    task = cluster.coordinator.tasks["t"]
    assert task.seats[W01].node == node
    assert task.seats[W01].incarnation == 2
    (incident,) = cluster.coordinator.log.incidents
    assert incident.closed
    assert incident.verdict is not None
    assert incident.verdict.severity == 2
    assert [r.what for r in incident.remedies] == ["restart the worker"]


@pytest.mark.parametrize(("known", "told"), [(60, 60), (58, 58), (0, None)])
def test_an_incident_is_told_in_the_step_that_the_dead_worker_was_in(known: int, told: int | None) -> None:
    """`--kill step=60` was told as "incident 1 in step 59": stage 0 is in the next step while the last stage
    still has ops of this one.
    """
    cluster = running()
    task = cluster.coordinator.tasks["t"]
    cluster.exits(W01, "killed by SIGKILL", step=known)
    (incident,) = cluster.coordinator.log.incidents
    assert incident.step == (told or task.next_step)
    assert incident.disturbed == range(min(incident.step, task.next_step), incident.step + 1)


def accused_by_another_task(cluster: FakeCluster) -> None:
    """The program of another task has spoken of broken hardware on every node."""
    for node in cluster.coordinator.nodes.values():
        node.accused["another"] = cluster.now


def test_a_grave_error_that_two_tasks_report_isolates_the_node_and_its_workers_move() -> None:
    cluster = running(nodes={"a": 2, "b": 2, "c": 2})
    node = node_of(cluster, W01)
    accused_by_another_task(cluster)
    cluster.raises(W01, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered")
    coordinator = cluster.coordinator
    assert coordinator.nodes[node].state is NodeState.ISOLATED
    seats = coordinator.tasks["t"].seats
    assert len(seats) == 4
    assert all(seat.node != node for seat in seats.values())
    assert all(incident.closed for incident in coordinator.log.incidents)


@pytest.mark.parametrize(
    "error",
    [
        "CUDA error: uncorrectable ECC error encountered",
        "OSError: [Errno 28] No space left on device",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "Error 807: MPS server is not ready to accept new MPS client requests",
    ],
)
def test_what_machines_cause_is_not_the_inputs_fault_when_two_workers_raise_it(error: str) -> None:
    """Seen under MPS: a fault of the GPU met two workers at one op, and the task failed."""
    cluster = running(nodes={"a": 4})
    cluster.raises(W01, error)
    cluster.raises(W11, error)
    assert cluster.coordinator.tasks["t"].state is TaskState.RUNNING
    cluster.wait(6)
    assert len(cluster.crew.actors) == 4, "both were started again"


def test_a_gpu_that_another_process_still_holds_is_tried_again() -> None:
    """Seen under MPS, where a client was killed: its replacement was refused twice, and the task failed."""
    busy = "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    cluster = running(nodes={"a": 4})
    for _ in range(3):
        cluster.raises(W01, busy)
        cluster.wait(10)
        assert cluster.coordinator.tasks["t"].state is TaskState.RUNNING
        assert len(cluster.crew.actors) == 4


def test_without_another_node_a_grave_error_is_tried_in_place() -> None:
    cluster = running(nodes={"a": 4})
    cluster.raises(W01, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered")
    assert cluster.coordinator.nodes["a"].state is NodeState.UP
    assert cluster.coordinator.tasks["t"].seats[W01].incarnation == 2
    (incident,) = cluster.coordinator.log.incidents
    assert "no other slot" in incident.remedies[0].because


def test_words_of_one_task_alone_isolate_no_node() -> None:
    """11 exceptions of one user's task had made lemons of three of four nodes."""
    cluster = running(nodes={"a": 2, "b": 2, "c": 2, "d": 2})
    for _ in range(6):
        worker = next(w for w in (W01, W11, W00, W10) if ("t", w) in cluster.crew.actors)
        cluster.raises(worker, "RuntimeError: CUDA error: uncorrectable ECC error encountered")
        cluster.wait(700)
        cluster.seal()
    coordinator = cluster.coordinator
    assert {node.state for node in coordinator.nodes.values()} == {NodeState.UP}
    assert not any(node.isolated_slots for node in coordinator.nodes.values())
    assert len(cluster.crew.actors) == 4


def test_a_worker_that_speaks_of_broken_hardware_goes_to_another_slot_and_its_node_is_checked() -> None:
    cluster = running(nodes={"a": 2, "b": 2, "c": 2})
    seat = cluster.coordinator.tasks["t"].seats[W01]
    cluster.raises(W01, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered")
    coordinator = cluster.coordinator
    after = coordinator.tasks["t"].seats[W01]
    assert (after.node, after.slot) != (seat.node, seat.slot)
    assert coordinator.nodes[seat.node].state is NodeState.UP
    assert list(coordinator.nodes[seat.node].isolated_slots) == [seat.slot]
    checks = [
        action.node
        for action in cluster.actions
        if isinstance(action, msg.Dispatch) and isinstance(action.order, msg.CheckNode)
    ]
    assert checks == [seat.node]
    (incident,) = coordinator.log.incidents
    assert [r.what for r in incident.remedies] == ["leave the slot"]


def test_a_program_that_raises_again_and_again_takes_no_node_from_others() -> None:
    """Three exceptions of a kind that says nothing of the machine isolated its node."""
    cluster = running(nodes={"a": 2, "b": 2, "c": 2})
    for number in range(3):
        cluster.raises(W01, f"ValueError: {number}")
        cluster.wait(30)
        cluster.seal()
    assert {node.state for node in cluster.coordinator.nodes.values()} == {NodeState.UP}


def test_restarts_that_do_not_help_escalate_to_isolation_and_back_off_before() -> None:
    cluster = running(nodes={"a": 2, "b": 2, "c": 2})
    node = node_of(cluster, W01)
    cluster.exits(W01, "killed by SIGSEGV")
    cluster.exits(W01, "killed by SIGSEGV")
    assert cluster.coordinator.tasks["t"].starts.waiting, "the second restart waits"
    cluster.wait(1.1)
    assert (("t", W01)) in cluster.crew.actors
    cluster.exits(W01, "killed by SIGSEGV")
    assert cluster.coordinator.nodes[node].state is NodeState.ISOLATED


def test_old_failures_are_forgotten() -> None:
    cluster = running(nodes={"a": 2, "b": 2, "c": 2})
    node = node_of(cluster, W01)
    for _ in range(5):
        cluster.exits(W01, "killed by SIGSEGV")
        cluster.wait(3601)
    assert cluster.coordinator.nodes[node].state is NodeState.UP


def test_a_node_isolated_twice_is_a_lemon_until_somebody_readmits_it() -> None:
    cluster = running(nodes={"a": 4, "b": 4})
    ecc = "CUDA error: uncorrectable ECC error encountered"
    for _ in range(2):
        worker = next(w for w, s in cluster.coordinator.tasks["t"].seats.items() if s.node == "a")
        accused_by_another_task(cluster)
        cluster.raises(worker, ecc + f" {cluster.now}")
        cluster.wait(601)
        if cluster.coordinator.nodes["a"].state is NodeState.UP:
            cluster.hear(msg.DrainRequested(node="b", force=True))
            cluster.hear(msg.ReadmitRequested(node="b", by="test"))
    assert cluster.coordinator.nodes["a"].state is NodeState.LEMON
    cluster.wait(100_000)
    assert cluster.coordinator.nodes["a"].state is NodeState.LEMON
    cluster.hear(msg.ReadmitRequested(node="a", by="a person"))
    assert cluster.coordinator.nodes["a"].state is NodeState.UP


def test_a_silent_node_is_left_alone_while_training_goes_on() -> None:
    cluster = running()
    cluster.silence("b")
    cluster.wait(10)
    assert cluster.coordinator.nodes["b"].state is NodeState.SILENT
    assert not cluster.coordinator.log.incidents
    cluster.join("b")
    assert cluster.coordinator.nodes["b"].state is NodeState.UP
    assert not cluster.coordinator.log.incidents
    assert len(cluster.coordinator.tasks["t"].seats) == 4


def test_a_silent_node_whose_workers_peers_wait_is_given_up() -> None:
    cluster = running()
    b = node_of(cluster, W10)
    elsewhere = next(w for w in (W00, W01) if node_of(cluster, w) != b)
    cluster.silence(b)
    cluster.overdue(elsewhere, busy=False, doing="A[2 stage 1 1.0]", elapsed_s=1.0)
    assert cluster.coordinator.nodes[b].state is NodeState.GONE
    assert all(incident.closed for incident in cluster.coordinator.log.incidents)
    assert cluster.coordinator.log.incidents[0].node == b
    cluster.seal()
    cluster.join(b)  # it comes back: what ran there is ended, and its slots are used again
    assert len(cluster.coordinator.tasks["t"].seats) == 4


def test_a_silent_node_with_a_task_of_its_own_is_given_up_after_long() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    cluster.submit(shape=Shape(1, 2, 2))
    assert {seat.node for seat in cluster.coordinator.tasks["t"].seats.values()} == {"a"}
    cluster.silence("a")
    cluster.wait(179)
    assert cluster.coordinator.nodes["a"].state is NodeState.SILENT
    cluster.wait(2)
    assert cluster.coordinator.nodes["a"].state is NodeState.GONE


def test_a_node_that_dies_while_its_workers_start_is_given_up_though_nobody_waits_for_them() -> None:
    cluster = FakeCluster()
    cluster.cut.add("b")
    cluster.submit()
    cluster.silence("b")
    cluster.wait(31)
    assert cluster.coordinator.nodes["b"].state is NodeState.GONE
    cluster.seal()
    assert cluster.coordinator.tasks["t"].recovery.recorded == 1


def test_a_drained_node_that_dies_is_given_up_though_a_joiner_elsewhere_waits_for_its_state() -> None:
    """The joiner is no member: it blames no worker, and does not speak for those it waits for."""
    cluster = FakeCluster(nodes={"a": 3})
    cluster.submit(shape=Shape(3, 1, 2))
    cluster.seal()
    cluster.crew.copies = False
    cluster.exits(Worker(0, 0), "killed by SIGKILL")  # it is started again, and joins
    cluster.join("b", 3)
    cluster.cut.add("a")
    cluster.hear(msg.DrainRequested(node="a", force=True))
    number = cluster.crew.actors.pop(("t", Worker(0, 0))).incarnation
    exited = ev.WorkerExited(worker=Worker(0, 0), incarnation=number, reason="killed by SIGKILL")
    sender = msg.Sender("t", Worker(0, 0), number)
    cluster.arrives("a", msg.TaskEvent(task="t", event=exited), sender)  # the only report that still does
    assert node_of(cluster, Worker(0, 0)) == "b"
    cluster.silence("a")
    cluster.wait(31)
    assert cluster.coordinator.nodes["a"].state is NodeState.GONE
    cluster.seal()
    assert {seat.node for seat in cluster.coordinator.tasks["t"].seats.values()} == {"b"}


def test_a_search_dies_with_the_node_that_was_asked_though_it_was_drained_before() -> None:
    cluster = FakeCluster(nodes={"a": 1, "b": 1})
    cluster.cut.add("a")
    cluster.submit(shape=Shape(1, 1, 2), has_checkpoints=True)
    assert cluster.coordinator.tasks["t"].state is TaskState.SEARCHING
    cluster.hear(msg.DrainRequested(node="a"))  # it has no process yet: its seat is given up at once
    cluster.silence("a")
    cluster.wait(31)
    assert cluster.coordinator.nodes["a"].state is NodeState.GONE
    assert cluster.coordinator.tasks["t"].state is TaskState.RUNNING
    assert {seat.node for seat in cluster.coordinator.tasks["t"].seats.values()} == {"b"}


def test_a_node_that_dies_while_ledgers_are_gathered_is_given_up_though_its_peers_stand_still() -> None:
    cluster = running()
    b = node_of(cluster, W10)
    cluster.cut.add(b)
    cluster.hear(msg.PlanAnswered(task="t", event=ev.ProfileChanged(because="a new schedule")))
    cluster.silence(b)
    cluster.wait(9.0)
    assert cluster.coordinator.nodes[b].state is NodeState.SILENT, "it may look for a coordinator that moved"
    cluster.wait(1.1)
    assert cluster.coordinator.nodes[b].state is NodeState.GONE
    cluster.seal()
    assert cluster.coordinator.tasks["t"].recovery.recorded == 2


def third_node_silent_and_a_peer_waiting_for_the_second() -> tuple[FakeCluster, dict[str, Worker]]:
    """Nodes a, b and c of one worker each; also the worker on each of them."""
    cluster = FakeCluster(nodes={"a": 1, "b": 1, "c": 1})
    cluster.submit(shape=Shape(3, 1, 2))
    cluster.seal()
    on = {node_of(cluster, Worker(replica, 0)): Worker(replica, 0) for replica in range(3)}
    cluster.silence("c")
    cluster.overdue(on["a"], busy=False, doing=f"P[2 stage 0 {on['b'].replica}.0]", elapsed_s=2.0)
    return cluster, on


def test_a_silent_node_is_not_given_up_because_a_peer_waits_for_another_one() -> None:
    """On a crowded machine an agent was late with its heartbeats while a slow cable elsewhere let workers
    wait: the wrong node was given up.
    """
    cluster, on = third_node_silent_and_a_peer_waiting_for_the_second()
    assert cluster.coordinator.nodes["c"].state is NodeState.SILENT, "it waits for the worker on b"
    cluster.overdue(on["b"], busy=False, doing=f"P[2 stage 0 {on['c'].replica}.0]", elapsed_s=2.0)
    assert cluster.coordinator.nodes["c"].state is NodeState.GONE, "b waits for it, and a for b"


def test_a_silent_node_is_given_up_after_a_while_whoever_the_waiting_peers_name() -> None:
    """Work may have been re-routed, and then another worker sends."""
    cluster, _ = third_node_silent_and_a_peer_waiting_for_the_second()
    cluster.wait(9.0)
    assert cluster.coordinator.nodes["c"].state is NodeState.SILENT
    cluster.wait(1.1)
    assert cluster.coordinator.nodes["c"].state is NodeState.GONE


def test_a_long_silence_that_others_speak_for_asks_for_no_time() -> None:
    cluster = running()
    cluster.silence("b")
    cluster.wait(100)
    assert cluster.coordinator.nodes["b"].state is NodeState.SILENT
    assert cluster.coordinator.due_at() is None


def test_a_hung_worker_is_ended_and_a_waiting_one_is_not_blamed() -> None:
    cluster = running()
    for innocent in (W00, W10, W11):
        cluster.overdue(innocent, busy=False, doing="G[2 stage 0 0.0]", elapsed_s=30.0)
    assert not cluster.coordinator.log.incidents
    cluster.overdue(W01, elapsed_s=0.3)
    assert not cluster.coordinator.log.incidents, "three times its usual time is a suspicion, no more"
    cluster.overdue(W01, elapsed_s=2.0)
    (incident,) = cluster.coordinator.log.incidents
    assert incident.workers == [W01]
    assert incident.closed
    assert incident.verdict is not None
    assert incident.verdict.kind == "task hang"
    assert sum("ruled out" in e.text for e in incident.evidence) == 3


def test_a_stopped_process_is_evidence_enough() -> None:
    cluster = running()
    cluster.overdue(W10, busy=False, stopped=True, elapsed_s=0.2)
    (incident,) = cluster.coordinator.log.incidents
    assert incident.workers == [W10]
    assert incident.closed


def test_a_worker_that_moves_again_was_slow_not_hung() -> None:
    cluster = running()
    cluster.overdue(W01, elapsed_s=0.5)
    cluster.report("t", W01, msg.WorkerMoved(task="t", worker=W01, incarnation=1))
    assert not cluster.coordinator.tasks["t"].failures.overdue
    assert not cluster.coordinator.log.incidents


def test_if_everybody_waits_what_was_lost_is_sent_again_and_nobody_is_ended() -> None:
    cluster = running()
    for worker in (W00, W01, W10, W11):
        cluster.overdue(worker, busy=False, doing="A[2 stage 1 0.0]", elapsed_s=9.0, expected_s=0.5)
    (incident,) = cluster.coordinator.log.incidents
    assert incident.closed
    assert incident.remedies[0].what == "retry in place"
    assert all(seat.incarnation == 1 for seat in cluster.coordinator.tasks["t"].seats.values())


def test_if_all_workers_wait_again_and_again_they_are_all_restarted_from_the_newest_state() -> None:
    cluster = FakeCluster(memory_port=7)
    cluster.submit()
    cluster.copy_to_memory(1)
    cluster.seal()
    cluster.seal()
    for _ in range(3):
        for worker in (W00, W01, W10, W11):
            cluster.overdue(worker, busy=False, doing="A[3 stage 1 0.0]", elapsed_s=9.0, expected_s=0.5)
    *retried, restarted = cluster.coordinator.log.incidents
    assert [incident.remedies[0].what for incident in retried] == ["retry in place"] * 2
    (remedy,) = restarted.remedies
    assert remedy.what == "restart all workers of the task"
    assert remedy.because == "2 retries in place have not helped; no single worker is to blame"
    assert restarted.closed
    assert restarted.restored_from == 1
    assert all(seat.incarnation == 2 for seat in cluster.coordinator.tasks["t"].seats.values())
    cluster.seal()
    assert cluster.coordinator.tasks["t"].progress.recorded == 2, "step 2 is done again"


def test_a_mended_link_is_retried_in_place_until_it_breaks_too_often() -> None:
    cluster = running()
    for error in ("", "a lane stood still"):
        cluster.report("t", W00, msg.LinkMended(task="t", worker=W00, peer=W01, error=error))
    link = "connection reset between 0:0 and 0:1"
    assert [i.what for i in cluster.coordinator.log.incidents] == [link, f"{link}: a lane stood still"]
    assert cluster.coordinator.tasks["t"].seats[W00].incarnation == 1
    assert [i.verdict.severity for i in cluster.coordinator.log.incidents if i.verdict] == [3, 3]
    cluster.report("t", W00, msg.LinkMended(task="t", worker=W00, peer=W01))
    assert cluster.coordinator.tasks["t"].seats[W00].incarnation == 2
    assert all(incident.closed for incident in cluster.coordinator.log.incidents)


def test_a_line_of_the_kernel_that_names_no_device_isolates_the_node() -> None:
    cluster = running(nodes={"a": 2, "b": 2, "c": 2})
    node = node_of(cluster, W00)
    cluster.report(
        "t", W00, msg.KernelSpoke(text="NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.")
    )
    assert cluster.coordinator.nodes[node].state is NodeState.ISOLATED
    assert len(cluster.coordinator.tasks["t"].seats) == 4


def test_a_line_of_the_kernel_isolates_the_slot_of_its_device() -> None:
    cluster = running(nodes={"a": 2, "b": 2, "c": 2})
    node = node_of(cluster, W00)
    text = "NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."
    slot = cluster.coordinator.tasks["t"].seats[W00].slot
    cluster.report("t", W00, msg.KernelSpoke(text=text, slots=(slot,)))
    (incident,) = [i for i in cluster.coordinator.log.incidents if i.node == node and not i.task]
    assert f"the device is slot {slot} of {node}: worker {W00} of t" in [e.text for e in incident.evidence]
    assert cluster.coordinator.nodes[node].state is NodeState.UP
    assert set(cluster.coordinator.nodes[node].isolated_slots) == {slot}
    assert len(cluster.coordinator.tasks["t"].seats) == 4


def test_a_drained_node_loses_its_workers_without_an_incident() -> None:
    cluster = running(nodes={"a": 2, "b": 2, "c": 2})
    node = node_of(cluster, W00)
    cluster.hear(msg.DrainRequested(node=node))
    assert cluster.coordinator.nodes[node].state is NodeState.DRAINING
    seats = cluster.coordinator.tasks["t"].seats
    assert len(seats) == 4
    assert all(seat.node != node for seat in seats.values())
    assert not cluster.coordinator.log.incidents


def test_a_task_waits_for_slots_and_starts_with_one_worker_a_stage() -> None:
    cluster = FakeCluster(nodes={"a": 1})
    cluster.submit()
    assert cluster.coordinator.tasks["t"].state is TaskState.WAITING
    cluster.join("b", slots=1)
    assert cluster.coordinator.tasks["t"].state is TaskState.RUNNING
    cluster.seal()
    cluster.join("c", slots=2)
    assert len(cluster.coordinator.tasks["t"].seats) == 4
    cluster.seal()
    assert not cluster.coordinator.log.incidents


def test_a_task_runs_to_its_end_and_gives_its_slots_back() -> None:
    cluster = FakeCluster()
    cluster.submit(steps=3)
    for _ in range(3):
        cluster.seal()
    assert cluster.coordinator.tasks["t"].state is TaskState.FINISHED
    assert len(cluster.coordinator.roster.free()) == 4


def test_the_next_task_gets_the_slots_of_the_one_before() -> None:
    cluster = FakeCluster()
    cluster.submit(steps=2)
    cluster.submit("u", steps=2)
    assert cluster.coordinator.tasks["u"].state is TaskState.WAITING
    cluster.seal()
    cluster.seal()
    assert cluster.coordinator.tasks["u"].state is TaskState.RUNNING


def test_a_resized_task_keeps_a_worker_of_every_stage() -> None:
    cluster = running()
    cluster.hear(msg.ResizeRequested(task="t", workers=2))
    seats = cluster.coordinator.tasks["t"].seats
    assert {w.stage for w in seats} == {0, 1}
    assert len(seats) == 2
    cluster.seal()
    cluster.hear(msg.ResizeRequested(task="t", workers=4))
    assert len(cluster.coordinator.tasks["t"].seats) == 4
    assert not cluster.coordinator.log.incidents


def pausing() -> FakeCluster:
    cluster = FakeCluster()
    cluster.submit(has_checkpoints=True)
    cluster.seal()
    cluster.hear(msg.PauseRequested(task="t"))
    assert cluster.coordinator.tasks["t"].state is TaskState.RUNNING
    return cluster


def until_left(cluster: FakeCluster) -> None:
    task = cluster.coordinator.tasks["t"]
    while task.state is TaskState.RUNNING and task.progress.held is None:
        cluster.seal()
    cluster.save(task.progress.recorded)


def test_a_paused_task_is_saved_first_gives_its_slots_back_and_goes_on() -> None:
    """It ended at once, and did again what it had done since its last checkpoint."""
    cluster = pausing()
    until_left(cluster)
    assert any(isinstance(one.facts, EpochFacts) and one.facts.saves for one in cluster.resumes())
    task = cluster.coordinator.tasks["t"]
    assert task.state is TaskState.PAUSED
    assert task.because.startswith("an operator paused it")
    assert len(cluster.coordinator.roster.free()) == 4
    cluster.hear(msg.UnpauseRequested(task="t"))
    assert task.state is TaskState.RUNNING


def test_a_pause_that_is_asked_for_again_does_not_wait_for_the_step() -> None:
    cluster = pausing()
    cluster.hear(msg.PauseRequested(task="t"))
    assert cluster.coordinator.tasks["t"].state is TaskState.PAUSED


def test_a_task_that_is_resumed_while_it_pauses_goes_on() -> None:
    cluster = pausing()
    cluster.hear(msg.UnpauseRequested(task="t"))
    for _ in range(3):
        cluster.seal()
    assert cluster.coordinator.tasks["t"].state is TaskState.RUNNING


def test_a_task_that_loses_a_stage_while_it_pauses_is_paused() -> None:
    """The planner takes its slots: it must not come back by itself."""
    cluster = pausing()
    task = cluster.coordinator.tasks["t"]
    for node in sorted({seat.node for seat in task.seats.values()}):
        cluster.hear(msg.NodeLeft(node=node))
    if task.state is TaskState.RUNNING:
        cluster.hear(msg.PauseRequested(task="t"))
    assert task.state is TaskState.PAUSED


def test_a_task_that_is_cancelled_while_it_pauses_is_cancelled() -> None:
    cluster = pausing()
    cluster.cut = {"a", "b"}  # its workers are slow to leave
    cluster.hear(msg.PauseRequested(task="t"))
    cluster.hear(msg.CancelRequested(task="t"))
    ending = cluster.coordinator.tasks["t"].ending
    assert ending is not None
    assert ending.state is TaskState.CANCELLED


def test_a_checkpoint_is_committed_when_all_parts_lie_there_and_its_step_is_on_record() -> None:
    cluster = FakeCluster()
    cluster.submit(has_checkpoints=True)
    for worker in (W00, W01):
        part = msg.PartWritten(task="t", step=1, stage=worker.stage, attempt=1, part={"file": str(worker)})
        cluster.report("t", worker, part)
    commits = [a for a in cluster.actions if isinstance(getattr(a, "order", None), msg.CommitCheckpoint)]
    assert not commits
    cluster.seal()
    commits = [a for a in cluster.actions if isinstance(getattr(a, "order", None), msg.CommitCheckpoint)]
    assert len(commits) == 1
    recovery = cluster.coordinator.tasks["t"].recovery
    assert recovery is not None
    assert recovery.checkpoint == 1


@pytest.mark.parametrize(
    ("on_disk", "compiled", "by_us", "then"),
    [
        (0, False, True, True),  # a new run
        (7, False, True, False),  # of an earlier version, or of a job that was shorter
        (7, True, True, True),
        (7, None, True, True),  # no run of ours
        (7, False, False, True),  # the job says it
    ],
)
def test_a_task_that_resumes_another_ones_checkpoint_compiles_as_that_one_did(
    on_disk: int, compiled: bool | None, by_us: bool, then: bool
) -> None:
    cluster = FakeCluster()
    cluster.crew.on_disk, cluster.crew.compiled = on_disk, compiled
    because = "1000 steps are worth it" if by_us else ""
    shape = Shape(2, 2, 2)
    cluster.hear(
        msg.TaskSubmitted(
            task="t",
            job={"job": "t", "compile": True},
            shape=shape,
            steps=99,
            secret="s",
            has_checkpoints=True,
            compile_because=because,
        )
    )
    task = cluster.coordinator.tasks["t"]
    assert task.state is TaskState.RUNNING
    opened = [a.order for a in cluster.actions if isinstance(getattr(a, "order", None), msg.OpenTask)]
    assert [order.job["compile"] for order in opened] == [then, then]
    assert task.job == {"job": "t", "compile": then}
    if on_disk and by_us and compiled is not None:
        was = "compiled" if compiled else "not compiled"
        assert task.request.compile_because == f"the run whose checkpoint of step 7 it resumes was {was}"


def test_a_task_keeps_what_it_began_with_though_its_own_checkpoint_does_not_say_it() -> None:
    """Its workers were of the version before, which writes no such word; others come after a pause."""
    cluster = FakeCluster()
    shape = Shape(2, 2, 2)
    job = {"job": "t", "compile": True}
    cluster.hear(
        msg.TaskSubmitted(
            task="t", job=job, shape=shape, steps=99, secret="s", has_checkpoints=True, compile_because="so"
        )
    )
    cluster.seal()
    cluster.hear(msg.PauseRequested(task="t"))
    until_left(cluster)
    task = cluster.coordinator.tasks["t"]
    assert task.state is TaskState.PAUSED
    cluster.crew.on_disk = task.progress.recorded
    cluster.hear(msg.UnpauseRequested(task="t"))
    assert task.state is TaskState.RUNNING
    assert task.job == job


def test_a_stage_s_part_is_whole_when_all_who_share_it_have_written() -> None:
    cluster = FakeCluster()
    cluster.submit(has_checkpoints=True)
    cluster.seal()

    def commits() -> list:
        orders = [getattr(a, "order", None) for a in cluster.actions]
        return [order for order in orders if isinstance(order, msg.CommitCheckpoint)]

    def writes(worker: Worker, share: tuple[int, int]) -> None:
        part = {"file": f"{worker} {share}"}
        cluster.report(
            "t",
            worker,
            msg.PartWritten(task="t", step=1, stage=worker.stage, attempt=1, part=part, share=share),
        )

    writes(W00, (0, 2))
    writes(W01, (0, 2))
    writes(Worker(1, 1), (1, 2))
    assert not commits()  # the other of stage 0 has died, say: the one that is left writes all of it
    writes(W00, (0, 1))
    assert [part["file"] for part in commits()[0].parts] == ["0:0 (0, 1)", "0:1 (0, 2)", "1:1 (1, 2)"]


def test_a_report_heard_twice_counts_once() -> None:
    cluster = running()
    node = node_of(cluster, W00)
    number = cluster.coordinator.nodes[node].heard
    again = msg.FromNode(
        node=node,
        boot="1",
        number=number,
        report=msg.TaskEvent(task="t", event=ev.WorkerExited(worker=W00, incarnation=1, reason="?")),
    )
    assert cluster.coordinator.handle(again, cluster.now) == []


def test_an_agent_started_anew_has_lost_its_workers() -> None:
    cluster = running()
    cluster.crew.lose("a")
    cluster.join("a", boot="2")
    assert len(cluster.coordinator.tasks["t"].seats) == 4
    assert all(incident.closed for incident in cluster.coordinator.log.incidents)
    cluster.seal()


def test_two_tasks_share_six_slots_and_the_heavier_one_keeps_its_workers_when_a_node_dies() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2}, planned=True)
    cluster.submit("heavy", Shape(4, 1, 2), weight=2.0)
    cluster.submit("light", Shape(4, 1, 2), weight=1.0)

    def workers(name: str) -> int:
        return len(cluster.coordinator.tasks[name].seats)

    assert (workers("heavy"), workers("light")) == (4, 2)
    node = next(seat.node for seat in cluster.coordinator.tasks["heavy"].seats.values())
    cluster.crew.lose(node)
    cluster.hear(msg.NodeLeft(node=node))
    assert (workers("heavy"), workers("light")) == (3, 1)
    cluster.seal("heavy")
    cluster.seal("light")
    cluster.join(node, boot="2")
    assert (workers("heavy"), workers("light")) == (4, 2)


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_snapshot_at_any_moment_changes_nothing_that_follows(at: int) -> None:
    """The same life twice; in the second, the coordinator is frozen and thawed after `at` events."""

    def life(swap_at: int | None) -> FakeCluster:
        cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2})
        handle, count = Coordinator.handle, 0

        def handled(event: msg.ClusterEvent, now: float) -> list[msg.ClusterAction]:
            nonlocal count
            count += 1
            if count == swap_at:
                fresh = Coordinator()
                thaw(fresh, json.loads(json.dumps(freeze(cluster.coordinator))))
                assert digest(fresh) == digest(cluster.coordinator)
                cluster.coordinator = fresh
                fresh.handle = handled  # type: ignore[method-assign]
            return handle(cluster.coordinator, event, now)

        cluster.coordinator.handle = handled  # type: ignore[method-assign]
        cluster.submit()
        cluster.seal()
        cluster.exits(W01, "killed by SIGKILL")
        accused_by_another_task(cluster)
        cluster.raises(W10, "CUDA error: uncorrectable ECC error encountered")
        cluster.overdue(W00, stopped=True)
        cluster.seal()
        return cluster

    assert life(at).transcript == life(None).transcript


def test_a_joiner_that_catches_up_while_another_is_planned_for_is_let_in_at_the_next_step() -> None:
    """Found on real processes: 1:1 told that it had copied between the survey and the plan, and was fed for
    ever.
    """
    cluster = running()
    recovery = cluster.coordinator.tasks["t"].recovery
    assert recovery is not None
    cluster.exits(W01, "killed by SIGKILL")
    place = recovery.places[W01] = Copied(incarnation=2, source=W11)
    recovery._places.__post_init__()  # it counts again
    cluster.crew.actors["t", W01].joining = True
    cluster.seal()
    cluster.seal()
    assert place is not recovery.places[W01]
    assert isinstance(recovery.places[W01], Member)


def searching() -> tuple[Coordinator, msg.FindCheckpoint]:
    """A task that waits to hear which checkpoint it starts from."""
    coordinator = Coordinator()
    coordinator.handle(msg.NodeJoined(node="a", boot="1", slots=1, host="a"), 0.0)
    submitted = msg.TaskSubmitted(
        task="t", job={}, shape=Shape(1, 1, 1), steps=9, secret="s", has_checkpoints=True
    )
    orders = coordinator.handle(submitted, 0.0)
    (find,) = [o.order for o in orders if isinstance(o, msg.Dispatch)]
    assert isinstance(find, msg.FindCheckpoint)
    return coordinator, find


def test_checkpoints_that_cannot_be_read_are_tried_again_and_then_fail_the_task_in_words() -> None:
    coordinator, find = searching()
    now = 0.0
    for number in range(1, 100):
        report = msg.CheckpointUnusable(
            task="t", because="folder x cannot be read: EIO", passing=True, search=find.search
        )
        actions = coordinator.handle(msg.FromNode(node="a", boot="1", number=number, report=report), now)
        coordinator.validate()
        if coordinator.tasks["t"].state is not TaskState.SEARCHING:
            break
        assert "folder x cannot be read: EIO; tried again in" in coordinator.tasks["t"].because
        due = coordinator.due_at()
        assert due is not None
        assert due > now
        now = due
        (again,) = coordinator.handle(msg.TimePassed(), now)
        assert isinstance(again, msg.Dispatch)
        assert again.order == replace(find, search=find.search + 1)
        find = again.order
    assert number == coordinator.patience.checkpoint_retries + 1
    assert 30 < now < 300
    (ended,) = [a for a in actions if isinstance(a, msg.TaskEnded)]
    assert (ended.state, ended.because) == ("failed", "folder x cannot be read: EIO")


def test_a_task_whose_checkpoints_are_of_no_use_fails_at_once_and_starts_nothing() -> None:
    coordinator, _ = searching()
    report = msg.CheckpointUnusable(task="t", because="version 99", passing=False)
    actions = coordinator.handle(msg.FromNode(node="a", boot="1", number=1, report=report), 1.0)
    assert coordinator.tasks["t"].state is TaskState.FAILED
    assert not any(isinstance(a, msg.Dispatch) and isinstance(a.order, msg.StartProcess) for a in actions)


def test_a_process_that_outlives_sigkill_costs_its_slot_until_it_ends() -> None:
    """It was started again and again in a slot that is not free."""
    cluster = running(nodes={"a": 3, "b": 2})
    seat = cluster.coordinator.tasks["t"].seats[W01]
    place, incarnation = (seat.node, seat.slot), seat.incarnation
    cluster.crew.actors.pop(("t", W01))
    stuck = ev.WorkerExited(worker=W01, incarnation=incarnation, reason="still there", stuck=True)
    cluster.report("t", W01, msg.TaskEvent(task="t", event=stuck))
    now = cluster.coordinator.tasks["t"].seats[W01]
    assert (now.node, now.slot) != place
    lost = next(i for i in cluster.coordinator.log.incidents if i.what.startswith("slot"))
    assert lost.verdict is not None
    assert lost.verdict.severity == 1
    assert not lost.closed
    assert place not in cluster.coordinator.roster.free()
    cluster.coordinator.validate()
    cluster.says(place[0], msg.SlotFreed(slot=place[1]), None)
    assert lost.closed
    assert place in cluster.coordinator.roster.free()


def test_a_worker_of_several_processes_that_outlives_sigkill_costs_all_its_slots() -> None:
    """One was counted: who was seated in the others could not start, and its node was isolated for that."""
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2})
    cluster.submit(shape=Shape(2, 1, 2, shards=2), steps=40)
    cluster.seal()
    seat = cluster.coordinator.tasks["t"].seats[W00]
    held = {(seat.node, slot) for slot in seat.slots}
    cluster.exits(W00, "still there", stuck=True)
    assert cluster.coordinator.nodes[seat.node].lost_slots == {0, 1}
    assert held.isdisjoint(cluster.coordinator.roster.free())
    (lost,) = (one for one in cluster.coordinator.log.incidents if isinstance(one.subject, SlotsLost))
    assert lost.what == f"slot 0, 1 of node {seat.node} are lost: a process there cannot be killed"
    cluster.says(seat.node, msg.SlotFreed(slot=1), None)
    assert not lost.closed
    cluster.says(seat.node, msg.SlotFreed(slot=0), None)
    assert lost.closed
    assert held <= set(cluster.coordinator.roster.free())


@pytest.mark.parametrize("error", [KeyError("a worker"), AssertionError(), ValueError("two\nlines")])
def test_a_bug_in_the_machine_of_one_task_ends_that_task_alone(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Only our own kind of error was contained; any other took the event down for all tasks."""
    cluster = FakeCluster(nodes={"a": 4, "b": 4})
    for name in ("t", "u"):
        cluster.submit(name, shape=Shape(2, 1, 2), steps=9)
        cluster.seal(name)
    broken = cluster.coordinator.tasks["t"].managed
    handle = Recovery.handle

    def breaks(self: Recovery, event: ev.Event, now: float) -> list[Action]:
        if self is broken and isinstance(event, ev.StepSealed):
            raise error
        return handle(self, event, now)

    monkeypatch.setattr(Recovery, "handle", breaks)
    cluster.seal("t")
    cluster.seal("u")
    tasks = cluster.coordinator.tasks
    assert tasks["t"].state is TaskState.FAILED
    assert tasks["t"].because.startswith(f"an internal error: {type(error).__name__} in test_coordinator.py:")
    assert tasks["u"].state is TaskState.RUNNING
    assert tasks["u"].progress.recorded == 2


def test_a_worker_that_was_lost_with_its_node_and_then_exits_twice_is_restarted() -> None:
    """Storm 4301359: the second exit was taken for the lost node's, and no remedy for that fits a process."""
    cluster = running()
    task, now = cluster.coordinator.tasks["t"], Moment(at=cluster.now, event=1)
    incidents = cluster.coordinator.incidents
    incident = incidents.suspect(task, W01, "silence", "node b is gone", now)
    incidents.judge(incident, known(ErrorKind.LOST_CONNECTION, "node b is gone"), now)
    incidents.treat(incident, "restart the worker", "its replacement has exited", now)
    cluster.exits(W01, "killed by SIGKILL")
    assert task.seats[W01].incarnation == 2
    assert incident.remedies[-1].what == "restart the worker"


def test_a_scheduler_that_raises_is_an_incident_and_costs_no_worker_its_recovery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exception was kept for nobody: the task stood in Planning for ever, without a word."""

    def raises(self: TaskScheduler, question: object, slow: object = None) -> ev.PlanComputed:
        raise ZeroDivisionError("a stage of no time")

    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    cluster.submit()
    monkeypatch.setattr(TaskScheduler, "answer", raises)
    cluster.exits(Worker(0, 1), "killed by SIGKILL")
    recovery = cluster.coordinator.tasks["t"].recovery
    assert recovery is not None
    assert isinstance(recovery.phase, Running)
    found = {incident.what: incident for incident in cluster.coordinator.log.incidents}
    failed = found["no schedule could be computed"]
    assert [e.text for e in failed.evidence] == ["ZeroDivisionError: a stage of no time"]
    assert failed.closed
    assert failed.remedies[-1].what == "use a plain schedule, which is slower"


def test_a_planner_that_raises_leaves_no_task_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object, **__: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(thinking, "think", raises)
    cluster = FakeCluster(nodes={"a": 2, "b": 2}, planned=True)
    cluster.submit()
    assert len(cluster.coordinator.tasks["t"].seats) == 4
    assert {i.what for i in cluster.coordinator.log.incidents} == {"no plan could be computed"}


# ------------------------------------------------------------------ starts that hang


def kills(cluster: FakeCluster) -> list[msg.KillProcess]:
    dispatched = [action.order for action in cluster.actions if isinstance(action, msg.Dispatch)]
    return [order for order in dispatched if isinstance(order, msg.KillProcess)]


def test_a_process_that_never_reports_is_noticed_and_started_again() -> None:
    """Before: no timer, no incident, `running` for ever (a sick GPU, a hung mount under an import)."""
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    cluster.crew.hang_at_start.add(Worker(0, 1))
    cluster.submit()
    assert cluster.coordinator.due_at() is not None
    cluster.wait(119.0)
    assert kills(cluster) == []
    cluster.crew.hang_at_start.clear()
    cluster.wait(2.0)
    assert [order.worker for order in kills(cluster)] == [Worker(0, 1)]
    (incident,) = cluster.coordinator.log.incidents
    assert incident.label == "SEV2 task hang"
    assert "worker 0:1 has not started after 12" in incident.evidence[0].text
    recovery = cluster.coordinator.tasks["t"].recovery
    assert recovery is not None
    assert recovery.num_members == 4
    assert cluster.coordinator.due_at() is None


def test_the_first_start_of_a_task_has_more_time() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    workers = [Worker(k, s) for k in range(2) for s in range(2)]
    cluster.crew.hang_at_start.update(workers)
    cluster.submit()
    cluster.wait(1799.0)
    assert kills(cluster) == []
    cluster.wait(2.0)
    assert sorted(order.worker for order in kills(cluster)) == workers


def test_a_place_whose_processes_hang_again_and_again_moves_to_another_node() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2})
    cluster.crew.hang_at_start.add(Worker(0, 1))
    cluster.submit()
    sick = cluster.coordinator.tasks["t"].seats[Worker(0, 1)].node
    for _ in range(6):
        cluster.wait(200.0)
    assert cluster.coordinator.nodes[sick].state is not NodeState.UP
    assert cluster.coordinator.tasks["t"].seats[Worker(0, 1)].node != sick


LASTING = msg.Patience(restarts_per_node=99, restarts_per_place=99)


def absences(cluster: FakeCluster, worker: Worker, kills: int, life_s: float) -> list[int]:
    """How long the worker's place was empty after each kill."""
    found: list[int] = []
    for _ in range(kills):
        cluster.wait(life_s)
        cluster.exits(worker, "killed by SIGKILL")
        began = cluster.now
        while ("t", worker) not in cluster.crew.actors:
            cluster.wait(0.5)
        found.append(round(cluster.now - began))
    return found


def test_a_worker_that_worked_for_long_is_replaced_at_once_however_often() -> None:
    """Waits grew with every kill of an hour: 0, 1, 2, 4, 8 s, and the task ran on the rest meanwhile."""
    cluster = FakeCluster(nodes={"a": 4}, patience=LASTING)
    cluster.submit()
    assert absences(cluster, Worker(0, 1), kills=5, life_s=60.0) == [0] * 5
    assert absences(cluster, Worker(0, 1), kills=5, life_s=5.0) == [0, 1, 2, 4, 8]
    assert absences(cluster, Worker(0, 1), kills=2, life_s=60.0) == [0, 0]


def test_a_process_that_hangs_while_it_starts_has_not_lived() -> None:
    cluster = FakeCluster(nodes={"a": 4}, patience=LASTING)
    cluster.submit()
    starts = cluster.coordinator.tasks["t"].starts
    cluster.crew.hang_at_start.add(Worker(0, 1))
    cluster.exits(Worker(0, 1), "killed by SIGKILL")
    for _ in range(5):
        cluster.wait(200.0)
    assert round(starts.not_before[Worker(0, 1)] - cluster.now) == 4


def test_restarting_all_workers_again_and_again_makes_no_healthy_node_a_lemon() -> None:
    """As when the data network of a node is dead and its agent is heard. The SIGKILLs of restart-all counted
    as failures of each place, and the third round isolated the node that comes first.
    """
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2, "d": 2})
    cluster.submit()
    for _ in range(12):
        for _, worker in list(cluster.crew.actors):
            if ("t", worker) in cluster.crew.actors:
                cluster.overdue(worker, busy=False, doing="1F0.0", elapsed_s=9.0, expected_s=0.5)
        cluster.wait(70.0)
    restarted = [i for i in cluster.coordinator.log.incidents if len(i.workers) == 4]
    assert len(restarted) >= 3
    assert {node.name: node.state for node in cluster.coordinator.nodes.values()} == dict.fromkeys(
        "abcd", NodeState.UP
    )
