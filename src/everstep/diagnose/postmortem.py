"""Dumps of gloo that were written after a failure: who stopped first.

gloo's recorder marks an operation as retired when it has completed *and when it has failed*; there is no
other mark. A rank that is killed closes its connections, its peers' operations fail and are retired, and the
dumps look like those of a healthy job. An operation whose wait ran into its timeout stays outstanding. So
here `retired` is no evidence of completion. What is left is who issued what, and when:

    never issued    an operation that needs all members, and one of them has not issued it: it cannot have
                    completed, whatever the recorder says. It failed, and the one that has not come is why
    missing         a member that left no dump, where the others did
    issued late     all have issued it, one of them when the others had given up: later than the timeout
    strayed         it called another operation than after the same ones before
    dumped first    messages leave no trace: of ranks that may have waited in one, the first to write its dump

`stops.py` says where each rank stopped and whom it waited for there. As in a live hang, the ends of that
graph are the suspects.

Is it a post-mortem at all? Yes, where an operation is retired that cannot have completed, where one rank
calls it retired and another outstanding, where a rank left no dump, or where nothing is outstanding and a
rank is late. Else the dumps are of a running job, and `hang.py` reads them. Ranks that answered a live pull
are believed to have run at that time: what a peer issued later says nothing about them.

Confidence falls with what the verdict rests on: 0.9 for a number, 0.7 or less for a dump that is not there,
0.35 for the dates of files; less where several share the blame.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from everstep.diagnose.case import Case
from everstep.diagnose.circles import last_circles
from everstep.diagnose.comm_record import RECV, SEND, UNKNOWN, Record
from everstep.diagnose.finding import Finding, RuledOut, Suspect, Syndrome, Where, ranks_text
from everstep.diagnose.mismatch import first_disagreement
from everstep.diagnose.next_calls import breaks_off, first_stray
from everstep.diagnose.stops import Operation, Stops, arrows_of_stops, places_of, stops_of
from everstep.diagnose.wait_graph import Arrow, Rests, operation

_NEVER, _NEVER_ONE_OF_SEVERAL = 0.9, 0.7
_MISSING, _MISSING_AT_THE_END = 0.7, 0.4
_STRAYED, _ONE_MORE, _FIRST_DUMP, _ONE_OF_MANY = 0.6, 0.5, 0.35, 0.6
_NOTHING_FAILED, _BESIDE_A_MISSING_ONE = 0.4, 0.5
_MOST_MISSING = 0.5  # of the world: with more, a missing dump is missing data
_LEAD_NS, _LONGEST_LEAD_NS = 5_000_000, 60_000_000_000
Blame = dict[int, tuple[float, str]]  # rank -> how sure, what says so


def find_stopped(case: Case) -> list[Finding]:
    """Who stopped first; nothing if these dumps are not post-mortem, or if all is well."""
    if case.has_device or not case.dumped:
        return []
    stops = stops_of(case)
    contradicted = stops.failed or stops.torn or (stops.missing and not case.pulled)
    if stops.waiting and not contradicted and not latecomers(case, stops, places_of(stops), surely=True):
        return []  # a rank waits, and nothing speaks against it
    disagreement = first_disagreement(case, stops.operations())
    if disagreement:
        return disagreement
    arrows = arrows_of_stops(case, stops)
    blame, where = _blame(case, stops, arrows)
    return [_finding(case, arrows, blame, where)] if blame else []


def older_dumps(case: Case) -> tuple[int, ...]:
    """Ranks whose dump is older than the others, of a job that ran on."""
    return () if case.has_device or not case.dumped else tuple(sorted(stops_of(case).older))


def _blame(case: Case, stops: Stops, arrows: list[Arrow]) -> tuple[Blame, Where]:
    after: dict[int, set[int]] = defaultdict(set)
    for rank in stops.at:
        after.setdefault(rank, set())
    for arrow in arrows:
        after[arrow.waiter].add(arrow.target)
        after.setdefault(arrow.target, set())
    _join_those_at_one_place(stops, after)
    ends = last_circles(after)
    never = [
        circle[0] for circle in ends if len(circle) == 1 and circle[0] not in {*stops.at, *stops.missing}
    ]
    missing = [circle[0] for circle in ends if len(circle) == 1 and circle[0] in stops.missing]
    together = [rank for circle in ends for rank in circle if circle[0] in stops.at]
    alone = [rank for rank in together if any(a.target == rank and a.rests is Rests.NEVER for a in arrows)]
    odd = _one_too_far(case, stops, never) or _strayed(case, stops, missing, together)
    if odd:
        return odd, Where.PROGRAM
    blame = _never_issued(case, stops, never, missing, arrows) | _left_no_dump(case, stops, missing, arrows)
    places = {(stops.at[rank].group, stops.at[rank].seq) for rank in together}
    blame |= latecomers(case, stops, places, surely=not stops.failed and not alone)
    if not blame and len(alone) == 1:
        blame = _never_issued(case, stops, alone, missing, arrows)
    elif not blame:
        blame = {rank: (_ONE_OF_MANY / len(alone), _said_of(case, rank, arrows)) for rank in alone}
    return blame or _first_to_dump(case, sorted(case.dumped)), Where.HOST


def _join_those_at_one_place(stops: Stops, after: dict[int, set[int]]) -> None:
    """Ranks that stopped at one operation waited for each other: they are one end, or none."""
    for ranks in places_of(stops).values():
        for one, other in zip(ranks, ranks[1:] + ranks[:1], strict=True):
            if one != other:
                after[one].add(other)


def _never_issued(
    case: Case, stops: Stops, never: list[int], missing: list[int], arrows: list[Arrow]
) -> Blame:
    """Those that may have waited in a message are blamed only where no rank is missing."""
    used = bool(case.messages_next)
    in_messages = [rank for rank in never if case.messages_next.get(rank, used and rank not in stops.calls)]
    if missing:
        never = [rank for rank in never if rank not in in_messages]
    elif in_messages and len(never) > 1:
        return _first_to_dump(case, never) or {
            rank: (_ONE_OF_MANY / len(never), _said_of(case, rank, arrows)) for rank in never
        }
    several = _NEVER_ONE_OF_SEVERAL * min(1.0, 2 / max(len(never), 1))
    sure = _NEVER if len(never) == 1 else several
    if missing:
        sure = min(sure, _BESIDE_A_MISSING_ONE)
    if not (stops.failed or stops.torn or stops.waiting or missing):
        sure = min(sure, _NOTHING_FAILED)  # as in a job that runs well, where one is just waited for
    return {rank: (sure, _said_of(case, rank, arrows)) for rank in never}


def _left_no_dump(case: Case, stops: Stops, missing: list[int], arrows: list[Arrow]) -> Blame:
    if not missing or len(stops.missing) > _MOST_MISSING * len(case.world):
        return {}
    inside = stops.failed or stops.torn or stops.waiting or _is_inside_a_step(stops)
    sure = (_MISSING if inside else _MISSING_AT_THE_END) * (1 - (len(missing) - 1) / len(case.world))
    return {rank: (sure, _said_of(case, rank, arrows)) for rank in missing}


def _is_inside_a_step(stops: Stops) -> bool:
    longest = max(stops.calls.values(), key=len, default=[])
    return breaks_off([(call.group, call.kind, call.bytes) for call in longest])


def _first_to_dump(case: Case, ranks: list[int]) -> Blame:
    """Where messages are used and nothing else tells: a failure spreads along a chain of neighbours, and each
    rank writes its dump when it is reached. By the files' dates, so only with a lead, and in that order."""
    written = {rank: case.taken_ns[rank] for rank in case.dumped if rank in case.taken_ns}
    unrecorded = (case.messages_next or not len(case.log)) and not case.log.is_kind(SEND, RECV).any()
    if not unrecorded or case.pulled or len(written) < max(2, len(case.dumped)):
        return {}
    first, second = sorted(written, key=lambda rank: written[rank])[:2]
    lead = written[second] - written[first]
    if first not in ranks or not _LEAD_NS <= lead < _LONGEST_LEAD_NS or not _spreads(written, first, ranks):
        return {}
    said = f"wrote its dump first, {lead / 1e6:.0f} ms before rank {second}; messages are not recorded"
    return {first: (_FIRST_DUMP, said)}


