"""Recovery of one task, event by event: what it asks for, and what it must not do."""

import json
from typing import Any

import pytest

from everstep.core.task.recovery import Course, Recovery
from everstep.core.task.states import (
    Absent,
    Assembling,
    Copied,
    Copying,
    Entering,
    Gathering,
    Member,
    Over,
    RecoveryPolicy,
    Restoring,
    Running,
    Started,
)
from everstep.errors import InternalError
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol.incidents import IncidentLog
from everstep.protocol.ops import OpLists, Worker
from everstep.protocol.shape import Shape
from everstep.protocol.work import Ledger

W00, W01, W10, W11 = Worker(0, 0), Worker(0, 1), Worker(1, 0), Worker(1, 1)


class Task:
    """A recovery, and the answers that a world without surprises gives it."""

    def __init__(self, *, replicas: int = 2, max_restarts: int = 3) -> None:
        policy = RecoveryPolicy(max_restarts=max_restarts)
        self.recovery = Recovery(Shape(replicas, 2, 1), Course(steps=9), policy=policy)
        self.recovery.begin()
        for worker in self.recovery.shape.workers():
            self.start(worker)
        self.plan()

    def happens(self, event: ev.Event) -> list[act.Action]:
        actions = self.recovery.handle(event, 1.0)
        self.recovery.validate()
        return actions

    def start(self, worker: Worker) -> list[act.Action]:
        place: Any = self.recovery.places[worker]
        return self.happens(ev.WorkerStarted(worker=worker, incarnation=place.incarnation))

    def exit(self, worker: Worker) -> list[act.Action]:
        place: Any = self.recovery.places[worker]
        return self.happens(
            ev.WorkerExited(worker=worker, incarnation=place.incarnation, reason="killed by SIGKILL")
        )

    def seal(self, step: int) -> list[act.Action]:
        return [
            action
            for stage in (0, 1)
            for action in self.happens(
                ev.StepSealed(
                    step=step,
                    stage=stage,
                    attempt=self.recovery.attempt_of(step),
                    microbatches=2,
                    executed=2,
                )
            )
        ]

    def copied(self, worker: Worker) -> list[act.Action]:
        place: Any = self.recovery.places[worker]
        return self.happens(
            ev.StateCopied(
                worker=worker, incarnation=place.incarnation, transfer=place.transfer, state_step=1
            )
        )

    def report(self, worker: Worker, step: int = 1, *, joining: bool = False) -> list[act.Action]:
        ledger = Ledger(step=step, joining=joining)
        return self.happens(ev.LedgerReported(worker=worker, epoch=self.recovery.epoch, ledger=ledger))

    def plan(self) -> list[act.Action]:
        steady = OpLists.of(dict.fromkeys(self.recovery.shape.workers(), ()))
        return self.happens(
            ev.PlanComputed(epoch=self.recovery.epoch, lists={}, steady=steady, hosts={}, steady_hosts={})
        )


def test_a_death_interrupts_the_members_and_the_plan_resumes_them() -> None:
    task = Task()
    interrupt, start = task.exit(W01)
    assert interrupt == act.InterruptWorkers(
        workers=(W00, W10, W11), epoch=2, because="worker 0:1 is gone: killed by SIGKILL"
    )
    assert isinstance(start, act.StartWorker)
    assert task.report(W00) == task.report(W10) == []
    (question,) = task.report(W11)
    assert isinstance(question, act.ComputePlan)
    assert question.dead == {W01}
    (resumed,) = task.plan()
    assert isinstance(resumed, act.ResumeWorkers)
    assert list(resumed.orders) == [W00, W10, W11]
    assert task.recovery.phase == Running(2)


def test_a_task_begins_without_a_worker_whose_slot_is_lost_while_it_starts() -> None:
    """Storm seed 3491 of `--corruption`: the last that had not started was lost, and all others waited."""
    recovery = Recovery(Shape(2, 2, 1), Course(steps=9), policy=RecoveryPolicy())
    recovery.begin()
    for worker in (W00, W01, W10):
        assert recovery.handle(ev.WorkerStarted(worker=worker, incarnation=1), 1.0) == []
    recovery.handle(ev.PlacesGranted(places=frozenset({W00, W01, W10})), 1.0)
    (question,) = recovery.handle(ev.WorkerExited(worker=W11, incarnation=1, reason="node n1 is gone"), 1.0)
    assert isinstance(question, act.ComputePlan)
    assert question.dead == {W11}
    assert isinstance(recovery.phase, Restoring)


