"""What to do about a fault: one table of remedies, mildest first, and the first that does not refuse.

    SEV3 ── retry in place ──► SEV2 ── restart the worker ──► SEV1 ── isolate the node

The severity of an error says where it enters the table. From there on each remedy looks at the situation and
may refuse, in words; what the refused ones said is the reason for the one that is taken. So a remedy that did
not help is followed by a more severe one. Failures older than a window are forgotten: a budget is a rate.

To add a remedy, add a row to `REMEDIES`. If it does something that no remedy did before, add an `Effect` and
carry it out in `core.cluster.failures`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from everstep.core.faults.kinds import OF_HARDWARE, SEV1, SEV2, SEV3, ErrorKind, Severity
from everstep.core.faults.severity import Judgement
from everstep.errors import InternalError
from everstep.protocol.messages import Patience


class Effect(StrEnum):
    """What the coordinator does."""

    RESEND = "resend"  # a new epoch: whatever may be lost is sent again
    RESTART = "restart"  # another process in the same slot
    RESTART_ALL = "restart all"  # every worker of the task, from the newest state that is kept
    ISOLATE_SLOT = "isolate slot"  # the same, of one slot of the node: the evidence names it
    ISOLATE = "isolate"  # the node gets no workers for a time, and those it has move
    REPLACE = "replace"  # workers that went with their node are started elsewhere
    REBALANCE = "rebalance"  # its peers run some of its microbatches
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a remedy may depend on. Counts are of the recent past and include what has just happened."""

    judgement: Judgement
    is_alive: bool = False  # the process still runs
    retries: int = 0  # in place, of the same link
    failures: int = 0  # processes that this place has lost on its node
    short_lives: int = 0  # of these the last ones: a start that fails again and again
    node: str = ""
    can_leave_node: bool = False  # other nodes can take what runs on this one
    slots: tuple[int, ...] = ()  # of the node, that the evidence names
    can_leave_slots: bool = False  # other slots can take what runs on these
    alone: str = ""  # why no other worker can run its microbatches; empty: one can
    only_words: bool = False  # of one task's own program: nothing else speaks against the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyRule:
    name: str  # what people read
    severity: Severity
    kinds: frozenset[ErrorKind]
    effect: Effect
    refuses: Callable[[Situation, Patience], str]  # why it cannot help; empty: it may
    helps: str  # why it is tried first
    pause_s: float = 0.0  # before a restart, at least
    for_words: bool = False  # only where nothing but the task's own words speaks against the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyChoice:
    what: str
    effect: Effect
    because: str
    refusals: str = ""  # why milder ones were not taken, if there are any
    wait_s: float = 0.0  # before a restart


def _retry(at: Situation, patience: Patience) -> str:
    if not at.is_alive:
        return "its process has ended, so it cannot be retried in place"
    if at.retries >= patience.mends_before_restart:
        return f"{at.retries - 1} retries in place have not helped"
    return ""


def _restart(at: Situation, patience: Patience) -> str:
    if not at.node:
        return "no single worker is to blame"
    tried = at.failures - 1
    return f"{tried} restarts on {at.node} have not helped" if tried >= patience.restarts_per_node else ""


def _restart_all(at: Situation, patience: Patience) -> str:
    return f"only what runs on {at.node} is to blame" if at.node else ""


def _isolate(at: Situation, patience: Patience) -> str:
    if at.only_words:
        return f"only the task's own words speak against {at.node}"
    return "" if at.can_leave_node else "no other node can take its workers"


def _isolate_slot(at: Situation, patience: Patience) -> str:
    return "" if at.can_leave_slots else "no other slot can take its workers"


def _rebalance(at: Situation, patience: Patience) -> str:
    return at.alone


def _never(at: Situation, patience: Patience) -> str:
    return ""


_SLOW_WORKER, _SLOW_LINK = frozenset({ErrorKind.SLOW_WORKER}), frozenset({ErrorKind.SLOW_LINK})
_GONE = frozenset({ErrorKind.LOST_CONNECTION})
_USED_UP = frozenset({ErrorKind.HOST_OUT_OF_MEMORY, ErrorKind.RESOURCE_LIMIT, ErrorKind.DISK_FULL})
_CODE = frozenset({ErrorKind.NOT_DETERMINISTIC})
_VERSIONS = frozenset({ErrorKind.MIXED_VERSIONS})
_OF_SLOT = frozenset({ErrorKind.WRONG_NUMBERS, ErrorKind.ECC, ErrorKind.GPU_LOST})
_OF_MACHINE = OF_HARDWARE | _USED_UP
_FAULTS = frozenset(ErrorKind) - _SLOW_WORKER - _SLOW_LINK - _GONE - _CODE - _VERSIONS

