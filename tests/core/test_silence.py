"""When a silent node is given up: what waits for it counts, not only who trains with it."""

from __future__ import annotations

import pytest

from everstep.core.cluster.silence import Silence
from everstep.core.cluster.snapshot import freeze, thaw
from everstep.core.cluster.task import KeptState, Task
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster

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
    assert "to start" in Silence(cluster.coordinator.roster, cluster.coordinator.policy).why_given_up(
        node, cluster.now
    )


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
    cluster = FakeCluster(nodes={"d": 1, "e": 1})
    cluster.cut.add("d")
    cluster.submit(shape=Shape(2, 1, 2), steps=40)
    cluster.hear(msg.NodeFellSilent(node="d", silent_s=1.0))
    cluster.wait(PATIENCE.lonely_silence_s + 1)
    assert cluster.coordinator.nodes["d"].state == "gone"
    cluster.actions.clear()
    cluster.join("d", 1)
    orders = [type(action.order) for action in cluster.actions if isinstance(action, msg.Dispatch)]
    assert orders.index(msg.OpenTask) < orders.index(msg.StartProcess)


# ------------------------------------------------------------------ several silent nodes


@pytest.mark.parametrize("gap", [0.0, 0.3])
@pytest.mark.parametrize("copy_s", [3.0, 9.0])
def test_two_silent_nodes_whose_workers_wait_are_given_up_in_one_look(copy_s: float, gap: float) -> None:
    """The first one's workers had waited for the second: they had no seats any more, and the look failed
    again and again, until `awaited_silence_s` made it take another way.
    """
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "c": 2})
    cluster.submit(shape=Shape(3, 1, 2), steps=40)
    cluster.seal()
    task = cluster.coordinator.tasks["t"]
    task.starts.longest_copy_s = copy_s
    for worker in list(task.seats):
        cluster.overdue(worker, busy=False, doing="no parcel", elapsed_s=1.5)
    for node in ("a", "b"):
        cluster.silence(node)
        cluster.wait(gap)
    for _ in range(30):
        cluster.wait(1.0)
    nodes = cluster.coordinator.nodes
    assert [nodes[name].state for name in "abc"] == ["gone", "gone", "up"]


# ------------------------------------------------------------------ the listener is cut off


def two_tasks(*, spare: int = 0, checkpoints: bool = False) -> FakeCluster:
    """Task t of two nodes, task u of two others, each node full; some slots to spare on one more."""
    nodes = {"a": 2, "b": 2, "c": 2, "d": 2} | ({"e": spare} if spare else {})
    cluster = FakeCluster(nodes=nodes)
    for name in ("t", "u"):
        cluster.submit(name, shape=Shape(2, 2, 2), steps=400, has_checkpoints=checkpoints)
        for _ in range(3):
            cluster.seal(name)
    assert nodes_of(cluster, "t") == {"a", "b"}
    return cluster


def nodes_of(cluster: FakeCluster, name: str) -> set[str]:
    return {seat.node for seat in task(cluster, name).seats.values()}


def task(cluster: FakeCluster, name: str = "t") -> Task:
    return cluster.coordinator.tasks[name]


def life(cluster: FakeCluster, name: str = "t") -> tuple[object, ...]:
    """What is another one if any worker was ended, or any step is done again."""
    recovery = task(cluster, name).recovery
    assert recovery is not None
    seats = {worker: (seat.node, seat.incarnation) for worker, seat in task(cluster, name).seats.items()}
    return seats, recovery.epoch, recovery.attempt_of(recovery.recorded + 1)


def waits_for_time(cluster: FakeCluster, seconds: float) -> None:
    until = cluster.now + seconds
    while cluster.now < until:
        cluster.wait(min(1.0, until - cluster.now))


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("cut_s", [5.0, 35.0, 120.0, 7200.0])
def test_a_coordinator_that_hears_nobody_gives_up_nobody(cut_s: float, checkpoints: bool) -> None:
    """After 30 s all nodes were gone. On return all workers, which trained on, were ended."""
    cluster = two_tasks(spare=8, checkpoints=checkpoints)
    before = life(cluster, "t"), life(cluster, "u")
    for node in "abcde":
        cluster.silence(node)
    waits_for_time(cluster, cut_s)
    for node in "ecadb":
        cluster.join(node)
        cluster.wait(2.0)
    assert (life(cluster, "t"), life(cluster, "u")) == before
    for name in ("t", "u"):
        cluster.seal(name)
        assert task(cluster, name).progress.recorded == 4
    assert not cluster.coordinator.log.incidents


@pytest.mark.parametrize("cut_s", [5.0, 35.0, 120.0])
def test_a_coordinator_that_hears_nobody_of_one_task_waits_though_others_could_run_it(cut_s: float) -> None:
    cluster = two_tasks(spare=8)
    before = life(cluster)
    for node in "ab":
        cluster.silence(node)
    waits_for_time(cluster, cut_s)
    for node in "ab":
        cluster.join(node)
        cluster.wait(2.0)
    assert life(cluster) == before
    cluster.seal()
    assert task(cluster).progress.recorded == 4


def test_a_task_on_one_node_is_waited_for_as_long() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    cluster.submit(shape=Shape(1, 2, 2), steps=40)
    cluster.seal()
    before = life(cluster)
    cluster.silence("a")
    waits_for_time(cluster, 120.0)
    cluster.join("a")
    assert life(cluster) == before


