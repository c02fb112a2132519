"""Where newcomers begin, and who gives what to whom: arithmetic on what the ranks have said.

A newcomer begins at an interval of which its predecessor left a record. It may not begin later than any of
its groups' survivors have come: what a survivor there still has to issue needs the newcomer in it. It need
not begin earlier: a survivor that has entered interval b has finished all of its collectives before b (a rank
does not enter an interval with a collective in the air), and its log answers those who lag behind.

    rank 0   … 4.2  4.3 │ 5.0           done 5.0, has answers from 4.0 on
    rank 1   … 4.2  4.3                 done 4.3: asks 0 for 5.0
    rank 2   … 4.2      ✝               record of 4: begins at 4.0, asks 0 for 4.0 … 5.0

The state comes from a rank with the same shard in another unit, as it was when the interval began: of one
that has not stepped since, else of one that has stepped once and kept its parameters from before.

Members of a unit compute together, so they begin at the same interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

from everstep.protocol.held import (
    PRELUDE,
    Address,
    Ask,
    CannotHold,
    Position,
    RankParked,
    RankPlan,
    Record,
    Rung,
    before,
    ranks_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that a plan follows from."""

    unit: int  # ranks that live and die together
    parked: Mapping[int, RankParked]
    records: Mapping[int, tuple[Record, ...]]  # of the newcomers' predecessors
    addresses: Mapping[int, Address]


@dataclass(slots=True)
class _Group:
    members: frozenset[int]
    at: dict[int, tuple[Position, int]] = field(default_factory=dict)  # of survivors: done, and log since

    @property
    def best(self) -> int:
        """The survivor that knows most."""
        return max(self.at, key=lambda rank: (self.at[rank][0], -self.at[rank][1], -rank))


def plan(situation: Situation) -> dict[int, RankPlan] | CannotHold:
    """Of every rank."""
    groups = _groups(situation)
    begins = _begins(situation, groups)
    if isinstance(begins, CannotHold):
        return begins
    donors = _donors(situation, begins)
    if isinstance(donors, CannotHold):
        return donors
    asks: dict[int, list[Ask]] = {rank: [] for rank in (*situation.parked, *situation.records)}
    for name, group in sorted(groups.items()):
        if not group.at:
            continue
        done, since = group.at[group.best]
        for rank in sorted(group.members):
            if rank in begins:
                after = before(begins[rank].interval)
                if since > begins[rank].interval:
                    had = f"rank {group.best} has answers of group {name} from interval {since} on only"
                    begins_at = f"rank {rank} begins in interval {begins[rank].interval}"
                    return CannotHold(rung=Rung.UNANSWERED, because=f"{begins_at}, and {had}")
            elif rank in group.at and group.at[rank][0] < done:
                after = group.at[rank][0]
            else:
                continue
            asks[rank].append(
                Ask(rank=group.best, address=situation.addresses[group.best], group=name, after=after)
            )
    return {
        rank: RankPlan(
            asks=tuple(asks[rank]),
            interval=begins[rank].interval if rank in begins else PRELUDE,
            updates=begins[rank].updates if rank in begins else (),
            donor=donors.get(rank, -1),
            donor_address=situation.addresses[donors[rank]] if rank in donors else ("", 0),
        )
        for rank in asks
    }


def _groups(situation: Situation) -> dict[str, _Group]:
    found: dict[str, _Group] = {}
    for rank, said in situation.parked.items():
        for name, at in said.groups.items():
            group = found.setdefault(name, _Group(frozenset(ranks_of(at.members))))
            group.at[rank] = (at.done, at.since)
    return found


def _begins(situation: Situation, groups: Mapping[str, _Group]) -> dict[int, Record] | CannotHold:
    """By newcomer: the record it begins with."""
    latest = dict.fromkeys((rank // situation.unit for rank in situation.records), 1 << 62)
    for rank, records in situation.records.items():
        if not records:
            return CannotHold(rung=Rung.PRELUDE, because=f"rank {rank} died before its first snapshot")
        shared = [group for group in groups.values() if rank in group.members]
        tops = [max(situation.parked[each].interval for each in group.at) for group in shared]
        unit = rank // situation.unit
        latest[unit] = min(latest[unit], max(each.interval for each in records), *tops)
    found: dict[int, Record] = {}
    for rank, records in situation.records.items():
        begin = latest[rank // situation.unit]
        record = next((each for each in records if each.interval == begin), None)
        if record is None:
            return CannotHold(
                rung=Rung.UNANSWERED,
                because=f"rank {rank} left no record of interval {begin}, where it would begin",
            )
        if record.refusal:
            return CannotHold(rung=Rung.REFUSED, because=f"rank {rank}: {record.refusal}")
        found[rank] = record
    return found


def _donors(situation: Situation, begins: Mapping[int, Record]) -> dict[int, int] | CannotHold:
    """By newcomer: who gives the state that it begins with."""
    found: dict[int, int] = {}
    load: Counter[int] = Counter()
    for rank, record in sorted(begins.items()):
        mates = [each for each in situation.parked if each % situation.unit == rank % situation.unit]
        steps = {each: steps_since(record, situation.parked[each]) for each in mates}
        able = [each for each in mates if steps[each] is not None]
        if not able:
            had = f"the state with which interval {record.interval} began"
            return CannotHold(rung=Rung.NO_REPLICA, because=f"no rank that is left has {had} for rank {rank}")
        found[rank] = min(able, key=lambda each: (steps[each], load[each], each))
        load[found[rank]] += 1
    return found


def steps_since(record: Record, donor: RankParked) -> int | None:
    """Updates that this rank has made since; None: it does not have that state any more."""
    if record.interval not in donor.gives:
        return None
    ahead = [has - had for has, had in zip_longest(donor.updates, record.updates, fillvalue=0)]
    return sum(ahead) if all(each in (0, 1) for each in ahead) else None