REMEDIES = (
    RemedyRule(
        name="give it less work",
        severity=SEV3,
        kinds=_SLOW_WORKER,
        effect=Effect.REBALANCE,
        refuses=_rebalance,
        helps="workers of its stage run some of its microbatches",
    ),
    RemedyRule(
        name="retry in place",
        severity=SEV3,
        kinds=_FAULTS,
        effect=Effect.RESEND,
        refuses=_retry,
        helps="the processes are alive: what may be lost is sent again",
    ),
    RemedyRule(
        name="restart the worker after a pause",
        severity=SEV2,
        kinds=_USED_UP,
        effect=Effect.RESTART,
        refuses=_restart,
        helps="memory, disk or a limit of the host is used up; what took it may have ended by then",
        pause_s=5.0,
    ),
    RemedyRule(
        name="restart the worker",
        severity=SEV2,
        kinds=_FAULTS,
        effect=Effect.RESTART,
        refuses=_restart,
        helps="a new process may not meet the fault again",
    ),
    RemedyRule(
        name="restart the worker later",
        severity=SEV2,
        kinds=_VERSIONS,
        effect=Effect.RESTART,
        refuses=_never,
        helps="no machine is to blame: its peers may have its version by then",
        pause_s=5.0,
    ),
    RemedyRule(
        name="restart all workers of the task",
        severity=SEV2,
        kinds=frozenset({ErrorKind.OTHER_NETWORK}),
        effect=Effect.RESTART_ALL,
        refuses=_restart_all,
        helps="what they wait for is lost with them",
    ),
    RemedyRule(
        name="isolate the slot",
        severity=SEV1,
        kinds=_OF_SLOT,
        effect=Effect.ISOLATE_SLOT,
        refuses=_isolate_slot,
        helps="the evidence names it: the other slots of the node keep working",
    ),
    RemedyRule(
        name="leave the slot",
        severity=SEV1,
        kinds=_OF_MACHINE,
        effect=Effect.ISOLATE_SLOT,
        refuses=_isolate_slot,
        helps="only the task's own words speak against the node: it is checked, and keeps its other workers",
        for_words=True,
    ),
    RemedyRule(
        name="isolate the node",
        severity=SEV1,
        kinds=_FAULTS,
        effect=Effect.ISOLATE,
        refuses=_isolate,
        helps="the fault is in the node: a new process there would meet it again",
    ),
    RemedyRule(
        name="restart the worker on the same node",
        severity=SEV1,
        kinds=_FAULTS,
        effect=Effect.RESTART,
        refuses=_never,
        helps="no other node is needed for it",
    ),
    RemedyRule(
        name="start its workers on other nodes",
        severity=SEV1,
        kinds=_GONE,
        effect=Effect.REPLACE,
        refuses=_never,
        helps="its processes are out of reach",
    ),
    RemedyRule(
        name="stop the votes and continue",
        severity=SEV3,
        kinds=_CODE,
        effect=Effect.NOTHING,
        refuses=_never,
        helps="no machine is to blame: a worker that takes over computes other bits, too",
    ),
    RemedyRule(
        name="none: an operator can help",
        severity=SEV1,
        kinds=_SLOW_WORKER | _SLOW_LINK,
        effect=Effect.NOTHING,
        refuses=_never,
        helps="a worker with less work would wait for the same link; another path or another node helps",
    ),
)


def choose(at: Situation, patience: Patience) -> RemedyChoice:
    """The first remedy that does not refuse, from the error's own severity on."""
    refusals: list[str] = []
    for rule in REMEDIES:
        if at.judgement.kind not in rule.kinds or rule.severity > at.judgement.severity:
            continue
        if rule.effect is Effect.ISOLATE_SLOT and (not at.slots or rule.for_words != at.only_words):
            continue
        refusal = rule.refuses(at, patience)
        if refusal:
            refusals.append(refusal)
            continue
        restarts = rule.effect is Effect.RESTART
        wait_s = max(rule.pause_s, backoff_s(at.short_lives, patience)) if restarts else 0.0
        refused = "; ".join(dict.fromkeys(refusals))  # two rules may say the same
        return RemedyChoice(
            what=rule.name,
            effect=rule.effect,
            because=refused or rule.helps,
            refusals=refused,
            wait_s=wait_s,
        )
    raise InternalError(f"no remedy for {at.judgement.kind}")


def includes(name: str, choice: RemedyChoice) -> bool:
    """Is this choice part of the remedy of that name, which is under way?"""
    all_restart = choice.effect is Effect.RESTART and name == name_of(Effect.RESTART_ALL)
    return name == choice.what or all_restart


def first_remedy(severity: Severity) -> str:
    """What is tried first for a fault of this severity, where the evidence names no slot."""
    fitting = (rule for rule in REMEDIES if ErrorKind.OTHER in rule.kinds and rule.severity <= severity)
    return next(rule.name for rule in fitting if rule.effect is not Effect.ISOLATE_SLOT)


def name_of(effect: Effect) -> str:
    return next(rule.name for rule in REMEDIES if rule.effect is effect)


def backoff_s(short_lives: int, patience: Patience) -> float:
    """The first restart is at once, and so is one after a long life; then 1, 2, 4 … seconds."""
    if short_lives <= 1:
        return patience.backoff_first_s
    return min(patience.backoff_most_s, patience.backoff_s * 2.0 ** (short_lives - 2))


def recent(times: list[float], now: float, patience: Patience) -> list[float]:
    return [at for at in times if now - at <= patience.forget_after_s]
