"""Who is stuck: the arrows of `waiting`, followed to their ends.

A rank that others wait for, and that no rank is shown to hold up, is an end of the graph: a suspect.
Everyone upstream is a victim, whatever group they wait in. So a rank of another pipeline stage, which a
rule that looks at one group at a time would blame, is cleared by its own arrow. Ranks in a circle are one
end together; inside it those are suspect who were shown (NEVER) not to have come and are not themselves
shown to wait.

What the end itself shows tells host from device:

    outstanding what its peers completed    asked for, not delivered: device, communication hang
    nothing of the kind                     never asked for: host, non-communication hang
    no word from it at all                  host, less sure: silence is not a record

Several ranks at one operation, none ahead or behind: all entered and none left. If some have started and
others have not, those are suspect (device); if some lag in what they have enqueued elsewhere, those; else the
group is named and no rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from everstep_diagnose.case import Case
from everstep_diagnose.circles import last_circles
from everstep_diagnose.comm_record import UNKNOWN
from everstep_diagnose.finding import Finding, RuledOut, Suspect, Syndrome, Where, ranks_text
from everstep_diagnose.mismatch import find_mismatches
from everstep_diagnose.raised import find_lost, find_raised
from everstep_diagnose.wait_graph import Arrow, RankPositions, Rests, arrows_of, operation, positions_of

_HANG_AFTER_S = 1.0
_PATIENCE = 5.0  # times the longest usual pause between two operations of a rank
_FIRST = 5  # pauses of a rank that do not count: connections are made, memory is allocated
Accused = dict[int, tuple[Where, float, str]]


def find_hangs(case: Case, *, now_ns: int = UNKNOWN) -> list[Finding]:
    """Every hang the case shows; none if all outstanding operations are younger than the job's patience."""
    raised = find_raised(case)
    if raised:
        return raised
    positions = positions_of(case)
    if not positions.first or not _overdue(case, positions, now_ns):
        return find_lost(case)
    mismatches = find_mismatches(case, positions)
    if mismatches:
        return mismatches
    arrows = arrows_of(case, positions)
    accused, unresolved = _accuse(case, positions, arrows)
    return _findings(case, positions, arrows, accused, unresolved) or find_lost(case)


def _overdue(case: Case, positions: RankPositions, now_ns: int) -> bool:
    """Outstanding for longer than this job usually pauses. Without a time of taking, outstanding is overdue:
    dumps are written when a timeout struck."""
    taken = dict.fromkeys(positions.first, now_ns) if now_ns != UNKNOWN else case.taken_ns
    ages = [
        taken[rank] - record.enqueued_ns
        for rank, record in positions.first.items()
        if record.enqueued_ns != UNKNOWN and rank in taken
    ]
    if not ages:
        return True
    return max(ages) > max(_HANG_AFTER_S * 1e9, _PATIENCE * _usual_pause_ns(case))


def _usual_pause_ns(case: Case) -> float:
    """Between two operations of a rank; the first few are no measure, where there are others."""
    log = case.log
    pauses, same = np.diff(log.enqueued_ns), np.diff(log.rank) == 0
    starts = np.flatnonzero(np.r_[True, ~same])
    since_start = np.arange(len(same)) - starts[np.searchsorted(starts, np.arange(len(same)), "right") - 1]
    usable = same & (log.enqueued_ns[1:] != UNKNOWN)
    for first in (_FIRST, 0):
        found = pauses[usable & (since_start >= first)]
        if len(found) >= 8:
            return float(np.quantile(found, 0.98))
    return 0.0


# ------------------------------------------------------------------ ends


def _accuse(case: Case, positions: RankPositions, arrows: list[Arrow]) -> tuple[Accused, list[list[int]]]:
    """Suspects, and groups of ranks that are stuck together with nothing to tell them apart."""
    accused: Accused = {}
    unresolved = []
    into: dict[int, list[Arrow]] = defaultdict(list)
    for arrow in arrows:
        into[arrow.target].append(arrow)
    for circle in _ends(positions, arrows):
        odd = [r for r in circle if _completed_elsewhere(case, positions, r)]
        if odd:
            accused |= {r: _device(case, positions, r, into[r]) for r in odd}
        elif len(circle) == 1 and _waits_alone(positions, circle[0]):
            accused[circle[0]] = _host(case, circle[0], into[circle[0]])
        else:
            found = _apart(case, positions, arrows, circle, into)
            accused |= found
            if not found:
                unresolved.append(circle)
    return accused, unresolved