def test_a_place_goes_from_absent_to_member_through_every_state() -> None:
    task = Task()
    seen = []

    def look() -> None:
        seen.append(task.recovery.places[W01])

    task.exit(W01)
    for worker in (W00, W10, W11):
        task.report(worker)
    task.plan()
    look()
    copy = task.start(W01)
    look()
    assert copy == [
        act.CopyState(
            source=W11,
            joiner=W01,
            incarnation=2,
            transfer=1,
            because="worker 0:1 copies its state from worker 1:1 while training continues",
        )
    ]
    task.copied(W01)
    look()
    for worker in (W00, W10, W11):
        task.report(worker, 3)
    look()
    task.plan()
    task.exit(W00)  # the next epoch asks the joiner too, which has its state by now
    for worker in (W10, W11):
        task.report(worker, 4)
    task.report(W01, 4, joining=True)
    look()
    assert [type(place).__name__ for place in seen] == ["Starting", "Copying", "Copied", "Entering", "Member"]
    assert seen[1:] == [Copying(2, W11, 1), Copied(2, W11), Entering(2, W11, 4), Member(2, 4)]


def test_a_joiner_enters_earlier_when_the_worker_that_was_furthest_has_died() -> None:
    """Else steps are planned with a worker that enters only after them, and nothing runs its ops there."""
    task = Task(replicas=3)
    ahead = Worker(2, 0)
    rest = [w for w in task.recovery.shape.workers() if w not in (W01, ahead)]
    task.exit(W01)
    for worker in (*rest, ahead):
        task.report(worker)
    task.plan()
    task.start(W01)
    task.copied(W01)
    for worker in rest:
        task.report(worker, 2)
    task.report(ahead, 3)
    assert task.recovery.places[W01] == Entering(2, W11, 4)
    task.exit(ahead)
    for worker in rest:
        task.report(worker, 2)
    task.report(W01, 2, joining=True)
    assert task.recovery.places[W01] == Entering(2, W11, 3)


def test_a_stage_whose_restarts_are_used_up_fails_the_task_while_another_stage_lives() -> None:
    """Was an assertion that ended the coordinator: only the death of all stages at once was a sentence."""
    task = Task(replicas=1, max_restarts=0)
    task.exit(W01)
    (failed,) = task.report(W00)
    assert failed == act.FailTask(
        because="stage 1 has no worker left and its restarts are used up (0 in a row per place); "
        "the last one: killed by SIGKILL"
    )
    assert isinstance(task.recovery.phase, Over)


def test_a_place_whose_process_worked_for_long_has_its_restarts_again() -> None:
    """A run of weeks lost a place for good at its fourth death, however far apart they were."""
    task = Task()
    places, enough = task.recovery._places, task.recovery.policy.forgiven_after_steps
    places.restarts[W01] = places.restarts[W11] = 4
    places.states[W01] = Member(4, 30)
    places.states[W11] = Absent(0, "killed by SIGKILL")
    places.__post_init__()  # it counts again
    places.forgive(30 + enough - 1)
    assert places.restarts[W01] == 4
    places.forgive(30 + enough)
    assert (places.restarts[W01], places.restarts[W11]) == (1, 4)  # who is not there has shown nothing
    places.to(W01, Absent(0, "killed by SIGKILL"))
    (start,) = places.start_due(60)
    assert isinstance(start, act.StartWorker)
    assert start.worker == W01


def test_an_invalid_update_reported_while_everyone_goes_back_to_a_kept_state_changes_nothing() -> None:
    """The update goes anyway. It was taken for a reason to ask workers that have no state for ledgers."""
    task = Task(replicas=1)
    invalid = ev.UpdateInvalidated(worker=W00, step=1, norm=9.0, attempt=task.recovery.attempt_of(2))
    task.exit(W01)
    task.report(W00, 2)
    assert isinstance(task.recovery.phase, Assembling)
    assert task.happens(invalid) == []
    task.start(W01)
    assert isinstance(task.recovery.phase, Restoring)
    assert task.happens(invalid) == []
    assert isinstance(task.recovery.phase, Restoring)
    assert all(isinstance(action, act.ResumeWorkers) for action in task.plan())


@pytest.mark.parametrize(
    ("norm", "words"), [(9.0, "9 is above the clip"), (float("nan"), "is not finite")], ids=["clipped", "NaN"]
)
def test_an_eager_update_that_is_undone_interrupts_the_task_and_is_no_incident(
    norm: float, words: str
) -> None:
    """It was one, of a healthy worker, and the planner took it for a failure."""
    task = Task()
    (asked,) = task.happens(ev.UpdateInvalidated(worker=W00, step=1, norm=norm, attempt=1))
    assert isinstance(asked, act.InterruptWorkers)
    assert asked.because == f"undo the eager update of step 1: its gradient norm {words}"
    assert isinstance(task.recovery.phase, Gathering)
    assert task.recovery.phase.rewind == 1
    assert task.recovery.incidents == []


def test_a_report_of_an_earlier_process_changes_nothing() -> None:
    task = Task()
    task.exit(W01)
    before = task.recovery.snapshot()
    assert task.happens(ev.WorkerExited(worker=W01, incarnation=1, reason="late")) == []
    assert task.happens(ev.WorkerStarted(worker=W01, incarnation=1)) == []
    assert task.happens(ev.StateCopied(worker=W01, incarnation=1, transfer=1, state_step=3)) == []
    assert task.recovery.snapshot() == before


