"""Where each rank stopped, by a gloo dump in which `retired` means completed or failed; see `postmortem.py`.

A rank stops at the first operation that has been outstanding for longer than a moment or cannot have
completed, because a member never issued it; else at its last one, unless a member went on after it. It waits
there for members that have not issued it, stopped before it, or left no dump.

A dump can also be older than the others, of a job that ran on. Then its rank has not issued what its peers
issued for several steps, one pause after the other; a rank that stopped has peers that stop at its absence,
within one step. Such a dump is set aside.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from everstep.diagnose.case import Case
from everstep.diagnose.comm_record import COMPUTE, RECV, SEND, SYNCHRONIZING, UNKNOWN, Record
from everstep.diagnose.wait_graph import Arrow, Rests, operation

_PULL_NS = 200_000_000  # a pull reads ranks one after the other
_MOMENT_NS = 1_000_000_000  # younger, an operation may be outstanding only because it was just issued
_LAST = 8  # operations of a rank that may have failed together
_FIRST = 5  # pauses of a rank that do not count: connections are made
Operation = tuple[int, int]  # group, sequence number


@dataclass(slots=True)
class Stops:
    """Where every rank stopped, as far as its dump says."""

    calls: dict[int, list[Record]] = field(default_factory=dict)  # by rank, in order
    issued: dict[Operation, dict[int, Record]] = field(default_factory=dict)  # by operation, then rank
    reached: dict[tuple[int, int], int] = field(default_factory=dict)  # (rank, group) -> last sequence number
    at: dict[int, Record] = field(default_factory=dict)  # the operation it stopped at
    failed: int = 0  # operations that are retired and cannot have completed
    torn: int = 0  # operations that are retired at one rank and outstanding at another
    waiting: int = 0  # operations that have been outstanding for longer than a moment
    missing: frozenset[int] = frozenset()  # ranks that left no dump
    older: frozenset[int] = frozenset()  # ranks whose dump is set aside

    def operations(self) -> list[list[Record]]:
        """Every operation as its members issued it, in the order of their first issue."""
        found = [list(calls.values()) for calls in self.issued.values()]
        return sorted(found, key=lambda calls: min(call.enqueued_ns for call in calls))


def stops_of(case: Case) -> Stops:
    stops = _read(case)
    stops.older = frozenset(rank for rank in case.dumped if _is_older(case, stops, rank))
    if stops.older:
        stops = _read(case, without=stops.older)
    waiting = {(c.group, c.seq) for calls in stops.calls.values() for c in calls if _waits(case, c)}
    stops.waiting = len(waiting)
    stops.torn = _torn(stops, waiting)
    least = _least_reached(case, stops)
    for rank, calls in stops.calls.items():
        place = None
        for call in calls:
            waits = _waits(case, call)
            cannot = call.seq > least[call.group] and _cannot_be_done(case, stops, call)
            stops.failed += cannot and call.done is not False
            if place is None and (waits or cannot):
                place = call
        if place is None and not _went_on(case, stops, calls[-1]):
            place = calls[-1]
        if place is not None:
            stops.at[rank] = place
    return stops


def _read(case: Case, without: frozenset[int] = frozenset()) -> Stops:
    log = case.log
    stops = Stops(missing=frozenset(case.world) - case.dumped, older=without)
    wanted = np.isin(log.rank, sorted(case.dumped - without))
    for at in np.flatnonzero(~log.is_kind(SEND, RECV, COMPUTE) & wanted).tolist():
        record = log.row(at)
        stops.calls.setdefault(record.rank, []).append(record)
        stops.issued.setdefault((record.group, record.seq), {})[record.rank] = record
        key = record.rank, record.group
        stops.reached[key] = max(record.seq, stops.reached.get(key, UNKNOWN))
    return stops


def _least_reached(case: Case, stops: Stops) -> dict[int, int]:
    """What all members of a group that are heard have issued."""
    return {
        index: min(
            (stops.reached.get((m, index), UNKNOWN) for m in group.members if _is_heard(case, stops, m)),
            default=UNKNOWN,
        )
        for index, group in enumerate(case.groups)
    }


def _is_heard(case: Case, stops: Stops, rank: int) -> bool:
    return rank in case.dumped and rank not in stops.older


def _waits(case: Case, call: Record) -> bool:
    """Outstanding, and not only because the dump was written the moment it ended."""
    taken = case.taken_ns.get(call.rank, UNKNOWN)
    return call.done is False and (taken == UNKNOWN or taken - call.enqueued_ns > _MOMENT_NS)


def _torn(stops: Stops, waiting: set[Operation]) -> int:
    """No rank completes one of these before all have come, and then all do: so it failed for some."""
    return sum(
        c.done is not False and c.kind in SYNCHRONIZING and (c.group, c.seq) in waiting
        for calls in stops.calls.values()
        for c in calls[-_LAST:]
    )


def _cannot_be_done(case: Case, stops: Stops, call: Record) -> bool:
    """A member has not issued it, and was not merely asked for its dump earlier."""
    if call.kind not in SYNCHRONIZING:
        return False
    for member in case.groups[call.group].members:
        reached = stops.reached.get((member, call.group), UNKNOWN)
        if not _is_heard(case, stops, member) or reached >= call.seq:
            continue
        if member not in case.pulled or call.enqueued_ns < case.taken_ns.get(member, 0) - _PULL_NS:
            return True
    return False


def _went_on(case: Case, stops: Stops, call: Record) -> bool:
    """Did a member that took part in it issue more after this operation? Then all have completed it, unless
    it is one with a root, where some are done before the others, or a member may have died inside it."""
    if call.kind not in SYNCHRONIZING or stops.missing.intersection(case.groups[call.group].members):
        return False
    for member in stops.issued[call.group, call.seq]:
        last = stops.calls[member][-1]
        if (last.group, last.seq) != (call.group, call.seq):
            return True
    return False


def _is_older(case: Case, stops: Stops, rank: int) -> bool:
    """Peers went on for two pauses or more with operations that this rank has not issued."""
    for index, group in enumerate(case.groups):
        if rank not in group.members or rank in case.pulled:
            continue
        reached = stops.reached.get((rank, index), UNKNOWN)
        for peer in group.members:
            if (
                stops.reached.get((peer, index), UNKNOWN) > reached + 2
                and _pauses(stops, peer, index, reached) > 1
            ):
                return True
    return False


def _pauses(stops: Stops, rank: int, group: int, after: int) -> int:
    """How many of the pauses that the rank makes between steps lie between its operations after a number."""
    times = np.array([call.enqueued_ns for call in stops.calls[rank]])
    beyond = [c.enqueued_ns for c in stops.calls[rank] if c.group == group and c.seq > after]
    usual = np.diff(times[times < beyond[0]])[_FIRST:]
    return int(np.sum(np.diff(beyond) > 0.3 * usual.max())) if len(usual) else 0


# ------------------------------------------------------------------ who waited for whom


def arrows_of_stops(case: Case, stops: Stops) -> list[Arrow]:
    arrows = []
    for rank, place in stops.at.items():
        for member in case.groups[place.group].members:
            if member == rank or member in stops.older:
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
    issued = stops.issued.get((place.group, place.seq), {}).get(rank)
    if issued is None:  # so long ago that its record has been written over
        return False
    return own.order < issued.order


def places_of(stops: Stops) -> dict[Operation, list[int]]:
    """The operations ranks stopped at, with the ranks."""
    places: dict[Operation, list[int]] = defaultdict(list)
    for rank, place in stops.at.items():
        places[place.group, place.seq].append(rank)
    return places
