"""States in nodes' memory: where copies go, which are dropped, and how a task takes another shape by them."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.copy_placement import Keepers, copied_at_end, copies_for
from everstep.core.cluster.snapshot import digest, freeze, thaw
from everstep.core.cluster.task import TaskState
from everstep.plan.change_times import AGREE_S, PACE, TRANSITION_S, Changes
from everstep.plan.measured import Measurements
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.messages import FailedRead
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster


def told(cluster: FakeCluster, kind: type) -> list:
    return [a.order for a in cluster.actions if isinstance(a, msg.Dispatch) and isinstance(a.order, kind)]


def resumes(cluster: FakeCluster) -> list[msg.ResumeWorker]:
    return cluster.resumes()


def four_nodes(**more: object) -> FakeCluster:
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 1), memory_port=7, **more)
    cluster.submit()
    return cluster


def test_a_copy_goes_to_a_node_without_a_worker_of_its_stage() -> None:
    cluster = four_nodes()
    task = cluster.coordinator.tasks["t"]
    for worker in task.seats:
        node = Keepers(cluster.coordinator.roster, task).of(worker).name
        assert all(w.stage != worker.stage for w, seat in task.seats.items() if seat.node == node)


def test_a_copy_goes_to_another_rack_and_those_of_a_rack_are_spread() -> None:
    """By name alone the neighbour was in the same rack: one power supply took a state and its copy."""
    racks = {f"n{number}": "abc"[number // 4] for number in range(12)}
    cluster = FakeCluster(nodes=dict.fromkeys(racks, 1), memory_port=7, racks=racks)
    cluster.submit(shape=Shape(4, 2, 4))
    task = cluster.coordinator.tasks["t"]
    copies = Keepers(cluster.coordinator.roster, task)
    kept = {worker: copies.of(worker).name for worker in task.seats}
    for worker, node in kept.items():
        assert racks[node] != racks[task.seats[worker].node]
        assert all(w.stage != worker.stage for w, seat in task.seats.items() if seat.node == node)
    for rack in "ab":
        keep = {node for worker, node in kept.items() if racks[task.seats[worker].node] == rack}
        assert len(keep) > 1, "not all on the first node of the next rack"


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=9), st.data())
def test_a_copy_stays_in_its_rack_only_if_no_other_rack_can_keep_it(
    racks: list[str], data: st.DataObject
) -> None:
    named = {f"n{number}": rack for number, rack in enumerate(racks)}
    cluster = FakeCluster(nodes=dict.fromkeys(named, 1), memory_port=7, racks=named)
    cluster.submit(shape=Shape(1, data.draw(st.integers(1, len(racks))), 2))
    task = cluster.coordinator.tasks["t"]
    for worker, seat in task.seats.items():
        node, own = Keepers(cluster.coordinator.roster, task).of(worker).name, named[seat.node]
        others = set(named) - {seat.node}
        assert (node in others) == bool(others)
        if own and any(named[other] != own for other in others):
            assert named[node] != own


def test_alone_on_a_node_without_a_door_a_copy_stays_where_it_is() -> None:
    cluster = FakeCluster(nodes={"a": 4})
    cluster.submit()
    task = cluster.coordinator.tasks["t"]
    assert {Keepers(cluster.coordinator.roster, task).of(w).name for w in task.seats} == {"a"}
    assert copied_at_end(task.seats) == {Worker(0, 0), Worker(0, 1)}, "one per stage and node"


def test_a_state_counts_when_every_stage_has_a_copy_and_its_step_is_on_record() -> None:
    cluster = four_nodes()
    task = cluster.coordinator.tasks["t"]
    cluster.copy_to_memory(1)
    assert task.copies.newest is None
    cluster.seal()
    assert task.copies.newest == 1
    assert task.recovery is not None
    assert task.recovery.kept == 1


def test_an_older_state_is_dropped_only_when_a_newer_one_is_on_two_nodes() -> None:
    cluster = four_nodes()
    task = cluster.coordinator.tasks["t"]
    cluster.copy_to_memory(1)
    cluster.seal()
    cluster.copy_to_memory(2, away=False)
    cluster.seal()
    assert sorted(task.copies.states) == [1, 2]
    cluster.copy_to_memory(2)
    assert sorted(task.copies.states) == [2]
    assert {order.before for order in told(cluster, msg.DropCopies)} == {2}


def test_states_on_one_node_only_do_not_pile_up() -> None:
    cluster = four_nodes()
    for step in range(1, 8):
        cluster.copy_to_memory(step, away=False)
        cluster.seal()
    assert sorted(cluster.coordinator.tasks["t"].copies.states) == [5, 6, 7]


def test_a_lost_stage_comes_back_from_memory_and_says_so() -> None:
    cluster = FakeCluster(nodes=dict.fromkeys("abc", 1), memory_port=7)
    cluster.submit(shape=Shape(1, 2, 2))
    for step in (1, 2):
        cluster.copy_to_memory(step)
        cluster.seal()
    cluster.exits(Worker(0, 1), "killed by SIGKILL")
    last = resumes(cluster)[-2:]
    assert {order.facts.restore for order in last} == {2}
    assert all(len(order.states.copies) == 2 for order in last)  # a copy of each stage
    assert cluster.coordinator.log.incidents[-1].restored_where == "the memory of nodes"


def test_with_the_node_that_kept_it_the_state_is_gone_and_the_disk_is_next() -> None:
    cluster = FakeCluster(nodes=dict.fromkeys("ab", 1), memory_port=7)
    cluster.submit(shape=Shape(1, 2, 2), has_checkpoints=True)
    cluster.seal()
    cluster.copy_to_memory(1, away=False)
    task = cluster.coordinator.tasks["t"]
    assert task.copies.newest == 1
    cluster.join("c", 1)
    cluster.hear(msg.NodeLeft(node=task.seats[Worker(0, 1)].node))
    assert task.copies.newest is None
    assert resumes(cluster)[-1].facts.restore == 0
    assert resumes(cluster)[-1].states.copies == ()


def test_a_state_that_cannot_be_read_is_not_asked_for_again() -> None:
    cluster = FakeCluster(nodes=dict.fromkeys("abc", 1), memory_port=7)
    cluster.submit(shape=Shape(1, 2, 2))
    cluster.copy_to_memory(1)
    cluster.seal()
    cluster.exits(Worker(0, 1), "killed by SIGKILL")
    task = cluster.coordinator.tasks["t"]
    assert task.recovery is not None
    assert task.recovery.recorded == 1
    failed = ev.RestoreFailed(worker=Worker(0, 0), incarnation=1, step=1)
    cluster.report("t", Worker(0, 0), msg.TaskEvent(task="t", event=failed))
    assert resumes(cluster)[-1].facts.restore == 0


def lost_stage(**more: object) -> FakeCluster:
    """A stage without a worker: all load the state of step 2, of which every stage is on two nodes."""
    cluster = FakeCluster(nodes=dict.fromkeys("abc", 1), memory_port=7)
    cluster.submit(shape=Shape(1, 2, 2), **more)
    cluster.copy_to_memory(1)
    cluster.seal()
    cluster.copy_to_memory(2)
    cluster.seal()
    cluster.exits(Worker(0, 1), "killed by SIGKILL")
    return cluster


def cannot_read(cluster: FakeCluster, worker: Worker, *, step: int = 2) -> msg.NotifyWorker:
    """This worker has asked all holders of its part in vain; its next order."""
    order = next(order for order in reversed(resumes(cluster)) if order.worker == worker)
    part = worker.stage
    asked = [order.states.copies[part], *order.states.other_holders[part]]
    failed = tuple(FailedRead(part=part, node=at.node, because="timed out") for at, _ in asked)
    fetched = msg.StateFetched(
        task="t", worker=worker, step=step, bytes_here=0, bytes_elsewhere=0, seconds=1.0, failed=failed
    )
    cluster.report("t", worker, fetched)
    incarnation = cluster.coordinator.tasks["t"].seats[worker].incarnation
    event = ev.RestoreFailed(worker=worker, incarnation=incarnation, step=step, epoch=order.facts.epoch)
    cluster.report("t", worker, msg.TaskEvent(task="t", event=event))
    return next(order for order in reversed(resumes(cluster)) if order.worker == worker)


def test_an_order_to_load_names_every_holder_of_every_part() -> None:
    cluster = lost_stage()
    kept = cluster.coordinator.tasks["t"].copies.states[2]
    for order in resumes(cluster)[-2:]:
        for part, first in enumerate(order.states.copies):
            named = [first, *order.states.other_holders[part]]
            assert {address.node for address, _ in named} == set(kept.copies[part])
            assert all(text["on"] == address.node for address, text in named)
    assert len(kept.copies[1]) == 2


def test_a_read_that_failed_at_one_holder_costs_no_state_and_the_incident_says_so() -> None:
    cluster = lost_stage()
    order = resumes(cluster)[-1]
    bad, good = order.states.copies[1][0].node, order.states.other_holders[1][0][0].node
    read = FailedRead(part=1, node=bad, because="timed out", then=good)
    fetched = msg.StateFetched(
        task="t", worker=order.worker, step=2, bytes_here=0, bytes_elsewhere=9, seconds=1.0, failed=(read,)
    )
    cluster.report("t", order.worker, fetched)
    task = cluster.coordinator.tasks["t"]
    assert task.copies.newest == 2
    said = [e.text for e in cluster.coordinator.log.incidents[-1].evidence if e.source == "memory"]
    assert said == [
        f"worker {order.worker} could not read 1 part of the state of step 2 from the memory of node {bad} "
        f"(timed out); read from node {good} instead"
    ]
    asked = copies_for(cluster.coordinator.nodes, task.copies.states[2], Worker(0, 0), bad)
    assert asked[1][-1][0].node == bad, "it is asked last from now on"


def test_a_state_that_no_holder_gives_is_tried_again_and_then_the_disk_s_is_loaded() -> None:
    cluster = lost_stage()
    orders = [cannot_read(cluster, Worker(0, 1)) for _ in range(3)]
    assert [order.facts.restore for order in orders] == [2, 2, 0]
    assert orders[-1].states.copies == ()
    incidents = cluster.coordinator.log.incidents
    assert incidents[-1].restored_where == "the seed"
    tried = [e.text for incident in incidents for e in incident.evidence if e.source == "memory"]
    assert len(tried) == 6, "two holders, three times"
    assert all("timed out" in text and "no other node gives it" in text for text in tried)
    for action in cluster.actions:
        if isinstance(action, msg.Dispatch) and isinstance(action.order, msg.DropCopies):
            assert action.order.before <= 2, "what could not be read is not deleted"


def test_an_older_state_in_memory_is_nearer_than_the_disk() -> None:
    cluster = FakeCluster(nodes=dict.fromkeys("abc", 1), memory_port=7)
    cluster.submit(shape=Shape(1, 2, 2))
    for step in (1, 2):  # each on one node only, so both are kept
        cluster.copy_to_memory(step, away=False)
        cluster.seal()
    cluster.exits(Worker(0, 1), "killed by SIGKILL")
    orders = [cannot_read(cluster, Worker(0, 1)) for _ in range(3)]
    assert [order.facts.restore for order in orders] == [2, 2, 1]
    assert len(orders[-1].states.copies) == 2


def test_a_failed_load_of_an_earlier_order_does_not_count() -> None:
    cluster = lost_stage()
    late = next(order for order in reversed(resumes(cluster)) if order.worker == Worker(0, 0))
    cannot_read(cluster, Worker(0, 1))
    task = cluster.coordinator.tasks["t"]
    assert task.recovery is not None
    epoch = task.recovery.epoch
    event = ev.RestoreFailed(worker=Worker(0, 0), incarnation=1, step=2, epoch=late.facts.epoch)
    cluster.report("t", Worker(0, 0), msg.TaskEvent(task="t", event=event))
    assert task.recovery.epoch == epoch, "it was ordered to load the state again, and may have it by now"
    assert task.copies.newest == 2


def cannot_load(cluster: FakeCluster, *workers: Worker) -> None:
    """Of the checkpoint on disk."""
    task = cluster.coordinator.tasks["t"]
    for worker in workers:
        order = next(order for order in reversed(resumes(cluster)) if order.worker == worker)
        event = ev.RestoreFailed(
            worker=worker,
            incarnation=task.seats[worker].incarnation,
            step=order.facts.restore,
            epoch=order.facts.epoch,
        )
        cluster.report("t", worker, msg.TaskEvent(task="t", event=event))
        if task.state is not TaskState.RUNNING:
            break


def test_a_checkpoint_that_a_worker_cannot_load_is_verified_and_an_older_one_is_taken() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    cluster.crew.on_disk = 5
    cluster.submit(has_checkpoints=True)
    assert [order.verify for order in told(cluster, msg.FindCheckpoint)] == [False]
    assert {order.facts.restore for order in resumes(cluster)} == {5}
    cluster.crew.on_disk = 3  # that of step 5 is set aside
    cannot_load(cluster, Worker(0, 1))
    task = cluster.coordinator.tasks["t"]
    assert [order.verify for order in told(cluster, msg.FindCheckpoint)] == [False, True]
    assert task.state is TaskState.RUNNING
    assert {order.facts.restore for order in resumes(cluster)[-4:]} == {3}
    cluster.seal()
    assert task.recovery is not None
    assert task.recovery.recorded == 4


def test_a_checkpoint_that_passes_every_check_and_cannot_be_loaded_ends_the_task() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    cluster.crew.on_disk = 5
    cluster.submit(has_checkpoints=True)
    task = cluster.coordinator.tasks["t"]
    for _ in range(3):
        assert task.state is TaskState.RUNNING
        cannot_load(cluster, Worker(0, 1))
    assert task.state is TaskState.FAILED
    assert task.because == "worker 0:1 could not load the checkpoint of step 5, which passes every check"


def test_a_task_takes_another_shape_after_the_step_somebody_is_in() -> None:
    cluster = four_nodes()
    cluster.seal()
    cluster.hear(msg.ReshapeRequested(task="t", job={"job": "other"}, shape=Shape(1, 4, 4)))
    task = cluster.coordinator.tasks["t"]
    assert resumes(cluster)[-1].facts.until == 2
    cluster.leave_in_memory(2)
    cluster.seal()
    assert task.state is TaskState.RUNNING
    assert task.shape == Shape(1, 4, 4)
    assert task.job == {"job": "other"}
    assert {order.facts.restore for order in resumes(cluster)[-4:]} == {2}
    assert not cluster.coordinator.log.incidents
    for _ in range(7):
        cluster.seal()
    assert task.state is TaskState.FINISHED
    assert task.copies.states == {}


def test_new_workers_sit_where_most_of_their_state_is() -> None:
    cluster = four_nodes()
    before = {w: seat.node for w, seat in cluster.coordinator.tasks["t"].seats.items()}
    cluster.hear(msg.ReshapeRequested(task="t", job={}, shape=Shape(1, 4, 4)))
    task = cluster.coordinator.tasks["t"]
    for worker in task.seats:
        part = {"file": str(worker)}
        copied = msg.PartWritten(
            task="t", step=1, stage=worker.stage, attempt=1, part=part, memory_of=before[worker]
        )
        cluster.report("t", worker, copied)
    cluster.seal()
    after = {w: seat.node for w, seat in task.seats.items()}
    for worker, node in after.items():
        assert node in {before[w] for w in before if w.stage == worker.stage // 2}


def test_a_worker_that_dies_while_its_shape_ends_delays_it_and_no_more() -> None:
    cluster = four_nodes()
    cluster.hear(msg.ReshapeRequested(task="t", job={}, shape=Shape(1, 2, 4)))
    cluster.exits(Worker(1, 0), "killed by SIGKILL")
    assert {order.facts.until for order in resumes(cluster)[-3:]} == {1}
    cluster.leave_in_memory(1)
    cluster.seal()
    assert cluster.coordinator.tasks["t"].shape == Shape(1, 2, 4)


def not_copied(cluster: FakeCluster, step: int) -> None:
    """Of all workers: the state that they hold finds no room."""
    for worker, seat in list(cluster.coordinator.tasks["t"].seats.items()):
        failed = msg.SaveFailed(task="t", step=step, attempt=1, because="no room", memory_of=seat.node)
        cluster.report("t", worker, failed)


def test_a_state_that_no_memory_takes_is_not_waited_for() -> None:
    """On real machines: copies went to a node whose network was dead, the last state of a shape found no room
    behind them, and its workers held it for ten minutes.
    """
    cluster = four_nodes()
    cluster.hear(msg.ReshapeRequested(task="t", job={}, shape=Shape(1, 4, 4)))
    cluster.leaves = False
    cluster.seal()
    task = cluster.coordinator.tasks["t"]
    assert task.progress.held is not None
    not_copied(cluster, 1)
    assert task.progress.held is None
    assert task.shape == Shape(2, 2, 2)
    (incident,) = (i for i in cluster.coordinator.log.incidents if i.what == "it was not stopped")
    assert "no room" in incident.evidence[0].text
    cluster.seal()
    assert task.recovery is not None
    assert task.recovery.recorded == 2


def test_copies_that_mostly_fail_are_one_incident() -> None:
    """One copy in eight succeeded, late, and each closed an incident: seventeen in half a minute."""
    cluster = four_nodes()
    cluster.seal()
    cluster.seal()
    not_copied(cluster, 2)
    cluster.copy_to_memory(1)
    (incident,) = cluster.coordinator.log.open_ones()
    cluster.seal()
    cluster.copy_to_memory(3)
    assert not list(cluster.coordinator.log.open_ones())
    assert "step 3" in incident.remedies[-1].outcome


def test_a_state_that_no_memory_takes_is_saved_after_another_step_where_there_are_checkpoints() -> None:
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 1), memory_port=7)
    cluster.submit(has_checkpoints=True)
    cluster.hear(msg.ReshapeRequested(task="t", job={}, shape=Shape(1, 4, 4)))
    cluster.leaves = False
    cluster.seal()
    not_copied(cluster, 1)
    facts = resumes(cluster)[-1].facts
    assert (facts.until, facts.saves) == (2, True)


def test_copies_go_elsewhere_once_the_node_that_was_to_keep_them_is_isolated() -> None:
    cluster = FakeCluster(nodes={"a": 2, "b": 2, "k": 2}, memory_port=7)
    cluster.submit(shape=Shape(2, 2, 2))
    keeper = cluster.coordinator.nodes["k"]
    assert keeper.memory_open == {"t"}
    epoch = resumes(cluster)[-1].facts.epoch
    cluster.says("k", msg.KernelSpoke(text="NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."))
    assert keeper.state == "isolated"
    assert resumes(cluster)[-1].facts.epoch > epoch
    to = {order.states.copy_to.node for order in resumes(cluster)[-4:] if order.states.copy_to}
    assert "k" not in to


def test_a_task_cancelled_while_it_changes_its_shape_is_cancelled() -> None:
    cluster = four_nodes()
    cluster.hear(msg.ReshapeRequested(task="t", job={}, shape=Shape(1, 2, 4)))
    task = cluster.coordinator.tasks["t"]
    late = task.seats[Worker(1, 1)].node
    cluster.leave_in_memory(1)
    cluster.cut.add(late)  # its worker's exit is not heard yet
    cluster.seal()
    assert task.state is TaskState.ENDING
    cluster.hear(msg.CancelRequested(task="t"))
    cluster.hear(msg.NodeLeft(node=late))
    assert task.state is TaskState.CANCELLED


def test_readers_of_a_state_are_spread_over_its_holders() -> None:
    cluster = four_nodes()
    task = cluster.coordinator.tasks["t"]
    cluster.copy_to_memory(1)
    kept = task.copies.states[1]
    chosen = {w: copies_for(cluster.coordinator.nodes, kept, w, "nowhere") for w in task.seats}
    of_stage_0 = {copies[0][0][0].node for copies in chosen.values()}
    assert len(of_stage_0) == 2
    for worker, seat in task.seats.items():
        for holders in copies_for(cluster.coordinator.nodes, kept, worker, seat.node):
            assert all(part["on"] == address.node for address, part in holders)
            assert seat.node not in {address.node for address, _ in holders[1:]}, "its own is the nearest"


def test_a_copy_is_not_read_from_a_silent_node_while_another_has_it() -> None:
    """A drained node was switched off. Until it was given up, its copies were asked for, in vain; the task
    began again at step 1 though another node had them too.
    """
    cluster = four_nodes()
    task = cluster.coordinator.tasks["t"]
    cluster.copy_to_memory(1)
    kept, nodes = task.copies.states[1], cluster.coordinator.nodes
    silent = sorted(kept.copies[0])[-1]
    cluster.silence(silent)
    assert nodes[silent].state == "silent"
    for worker in task.seats:
        asked = copies_for(nodes, kept, worker, "nowhere")
        assert {holders[0][0].node for holders in asked}.isdisjoint({silent})
        assert asked[0][-1][0].node == silent, "if the others fail, it is asked too"
    kept.copies[0] = {silent: kept.copies[0][silent]}
    assert copies_for(nodes, kept, Worker(0, 0), "nowhere")[0][0][0].node == silent, "there is no other"


def test_a_snapshot_keeps_what_is_in_memory_and_what_is_to_come() -> None:
    cluster = four_nodes()
    cluster.copy_to_memory(1)
    cluster.seal()
    cluster.hear(msg.ReshapeRequested(task="t", job={}, shape=Shape(1, 4, 4)))
    again = Coordinator()
    thaw(again, freeze(cluster.coordinator))
    assert digest(again) == digest(cluster.coordinator)
    assert again.tasks["t"].copies.states == cluster.coordinator.tasks["t"].copies.states
    assert again.tasks["t"].next_shape == cluster.coordinator.tasks["t"].next_shape


def test_what_a_change_costs_follows_from_the_bytes_that_move_and_the_pace_of_the_last_move() -> None:
    cluster = four_nodes()
    task = cluster.coordinator.tasks["t"]

    def copying_s() -> float:
        return Changes([task], cluster.coordinator.log, Measurements()).of(task).copy_s

    assert copying_s() == TRANSITION_S - AGREE_S
    for stage, size in enumerate((10**9, 3 * 10**9)):
        worker = Worker(0, stage)
        part = {"file": "x", "bytes": size}
        node = task.seats[worker].node
        cluster.report(
            "t", worker, msg.PartWritten(task="t", step=1, stage=stage, attempt=1, part=part, memory_of=node)
        )
    cluster.seal()
    assert copying_s() == 3 * 10**9 / PACE
    for worker in (Worker(0, 0), Worker(0, 1)):
        moved = msg.StateFetched(
            task="t", worker=worker, step=1, bytes_here=0, bytes_elsewhere=10**9, seconds=1.0
        )
        cluster.report("t", worker, moved)
    assert copying_s() == 3.0