def test_a_task_that_really_died_goes_on_elsewhere_within_a_known_time() -> None:
    cluster = two_tasks(spare=8, checkpoints=True)
    cluster.save(2)
    for node in "ab":
        cluster.crew.lose(node)
        cluster.silence(node)
    waits_for_time(cluster, PATIENCE.cut_silence_s - 1.0)
    assert nodes_of(cluster, "t") == {"a", "b"}
    waits_for_time(cluster, 2.0)
    assert {cluster.coordinator.nodes[node].state for node in "ab"} == {"gone"}
    assert "every node of t" in cluster.coordinator.nodes["a"].because
    assert nodes_of(cluster, "t") == {"e"}
    cluster.seal()
    assert task(cluster).progress.recorded == 3


def test_a_task_that_no_free_slots_could_take_is_waited_for_until_some_can() -> None:
    cluster = two_tasks()
    before = life(cluster)
    for node in "ab":
        cluster.silence(node)
    waits_for_time(cluster, 3600.0)
    assert life(cluster) == before
    assert cluster.coordinator.due_at() is None
    cluster.join("e", 4)
    cluster.wait(0.1)
    assert nodes_of(cluster, "t") == {"e"}


def test_agents_that_come_back_without_their_workers_are_believed_at_once() -> None:
    """All lost their power, the coordinator's line was cut as well."""
    cluster = two_tasks(checkpoints=True)
    cluster.save(2)
    for node in "abcd":
        cluster.crew.lose(node)
        cluster.silence(node)
    waits_for_time(cluster, 120.0)
    for node in "abcd":
        cluster.join(node, boot="2")
    assert nodes_of(cluster, "t") == {"a", "b"}
    cluster.seal()
    assert task(cluster).progress.recorded == 3


def test_of_those_that_return_the_last_is_not_taken_for_dead_by_the_first() -> None:
    """Workers died in the cut, so others wait; the first agent to return says so."""
    cluster = two_tasks()
    before = life(cluster)[0]
    for node in "abcd":
        cluster.silence(node)
    waits_for_time(cluster, 35.0)
    cluster.join("a")
    waiting = next(worker for worker, seat in task(cluster).seats.items() if seat.node == "a")
    cluster.overdue(waiting, busy=False, doing="no parcel", elapsed_s=30.0)
    waits_for_time(cluster, PATIENCE.awaited_silence_s - 1.0)
    assert cluster.coordinator.nodes["b"].state == "silent"
    cluster.join("b")
    assert life(cluster)[0] == before


def test_of_those_that_return_one_that_stays_away_and_is_missed_is_given_up() -> None:
    cluster = two_tasks(spare=2)
    for node in "abcd":
        cluster.silence(node)
    waits_for_time(cluster, 35.0)
    cluster.join("a")
    waiting = next(worker for worker, seat in task(cluster).seats.items() if seat.node == "a")
    cluster.overdue(waiting, busy=False, doing="no parcel", elapsed_s=30.0)
    waits_for_time(cluster, PATIENCE.awaited_silence_s + 1.0)
    assert cluster.coordinator.nodes["b"].state == "gone"
    assert nodes_of(cluster, "t") == {"a", "e"}


def test_a_worker_that_died_in_the_cut_is_replaced_when_its_agent_is_back() -> None:
    cluster = two_tasks()
    task_before = life(cluster, "u")
    for node in "abcd":
        cluster.silence(node)
    waits_for_time(cluster, 35.0)
    for node in "abcd":
        cluster.join(node)
    dead = next(worker for worker, seat in task(cluster).seats.items() if seat.node == "b")
    cluster.exits(dead, "killed by SIGKILL")
    cluster.wait(1.0)
    seats = task(cluster).seats
    assert [seat.incarnation for worker, seat in sorted(seats.items()) if worker != dead] == [1, 1, 1]
    assert seats[dead].incarnation == 2
    assert life(cluster, "u") == task_before
    cluster.seal()
    assert task(cluster).progress.recorded == 4


def test_what_was_said_before_a_cut_speaks_against_nobody_in_it() -> None:
    """Its workers on silent nodes waited for a moment when the cut came."""
    cluster = two_tasks(spare=8)
    before = life(cluster)
    for worker in list(task(cluster).seats):
        cluster.overdue(worker, busy=False, doing="no parcel", elapsed_s=1.5)
    cluster.wait(0.9)  # the coordinator heard the first of them 1.0 s before it notices
    for node in "ab":
        cluster.silence(node)
        cluster.wait(0.1)
    waits_for_time(cluster, 120.0)
    for node in "ab":
        cluster.join(node)
    assert life(cluster) == before


def test_a_restarted_coordinator_waits_as_the_one_before() -> None:
    cluster = two_tasks(spare=8)
    for node in "ab":
        cluster.silence(node)
        cluster.wait(1.0)
    cluster.join("a")
    again = FakeCluster(nodes={}).coordinator
    thaw(again, freeze(cluster.coordinator))
    assert again.due_at() == cluster.coordinator.due_at()
    assert again.nodes["b"].last_heard_at == cluster.coordinator.nodes["b"].last_heard_at is not None
