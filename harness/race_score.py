"""What a race came to, from the diaries of its workers alone; the same arithmetic for every system.

A step counts when rank 0 writes it down. It is *useful* if no step with its number or a later one was
finished before, else it is *redone*. The healthy time per step is the mean from the beginning to the first
fault, checkpoints included. What a fault cost is the time until the next fault (or the end) less the useful
steps in it at the healthy pace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

WARM_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    useful_steps: int
    redone_steps: int
    healthy_step_s: float
    goodput: float  # useful steps at the healthy pace, as a part of the time
    lost_s: tuple[float, ...]  # of each fault
    stalled_s: tuple[
        float, ...
    ]  # of each fault: the longest time without a useful step, until the next fault
    last_loss: float
    useful_at: tuple[float, ...]  # when each useful step ended, since the first one
    losses: dict[int, float]  # by step; of a redone step the last


def finished_steps(lines: Sequence[Mapping[str, Any]]) -> list[tuple[float, int, float]]:
    """When, which, loss: of rank 0, in the order of time."""
    rows = (line for line in lines if line["kind"] == "step" and line["rank"] == 0)
    return sorted((line["at"], line["step"], line["loss"]) for line in rows)


def score(
    lines: Sequence[Mapping[str, Any]],
    faults_s: Sequence[float],
    seconds: float,
    began: float | None = None,
) -> Score | None:
    """`faults_s`: when they happened, since the beginning, which is the first step unless it is given: all
    systems begin when the last of them has finished a step. None if no step was finished.
    """
    rows = finished_steps(lines)
    if not rows:
        return None
    began = rows[0][0] if began is None else began
    before = max((step for at, step, _ in rows if at < began), default=0)
    frontier, redone, useful_at = before, 0, []
    losses = {step: loss for at, step, loss in rows if at < began}
    for at, step, loss in rows:
        if not 0 <= at - began <= seconds:
            continue
        losses[step] = loss
        if step > frontier:
            useful_at += [at - began] * (step - frontier)
            frontier = step
        else:
            redone += 1
    pace = healthy_step_s(useful_at, faults_s[0] if faults_s else seconds)
    ends = [*faults_s[1:], seconds] if faults_s else []
    lost = [
        max(end - at - pace * _between(useful_at, at, end), 0.0)
        for at, end in zip(faults_s, ends, strict=True)
    ]
    stalled = [_longest_gap(useful_at, at, end) for at, end in zip(faults_s, ends, strict=True)]
    return Score(
        useful_steps=frontier - before,
        redone_steps=redone,
        healthy_step_s=pace,
        goodput=min((frontier - before) * pace / seconds, 1.0),  # not the other way round: it may be nan
        lost_s=tuple(lost),
        stalled_s=tuple(stalled),
        last_loss=losses[max(losses)],
        useful_at=tuple(useful_at),
        losses=losses,
    )


def healthy_step_s(useful_at: Sequence[float], until: float) -> float:
    """The mean of the steps before the first fault."""
    clean = [at for at in useful_at[WARM_STEPS:] if at <= until]
    return (clean[-1] - clean[0]) / (len(clean) - 1) if len(clean) > 1 else float("nan")


def rates(useful_at: Sequence[float], seconds: float, bin_s: float) -> list[float]:
    """Useful steps per second, bin by bin. A step counts over the whole time since the one before it: else
    steps as long as a bin would come and go with the place of its edges.
    """
    found = [0.0] * round(seconds / bin_s)
    done = Counter(useful_at)  # of several at once it is known when all were done
    for (begin, _), (end, steps) in pairwise([(0.0, 0), *sorted(done.items())]):
        for k in range(int(begin // bin_s), min(len(found), int(end // bin_s) + 1)):
            inside = min(end, (k + 1) * bin_s) - max(begin, k * bin_s)
            found[k] += steps * inside / (end - begin) / bin_s
    return found


def apart(losses: Mapping[int, float], clean: Mapping[int, float]) -> tuple[int, float, float] | None:
    """The last step that both have, the difference there, and the largest of all steps."""
    common = sorted(losses.keys() & clean.keys())
    if not common:
        return None
    gaps = [abs(losses[step] - clean[step]) for step in common]
    return common[-1], gaps[-1], max(gaps)


def _between(times: Sequence[float], begin: float, end: float) -> int:
    return sum(begin < at <= end for at in times)


def _longest_gap(times: Sequence[float], begin: float, end: float) -> float:
    marks = [begin, *(at for at in times if begin < at <= end), end]
    return max(after - before for before, after in pairwise(marks))