def _spreads(written: dict[int, int], first: int, ranks: list[int]) -> bool:
    """Did those that may have failed one after the other write their dumps in order of their distance?"""
    below = [written[rank] for rank in sorted(ranks, reverse=True) if rank <= first]
    above = [written[rank] for rank in sorted(ranks) if rank >= first]
    return below == sorted(below) and above == sorted(above)


def _strayed(case: Case, stops: Stops, missing: list[int], together: list[int]) -> Blame:
    """Where a rank is missing, or ranks wait in a circle: one that called what it never called there."""
    found: Blame = {}
    if not missing and len(together) < 2:
        return found
    for rank, calls in stops.calls.items():
        at = first_stray([(call.group, call.kind, call.bytes) for call in calls])
        if at is not None:
            found[rank] = (_STRAYED, f"called {operation(case, calls[at])} where it called another before")
    return found if len(found) <= len(stops.calls) / 2 or len(stops.calls) == 1 else {}


def _one_too_far(case: Case, stops: Stops, never: list[int]) -> Blame:
    """Most members ended at one place, and a few went on alone: those are the odd ones."""
    if len(never) < 2 or case.messages_next or stops.missing:
        return {}
    beyond = sorted(stops.at)
    ended = {stops.calls[rank][-1].seq for rank in never if stops.calls.get(rank)}
    if len(beyond) >= len(never) or len(ended) != 1 or len(beyond) + len(never) < len(case.world):
        return {}
    return {
        rank: (
            _ONE_MORE,
            f"issued {operation(case, stops.at[rank])}, and rank {ranks_text(never)} ended before it",
        )
        for rank in beyond
    }


