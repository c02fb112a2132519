"""When a silent node is given up: what waits for it counts, not only who trains with it."""

from __future__ import annotations

from everstep.core.cluster.silence import Silence
from everstep.core.cluster.task import KeptState
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.shape import Shape
from tests.core.fake_cluster import FakeCluster

PATIENCE = msg.Patience()


def dies_with_its_node(shape: Shape = Shape(1, 4, 2), *, copies: str = "") -> FakeCluster:  # noqa: B008
    """Everything on node d is killed. Its agent still reports that its worker died, the coordinator orders
    another one there, and nothing is heard any more. `copies`: of the states in memory, "here" or "away".
    """
    cluster = FakeCluster(nodes={"a": 3, "d": 1, "e": 1}, memory_port=7 if copies else 0)
    cluster.submit(shape=shape, steps=40, has_checkpoints=not copies)
    if copies:
        cluster.copy_to_memory(1, away=copies == "away")
    cluster.seal()
    task = cluster.coordinator.tasks["t"]
    worker = next(w for w, seat in task.seats.items() if seat.node == "d")
    incarnation = cluster.crew.actors.pop(("t", worker)).incarnation
    cluster.cut.add("d")
    exited = ev.WorkerExited(worker=worker, incarnation=incarnation, reason="killed by SIGKILL")
    cluster.arrives("d", msg.TaskEvent(task="t", event=exited), msg.Sender("t", worker, incarnation))
    cluster.hear(msg.NodeFellSilent(node="d", silent_s=1.0))
    return cluster


def test_a_node_whose_restarted_worker_its_whole_task_waits_for_is_not_waited_for_like_an_idle_one() -> None:
    cluster = dies_with_its_node()
    due = cluster.coordinator.due_at()
    assert due is not None
    assert due - cluster.now <= PATIENCE.start_silence_s < PATIENCE.lonely_silence_s
    cluster.wait(PATIENCE.start_silence_s + 0.1)
    node = cluster.coordinator.nodes["d"]
    assert node.state == "gone", node.because
    assert "to start" in node.because
    assert "e" in {seat.node for seat in cluster.coordinator.tasks["t"].seats.values()}


def test_a_node_with_the_only_copy_of_a_state_is_waited_for() -> None:
    """After 3 s of silence it was given up, and a task without checkpoints began again at step 1."""
    cluster = dies_with_its_node(copies="here")
    assert cluster.coordinator.tasks["t"].copies.newest == 1
    cluster.wait(PATIENCE.start_silence_s + 0.1)
    assert cluster.coordinator.nodes["d"].state != "gone"
    cluster.wait(PATIENCE.lonely_silence_s)
    assert cluster.coordinator.nodes["d"].state == "gone"


def test_a_node_whose_copies_are_elsewhere_too_is_not_waited_for() -> None:
    cluster = dies_with_its_node(copies="away")
    cluster.wait(PATIENCE.start_silence_s + 0.1)
    assert cluster.coordinator.nodes["d"].state == "gone"


def test_a_node_that_is_back_in_time_keeps_its_worker() -> None:
    cluster = dies_with_its_node()
    cluster.wait(PATIENCE.start_silence_s / 2)
    assert cluster.coordinator.nodes["d"].state != "gone"


def test_an_idle_node_is_waited_for_as_long_as_before() -> None:
    cluster = FakeCluster(nodes={"a": 4, "d": 1})
    cluster.submit(shape=Shape(1, 4, 2), steps=40)
    cluster.silence("d")
    cluster.wait(PATIENCE.lonely_silence_s / 2)
    assert cluster.coordinator.nodes["d"].state != "gone"
    cluster.wait(PATIENCE.lonely_silence_s)
    assert cluster.coordinator.nodes["d"].state == "gone"


def test_a_node_on_which_nothing_trains_is_given_up_as_soon_where_the_task_trains_on_without_it() -> None:
    """Peers do its work, so none waits for it; but the planner could fill the place from elsewhere."""
    cluster = dies_with_its_node(Shape(4, 1, 2))
    cluster.wait(PATIENCE.start_silence_s + 0.1)
    assert cluster.coordinator.nodes["d"].state == "gone", cluster.coordinator.nodes["d"].because
    assert "e" in {seat.node for seat in cluster.coordinator.tasks["t"].seats.values()}


