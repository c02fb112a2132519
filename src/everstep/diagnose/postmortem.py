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

Every rank *stops* at one operation: the first that has been outstanding for longer than a moment or cannot
have completed, else its last one, unless a peer went on after it. A rank waits there for members that have
not issued it or stopped before it. As in a live hang, the ends of that graph are the suspects.

Is it a post-mortem at all? Yes, where an operation is retired that cannot have completed, where one rank
calls it retired and another outstanding, where a rank left no dump, or where nothing is outstanding and a
rank is late. Else the dumps are of a running job, and `hang.py` reads them. Ranks that answered a live pull
are believed to have run at that time: what a peer issued later says nothing about them.

Confidence falls with what the verdict rests on: 0.9 for a number, 0.7 or less for a dump that is not there,
0.4 for the dates of files; less where several share the blame.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from everstep.diagnose.case import Case
from everstep.diagnose.circles import last_circles
from everstep.diagnose.finding import Finding, RuledOut, Suspect, Syndrome, Where, ranks_text
from everstep.diagnose.mismatch import first_disagreement
from everstep.diagnose.program import breaks_off, first_stray
from everstep.diagnose.record import COMPUTE, RECV, SEND, SYNCHRONIZING, UNKNOWN, Record
from everstep.diagnose.waiting import Arrow, Rests, operation

NOTE = "these dumps were written after the job had failed: operations they show as retired may have failed."
_NEVER, _NEVER_ONE_OF_SEVERAL = 0.9, 0.7
_MISSING, _MISSING_AT_THE_END = 0.7, 0.4
_LATE, _LATER = 0.9, 0.6
_STRAYED, _ONE_MORE, _FIRST_DUMP, _ONE_OF_MANY = 0.6, 0.5, 0.4, 0.6
_MOST_MISSING = 0.5  # of the world: with more, a missing dump is missing data
_PULL_NS = 200_000_000  # a pull reads ranks one after the other
_LATE_NS = 500_000_000
_MOMENT_NS = 500_000_000
_LEAD_NS, _LONGEST_LEAD_NS = 5_000_000, 60_000_000_000
Blame = dict[int, tuple[float, str]]  # rank -> how sure, what says so


@dataclass(slots=True)
class Stops:
    """Where every rank stopped, as far as its dump says."""

    reached: dict[tuple[int, int], int] = field(default_factory=dict)  # (rank, group) -> last sequence number
    calls: dict[int, list[Record]] = field(default_factory=dict)  # its operations in order
    at: dict[int, Record] = field(default_factory=dict)  # the operation it stopped at
    failed: int = 0  # operations that are retired and cannot have completed
    torn: int = 0  # operations that are retired at one rank and outstanding at another
    waiting: int = 0  # operations that have been outstanding for longer than a moment
    missing: frozenset[int] = frozenset()


def find_stopped(case: Case) -> list[Finding]:
    """Who stopped first; nothing if these dumps are not post-mortem, or if all is well."""
    if case.has_device or not case.dumped:
        return []
    stops = _stops(case)
    contradicted = stops.failed or stops.torn or (stops.missing and not case.pulled)
    if stops.waiting and not contradicted and not _came_too_late(case, stops):
        return []  # somebody waits, and nothing speaks against it
    disagreement = first_disagreement(case, _operations(stops))
    if disagreement:
        return disagreement
    arrows = _arrows(case, stops)
    blame, where = _blame(case, stops, arrows)
    return [_finding(case, stops, arrows, blame, where)] if blame else []


# ------------------------------------------------------------------ where each rank stopped


def _stops(case: Case) -> Stops:
    log, stops = case.log, Stops()
    stops.missing = frozenset(case.world) - case.dumped
    rows = np.flatnonzero(~log.is_kind(SEND, RECV, COMPUTE) & np.isin(log.rank, list(case.dumped)))
    for at in rows.tolist():
        record = log.row(at)
        stops.calls.setdefault(record.rank, []).append(record)
        key = record.rank, record.group
        stops.reached[key] = max(record.seq, stops.reached.get(key, UNKNOWN))
    waiting = {(c.group, c.seq) for calls in stops.calls.values() for c in calls if _waits(case, c)}
    stops.waiting = len(waiting)
    stops.torn = _torn(stops, waiting)
    for rank, calls in stops.calls.items():
        failed = [c for c in calls if _cannot_be_done(case, stops, c)]
        stops.failed += sum(not _waits(case, c) for c in failed)
        place = next((c for c in calls if c in failed or _waits(case, c)), None)
        if place is None and not _went_on(case, stops, calls[-1]):
            place = calls[-1]
        if place is not None:
            stops.at[rank] = place
    return stops


def _operations(stops: Stops) -> list[list[Record]]:
    """Every operation as its members issued it, in the order of their first issue."""
    found: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for calls in stops.calls.values():
        for call in calls:
            found[call.group, call.seq].append(call)
    return sorted(found.values(), key=lambda calls: min(call.enqueued_ns for call in calls))