def _ends(positions: RankPositions, arrows: list[Arrow]) -> list[list[int]]:
    """Circles without an exit; ranks that wait at one operation, without an arrow between them, are one."""
    after: dict[int, set[int]] = defaultdict(set)
    for arrow in arrows:
        after[arrow.waiter].add(arrow.target)
        after.setdefault(arrow.target, set())
    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, record in positions.first.items():
        if not record.is_message:
            together[record.group, record.seq].append(rank)
        elif (
            rank not in after
            and record.peer in positions.first
            and not positions.is_through(record.peer, record)
        ):
            after[rank].add(record.peer)
    for ranks in together.values():
        for one, other in zip(ranks, ranks[1:] + ranks[:1], strict=True):
            if one != other:
                after[one].add(other)
    return last_circles(after)


def _waits_alone(positions: RankPositions, rank: int) -> bool:
    """With nothing outstanding, or with a message that no rank is shown to owe it."""
    first = positions.first.get(rank)
    return first is None or first.is_message


def _completed_elsewhere(case: Case, positions: RankPositions, rank: int) -> list[int]:
    first = positions.first.get(rank)
    if first is None or not case.has_device:
        return []
    others = [first.peer] if first.is_message else list(case.groups[first.group].members)
    return [m for m in others if m != rank and positions.is_through(m, first)]


def _apart(
    case: Case, positions: RankPositions, arrows: list[Arrow], circle: list[int], into: dict[int, list[Arrow]]
) -> Accused:
    """Who stands out in a circle."""
    shown = {a.waiter for a in arrows if a.rests > Rests.ABSENT}
    never = [r for r in circle if any(a.rests is Rests.NEVER for a in into[r]) and r not in shown]
    if never and len(never) < len(circle):
        return {r: _host(case, r, into[r]) for r in never}
    inside = [r for r in circle if r in positions.first]
    unstarted = [r for r in inside if positions.first[r].started_ns == UNKNOWN]
    if 0 < len(unstarted) <= len(inside) // 2:
        late, why, confidence = unstarted, "has not started it on its device, the others have", 0.85
    else:
        late, why, confidence = _laggards(positions, inside), "enqueued less than its peers elsewhere", 0.6
    return {r: (Where.DEVICE, confidence, f"at {operation(case, positions.first[r])} it {why}") for r in late}


def _laggards(positions: RankPositions, ranks: list[int]) -> list[int]:
    """Ranks whose hosts got less far than most, in any group they share with the others."""
    behind: set[int] = set()
    by_group: dict[tuple[int, bool], dict[int, int]] = defaultdict(dict)
    for (rank, group, message), seq in positions.reached.items():
        if rank in ranks:
            by_group[group, message][rank] = seq
    for reached in by_group.values():
        most = max(reached.values())
        late = {rank for rank, seq in reached.items() if seq < most}
        if len(reached) > 2 and len(late) <= len(reached) // 3:
            behind |= late
    return sorted(behind) if len(behind) <= len(ranks) // 3 else []


# ------------------------------------------------------------------ evidence


def _device(case: Case, positions: RankPositions, rank: int, into: list[Arrow]) -> tuple[Where, float, str]:
    first, through = positions.first[rank], _completed_elsewhere(case, positions, rank)
    return (
        Where.DEVICE,
        0.95,
        f"{_waited_for(case, into)}it still has {operation(case, first)} outstanding, which rank "
        f"{ranks_text(through)} completed ({len(positions.outstanding[rank])} outstanding in all)",
    )


def _host(case: Case, rank: int, into: list[Arrow]) -> tuple[Where, float, str]:
    waited_for = _waited_for(case, into)
    if rank in case.silent or rank not in case.ranks:
        asked = rank in case.silent
        return (
            Where.HOST,
            0.85 if asked else 0.6,
            f"{waited_for}it {case.silent.get(rank, 'left no records')}",
        )
    best = max(into, key=lambda a: a.rests)
    return Where.HOST, 0.95 if best.rests is Rests.NEVER else 0.75, f"{waited_for}it {best.how}"