def test_a_node_with_the_only_copy_of_a_waiting_tasks_state_is_waited_for() -> None:
    """Another task's worker was to start there. The waiting one has no worker, and no state elsewhere."""
    cluster = dies_with_its_node(Shape(4, 1, 2), copies="away")
    cluster.submit("u", shape=Shape(1, 4, 2), steps=40)
    waiting, node = cluster.coordinator.tasks["u"], cluster.coordinator.nodes["d"]
    waiting.copies.newest, waiting.copies.states[1] = 1, KeptState(stages=1, copies={0: {"d": {}}})
    assert not waiting.seats
    cluster.wait(PATIENCE.start_silence_s + 0.1)
    assert node.state != "gone"
    waiting.copies.states[1].copies[0]["a"] = {}
    assert "to start" in Silence(cluster.coordinator.roster, PATIENCE).why_given_up(node, cluster.now)


# ------------------------------------------------------------------ what waiting and healing cost


def two_by_two(copy_s: float) -> FakeCluster:
    """Two replicas of two stages on two nodes of two slots each, and one to spare. Copies take `copy_s`."""
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2})
    cluster.submit(shape=Shape(2, 2, 2), steps=40)
    cluster.seal()
    cluster.coordinator.tasks["t"].starts.longest_copy_s = copy_s
    return cluster


def freezes(cluster: FakeCluster) -> str:
    """A node with workers falls silent, and a worker on the other one waits."""
    task = cluster.coordinator.tasks["t"]
    lost = min(seat.node for seat in task.seats.values())
    waiting = next(worker for worker, seat in task.seats.items() if seat.node != lost)
    cluster.silence(lost)
    cluster.overdue(waiting, busy=False, doing="no parcel", elapsed_s=1.5)
    return lost


def test_a_silent_node_that_is_missed_is_given_up_at_once_where_copies_are_quick() -> None:
    cluster = two_by_two(copy_s=0.0)
    assert cluster.coordinator.nodes[freezes(cluster)].state == "gone"


def test_a_silent_node_with_a_large_state_is_waited_for_as_long_as_its_loss_costs() -> None:
    """40 s of copying by half of the workers: 20 s of the task."""
    cluster = two_by_two(copy_s=40.0)
    node = cluster.coordinator.nodes[freezes(cluster)]
    assert node.state == "silent"
    cluster.wait(19.0)
    assert node.state == "silent"
    cluster.wait(2.0)
    assert node.state == "gone", node.because


def test_a_node_that_was_frozen_for_a_moment_keeps_its_workers_and_their_state() -> None:
    """A freeze of 1.5 s cost all its workers, and minutes of copying."""
    cluster = two_by_two(copy_s=40.0)
    task = cluster.coordinator.tasks["t"]
    before = {worker: seat.incarnation for worker, seat in task.seats.items()}
    node = freezes(cluster)
    cluster.wait(1.5)
    cluster.join(node, 2)
    cluster.wait(60.0)
    assert cluster.coordinator.nodes[node].state == "up"
    assert {worker: seat.incarnation for worker, seat in task.seats.items()} == before


def test_no_state_is_so_large_that_a_dead_node_is_waited_for_without_end() -> None:
    cluster = two_by_two(copy_s=4000.0)
    node = cluster.coordinator.nodes[freezes(cluster)]
    cluster.wait(PATIENCE.lonely_silence_s + 0.1)
    assert node.state == "gone"


def test_a_node_that_never_got_its_orders_is_told_of_its_tasks_again() -> None:
    """Its agent was away when a task came to it, and it was given up. Back again, it started no worker:
    the coordinator took the task for known there.
    """
    cluster = FakeCluster(nodes={"d": 1})
    cluster.cut.add("d")
    cluster.submit(shape=Shape(1, 1, 2), steps=40)
    cluster.hear(msg.NodeFellSilent(node="d", silent_s=1.0))
    cluster.wait(PATIENCE.lonely_silence_s + 1)
    assert cluster.coordinator.nodes["d"].state == "gone"
    cluster.actions.clear()
    cluster.join("d", 1)
    orders = [type(action.order) for action in cluster.actions if isinstance(action, msg.Dispatch)]
    assert orders.index(msg.OpenTask) < orders.index(msg.StartProcess)
