"""Is a node fit to train? From what its checks have found, its earlier ones, and its peers'.

    failed   a check of the machine itself: it computes wrong numbers, loses bytes, counts ECC errors, or a
             check of the node's own says so                                   no workers
    slow     below a quarter of what its peers, or it in earlier weeks, have   no workers
    marked   below half of it; or limits, clock and kernel log say something   workers, and an incident

Figures are compared where three others have them. All in one run may be slow for the same harmless reason (a
busy machine), so one run of its own past is no comparison: three are.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep.protocol.messages import CheckResult

OF_THE_MACHINE = ("compute", "memory", "disk", "ecc", "command")  # first words of checks
SLOW, TOO_SLOW = 0.5, 0.25  # of the median
LEAST_OTHERS = 3
WEEK_S = 7 * 86_400.0
KEPT_RUNS = 8  # one per week, and the last


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRun:
    at: float
    figures: dict[str, float]  # by check and figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitness:
    unfit: tuple[str, ...] = ()
    marked: tuple[str, ...] = ()


def run_of(results: Sequence[CheckResult], now: float) -> CheckRun:
    found = {f"{one.check}: {name}": value for one in results for name, value in one.figures.items()}
    return CheckRun(at=now, figures=found)


def kept_with(runs: Sequence[CheckRun], new: CheckRun) -> list[CheckRun]:
    """The last one takes the place of another of the same week; what it has not measured is kept."""
    this_week = int(new.at // WEEK_S)
    older = [run for run in runs if int(run.at // WEEK_S) != this_week]
    before = [run.figures for run in runs if int(run.at // WEEK_S) == this_week]
    figures = {name: value for known in (*before, new.figures) for name, value in known.items()}
    return [*older, CheckRun(at=new.at, figures=figures)][-KEPT_RUNS:]


def judge_checks(
    results: Sequence[CheckResult], mine: Sequence[CheckRun], peers: Iterable[CheckRun]
) -> Fitness:
    unfit: list[str] = []
    marked: list[str] = []
    for one in results:
        if one.state == "failed":
            is_own = one.check.split()[0] in OF_THE_MACHINE
            (unfit if is_own else marked).append(f"{one.check}: {one.says}")
    others = list(peers)
    for name, value in run_of(results, 0.0).figures.items():
        for whose, runs in (("peers", others), ("earlier checks of it", mine)):
            known = [run.figures[name] for run in runs if name in run.figures]
            if len(known) < LEAST_OTHERS or value >= SLOW * (usual := statistics.median(known)):
                continue
            text = f"{name} {value:.4g}; the median of {len(known)} {whose} is {usual:.4g}"
            (unfit if value < TOO_SLOW * usual else marked).append(text)
    return Fitness(unfit=tuple(unfit), marked=tuple(marked))
