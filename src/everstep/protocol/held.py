"""What the ranks of a held script and the machine that heals them say to each other (`core.held`).

A script's ranks run collectives. `everstep.snapshot` cuts a rank's run into *intervals*, counted from 0; what
comes before the first is the *prelude*. Every collective of a group has a *position*: the interval, and its
number within it. An *epoch* is the time between two changes of membership.

    machine ── Hold ──► survivors ── RankParked ──┐
            └─ StartRank ► newcomers ── RankReady ─┴─► machine ── Rebuild ──► all ── RankRebuilt ──► machine
                                                                                     all ◄── Resume ──┘
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

PRELUDE = -1  # the interval before the first snapshot

Address = tuple[str, int]
Runs = tuple[tuple[int, int, int], ...]  # ranks as (first, last, stride): a group of thousands is one run


class Position(NamedTuple):
    """Of a collective in its group."""

    interval: int
    number: int

    def __str__(self) -> str:
        return f"{self.interval}.{self.number}"


def before(interval: int) -> Position:
    """Every position of this interval comes after it."""
    return Position(interval, -1)


def runs_of(ranks: Iterable[int]) -> Runs:
    found: list[tuple[int, int, int]] = []
    for rank in sorted(ranks):
        if found:
            first, last, stride = found[-1]
            if first == last or rank - last == stride:
                found[-1] = (first, rank, rank - last)
                continue
        found.append((rank, rank, 1))
    return tuple(found)


def ranks_of(runs: Runs) -> Iterator[int]:
    for first, last, stride in runs:
        yield from range(first, last + 1, stride)


# ------------------------------------------------------------------ facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a rank wrote down at a snapshot, as far as a decision needs it. It outlives its rank."""

    interval: int
    step: int  # as the script calls it
    updates: tuple[int, ...]  # made so far, by each optimizer
    refusal: str = ""  # why nothing can be resumed here; empty: it can


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAt:
    """How far a rank has come in one group."""

    members: Runs
    done: Position  # all up to this are finished
    since: int  # the log has every answer from this interval on


# ------------------------------------------------------------------ what ranks say


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOpened:
    """Its process runs; peers reach it there."""

    rank: int
    address: Address


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParked:
    """A survivor: neither its parameters nor its place in broken groups change until it is resumed."""

    rank: int
    epoch: int
    interval: int
    updates: tuple[int, ...]
    groups: Mapping[str, GroupAt] = field(default_factory=dict)  # the broken ones
    gives: tuple[int, ...] = ()  # the intervals whose beginning it still has


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """A newcomer has come to `everstep.restore`, and waits there for its state."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRebuilt:
    """Its groups are connected, and it has what its plan told it to fetch."""

    rank: int
    epoch: int
    connect_s: float = 0.0
    fetch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUnheld:
    """This heal cannot be finished: it found out why."""

    rank: int
    epoch: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRefused:
    """The script does something that cannot be held; from now on a death restarts all ranks."""

    rank: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUnit:
    """Its parameters are sharded: so many ranks next to each other hold one replica."""

    rank: int
    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    """Its script has come to its end. The process stays while others may need its answers."""

    rank: int


RankWord = RankOpened | RankParked | RankReady | RankRebuilt | RankUnheld | RankRefused | RankUnit | RankEnded

# ------------------------------------------------------------------ what ranks are told


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Abandon what is under way in groups with an absent member, and wait."""

    epoch: int
    absent: tuple[int, ...]
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Answers of a group, from a rank that has them: those after a position."""

    rank: int
    address: Address
    group: str
    after: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank fetches before it continues. `interval`: where a newcomer begins; PRELUDE: a survivor."""

    asks: tuple[Ask, ...] = ()
    interval: int = PRELUDE
    updates: tuple[int, ...] = ()  # at the beginning of that interval
    donor: int = -1
    donor_address: Address = ("", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """Connect the broken groups again and carry out the plan."""

    epoch: int
    plan: RankPlan
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    epoch: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """No rank needs another one's answers: its process may end."""

    because: str


RankOrder = Hold | Rebuild | Resume | Bye

# ------------------------------------------------------------------ what keepers are told


@dataclass(frozen=True, slots=True, kw_only=True)
class TellRank:
    rank: int
    order: Hold | Rebuild | Resume | Bye
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRank:
    """A replacement. `peers`: the ranks that know how the run began, and where they are."""

    rank: int
    epoch: int
    unit: int
    absent: tuple[int, ...]
    peers: Mapping[int, Address]
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRank:
    """SIGKILL; `RankDied` follows."""

    rank: int
    because: str


KeeperOrder = TellRank | StartRank | EndRank

# ------------------------------------------------------------------ why not


class Rung(StrEnum):
    """Why a death could not be held, so all ranks start again."""

    NO_REPLICA = "no replica left"
    PRELUDE = "before the first snapshot"
    REFUSED = "refused"
    FINISHED = "ranks have finished"
    REPLACEMENTS = "too many replacements"
    TOO_LONG = "held too long"
    LATE_NEWCOMER = "the replacement is late"
    UNANSWERED = "an answer is missing"
    UNHELD = "a rank could not go on"


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotHold:
    rung: Rung
    because: str
