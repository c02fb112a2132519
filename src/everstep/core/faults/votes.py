"""Who is wrong, when two workers have computed different bits from the same inputs.

Host, checker and, where the stage has one, a third worker compute the same again. What they found decides:

    an input is not what was sent            a tensor was damaged on its way, or in its receiver's memory
    several workers differ from themselves   the code gives other bits each time: no machine is to blame
    one worker differs from itself           it was wrong, once or now and then; the others agree
    all are steady, and a third one is there the odd one out is wrong
    all are steady, and there are two        undecided: a person runs everstep check on both
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from everstep.protocol.actions import RecordStep
from everstep.protocol.events import VoteDiffered, VoteRun
from everstep.protocol.ops import Worker
from everstep.protocol.work import mean_loss

STATE = "state"


class VoteEnd(StrEnum):
    WRONG_NUMBERS = "wrong numbers"  # a worker has computed them, or has them in its state
    DAMAGED_INPUT = "damaged input"  # a worker has received another tensor than was sent
    NOT_DETERMINISTIC = "not deterministic"  # the code
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteVerdict:
    finding: VoteEnd
    because: str
    worker: Worker | None = None  # who is wrong, or has the damaged tensor
    parts: tuple[str, ...] = ()  # of what was computed: those that differ

    @property
    def has_spread(self) -> bool:
        """Have workers of other stages computed with it? Not with a weight gradient alone."""
        return self.finding is VoteEnd.DAMAGED_INPUT or any(part in OUTPUTS for part in self.parts)


OUTPUTS = ("output", "gradient out", STATE)


def judge_votes(event: VoteDiffered) -> VoteVerdict:
    about = "the state before step" if event.microbatch is None else f"microbatch {event.microbatch} of step"
    what = f"{about} {event.step} at stage {event.worker.stage}"
    parts = _parts_that_differ(event.runs)
    if event.microbatch is None:
        parts = (STATE, *parts)
    if (damaged := _damaged(event.runs)) is not None:
        worker, name = damaged
        because = f"worker {worker} computed {what} from another {name} than was sent to it"
        return VoteVerdict(finding=VoteEnd.DAMAGED_INPUT, because=because, worker=worker, parts=parts)
    by_worker: dict[Worker, list[str]] = {}
    for run in event.runs:
        by_worker.setdefault(run.worker, []).append(run.whole)
    unsteady = [worker for worker, found in by_worker.items() if len(set(found)) > 1]
    if len(unsteady) > 1:
        who = " and ".join(map(str, unsteady))
        because = f"workers {who} each compute {what} differently from run to run, from the same inputs"
        return VoteVerdict(finding=VoteEnd.NOT_DETERMINISTIC, because=because, parts=parts)
    if len(unsteady) == 1:
        return _one_unsteady(unsteady[0], by_worker, what, parts)
    return _all_steady(event, by_worker, what, parts)


def _one_unsteady(
    worker: Worker, by_worker: dict[Worker, list[str]], what: str, parts: tuple[str, ...]
) -> VoteVerdict:
    others = {found[0] for other, found in by_worker.items() if other != worker}
    runs = by_worker[worker]
    if len(others) > 1:
        because = f"three workers disagree about {what}, and worker {worker} with itself"
        return VoteVerdict(finding=VoteEnd.UNDECIDED, because=because, parts=parts)
    right = others.pop()
    wrong = sum(found != right for found in runs)
    count = len(by_worker) - 1
    agree = "the other worker agrees" if count == 1 else f"{count} others agree"
    because = (
        f"worker {worker} computed {what} wrongly in {wrong} of {len(runs)} runs from the same inputs; "
        f"{agree} in all {sum(map(len, by_worker.values())) - len(runs)} of theirs"
    )
    return VoteVerdict(finding=VoteEnd.WRONG_NUMBERS, because=because, worker=worker, parts=parts)


def _all_steady(
    event: VoteDiffered, by_worker: dict[Worker, list[str]], what: str, parts: tuple[str, ...]
) -> VoteVerdict:
    found: dict[str, list[Worker]] = {}
    for worker, runs in by_worker.items():
        found.setdefault(runs[0], []).append(worker)
    has = "have different bits of" if event.microbatch is None else "compute different bits of"
    both = f"workers {event.host} and {event.worker} {has} {what}, each the same in every run"
    odd = [workers[0] for workers in found.values() if len(workers) == 1]
    if len(by_worker) < 3 or len(odd) != 1:
        why = "there is no third worker" if len(by_worker) < 3 else "a third worker has others still"
        because = f"{both}, and {why}"
        return VoteVerdict(finding=VoteEnd.UNDECIDED, because=because, parts=parts)
    third = next(worker for worker in by_worker if worker not in (event.host, event.worker))
    agrees = event.worker if odd[0] == event.host else event.host
    because = f"{both}; worker {third} agrees with worker {agrees}"
    return VoteVerdict(finding=VoteEnd.WRONG_NUMBERS, because=because, worker=odd[0], parts=parts)


class Replay(StrEnum):
    """What the second run of a suspected step says."""

    SAME = "the data or the model"
    OTHER = "a machine, or code that gives other bits each time"


def judge_replay(record: RecordStep) -> Replay:
    suspect = record.suspect
    assert suspect is not None
    if suspect.stage >= 0:
        return Replay.OTHER if math.isfinite(record.norm) else Replay.SAME
    found = mean_loss(record.losses)
    loss = suspect.loss if found is None else found  # all who knew them may be dead
    return Replay.SAME if suspect.is_again(loss) else Replay.OTHER


def _damaged(runs: Sequence[VoteRun]) -> tuple[Worker, str] | None:
    """A worker whose first run had another input than its sender had hashed."""
    for run in runs:
        for name in ("input", "gradient in"):
            sent = run.hashes.get(f"{name} as sent")
            if sent and run.hashes.get(name) != sent:
                return run.worker, "gradient" if name == "gradient in" else "input"
    return None


def _parts_that_differ(runs: Sequence[VoteRun]) -> tuple[str, ...]:
    names = dict.fromkeys(name for run in runs for name in run.hashes)
    return tuple(name for name in names if len({run.hashes.get(name) for run in runs}) > 1)
