"""States in nodes' memory: where copies go, which are dropped, and how a task takes another shape by them."""

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.copy_placement import copies_for, leaves, shelf_for
from everstep.core.cluster.snapshot import digest, freeze, thaw
from everstep.core.cluster.task import TaskState
from everstep.core.words import actions as act
from everstep.core.words import cluster_messages as msg
from everstep.core.words import events as ev
from everstep.core.words.ops import Worker
from everstep.core.words.shape import Shape
from everstep.plan.ask import AGREE_S, PACE, TRANSITION_S, transition_s
from tests.core.drama import Drama


def told(drama: Drama, kind: type) -> list:
    return [a.order for a in drama.actions if isinstance(a, msg.Dispatch) and isinstance(a.order, kind)]


def resumes(drama: Drama) -> list[msg.NotifyWorker]:
    return [order for order in told(drama, msg.NotifyWorker) if isinstance(order.words, act.ResumeStep)]


def four_nodes(**more: object) -> Drama:
    drama = Drama(nodes=dict.fromkeys("abcd", 1), shelf_port=7, **more)
    drama.submit()
    return drama


def test_a_copy_goes_to_a_node_without_a_worker_of_its_stage() -> None:
    drama = four_nodes()
    task = drama.coordinator.tasks["t"]
    for worker in task.seats:
        node = shelf_for(drama.coordinator.nodes, task, worker).node
        assert all(w.stage != worker.stage for w, seat in task.seats.items() if seat.node == node)


def test_alone_on_a_node_without_a_door_a_copy_stays_where_it_is() -> None:
    drama = Drama(nodes={"a": 4})
    drama.submit()
    task = drama.coordinator.tasks["t"]
    assert {shelf_for(drama.coordinator.nodes, task, w).node for w in task.seats} == {"a"}
    assert [w for w in task.seats if leaves(task, w)] == [Worker(0, 0), Worker(0, 1)]  # one a stage and node


def test_a_state_counts_when_every_stage_has_a_copy_and_its_step_is_on_record() -> None:
    drama = four_nodes()
    task = drama.coordinator.tasks["t"]
    drama.shelve(1)
    assert task.copies.newest is None
    drama.seal()
    assert task.copies.newest == 1
    assert task.recovery is not None
    assert task.recovery.kept == 1


def test_an_older_state_is_dropped_only_when_a_newer_one_is_on_two_nodes() -> None:
    drama = four_nodes()
    task = drama.coordinator.tasks["t"]
    drama.shelve(1)
    drama.seal()
    drama.shelve(2, away=False)
    drama.seal()
    assert sorted(task.copies.states) == [1, 2]
    drama.shelve(2)
    assert sorted(task.copies.states) == [2]
    assert {order.before for order in told(drama, msg.DropCopies)} == {2}


def test_states_on_one_node_only_do_not_pile_up() -> None:
    drama = four_nodes()
    for step in range(1, 8):
        drama.shelve(step, away=False)
        drama.seal()
    assert sorted(drama.coordinator.tasks["t"].copies.states) == [5, 6, 7]


def test_a_lost_stage_comes_back_from_memory_and_says_so() -> None:
    drama = Drama(nodes=dict.fromkeys("abc", 1), shelf_port=7)
    drama.submit(shape=Shape(1, 2, 2))
    for step in (1, 2):
        drama.shelve(step)
        drama.seal()
    drama.exits(Worker(0, 1), "killed by SIGKILL")
    last = resumes(drama)[-2:]
    assert {order.words.order.restore for order in last} == {2}
    assert all(len(order.kept) == 2 for order in last)  # a copy of each stage
    assert drama.coordinator.log.incidents[-1].restored_where == "the memory of nodes"


def test_with_the_node_that_kept_it_the_state_is_gone_and_the_disk_is_next() -> None:
    drama = Drama(nodes=dict.fromkeys("ab", 1), shelf_port=7)
    drama.submit(shape=Shape(1, 2, 2), has_checkpoints=True)
    drama.seal()
    drama.shelve(1, away=False)
    task = drama.coordinator.tasks["t"]
    assert task.copies.newest == 1
    drama.join("c", 1)
    drama.hear(msg.NodeLeft(node=task.seats[Worker(0, 1)].node))
    assert task.copies.newest is None
    assert resumes(drama)[-1].words.order.restore == 0
    assert resumes(drama)[-1].kept == ()


def test_a_state_that_cannot_be_read_is_not_asked_for_again() -> None:
    drama = Drama(nodes=dict.fromkeys("abc", 1), shelf_port=7)
    drama.submit(shape=Shape(1, 2, 2))
    drama.shelve(1)
    drama.seal()
    drama.exits(Worker(0, 1), "killed by SIGKILL")
    task = drama.coordinator.tasks["t"]
    assert task.recovery is not None
    assert task.recovery.recorded == 1
    failed = ev.RestoreFailed(worker=Worker(0, 0), incarnation=1, step=1)
    drama.report("t", Worker(0, 0), msg.TaskEvent(task="t", event=failed))
    assert resumes(drama)[-1].words.order.restore == 0


