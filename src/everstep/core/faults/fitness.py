"""Is a node fit to train? From what its checks have found, its earlier ones, and its peers'.

    failed   a check of the machine itself: it computes wrong numbers, loses bytes, counts ECC errors, or a
             check of the node's own says so                                   no workers
    slow     below a quarter of what its peers, or it in earlier weeks, have   no workers
    marked   below half of it; other versions than its peers have; or limits,
             clock and kernel log say something                                workers, and an incident

What is about one GPU is about its slots: they get no workers, the node's others do.

Figures are compared where three others have them. All in one run may be slow for the same harmless reason (a
busy machine), so one run of its own past is no comparison: three are.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitness:
    unfit: tuple[str, ...] = ()
    marked: tuple[str, ...] = ()
    slots: Mapping[int, str] = field(default_factory=dict)  # that get no workers, and why


def run_of(results: Sequence[CheckResult], now: float) -> CheckRun:
    found = {name: value for one in results for name, value in _figures(one).items()}
    facts = {name: fact for one in results for name, fact in one.facts.items()}
    return CheckRun(at=now, figures=found, facts=facts)


def _figures(one: CheckResult) -> dict[str, float]:
    return {f"{one.check}: {name}": value for name, value in one.figures.items()}


def kept_with(runs: Sequence[CheckRun], new: CheckRun) -> list[CheckRun]:
    """The last one takes the place of another of the same week; what it has not measured is kept."""
    this_week = int(new.at // WEEK_S)
    older = [run for run in runs if int(run.at // WEEK_S) != this_week]
    before = [run for run in runs if int(run.at // WEEK_S) == this_week]
    figures = {name: value for run in (*before, new) for name, value in run.figures.items()}
    facts = {name: fact for run in (*before, new) for name, fact in run.facts.items()}
    return [*older, CheckRun(at=new.at, figures=figures, facts=facts)][-KEPT_RUNS:]


def judge_checks(
    results: Sequence[CheckResult], mine: Sequence[CheckRun], peers: Iterable[CheckRun]
) -> Fitness:
    unfit: list[str] = []
    marked: list[str] = []
    slots: dict[int, str] = {}
    others = list(peers)
    for one in results:
        bad, odd = _judged(one, mine, others)
        marked += odd
        if one.slots and bad:
            slots |= {slot: slots.get(slot, bad[0]) for slot in one.slots}
        else:
            unfit += bad
    return Fitness(unfit=tuple(unfit), marked=tuple(marked), slots=slots)


def _judged(
    one: CheckResult, mine: Sequence[CheckRun], peers: Sequence[CheckRun]
) -> tuple[list[str], list[str]]:
    """What makes it unfit, and what marks it."""
    bad: list[str] = []
    odd: list[str] = []
    if one.state == "failed":
        is_own = bool(one.slots) or one.check.split()[0] in OF_THE_MACHINE
        (bad if is_own else odd).append(f"{one.check}: {one.says}")
    for name, value in _figures(one).items():
        for whose, runs in (("peers", peers), ("earlier checks of it", mine)):
            known = [run.figures[name] for run in runs if name in run.figures]
            if len(known) < LEAST_OTHERS or value >= SLOW * (usual := statistics.median(known)):
                continue
            text = f"{name} {value:.4g}; the median of {len(known)} {whose} is {usual:.4g}"
            (bad if value < TOO_SLOW * usual else odd).append(text)
    for name, fact in one.facts.items():
        facts = [run.facts[name] for run in peers if name in run.facts]
        if len(facts) >= LEAST_OTHERS and fact != (most := statistics.mode(facts)):
            odd.append(f"{name} is {fact}; {facts.count(most)} of {len(facts)} peers have {most}")
    return bad, odd