def _waited_for(case: Case, into: list[Arrow]) -> str:
    places = Counter(operation(case, a.at) for a in into)
    parts = []
    for place, _ in places.most_common(2):
        ranks = sorted({a.waiter for a in into if operation(case, a.at) == place})
        parts.append(f"rank {ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for it at {place}")
    return "; ".join(parts) + "; " if parts else ""


def _findings(
    case: Case, positions: RankPositions, arrows: list[Arrow], accused: Accused, unresolved: list[list[int]]
) -> list[Finding]:
    found = []
    for where in dict.fromkeys(place for place, _, _ in accused.values()):
        ranks = sorted(r for r, (place, _, _) in accused.items() if place is where)
        victims = sorted(_upstream(arrows, positions, set(ranks)) - set(accused))
        host = where is Where.HOST
        found.append(
            Finding(
                syndrome=Syndrome.NON_COMMUNICATION_HANG if host else Syndrome.COMMUNICATION_HANG,
                where=where,
                suspects=tuple(
                    Suspect(
                        rank=r, confidence=accused[r][1], evidence=accused[r][2], node=case.hosts.get(r, "")
                    )
                    for r in ranks
                ),
                victims=tuple(victims),
                ruled_out=_ruled_out(case, positions, arrows, set(accused), where),
                because=f"the {where} of rank {ranks_text(ranks)} "
                f"{'never asked for' if host else 'does not complete'} "
                f"what {len(victims)} other rank{'s wait' if len(victims) != 1 else ' waits'} for.",
            )
        )
    return found + [_together(case, positions, circle) for circle in unresolved if not found]


def _together(case: Case, positions: RankPositions, circle: list[int]) -> Finding:
    """Stuck at the same place, and nothing recorded tells them apart."""
    places = {operation(case, positions.first[r]) for r in circle if r in positions.first}
    link = len(circle) == 2
    said = f"both ends entered {', '.join(sorted(places)[:2])} and neither left"
    return Finding(
        syndrome=Syndrome.COMMUNICATION_HANG,
        where=Where.LINK if link else Where.UNKNOWN,
        suspects=(Suspect(rank=circle[0], peer=circle[1], confidence=0.5, evidence=said),) if link else (),
        victims=tuple(circle),
        ruled_out=(
            RuledOut(what="host", because=f"all {len(circle)} ranks have asked for what they wait at"),
        ),
        because=f"rank {ranks_text(circle)} entered {', '.join(sorted(places)[:2])} and none left; "
        "what is recorded does not tell which of them, or of the links between them, holds it up.",
    )


def _upstream(arrows: list[Arrow], positions: RankPositions, ends: set[int]) -> set[int]:
    waiters: dict[int, set[int]] = defaultdict(set)
    for arrow in arrows:
        waiters[arrow.target].add(arrow.waiter)
    together: dict[tuple[int, int], set[int]] = defaultdict(set)
    for rank, record in positions.first.items():
        if not record.is_message:
            together[record.group, record.seq].add(rank)
    reached, todo = set(ends), list(ends)
    while todo:
        rank = todo.pop()
        more = set(waiters[rank])
        for waiter in waiters[rank]:
            at = positions.first[waiter]
            more |= together.pop((at.group, at.seq), set())
        fresh = [r for r in more if r not in reached]
        reached.update(fresh)
        todo += fresh
    return reached


def _ruled_out(
    case: Case, positions: RankPositions, arrows: list[Arrow], accused: set[int], where: Where
) -> tuple[RuledOut, ...]:
    reasons: dict[str, list[int]] = defaultdict(list)
    for arrow in arrows:
        if arrow.waiter not in accused:
            reasons[f"it waits for rank {arrow.target} at {operation(case, arrow.at)}"].append(arrow.waiter)
    out = [RuledOut(what=f"rank {ranks_text(ranks)}", because=why) for why, ranks in reasons.items()]
    quiet = [r for r in case.ranks if r not in positions.first and r not in accused]
    if quiet:
        out.append(RuledOut(what=f"rank {ranks_text(quiet)}", because="no rank waits for it"))
    if where is Where.HOST:
        out.append(RuledOut(what="device", because="no operation its peers completed is outstanding there"))
        out.append(
            RuledOut(what="link", because="not all have entered the operation, so no transfer is owed")
        )
    else:
        out.append(RuledOut(what="host", because="it asked for what it has outstanding"))
    return tuple(out)
