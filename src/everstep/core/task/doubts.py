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
    """The step whose update must be taken back because a dead worker may have made it wrongly. One pass over
    the ledgers, of which there are thousands, for all stages.
    """
    lost = {worker.stage for worker in dead}
    if not lost:
        return None
    last: dict[int, int] = {}  # by stage, the last step whose sum a worker has held
    verdicts: dict[int, set[bool]] = {}  # by step
    received: dict[tuple[int, int], int] = {}  # by step and maker: the earliest step that a holder is in
    highest = 0
    for worker, ledger in ledgers.items():
        step = ledger.step
        highest = max(highest, step)
        if worker.stage in lost:
            done = step if ledger.has_sum else step - 1
            last[worker.stage] = max(done, last.get(worker.stage, done))
        for of_step, ok in ledger.norms:
            verdicts.setdefault(of_step, set()).add(ok)
        for parcel in ledger.holding:
            made = (parcel.step, parcel.maker)
            received[made] = min(step, received.get(made, step))
    found = []
    for stage, done in last.items():
        holder = received.get((done + 1, stage))
        known = verdicts.get(done, set())
        if True in known:
            continue
        if known:
            is_begun = highest > done or holder is not None
        else:
            is_begun = holder is not None and holder <= done
        if is_begun:
            found.append(done)
    return min(found, default=None)
