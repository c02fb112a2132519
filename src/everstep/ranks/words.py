"""What is seen of the ranks of a script on this machine: `group` says it, `keeper` hears it.

Ranks are torchrun's: processes of your script.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.protocol.held import RankWord


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRaised:
    """An exception has reached the top of the script. `raised_at`: on the monotonic clock."""

    rank: int
    error: str  # "ValueError: no such file"
    where: str = ""  # "train.py:17 in load"
    traceback: str = ""
    raised_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """`code` is negative for a signal, as in `subprocess`. `words`: the end of its stderr."""

    rank: int
    code: int
    reason: str  # "killed by SIGKILL"
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at a rank and its children from outside. `cpu_s`, `output_bytes`: since it was started."""

    state: str  # of /proc/PID/stat: R running, S sleeping, D disk, T stopped, t traced
    cpu_s: float
    output_bytes: int
    entered: Mapping[str, int] | None = None  # by process group: collectives so far; None: it has no group


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """The script has called `everstep.progress`."""

    rank: int
    step: int
    tokens: int | None = None
    is_saved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHandedOver:
    """The script has called `everstep.snapshot`: the rank's file, or why there is none."""

    rank: int
    step: int
    name: str = ""  # empty: other ranks have all of it
    size: int = 0
    hash: str = ""
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLeft:
    """Its script has come to an end, and raised nothing."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecorded:
    """Its flight recorder is written where `RankGroup.ask_for_paces` asked for it, if it has one."""

    rank: int
    is_written: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRankSaid:
    """Of a life whose ranks are held; for the machine that heals them."""

    rank: int
    word: RankWord


Event = RankRaised | RankExited | StepSeen | RankHandedOver | RankLeft | RankRecorded | HeldRankSaid
