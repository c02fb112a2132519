"""Where a place (replica, stage) stands, and what the task is doing: the states of `core.task.recovery`.

Each state carries its own data; there is no object with fields that mean something only sometimes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.core.task.owed import Owed
from everstep.core.words.ops import Worker
from everstep.core.words.worker_messages import Ledger

# ------------------------------------------------------------------ where a place (replica, stage) stands


@dataclass(slots=True)
class Starting:
    incarnation: int


@dataclass(slots=True)
class Joining:
    """Up, not yet a member. `source` feeds it; `copied`: its state is whole; `enter_at`: let in from
    there.
    """

    incarnation: int
    source: Worker | None = None
    copied: bool = False
    enter_at: int | None = None


@dataclass(slots=True)
class Member:
    """Takes part from step `since` on."""

    incarnation: int
    since: int


@dataclass(slots=True)
class Absent:
    """Dead. Started again once `due_step` is on record, if the budget allows."""

    due_step: int
    because: str


PlaceState = Starting | Joining | Member | Absent

# ------------------------------------------------------------------ what the task is doing


@dataclass(slots=True)
class Assembling:
    """Waiting until every stage has a worker; then everyone loads the checkpoint of `restore`."""

    restore: int
    wait_for_all: bool


@dataclass(slots=True)
class Gathering:
    epoch: int
    awaited: set[Worker]
    because: str
    ledgers: dict[Worker, Ledger] = field(default_factory=dict)


@dataclass(slots=True)
class Planning:
    epoch: int
    because: str
    restore: int | None
    survey: Owed | None
    ledgers: dict[Worker, Ledger]


@dataclass(slots=True)
class Running:
    epoch: int


@dataclass(slots=True)
class Over:
    because: str


Phase = Assembling | Gathering | Planning | Running | Over


@dataclass(frozen=True, slots=True)
class Lived:
    """How far a task's earlier lives went: a later one counts on from there, so that nobody takes a word of
    the one for a word of the other.
    """

    epoch: int = 0
    attempt: int = 0
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPolicy:
    """How patient to be with a place that keeps dying, and when to bring it back."""

    rejoin_after_steps: int = 0
    max_restarts: int = 3  # per place