def _waits(case: Case, call: Record) -> bool:
    """Outstanding, and not only because the dump was written the moment it ended."""
    taken = case.taken_ns.get(call.rank, UNKNOWN)
    return call.done is False and (taken == UNKNOWN or taken - call.enqueued_ns > _MOMENT_NS)


def _torn(stops: Stops, waiting: set[tuple[int, int]]) -> int:
    """Nobody completes one of these before all have come, and then all do: so it failed for some."""
    return sum(
        c.done is not False and c.kind in SYNCHRONIZING and (c.group, c.seq) in waiting
        for calls in stops.calls.values()
        for c in calls[-8:]
    )


def _cannot_be_done(case: Case, stops: Stops, call: Record) -> bool:
    """A member has not issued it, and is not merely dumped earlier."""
    if call.kind not in SYNCHRONIZING:
        return False
    for member in case.groups[call.group].members:
        if member not in case.dumped or stops.reached.get((member, call.group), UNKNOWN) >= call.seq:
            continue
        if member not in case.pulled or call.enqueued_ns < case.taken_ns.get(member, 0) - _PULL_NS:
            return True
    return False


def _went_on(case: Case, stops: Stops, call: Record) -> bool:
    """Did a member that took part in it issue more after this operation? Then all have completed it, unless
    it is one with a root, where some are done before the others."""
    if call.kind not in SYNCHRONIZING:
        return False
    for member in case.groups[call.group].members:
        calls = stops.calls.get(member)
        if calls and stops.reached.get((member, call.group), UNKNOWN) >= call.seq:
            last = calls[-1]
            if (last.group, last.seq) != (call.group, call.seq):
                return True
    return False


# ------------------------------------------------------------------ who waited for whom


def _arrows(case: Case, stops: Stops) -> list[Arrow]:
    arrows = []
    for rank, place in stops.at.items():
        for member in case.groups[place.group].members:
            if member == rank:
                continue
            if member in stops.missing:
                arrows.append(Arrow(rank, member, place, Rests.ABSENT, "left no dump"))
            elif stops.reached.get((member, place.group), UNKNOWN) < place.seq:
                arrows.append(Arrow(rank, member, place, Rests.NEVER, _never(case, stops, member, place)))
            elif _is_before(stops, member, place):
                how = f"stopped before it, at {operation(case, stops.at[member])}"
                arrows.append(Arrow(rank, member, place, Rests.BEHIND, how))
    return arrows


def _never(case: Case, stops: Stops, rank: int, place: Record) -> str:
    calls = stops.calls.get(rank)
    last = f"the last it issued is {operation(case, calls[-1])}" if calls else "it issued nothing at all"
    return f"never issued {operation(case, place)}: {last}"


def _is_before(stops: Stops, rank: int, place: Record) -> bool:
    """Did it stop at another operation, one it issued before this one?"""
    own = stops.at.get(rank)
    if own is None or (own.group, own.seq) == (place.group, place.seq):
        return False
    issued = next(c for c in stops.calls[rank] if (c.group, c.seq) == (place.group, place.seq))
    return own.order < issued.order


# ------------------------------------------------------------------ who is to blame


def _blame(case: Case, stops: Stops, arrows: list[Arrow]) -> tuple[Blame, Where]:
    after: dict[int, set[int]] = defaultdict(set)
    for rank in stops.at:
        after.setdefault(rank, set())
    for arrow in arrows:
        after[arrow.waiter].add(arrow.target)
        after.setdefault(arrow.target, set())
    _join_those_at_one_place(stops, after)
    ends = last_circles(after)
    never = [circle[0] for circle in ends if len(circle) == 1 and circle[0] in case.dumped - set(stops.at)]
    missing = [circle[0] for circle in ends if len(circle) == 1 and circle[0] in stops.missing]
    together = [rank for circle in ends for rank in circle if circle[0] in stops.at]
    alone = [rank for rank in together if any(a.target == rank and a.rests is Rests.NEVER for a in arrows)]
    odd = _one_too_far(case, stops, never) or _strayed(case, stops, missing, together)
    if odd:
        return odd, Where.PROGRAM
    blame = _never_issued(case, never, missing, arrows) | _left_no_dump(case, stops, missing, arrows)
    places = {(stops.at[rank].group, stops.at[rank].seq) for rank in together}
    blame |= _latecomers(case, stops, places, surely=not stops.failed and not alone)
    if not blame and len(alone) == 1:
        blame = _never_issued(case, alone, missing, arrows)
    elif not blame:
        blame = {rank: (_ONE_OF_MANY / len(alone), _said_of(case, rank, arrows)) for rank in alone}
    return blame or _first_to_dump(case, sorted(case.dumped)), Where.HOST