def test_a_transition_that_the_tables_do_not_list_is_an_internal_error() -> None:
    task = Task()
    with pytest.raises(InternalError, match="worker 0:1: member cannot become copied"):
        task.recovery._places.to(W01, Copied(1, W11))
    with pytest.raises(InternalError, match="the task: running cannot become running"):
        task.recovery._phases.to(Running(7))


def test_a_snapshot_in_any_phase_is_the_same_machine() -> None:
    """With every phase in it, and every state of a place."""
    task = Task()
    phases, places = set(), set()

    def swap() -> None:
        phases.add(type(task.recovery.phase))
        places.update(map(type, task.recovery.places.values()))
        data = json.loads(json.dumps(task.recovery.snapshot()))
        log = IncidentLog()
        log.incidents = task.recovery.incidents
        task.recovery = Recovery.from_snapshot(data, log.of_task(""))
        assert task.recovery.snapshot() == data

    swap()
    task.exit(W01)
    swap()
    for worker in (W00, W10, W11):
        task.report(worker)
    swap()
    task.plan()
    swap()
    task.start(W01)
    swap()
    task.copied(W01)
    swap()
    for worker in (W00, W10, W11):
        task.report(worker, 2)
    swap()
    task.plan()
    for worker in (W00, W10, W11, W01):
        task.exit(worker)
        swap()
    task.start(W00)
    swap()
    task.start(W01)
    swap()
    task.plan()
    swap()
    assert phases >= {Assembling, Restoring, Running, Gathering}
    assert places >= {Started, Copying, Copied, Entering, Member}
    assert not any(isinstance(place, Absent) for place in task.recovery.places.values())


def raised(
    worker: Worker,
    error: str,
    *,
    incarnation: int = 1,
    where: str = "step 3 1F0.0",
    raised_for: ev.RaisedFor = ev.RaisedFor.UNKNOWN,
) -> ev.WorkerRaised:
    return ev.WorkerRaised(
        worker=worker, incarnation=incarnation, error=error, where=where, raised_for=raised_for
    )


def test_the_same_exception_at_the_same_op_from_two_replicas_fails_the_task() -> None:
    task = Task()
    assert task.happens(raised(W01, "ValueError: token 70000 at 0x7f12 is not below 50257")) == []
    assert task.happens(raised(W01, "ValueError: token 70000 at 0x7f12 is not below 50257")) == []
    (failed,) = task.happens(raised(W11, "ValueError: token 71234 at 0x7e99 is not below 50257"))
    assert failed == act.FailTask(
        because="workers 0:1 and 1:1 raised the same exception at step 3 1F0.0, so the input causes it: "
        "ValueError: token 71234 at 0x7e99 is not below 50257"
    )


OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB"


@pytest.mark.parametrize("op", ["1R", "1U"])
def test_replicas_that_raise_together_in_a_reduce_or_an_update_do_not_fail_the_task(op: str) -> None:
    """Eight workers on one GPU ran out of memory in the reduce of step 2, and "the input causes it"."""
    task = Task()
    for error in (OUT_OF_MEMORY, "RuntimeError: Numerator() is wrong"):
        for worker in (W01, W11):
            assert task.happens(raised(worker, error, where=f"step 2 {op}")) == []
    (failed,) = task.happens(raised(W11, OUT_OF_MEMORY, incarnation=2, where=f"step 2 {op}"))
    assert isinstance(failed, act.FailTask)
    assert failed.because == (
        f"worker 1:1 and its replacement raised the same exception at step 2 {op}, so the step needs more "
        f"memory than there is: {OUT_OF_MEMORY}"
    )


def test_memory_and_sentences_about_a_model_are_not_called_faults_of_the_input() -> None:
    for error, raised_for, cause in (
        (OUT_OF_MEMORY, ev.RaisedFor.UNKNOWN, ", so the step needs more memory than there is"),
        ("layer 'b' changes its buffer 'load' in its forward.", ev.RaisedFor.INPUT, ""),
    ):
        task = Task()
        assert task.happens(raised(W01, error, raised_for=raised_for)) == []
        (failed,) = task.happens(raised(W11, error, raised_for=raised_for))
        assert isinstance(failed, act.FailTask)
        assert (
            failed.because == f"workers 0:1 and 1:1 raised the same exception at step 3 1F0.0{cause}: {error}"
        )


def test_two_replicas_that_raise_at_one_op_for_different_reasons_do_not_fail_the_task() -> None:
    """Was keyed by the op alone: a machine out of memory and one without a network were the input's fault."""
    task = Task()
    assert task.happens(raised(W01, "RuntimeError: CUDA out of memory")) == []
    assert task.happens(raised(W11, "ConnectionError: connection reset by peer")) == []
    assert task.happens(raised(W11, "RuntimeError: CUDA out of memory", where="step 3 1I0.0")) == []
    assert isinstance(task.recovery.phase, Running)