def test_a_task_takes_another_shape_after_the_step_somebody_is_in() -> None:
    drama = four_nodes()
    drama.seal()
    drama.hear(msg.ReshapeRequested(task="t", job={"job": "other"}, shape=Shape(1, 4, 4)))
    task = drama.coordinator.tasks["t"]
    assert resumes(drama)[-1].words.order.until == 2
    drama.shelve(2, away=False)
    drama.seal()
    assert task.state is TaskState.RUNNING
    assert task.shape == Shape(1, 4, 4)
    assert task.job == {"job": "other"}
    assert {order.words.order.restore for order in resumes(drama)[-4:]} == {2}
    assert not drama.coordinator.log.incidents
    for _ in range(7):
        drama.seal()
    assert task.state is TaskState.FINISHED
    assert task.copies.states == {}


def test_new_workers_sit_where_most_of_their_state_is() -> None:
    drama = four_nodes()
    before = {w: seat.node for w, seat in drama.coordinator.tasks["t"].seats.items()}
    drama.hear(msg.ReshapeRequested(task="t", job={}, shape=Shape(1, 4, 4)))
    task = drama.coordinator.tasks["t"]
    for worker in task.seats:
        part = {"file": str(worker)}
        shelved = msg.PartWritten(
            task="t", step=1, stage=worker.stage, attempt=1, part=part, shelf=before[worker]
        )
        drama.report("t", worker, shelved)
    drama.seal()
    after = {w: seat.node for w, seat in task.seats.items()}
    for worker, node in after.items():
        assert node in {before[w] for w in before if w.stage == worker.stage // 2}


def test_a_worker_that_dies_while_its_shape_ends_delays_it_and_no_more() -> None:
    drama = four_nodes()
    drama.hear(msg.ReshapeRequested(task="t", job={}, shape=Shape(1, 2, 4)))
    drama.exits(Worker(1, 0), "killed by SIGKILL")
    assert {order.words.order.until for order in resumes(drama)[-3:]} == {1}
    drama.shelve(1, away=False)
    drama.seal()
    assert drama.coordinator.tasks["t"].shape == Shape(1, 2, 4)


def test_a_task_cancelled_while_it_changes_its_shape_is_cancelled() -> None:
    drama = four_nodes()
    drama.hear(msg.ReshapeRequested(task="t", job={}, shape=Shape(1, 2, 4)))
    task = drama.coordinator.tasks["t"]
    late = task.seats[Worker(1, 1)].node
    drama.cut.add(late)  # its worker's exit is not heard yet
    drama.shelve(1, away=False)
    drama.seal()
    assert task.state is TaskState.ENDING
    drama.hear(msg.CancelRequested(task="t"))
    drama.hear(msg.NodeLeft(node=late))
    assert task.state is TaskState.CANCELLED


def test_readers_of_a_state_are_spread_over_its_holders() -> None:
    drama = four_nodes()
    task = drama.coordinator.tasks["t"]
    drama.shelve(1)
    kept = task.copies.states[1]
    chosen = {w: copies_for(drama.coordinator.nodes, kept, w, "nowhere") for w in task.seats}
    of_stage_0 = {copies[0][0].node for copies in chosen.values()}
    assert len(of_stage_0) == 2
    for worker, seat in task.seats.items():
        for shelf, part in copies_for(drama.coordinator.nodes, kept, worker, seat.node):
            assert part["on"] == shelf.node


def test_a_snapshot_keeps_what_is_in_memory_and_what_is_to_come() -> None:
    drama = four_nodes()
    drama.shelve(1)
    drama.seal()
    drama.hear(msg.ReshapeRequested(task="t", job={}, shape=Shape(1, 4, 4)))
    again = Coordinator()
    thaw(again, freeze(drama.coordinator))
    assert digest(again) == digest(drama.coordinator)
    assert again.tasks["t"].copies.states == drama.coordinator.tasks["t"].copies.states
    assert again.tasks["t"].next_shape == drama.coordinator.tasks["t"].next_shape


def test_what_a_change_costs_follows_from_the_bytes_that_move_and_the_pace_of_the_last_move() -> None:
    drama = four_nodes()
    task = drama.coordinator.tasks["t"]
    assert transition_s(task) == TRANSITION_S
    for stage, size in enumerate((10**9, 3 * 10**9)):
        worker = Worker(0, stage)
        part = {"file": "x", "bytes": size}
        node = task.seats[worker].node
        drama.report(
            "t", worker, msg.PartWritten(task="t", step=1, stage=stage, attempt=1, part=part, shelf=node)
        )
    drama.seal()
    assert transition_s(task) == AGREE_S + 3 * 10**9 / PACE
    for worker in (Worker(0, 0), Worker(0, 1)):
        moved = msg.StateFetched(
            task="t", worker=worker, step=1, bytes_here=0, bytes_elsewhere=10**9, seconds=1.0
        )
        drama.report("t", worker, moved)
    assert transition_s(task) == AGREE_S + 3.0
