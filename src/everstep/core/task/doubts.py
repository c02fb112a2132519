"""Was an update made eagerly by a worker that died before it could say that it does not hold?

A worker that updates a step before the norm of all stages is known begins the next one with weights that may
be wrong. If the norm forbids the update, the worker reports it and waits; until then its stage cannot hold
the sum of the next step, so that step is final nowhere. But if the worker dies first, no survivor knows
whether it was eager, and what others have made of its work would count.

So where a stage has lost a worker, and its last sum is that of step t: if the norm of step t is known to
forbid eager updates, step t + 1 is done again. If no survivor knows the norm of step t, a survivor in a later
step has been eager itself, and will see; one that is still in step t must not use what the dead worker has
sent to it of step t + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.protocol.ops import Worker
from everstep.protocol.work import Ledger


def unreported(dead: Iterable[Worker], ledgers: Mapping[Worker, Ledger]) -> int | None:
    """The step whose update must be taken back because a dead worker may have made it wrongly."""
    found = [_in_doubt(stage, ledgers) for stage in sorted({worker.stage for worker in dead})]
    return min((step for step in found if step is not None), default=None)


def _in_doubt(stage: int, ledgers: Mapping[Worker, Ledger]) -> int | None:
    last = max(_last_sum(ledger) for worker, ledger in ledgers.items() if worker.stage == stage)
    verdicts = {ok for ledger in ledgers.values() for step, ok in ledger.norms if step == last}
    if True in verdicts:
        return None
    if verdicts:
        is_begun = any(
            ledger.step > last or _has_work_of(stage, last + 1, ledger) for ledger in ledgers.values()
        )
        return last if is_begun else None
    behind = [ledger for ledger in ledgers.values() if ledger.step <= last]
    return last if any(_has_work_of(stage, last + 1, ledger) for ledger in behind) else None


def _last_sum(ledger: Ledger) -> int:
    """The last step whose sum this worker has held."""
    return ledger.step if ledger.has_sum else ledger.step - 1


def _has_work_of(stage: int, step: int, ledger: Ledger) -> bool:
    """Has it received a boundary tensor that this stage has made?"""
    return any(parcel.step == step and parcel.maker == stage for parcel in ledger.holding)