def _join_those_at_one_place(stops: Stops, after: dict[int, set[int]]) -> None:
    """Ranks that stopped at one operation waited for each other: they are one end, or none."""
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, place in stops.at.items():
        places[place.group, place.seq].append(rank)
    for ranks in places.values():
        for one, other in zip(ranks, ranks[1:] + ranks[:1], strict=True):
            if one != other:
                after[one].add(other)


def _never_issued(case: Case, never: list[int], missing: list[int], arrows: list[Arrow]) -> Blame:
    """Those that may have waited in a message are blamed only where nobody is missing."""
    in_messages = [rank for rank in never if case.messages_next.get(rank)]
    if missing:
        never = [rank for rank in never if rank not in in_messages]
    elif in_messages and len(never) > 1:
        return _first_to_dump(case, never) or {
            rank: (_ONE_OF_MANY / len(never), _said_of(case, rank, arrows)) for rank in never
        }
    sure = _NEVER if len(never) == 1 and not missing else _NEVER_ONE_OF_SEVERAL
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
    """Where messages are used and nothing else tells: a failure spreads along them, and each rank writes its
    dump when it is reached. Only the first by a clear lead, and only by dates of files."""
    written = {rank: case.taken_ns[rank] for rank in case.dumped if rank in case.taken_ns}
    untold = case.messages_next or not len(case.log)
    if not untold or case.pulled or len(written) < max(2, len(case.dumped)):
        return {}
    first, second = sorted(written, key=lambda rank: written[rank])[:2]
    lead = written[second] - written[first]
    if first not in ranks or not _LEAD_NS <= lead < _LONGEST_LEAD_NS:
        return {}
    said = f"wrote its dump first, {lead / 1e6:.0f} ms before rank {second}; messages are not recorded"
    return {first: (_FIRST_DUMP, said)}


def _strayed(case: Case, stops: Stops, missing: list[int], together: list[int]) -> Blame:
    """Where somebody is missing, or ranks wait in a circle: one that called what it never called there."""
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


# ------------------------------------------------------------------ who came late


def _came_too_late(case: Case, stops: Stops) -> Blame:
    return _latecomers(case, stops, {(at.group, at.seq) for at in stops.at.values()}, surely=True)


def _latecomers(case: Case, stops: Stops, places: set[tuple[int, int]], *, surely: bool) -> Blame:
    """Ranks that issued an operation long after most; `surely`: only when these had given up by then."""
    found: Blame = {}
    for group, seq in places:
        issued = {
            rank: call
            for rank, calls in stops.calls.items()
            for call in calls
            if (call.group, call.seq) == (group, seq) and call.enqueued_ns != UNKNOWN
        }
        late_ns = _late_ns(stops, issued)
        timeout = case.groups[group].timeout_ns
        limit = 0.9 * timeout if timeout > 0 else float("inf")
        enough = limit if surely else min(limit, max(_LATE_NS, 5 * _usual_pause(stops, issued)))
        late = {rank: by for rank, by in late_ns.items() if by >= enough}
        if 0 < len(late) <= len(issued) / 2:
            found |= {
                rank: (
                    _LATE if by >= limit else _LATER,
                    f"issued {operation(case, issued[rank])} {by / 1e9:.1f} s after the others",
                )
                for rank, by in late.items()
            }
    return found


def _late_ns(stops: Stops, issued: dict[int, Record]) -> dict[int, float]:
    """After the first half of the ranks; what is usual is taken out, for clocks may differ."""
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
    both = sorted(mine.keys() & its.keys())[-32:]
    return float(np.median([mine[n] - its[n] for n in both])) if both else 0.0


def _usual_pause(stops: Stops, ranks: Iterable[int]) -> float:
    pauses = [np.diff([call.enqueued_ns for call in stops.calls[rank][:-1]]) for rank in ranks]
    together = np.concatenate(pauses) if pauses else np.zeros(0)
    return float(np.quantile(together, 0.98)) if len(together) >= 8 else 0.0


# ------------------------------------------------------------------ words


def _said_of(case: Case, rank: int, arrows: list[Arrow]) -> str:
    into = [arrow for arrow in arrows if arrow.target == rank]
    if not into:
        return "stopped first"
    best = max(into, key=lambda arrow: arrow.rests)
    waiters = sorted({arrow.waiter for arrow in into})
    failed = f"rank {ranks_text(waiters)} stopped at {operation(case, best.at)}"
    return f"{best.how}; {failed}, which needs it"


def _finding(case: Case, stops: Stops, arrows: list[Arrow], blame: Blame, where: Where) -> Finding:
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
        because=f"rank {ranks_text(ranks)} stopped first, and the others failed for want of it; "
        "the dumps were written after that.",
        waits=tuple((a.waiter, a.target, operation(case, a.at)) for a in arrows),
    )