# ------------------------------------------------------------------ words


def _said_of(case: Case, rank: int, arrows: list[Arrow]) -> str:
    into = [arrow for arrow in arrows if arrow.target == rank]
    if not into:
        return "stopped first"
    best = max(into, key=lambda arrow: arrow.rests)
    waiters = sorted({arrow.waiter for arrow in into})
    failed = f"rank {ranks_text(waiters)} stopped at {operation(case, best.at)}"
    return f"{best.how}; {failed}, which needs it"


def _finding(case: Case, arrows: list[Arrow], blame: Blame, where: Where) -> Finding:
    ranks = sorted(blame)
    victims = tuple(rank for rank in case.world if rank not in blame)
    waited = {arrow.waiter: arrow for arrow in arrows if arrow.waiter not in blame}
    program = where is Where.PROGRAM
    return Finding(
        syndrome=Syndrome.COMMUNICATION_HANG if program else Syndrome.NON_COMMUNICATION_HANG,
        where=where,
        suspects=tuple(
            Suspect(
                rank=rank, confidence=round(sure, 2), evidence=f"it {said}", node=case.hosts.get(rank, "")
            )
            for rank, (sure, said) in sorted(blame.items(), key=lambda each: (-each[1][0], each[0]))
        ),
        victims=victims,
        ruled_out=tuple(
            RuledOut(what=f"rank {rank}", because=f"it waited for rank {a.target} at {operation(case, a.at)}")
            for rank, a in sorted(waited.items())
        ),
        because=f"rank {ranks_text(ranks)} stopped first, and the others failed without it; "
        "these dumps were written after the failure.",
        waits=tuple((a.waiter, a.target, operation(case, a.at)) for a in arrows),
    )


# Who issued an operation long after the others: later than they wait for it.
#
# What is usual between two ranks is taken out first: their clocks may differ, and one may always be the last.

_SURE, _UNSURE = 0.9, 0.6
_LATE_NS = 500_000_000
_PATIENCE = 5.0  # times the longest usual pause
_LOOK_BACK = 32  # operations


def latecomers(
    case: Case, stops: Stops, places: Iterable[Operation], *, surely: bool
) -> dict[int, tuple[float, str]]:
    """Rank -> how sure, and what says so. `surely`: only those that came when the others had given up."""
    found = {}
    for place in places:
        issued = {r: call for r, call in stops.issued.get(place, {}).items() if call.enqueued_ns != UNKNOWN}
        timeout = case.groups[place[0]].timeout_ns
        limit = 0.9 * timeout if timeout > 0 else float("inf")
        enough = limit if surely else min(limit, max(_LATE_NS, _PATIENCE * _usual_pause(stops, issued)))
        late = {rank: by for rank, by in _late_ns(stops, issued).items() if by >= enough}
        if 0 < len(late) <= len(issued) / 2:
            for rank, by in late.items():
                said = f"issued {operation(case, issued[rank])} {by / 1e9:.1f} s after the others"
                found[rank] = (_SURE if by >= limit else _UNSURE, said)
    return found


def _late_ns(stops: Stops, issued: dict[int, Record]) -> dict[int, float]:
    """By how much each rank came after the first half of them."""
    if len(issued) < 2:
        return {}
    first = min(issued, key=lambda rank: issued[rank].enqueued_ns)
    after = {
        rank: call.enqueued_ns - issued[first].enqueued_ns - _usually_late(stops, call, rank, first)
        for rank, call in issued.items()
    }
    half = sorted(after.values())[(len(after) - 1) // 2]
    return {rank: late - half for rank, late in after.items()}


def _usually_late(stops: Stops, call: Record, rank: int, other: int) -> float:
    mine, its = (
        {c.seq: c.enqueued_ns for c in stops.calls[r] if c.group == call.group and c.seq < call.seq}
        for r in (rank, other)
    )
    both = sorted(mine.keys() & its.keys())[-_LOOK_BACK:]
    return float(np.median([mine[n] - its[n] for n in both])) if both else 0.0


def _usual_pause(stops: Stops, ranks: Iterable[int]) -> float:
    pauses = [np.diff([call.enqueued_ns for call in stops.calls[rank][:-1]]) for rank in ranks]
    together = np.concatenate(pauses) if pauses else np.zeros(0)
    return float(np.quantile(together, 0.98)) if len(together) >= 8 else 0.0
