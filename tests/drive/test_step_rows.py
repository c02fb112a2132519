"""Rows of steps: each microbatch of a task is counted once, whatever of its steps was reported."""

from dataclasses import replace

from everstep.drive.step_rows import StepRows
from everstep.protocol.actions import RecordStep
from everstep.protocol.ops import Microbatch
from everstep.protocol.work import mean_loss


def record(step: int) -> RecordStep:
    return RecordStep(
        step=step,
        epoch=1,
        attempt=0,
        losses=((Microbatch(0, 0), 1.0),),
        norm=1.0,
        microbatches_committed=4,
        replayed_elsewhere=0,
        because="",
    )


def rows_of(*steps: int) -> StepRows:
    rows = StepRows()
    rows.begin(0.0)
    for step in steps:
        rows.add(record(step), float(step))
    return rows


def test_steps_of_a_checkpoint_that_nobody_reported_were_done_once() -> None:
    """An older journal knew two steps, the checkpoint in the folder had fifty: 48 of 240 microbatches counted
    (a storm on real processes).
    """
    rows = rows_of(1, 2)
    rows.begin(3.0, done=50, microbatches=4)
    for step in range(51, 61):
        rows.add(record(step), float(step))
    assert (rows.first, rows.last, rows.committed) == (1, 60, 240)


def test_a_task_that_goes_back_or_stands_where_its_rows_end_counts_nothing_more() -> None:
    rows = rows_of(*range(1, 11))
    for done in (0, 5, 10):
        rows.begin(11.0, done=done, microbatches=4)
        assert (rows.last, rows.committed) == (10, 40)
    rows.add(record(6), 12.0)
    assert (rows.last, rows.committed) == (6, 24)


def test_a_task_that_resumes_an_earlier_run_counts_its_own_steps() -> None:
    rows = StepRows()
    rows.begin(0.0, done=50, microbatches=4)
    rows.add(record(51), 1.0)
    assert (rows.first, rows.committed) == (51, 4)


def test_a_row_has_the_loss_that_judges_and_checkpoints_have() -> None:
    """To the last bit: it was added up in order, and differed from the one in the checkpoint's index."""
    losses = tuple((Microbatch(0, m), loss) for m, loss in enumerate((0.1, 0.2, 0.3)))
    row = StepRows().add(replace(record(1), losses=losses), 1.0)
    assert row.loss == mean_loss(losses) != (0.1 + 0.2 + 0.3) / 3


def test_evaluations_of_steps_done_again_are_kept() -> None:
    """The last ones were kept by the numbers of their steps."""
    rows = StepRows()
    scored = [replace(record(step), scores=((Microbatch(0, 0), (1.0, 1.0)),)) for step in range(1, 400)]
    for one in scored:
        rows.evaluate(one, ("loss",))
    last = max(rows.evaluations)
    assert last == 398
    rows.evaluate(scored[10], ("loss",))
    assert list(rows.evaluations) == [10]
