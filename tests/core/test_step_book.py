"""Steps on record, from the reports of stages."""

from everstep.core.task.step_book import StepBook
from everstep.protocol.actions import RecordStep
from everstep.protocol.events import StepSealed
from everstep.protocol.ops import Microbatch
from everstep.protocol.shape import Shape

LOSSES = ((Microbatch(0, 0), 5.5),)


def sealed(step: int) -> StepSealed:
    return StepSealed(step=step, stage=0, attempt=1, microbatches=2, executed=6, losses=LOSSES)


def told(book: StepBook, event: StepSealed, *, lives: bool) -> list[RecordStep]:
    def has_witness(stage: int, step: int) -> bool:
        return lives

    return book.seal(event, epoch=1, attempt=1, alone=lambda step: (), has_witness=has_witness)


def test_a_report_that_is_on_its_way_is_waited_for() -> None:
    """After a restart of the coordinator one node was connected sooner than the other: its worker had joined
    in step 4 and reported that, and step 3, which a live peer of the other node reported then, was on record
    without its loss.
    """
    book = StepBook(shape=Shape(2, 1, 1), steps=9, recorded=2)
    assert told(book, sealed(4), lives=True) == []
    assert [(one.step, one.losses) for one in told(book, sealed(3), lives=True)] == [(3, LOSSES), (4, LOSSES)]


def test_a_report_that_died_with_its_worker_is_not_waited_for() -> None:
    book = StepBook(shape=Shape(2, 1, 1), steps=9, recorded=2)
    assert told(book, sealed(4), lives=True) == []
    again = told(book, sealed(4), lives=False)  # reported again in the epoch after the death
    assert [(one.step, one.losses) for one in again] == [(3, ()), (4, LOSSES)]


def test_what_a_witness_may_have_forgotten_is_not_waited_for() -> None:
    book = StepBook(shape=Shape(2, 1, 1), steps=900, recorded=2)
    assert [one.step for one in told(book, sealed(400), lives=True)] == list(range(3, 145))
