"""What is said of a task follows from its progress; and what a drain would cost is said before."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.core.cluster.checkpoints import MOST_BROKEN
from everstep.core.cluster.progress import costs_of_drain, why_stalled
from everstep.core.cluster.skipped_steps import MOST_IN_A_ROW, NOT_FINITE, SkippedSteps
from everstep.core.cluster.task import Task, TaskState
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.actions import RecordStep
from everstep.protocol.shape import Shape
from everstep.protocol.work import EpochFacts
from everstep.server import views
from everstep.server.record import ClusterRecord
from tests.support.fake_cluster import FakeCluster


def pipeline(nodes: dict[str, int], **more: Any) -> FakeCluster:
    """One replica of two stages, two steps done."""
    cluster = FakeCluster(nodes=nodes)
    cluster.submit(shape=Shape(1, 2, 2), **more)
    cluster.seal()
    cluster.seal()
    return cluster


def task_of(cluster: FakeCluster) -> Task:
    return cluster.coordinator.tasks["t"]


def test_a_drain_that_takes_the_only_workers_of_a_stage_says_what_it_costs() -> None:
    """It stopped the task, which was seen at an earlier step afterwards."""
    cluster = pipeline({"a": 1, "b": 1})
    (cost,) = costs_of_drain(cluster.coordinator.roster, "a")
    sentence = cost.sentence("a")
    assert not cost.is_savable, "there is no other memory for its state, and no checkpoint folder"
    assert "from step 2 to step 0" in sentence
    assert "only node a has stage" in sentence


def test_a_drain_costs_nothing_where_another_replica_lives_or_the_state_is_saved() -> None:
    cluster = FakeCluster()
    cluster.submit()
    cluster.seal()
    assert costs_of_drain(cluster.coordinator.roster, "a") == []
    cluster = pipeline({"a": 1, "b": 1}, has_checkpoints=True)
    task_of(cluster).checkpoints.newest = 2
    assert costs_of_drain(cluster.coordinator.roster, "a") == []


def resumes(cluster: FakeCluster) -> list[msg.ResumeWorker]:
    """The last order to resume of each worker."""
    return list({order.worker: order for order in cluster.resumes()}.values())


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("readmitted", [False, True])
def test_a_task_that_need_not_leave_a_node_any_more_does_not_stop_for_it(
    paused: bool, readmitted: bool
) -> None:
    """The node was gone, or readmitted: the task healed, stopped, let all its workers go and was started
    again. A pause is a pause.
    """
    cluster = FakeCluster(nodes={"a": 1, "b": 1, "c": 1}, memory_port=9)
    cluster.submit(shape=Shape(1, 2, 2), has_checkpoints=True)
    cluster.seal()
    cluster.seal()
    cluster.hear(msg.DrainRequested(node="a"))
    if paused:
        cluster.hear(msg.PauseRequested(task="t"))
    task = task_of(cluster)
    assert len(task.seats) == 2, "its state is made safe first"
    if readmitted:
        cluster.hear(msg.ReadmitRequested(node="a", by="p"))
    else:
        cluster.cut.add("a")
        cluster.hear(msg.NodeLeft(node="a"))
        assert {seat.node for seat in task.seats.values()} == {"b", "c"}
    assert task.state is TaskState.RUNNING
    until = {order.facts.until for order in resumes(cluster) if isinstance(order.facts, EpochFacts)}
    assert (until == {None}) != paused, until


def test_a_drain_that_would_cost_steps_makes_the_state_safe_at_the_end_of_the_step() -> None:
    """Its workers were ended at once, or the drain was refused."""
    cluster = FakeCluster(nodes={"a": 1, "b": 1}, memory_port=9)
    cluster.submit(shape=Shape(1, 2, 2))
    cluster.seal()
    cluster.seal()
    (cost,) = costs_of_drain(cluster.coordinator.roster, "a")
    assert cost.is_savable
    cluster.hear(msg.DrainRequested(node="a"))
    task = task_of(cluster)
    assert len(task.seats) == 2, "nobody has gone yet"
    for order in resumes(cluster):
        on_a = task.seats[order.worker].node == "a"
        states = order.states
        assert isinstance(order.facts, EpochFacts)
        assert (order.facts.until, order.facts.saves) == (3, True)
        assert states.copy_away is on_a
        assert not on_a or (states.copy_to is not None and states.copy_to.node == "b")
    cluster.copy_to_memory(3)
    cluster.seal()
    assert task.state is TaskState.WAITING
    assert task.protected == 3
    cluster.join("c", 1)
    assert task.state is TaskState.RUNNING
    assert task.next_step == 4, "not a step is done twice"
    assert not [i for i in cluster.coordinator.log.incidents if i.stops_training]


def test_a_drain_by_force_ends_the_workers_at_once() -> None:
    cluster = FakeCluster(nodes={"a": 1, "b": 1}, memory_port=9)
    cluster.submit(shape=Shape(1, 2, 2))
    cluster.seal()
    cluster.hear(msg.DrainRequested(node="a"))
    assert len(task_of(cluster).seats) == 2
    cluster.hear(msg.DrainRequested(node="a", force=True))
    assert "a" not in {seat.node for seat in task_of(cluster).seats.values()}


def test_a_task_without_a_worker_in_a_stage_does_not_train_whatever_it_is_meant_to() -> None:
    """Page and status said "running" and "work re-routed"."""
    cluster = pipeline({"a": 1, "b": 1})
    assert (
        why_stalled(cluster.coordinator.roster, task_of(cluster), since_step_s=60.0, usual_step_s=0.1) == ""
    )
    cluster.hear(msg.DrainRequested(node="a", force=True))
    assert task_of(cluster).state is TaskState.RUNNING
    said = why_stalled(cluster.coordinator.roster, task_of(cluster), since_step_s=60.0, usual_step_s=0.1)
    assert said.startswith("no step for 60 s: stage")
    assert why_stalled(cluster.coordinator.roster, task_of(cluster), since_step_s=2.0, usual_step_s=0.1) == ""
    assert (
        why_stalled(cluster.coordinator.roster, task_of(cluster), since_step_s=60.0, usual_step_s=30.0) == ""
    )


def test_a_task_of_which_no_node_is_heard_is_not_said_to_train() -> None:
    """Its workers may, behind a cut line; or they are all dead. Nobody knows, and that is what is said."""
    cluster = pipeline({"a": 1, "b": 1, "c": 1})
    roster, task = cluster.coordinator.roster, task_of(cluster)
    cluster.silence("a")
    assert why_stalled(roster, task, since_step_s=60.0, usual_step_s=0.1) == ""
    cluster.silence("b")
    assert why_stalled(roster, task, since_step_s=2.0, usual_step_s=0.1) == ""
    said = why_stalled(roster, task, since_step_s=60.0, usual_step_s=0.1)
    assert said == "no step for 60 s: none of its nodes is heard; its workers may train on"


def test_a_run_whose_every_step_was_skipped_fails_with_an_incident() -> None:
    """It ended with exit code 0 and "no incident"."""
    cluster = FakeCluster()
    cluster.submit(steps=3)
    for _ in range(3):
        cluster.seal(sum_of_squares=math.nan)
    assert task_of(cluster).state is TaskState.FAILED
    assert "all 3 steps were skipped" in task_of(cluster).because
    assert [incident.what for incident in cluster.coordinator.log.incidents] == [NOT_FINITE]


def test_a_run_of_one_step_that_was_skipped_says_so_in_the_singular() -> None:
    """ "all 1 steps were skipped"; "the gradients of 1 steps up to step 14"."""
    cluster = FakeCluster()
    cluster.submit(steps=1)
    cluster.seal(sum_of_squares=math.nan)
    assert task_of(cluster).because.startswith("the only step was skipped, its gradient was not finite")
    (incident,) = cluster.coordinator.log.incidents
    assert incident.verdict is not None
    assert incident.verdict.because.startswith("the gradient of step 1 was not finite")


def test_a_run_that_trains_nothing_more_fails_with_the_step_it_has_got_to() -> None:
    """Every step from 4 on was skipped: "1 incident healed", exit code 0."""
    cluster = FakeCluster()
    cluster.submit(steps=MOST_IN_A_ROW + 3)
    for _ in range(3):
        cluster.seal(sum_of_squares=1.0)
    for _ in range(MOST_IN_A_ROW):
        cluster.seal(sum_of_squares=math.nan)
    assert task_of(cluster).state is TaskState.FAILED
    assert f"the last {MOST_IN_A_ROW} of {MOST_IN_A_ROW + 3} steps were skipped" in task_of(cluster).because
    assert task_of(cluster).because.endswith("nothing is trained after step 3")


def test_a_run_whose_last_steps_are_skipped_is_finished_if_they_are_few() -> None:
    cluster = FakeCluster()
    cluster.submit(steps=MOST_IN_A_ROW + 3)
    for _ in range(4):
        cluster.seal(sum_of_squares=1.0)
    for _ in range(MOST_IN_A_ROW - 1):
        cluster.seal(sum_of_squares=math.nan)
    assert task_of(cluster).state is TaskState.FINISHED


def test_many_skipped_steps_in_a_row_are_an_incident_that_the_next_update_closes() -> None:
    cluster = FakeCluster()
    cluster.submit(steps=MOST_IN_A_ROW + 5)
    for _ in range(MOST_IN_A_ROW):
        cluster.seal(sum_of_squares=math.inf)
    (incident,) = cluster.coordinator.log.incidents
    assert not incident.closed
    cluster.seal()
    assert incident.closed
    assert task_of(cluster).state is TaskState.RUNNING


def test_a_closing_step_has_no_gradient_and_is_not_a_skipped_one() -> None:
    """A start with nothing left but the last evaluation failed: all 1 steps were skipped."""
    skips = SimpleNamespace(recorded=0, total=0, in_a_row=0)
    task = SimpleNamespace(progress=SimpleNamespace(skips=skips, losses={}), steps=14)
    closing = RecordStep(
        step=15,
        epoch=1,
        attempt=0,
        losses=(),
        norm=math.nan,
        microbatches_committed=0,
        replayed_elsewhere=0,
        because="",
        trains=False,
    )
    book = SkippedSteps(incidents=None)  # type: ignore[arg-type]
    assert book.recorded(task, closing, None) == []  # type: ignore[arg-type]
    assert book.why_failed(task, None) == ""  # type: ignore[arg-type]


def test_a_closing_step_is_not_counted_among_the_steps_of_its_task() -> None:
    """`everstep status` said 401/400, and one step's microbatches were issued and never committed."""
    task = SimpleNamespace(recovery=SimpleNamespace(recorded=401), steps=400, shape=Shape(2, 2, 2))
    rows = SimpleNamespace(first=1, last=400, committed=1600)
    assert views._recorded(task) == 400  # type: ignore[arg-type]
    assert views._microbatches(task, rows) == {"issued": 1600, "committed": 1600}  # type: ignore[arg-type]


