"""The states of a supervised script; `supervision` decides which one is next. Each has only its own data."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.ranks.stillness import Stillness
from everstep.ranks.testimony import Witness
from everstep.ranks.words import ScriptIncident


@dataclass(slots=True, kw_only=True)
class ScriptWaiting:
    """Before the first life."""


@dataclass(slots=True, kw_only=True)
class ScriptRunning:
    stillness: Stillness


@dataclass(slots=True, kw_only=True)
class ScriptSettling:
    until: float
    witnesses: list[Witness]


@dataclass(slots=True, kw_only=True)
class ScriptDiagnosing:
    until: float
    idle_since: float
    idle: str


@dataclass(slots=True, kw_only=True)
class ScriptEnding:
    incident: ScriptIncident | None  # None: a person has stopped it
    cause: Witness | None
    exit_code: int
    terminate_later: tuple[int, ...]  # who is saying last words
    terminate_at: float
    kill_at: float
    is_killed: bool = False


@dataclass(slots=True, kw_only=True)
class ScriptResting:
    until: float
    incident: ScriptIncident
    because: str


@dataclass(slots=True, kw_only=True)
class ScriptEnded:
    code: int
    because: str


ScriptState = (
    ScriptWaiting
    | ScriptRunning
    | ScriptSettling
    | ScriptDiagnosing
    | ScriptEnding
    | ScriptResting
    | ScriptEnded
)
