"""A worker that dies before it can say that its eager update does not hold."""

from everstep.core.task.doubts import unreported
from everstep.protocol.ops import Kind, Microbatch, Op, Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.work import Ledger

DEAD = Worker(1, 0)  # of two stages and two replicas
HELD = (Op(Kind.R, None, 0),)


def sent_by_stage_0(step: int) -> Parcel:
    return Parcel(ParcelKind.ACTIVATION, 1, step, 1, Microbatch(1, 0))


def test_a_step_begun_after_a_norm_that_forbids_eager_updates_is_done_again() -> None:
    """The others have skipped step 1; the dead one may not have, and stage 1 may have used its step 2."""
    skipped = Ledger(step=2, norms=((1, False),))
    ledgers = {Worker(0, 0): skipped, Worker(0, 1): skipped, Worker(1, 1): skipped}
    assert unreported([DEAD], ledgers) == 1
    assert unreported([], ledgers) is None, "all who could have been eager can say so"


def test_a_norm_that_allows_eager_updates_leaves_no_doubt() -> None:
    fine = Ledger(step=2, norms=((1, True),))
    unsure = Ledger(step=2)  # eager, and it has not heard all shares of the norm yet
    assert unreported([DEAD], {Worker(0, 0): unsure, Worker(0, 1): fine, Worker(1, 1): unsure}) is None


def test_a_stage_that_holds_the_next_sum_had_no_worker_in_doubt() -> None:
    """Its dead worker owned a part of that sum, which it makes only on weights that are final."""
    ahead = Ledger(step=2, done=HELD, norms=((1, False),))
    assert unreported([DEAD], {Worker(0, 0): ahead, Worker(0, 1): ahead}) is None


def test_what_waits_in_a_box_is_not_used_where_no_survivor_knows_the_norm() -> None:
    behind = Ledger(step=1, done=HELD, holding=(sent_by_stage_0(2),))
    ledgers = {Worker(0, 0): Ledger(step=1, done=HELD), Worker(0, 1): behind, Worker(1, 1): Ledger(step=1)}
    assert unreported([DEAD], ledgers) == 1
    ledgers[Worker(0, 1)] = Ledger(step=1, done=HELD)
    assert unreported([DEAD], ledgers) is None
