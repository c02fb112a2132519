"""The states of a task's recovery, and which may follow which.

A *place* (replica, stage) is filled by one process at a time:

    Absent ──► Starting ──► Started ──► Copying ──► Copied ──► Entering ──► Member

A *phase* is what the task as a whole does:

    Assembling ──► Restoring ──► Running ──► Gathering ──► Planning ──► Running

Each state carries its own data. The two tables list every transition that is allowed; `protocol.lifecycle`
checks each one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.core.task.owed import Owed
from everstep.protocol.lifecycle import StateClasses
from everstep.protocol.ops import Worker
from everstep.protocol.work import Ledger

# ------------------------------------------------------------------ a place


@dataclass(frozen=True, slots=True)
class Absent:
    """No process. Started again once step `due_step` is recorded, if the place may be restarted."""

    due_step: int
    because: str


@dataclass(frozen=True, slots=True)
class Starting:
    """Its process was ordered and has not reported yet."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Started:
    """Its process is up and has no state."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Copying:
    """Its process copies the state of `source`, a member of its stage, while training continues."""

    incarnation: int
    source: Worker
    transfer: int  # the number of this copy: a report of an earlier one does not count


@dataclass(frozen=True, slots=True)
class Copied:
    """Its process has the whole state, follows every step through `source`, and waits to be let in."""

    incarnation: int
    source: Worker


@dataclass(frozen=True, slots=True)
class Entering:
    """A member from step `enter_at` on; until then `source` feeds it."""

    incarnation: int
    source: Worker
    enter_at: int


@dataclass(frozen=True, slots=True)
class Member:
    """Takes part from step `since` on."""

    incarnation: int
    since: int


Fed = Copying | Copied | Entering
Joining = Started | Fed
PlaceState = Absent | Starting | Started | Copying | Copied | Entering | Member

PLACE: StateClasses = {
    Absent: frozenset({Starting}),
    Starting: frozenset({Started, Absent}),
    Started: frozenset({Copying, Member, Absent}),  # Member: everyone loads a kept state
    Copying: frozenset({Copied, Copying, Started, Absent}),  # Copying: the source died, another one is found
    Copied: frozenset({Entering, Copying, Started, Absent}),
    # Started: the source died before the last feed; Entering: sooner, since steps between are lost or undone
    Entering: frozenset({Member, Started, Entering, Absent}),
    Member: frozenset({Started, Absent}),  # Started: another stage is lost, so everyone loads a kept state
}

# ------------------------------------------------------------------ the task


@dataclass(frozen=True, slots=True)
class Assembling:
    """Waits until every stage has a worker (or every place, where `wait_for_all`), to load step `restore`."""

    restore: int
    wait_for_all: bool


@dataclass(frozen=True, slots=True)
class Restoring:
    """Every stage has a worker: the schedule is being computed, then everyone loads step `restore`."""

    epoch: int
    restore: int
    because: str


@dataclass(frozen=True, slots=True)
class Running:
    """Every worker walks its op list; recovery has nothing to do."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Gathering:
    """Members were interrupted; those in `awaited` have not reported their ledgers yet.

    `rewind`: the step whose eager update is invalid, if this is why, or why an earlier epoch began.
    """

    epoch: int
    because: str
    rewind: int | None
    awaited: set[Worker]
    ledgers: dict[Worker, Ledger] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Planning:
    """What is owed is known; the schedule of it is being computed."""

    epoch: int
    because: str
    rewind: int | None
    owed: Owed
    ledgers: Mapping[Worker, Ledger]


@dataclass(frozen=True, slots=True)
class Over:
    """The last step is sealed, or the task has failed."""

    because: str


Phase = Assembling | Restoring | Running | Gathering | Planning | Over

PHASE: StateClasses = {
    Assembling: frozenset({Restoring, Assembling, Over}),  # Assembling: another state is the newest now
    Restoring: frozenset({Running, Assembling, Over}),
    Running: frozenset({Gathering, Assembling, Over}),
    Gathering: frozenset({Planning, Gathering, Assembling, Over}),  # Gathering: another death meanwhile
    Planning: frozenset({Running, Gathering, Assembling, Over}),
    Over: frozenset(),
}

# ------------------------------------------------------------------ what recovery is created with


@dataclass(frozen=True, slots=True)
class Lived:
    """The highest numbers that earlier runs of the task have used. The next run continues after them, so that
    a late message of an earlier run is recognised.
    """

    epoch: int = 0
    attempt: int = 0
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPolicy:
    """When a place is filled again, and how often; which states count."""

    rejoin_after_steps: int = 0
    looks: bool = False  # before all go back, for a checkpoint that no report told of
    max_restarts: int = 3  # per place, in a row
    votes_on_all: bool = False  # replicas check each other's numbers in every step: a state waits for that
    forgiven_after_steps: int = 20  # a process that took part in so many is no sign of a crash loop
