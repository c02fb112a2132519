"""The words of supervision: what may happen to the ranks of a script, and what may be done about it.

Ranks are torchrun's: processes of your script. `ranks.supervision` takes these events and answers
with these actions; `life` counts from 0 and is the number of restarts before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    ranks: int
    max_restarts: int = 3
    hang_after_s: float | None = None
    grace_s: float = 5.0  # from SIGTERM to SIGKILL
    last_words_s: float = 0.5  # a rank that has raised may end by itself for so long
    settle_s: float = 0.3
    stopped_patience_s: float = 5.0
    diagnosis_s: float = 10.0  # stacks that take longer to collect are done without
    idle_share: float = 0.02  # of one core; a rank below it is not using the CPU
    backoff_s: float = 1.0  # before the second restart; doubles
    max_backoff_s: float = 30.0
    long_life_s: float = 600.0  # after which back-off starts from the beginning


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequested:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRaised:
    """An exception has reached the top of the script. `raised_at`: on the clock that `handle` is given."""

    rank: int
    life: int
    error: str  # "ValueError: no such file"
    where: str = ""  # "train.py:17 in load"
    traceback: str = ""
    raised_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """`code` is negative for a signal, as in `subprocess`. `words`: the end of its stderr."""

    rank: int
    life: int
    code: int
    reason: str  # "killed by SIGKILL"
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at a rank and its children from outside. `cpu_s`, `output_bytes`: since it was started."""

    state: str  # of /proc/PID/stat: R running, S sleeping, D disk, T stopped, t traced
    cpu_s: float
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSeen:
    life: int
    looks: Mapping[int, Look]


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDiagnosed:
    """The answer to `DiagnoseHang`. No suspect: the cause is unknown."""

    life: int
    suspects: tuple[int, ...]
    because: str
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgressed:
    """The script has called `everstep.progress`."""

    rank: int
    life: int
    step: int
    tokens: int | None = None
    is_saved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHandedOver:
    """The script has called `everstep.snapshot`: the rank's file, or why there is none."""

    rank: int
    life: int
    step: int
    name: str = ""  # empty: other ranks have all of it
    size: int = 0
    hash: str = ""
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptTimePassed:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    signal: str
    code: int


Event = (
    RunRequested
    | RankRaised
    | RankExited
    | RankProgressed
    | RankHandedOver
    | RanksSeen
    | HangDiagnosed
    | ScriptTimePassed
    | Interrupted
)


# ------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRanks:
    life: int  # also the number of restarts before it
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRanks:
    ranks: tuple[int, ...]
    signal: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseHang:
    """Collect every rank's stacks and communication records, and say who looks guilty."""

    life: int
    ranks: tuple[int, ...]
    finished: tuple[int, ...]
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellPerson:
    """Something is seen, nothing is done about it yet."""

    rank: int | None
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    code: int
    because: str


Action = StartRanks | SignalRanks | DiagnoseHang | TellPerson | EndRun


# ------------------------------------------------------------------ incidents


@dataclass(slots=True, kw_only=True)
class ScriptIncident:
    number: int
    what: str
    rank: int | None
    life: int
    verdict: str
    severity: str
    because: str
    noticed_ms: float
    at: float
    evidence: list[str] = field(default_factory=list)
    traceback: str = ""
    remedy: str = ""
    restarted_at: float | None = None
