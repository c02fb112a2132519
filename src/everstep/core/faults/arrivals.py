"""Which ranks of a script are slow, by when they enter collectives: who comes last is waited for.

All ranks leave a collective together, so the time between two of them is the same for all, and says nothing.
What differs is when they come. Where the device measures how long a rank was inside (NCCL), the last one to
come was inside for the shortest time, and no clock is compared; else times of entering are, and the clocks of
nodes must agree within `CLOCKS_S`.

A rank is late in a group if it comes last to nearly all of its collectives, by a share of a step that is
worth a word. A rank that others keep waiting is late elsewhere: with tensor parallelism, the partners of a
slow rank come late to the collectives of their own replicas. So a rank is slow only if it is late in every
group that it is a member of. If no single rank is, all ranks of one node may be.

One look can be chance: `SlowRanks` is sure after two that agree, and calm after two without.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from everstep.protocol.messages import RankPace

LEAST = 8  # collectives that all members have entered
NEARLY_ALL = 0.85
WORTH = 0.10  # of a step
LEAST_S, CLOCKS_S = 0.005, 0.020  # on one node; between two
LOOKS = 2  # on end


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    ranks: tuple[int, ...]  # of one node if there are several
    last: int  # of how many collectives
    seen: int
    by_s: float  # before the last came, at the median
    step_s: float

    @property
    def factor(self) -> float:
        """A step takes so many times as long as one in which no rank waits for these."""
        return self.step_s / max(self.step_s - self.by_s, 0.05 * self.step_s)

    def __str__(self) -> str:
        who = f"rank {self.ranks[0]} enters"
        if len(self.ranks) > 1:
            who = f"ranks {self.ranks[0]} to {self.ranks[-1]}, all of one node, enter"
        return (
            f"{who} {self.last} of {self.seen} collectives last, {self.by_s * 1e3:.0f} ms after the others; "
            f"a step takes about {self.step_s * 1e3:.0f} ms"
        )


@dataclass(slots=True, kw_only=True)
class SlowRanks:
    """What is sure, from look to look."""

    slow: tuple[int, ...] = ()  # and told
    suspected: tuple[int, ...] = ()
    looks: int = 0  # on end, that show the same

    def see(self, late: Late | None) -> bool:
        """Is something else sure now?"""
        found = () if late is None else late.ranks
        self.looks = self.looks + 1 if found == self.suspected else 1
        self.suspected = found
        if found == self.slow or self.looks < LOOKS:
            return False
        self.slow = found
        return True


def slowest(paces: Iterable[RankPace], ranks_per_node: int) -> Late | None:
    groups: dict[str, dict[int, RankPace]] = defaultdict(dict)
    for pace in paces:
        groups[pace.group][pace.rank] = pace
    members = [group for group in groups.values() if len(group) > 1]
    alone: list[dict[_Unit, _Entered]]
    alone = [{(rank,): pace.entered for rank, pace in group.items()} for group in members]
    by_node = [_by_node(group, ranks_per_node) for group in members]
    clocks = [len(nodes) for nodes in by_node]
    return _late(alone, members, clocks) or _late(by_node, members, clocks)


_Unit = tuple[int, ...]  # a rank, or all ranks of a node
_Entered = Mapping[int, float]


def _by_node(group: Mapping[int, RankPace], ranks_per_node: int) -> dict[_Unit, _Entered]:
    """A node has come when one of its ranks has: it is late if all of them are."""
    nodes: dict[int, list[RankPace]] = defaultdict(list)
    for rank, pace in group.items():
        nodes[rank // ranks_per_node].append(pace)
    return {
        tuple(pace.rank for pace in sorted(paces, key=lambda pace: pace.rank)): {
            number: min(pace.entered[number] for pace in paces)
            for number in set.intersection(*(set(pace.entered) for pace in paces))
        }
        for paces in nodes.values()
    }


def _late(
    groups: list[dict[_Unit, _Entered]], members: list[dict[int, RankPace]], clocks: list[int]
) -> Late | None:
    """The only unit that is late wherever it takes part."""
    found: dict[_Unit, list[Late]] = defaultdict(list)
    on_time: set[_Unit] = set()
    for entered, group, num_clocks in zip(groups, members, clocks, strict=True):
        late = _last_of(entered, group, num_clocks) if len(entered) > 1 else None
        if late is not None:
            found[late.ranks].append(late)
        if len(entered) > 1:
            on_time |= {unit for unit in entered if late is None or unit != late.ranks}
    named = [lates for unit, lates in found.items() if unit not in on_time]
    return max(named[0], key=lambda late: late.seen) if len(named) == 1 else None


def _last_of(entered: dict[_Unit, _Entered], group: Mapping[int, RankPace], num_clocks: int) -> Late | None:
    numbers = set.intersection(*(set(each) for each in entered.values()))
    if len(numbers) < LEAST:
        return None
    came: list[tuple[_Unit, float]] = []
    for number in numbers:
        second, last = sorted((each[number], unit) for unit, each in entered.items())[-2:]
        came.append((last[1], last[0] - second[0]))
    unit, count = Counter(unit for unit, _ in came).most_common(1)[0]
    by_s = median(after for each, after in came if each == unit)
    step_s = median(pace.step_s for pace in group.values())
    is_by_device = all(pace.is_by_device for pace in group.values())
    least_s = LEAST_S if is_by_device or num_clocks == 1 else CLOCKS_S
    if count < NEARLY_ALL * len(came) or by_s < max(WORTH * step_s, least_s):
        return None
    return Late(ranks=unit, last=count, seen=len(came), by_s=by_s, step_s=step_s)