def test_a_step_done_again_after_going_back_far_has_a_loss_for_its_checkpoint() -> None:
    """The last 64 steps were kept by their numbers: what was done again was forgotten at once."""
    cluster = FakeCluster()
    cluster.submit(steps=400)
    for _ in range(100):
        cluster.seal()
    progress = task_of(cluster).progress
    book = SkippedSteps(incidents=cluster.coordinator.incidents)
    row = next(action.record for action in reversed(cluster.actions) if isinstance(action, msg.RecordRow))
    book.recorded(task_of(cluster), replace(row, step=11), None)  # type: ignore[arg-type]
    assert list(progress.losses) == [11]
    for step in range(12, 100):
        book.recorded(task_of(cluster), replace(row, step=step), None)  # type: ignore[arg-type]
    assert list(progress.losses) == list(range(36, 100))


def test_an_exception_that_says_what_an_incident_of_ours_says_is_not_taken_for_it() -> None:
    """Incidents were found by their words: the next good step "updated again" what a worker had raised."""
    cluster = FakeCluster()
    cluster.submit(steps=40)
    cluster.seal()
    worker = next(iter(task_of(cluster).seats))
    cluster.says(
        task_of(cluster).seats[worker].node,
        msg.TaskEvent(
            task="t", event=ev.WorkerRaised(worker=worker, incarnation=1, error=NOT_FINITE, where="step 2")
        ),
        msg.Sender("t", worker, 1),
    )
    (incident,) = cluster.coordinator.log.incidents
    assert incident.what == NOT_FINITE
    cluster.seal()
    assert not incident.closed


def test_a_save_that_fails_after_going_back_is_remembered() -> None:
    cluster = FakeCluster()
    cluster.submit(steps=400, has_checkpoints=True)
    known = task_of(cluster).checkpoints
    known.broken = dict.fromkeys(range(100, 100 + MOST_BROKEN), 1)
    worker = next(iter(task_of(cluster).seats))
    attempt = task_of(cluster).managed.attempt_of(7)
    cluster.report("t", worker, msg.SaveFailed(task="t", step=7, attempt=attempt, because="no space left"))
    assert known.broken[7] == attempt
    assert 100 not in known.broken
    assert len(known.broken) == MOST_BROKEN


def test_a_task_that_is_over_has_no_workers() -> None:
    """The page showed 4/4, 2/4 or 6/6, `everstep status` 0/4."""
    cluster = pipeline({"a": 1, "b": 1})
    record = ClusterRecord()
    record.begin(cluster.coordinator, record.hearts, 0, None)
    assert views.task_row(record, task_of(cluster))["working"] == 2
    cluster.hear(msg.CancelRequested(task="t", by="me"))
    row = views.task_row(record, task_of(cluster))
    assert (row["state"], row["working"], row["workers"]) == ("cancelled", 0, 0)
