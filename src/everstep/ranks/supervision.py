"""Supervises the ranks of your script: which failure was the first, and is a restart useful?

The script is not ours. It reports no ops and keeps its own checkpoints, so the only remedy is torchrun's: end
every rank, start all of them again. What is decided here is when, whom to name, and when to stop.

    Running ──evidence──▶ Settling ──▶ Ending ──all gone──▶ Resting ──▶ Running (the next life)
       │                     ▲            ▲                    └──────▶ Ended
       └──no progress──▶ Diagnosing ──────┘

No innocent rank is named. A rank that is killed takes its peers' connections with it, and a peer's
"connection closed" may be heard before the kernel has buried the one that was killed. So hearsay
(`testimony`) is held for `settle_s`: if a better witness comes, it is the cause; if none does, the one who
spoke is. Any other evidence is acted on at once.

A rank that sleeps may be waiting for one that is stuck. No rank is called hung while any rank uses a CPU or
writes output; a stopped rank (SIGSTOP) is named as soon as it is seen, and has `stopped_patience_s`
to continue.

Whether another start is useful, and when, is decided in `restarts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from everstep.core.faults.severity import Severity
from everstep.core.faults.testimony import Witness, cause_of, names
from everstep.ranks import testimony
from everstep.ranks.stillness import Stillness
from everstep.ranks.words import (
    Action,
    DiagnoseHang,
    EndRun,
    Event,
    HangDiagnosed,
    Interrupted,
    RankExited,
    RankHandedOver,
    RankProgressed,
    RankRaised,
    RanksSeen,
    RestartPolicy,
    RunRequested,
    ScriptIncident,
    ScriptTimePassed,
    SignalRanks,
    StartRanks,
    TellPerson,
)

_BURIAL_S = 30.0  # the kernel may take so long to end a killed process; one that hangs in it never ends


class Supervision:
    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.life = 0
        self.incidents: list[ScriptIncident] = []
        self._state: ScriptState = ScriptWaiting()
        self._live: set[int] = set()
        self._raised: set[int] = set()
        self._exit_codes: dict[int, int] = {}  # of this life
        self._started_at = 0.0
        self._restarts = Restarts(policy)

    # -------------------------------------------------------------- what others may ask

    @property
    def is_over(self) -> bool:
        return isinstance(self._state, ScriptEnded)

    @property
    def restarts(self) -> int:
        return self.life

    @property
    def exit_codes(self) -> Mapping[int, int]:
        """Of the ranks of this life that have ended."""
        return dict(self._exit_codes)

    def deadline(self) -> float | None:
        """When `TimePassed` is due."""
        match self._state:
            case ScriptSettling(until=until) | ScriptDiagnosing(until=until) | ScriptResting(until=until):
                return until
            case ScriptEnding(is_killed=True) as ending:
                return ending.kill_at + _BURIAL_S
            case ScriptEnding() as ending:
                return min(ending.kill_at, ending.terminate_at) if ending.terminate_later else ending.kill_at
            case ScriptRunning(stillness=Stillness(stopped=stopped)) if stopped:
                return min(stopped.values()) + self._stopped_patience_s
            case _:
                return None

    def snapshot(self) -> dict[str, object]:
        return {
            "state": type(self._state).__name__.removeprefix("Script").lower(),
            "life": self.life,
            "live": sorted(self._live),
            "exit_codes": dict(sorted(self._exit_codes.items())),
            "incidents": len(self.incidents),
        }

    def validate(self) -> None:
        everyone = set(range(self.policy.ranks))
        assert not self._live & self._exit_codes.keys(), "a rank both lives and has ended"
        assert self._live <= everyone
        assert self.life <= self.policy.max_restarts, "more lives than were allowed"
        match self._state:
            case ScriptRunning() | ScriptSettling() | ScriptDiagnosing():
                assert self._live | self._exit_codes.keys() == everyone, "a rank is unaccounted for"
                assert self._live, "runs without a live rank"
            case ScriptEnding():
                assert self._live, "ends no rank"
            case ScriptWaiting() | ScriptResting() | ScriptEnded():
                assert not self._live, "a rank outlives its group"

    # -------------------------------------------------------------- events in, actions out

    def handle(self, event: Event, now: float) -> list[Action]:
        if self.is_over or self._is_stale(event):
            return []
        match event:
            case RunRequested():
                return self._start(now, "The run was asked for.")
            case RankRaised():
                return self._rank_raised(event, now)
            case RankExited():
                return self._rank_exited(event, now)
            case RanksSeen():
                return self._ranks_seen(event, now)
            case RankProgressed() | RankHandedOver():
                return []
            case HangDiagnosed():
                return self._hang_diagnosed(event, now)
            case ScriptTimePassed():
                return self._time_passed(now)
            case Interrupted():
                return self._interrupted(event, now)
        assert_never(event)

    def _is_stale(self, event: Event) -> bool:
        match event:
            case RankRaised() | RankExited():
                return event.life != self.life or event.rank not in self._live
            case RanksSeen() | HangDiagnosed():
                return event.life != self.life
            case _:
                return False

    # -------------------------------------------------------------- lives

    def _start(self, now: float, because: str) -> list[Action]:
        self._live = set(range(self.policy.ranks))
        self._raised, self._exit_codes = set(), {}
        self._started_at = now
        self._state = ScriptRunning(stillness=Stillness(idle_share=self.policy.idle_share, moved_at=now))
        return [StartRanks(life=self.life, because=because)]

    def _rank_raised(self, event: RankRaised, now: float) -> list[Action]:
        self._raised.add(event.rank)
        return self._testify(testimony.of_exception(event, now), now)

    def _rank_exited(self, event: RankExited, now: float) -> list[Action]:
        self._live.discard(event.rank)
        self._exit_codes[event.rank] = event.code
        if isinstance(self._state, ScriptEnding):
            return self._someone_gone(self._state, event, now)
        if event.code != 0 and event.rank not in self._raised:
            return self._testify(testimony.of_exit(event, now), now)
        if self._live:
            if isinstance(self._state, ScriptRunning):
                self._state.stillness.forget(event.rank)
            return []
        if isinstance(self._state, ScriptSettling):
            return self._conclude(self._state.witnesses, now)
        return self._end_run(0, f"All {self.policy.ranks} ranks have ended with code 0.")

    # -------------------------------------------------------------- evidence

    def _testify(self, witness: Witness, now: float) -> list[Action]:
        match self._state:
            case ScriptSettling() as settling:
                settling.witnesses.append(witness)
                if not witness.is_hearsay or not self._live:
                    return self._conclude(settling.witnesses, now)
                return []
            case ScriptEnding(incident=ScriptIncident() as incident):
                testimony.add_evidence(incident, f"then {witness.what}", *witness.evidence)
                return []
            case ScriptRunning() | ScriptDiagnosing() if witness.is_hearsay and self._live - {witness.rank}:
                self._state = ScriptSettling(until=now + self.policy.settle_s, witnesses=[witness])
                return []
            case ScriptRunning() | ScriptDiagnosing():
                return self._conclude([witness], now)
            case _:
                return []

    def _conclude(self, witnesses: list[Witness], now: float) -> list[Action]:
        cause = cause_of(witnesses)
        incident = testimony.incident_of(witnesses, number=len(self.incidents) + 1, life=self.life, now=now)
        self.incidents.append(incident)
        named = TellPerson(rank=cause.rank, because=f"{cause.what}. {incident.because}")
        return [named, *self._end_ranks(now, incident, cause, _shell_code(cause.code), cause.what)]

    # -------------------------------------------------------------- no progress

    def _ranks_seen(self, event: RanksSeen, now: float) -> list[Action]:
        if not isinstance(self._state, ScriptRunning):
            return []
        stillness = self._state.stillness
        looks = {rank: look for rank, look in event.looks.items() if rank in self._live}
        stopped, resumed = stillness.see(looks, now)
        actions: list[Action] = [
            TellPerson(
                rank=rank,
                because=f"rank {rank} is stopped (SIGSTOP); the others wait for it; it has "
                f"{self._stopped_patience_s:g} s to continue before all ranks are restarted.",
            )
            for rank in stopped
        ]
        actions += [
            TellPerson(
                rank=rank, because=f"rank {rank} continues after {after_s:.1f} s; no action was needed."
            )
            for rank, after_s in resumed
        ]
        idle_s, limit_s = now - stillness.moved_at, self.policy.hang_after_s
        if limit_s is not None and idle_s >= limit_s and not stillness.stopped:
            actions += self._suspect_hang(stillness, idle_s, now)
        return actions

    @property
    def _stopped_patience_s(self) -> float:
        return min(self.policy.stopped_patience_s, self.policy.hang_after_s or self.policy.stopped_patience_s)

    def _stopped_too_long(self, stopped: Mapping[int, float], now: float) -> list[Action]:
        rank, since = min(stopped.items(), key=lambda item: item[1])
        if now < since + self._stopped_patience_s:
            return []
        what = f"rank {rank} has been stopped for {now - since:.1f} s"
        because = "Its process is in state T since a SIGSTOP; the other ranks wait for it."
        return self._conclude([testimony.of_stillness(rank, what, because, since)], now)

    def _suspect_hang(self, stillness: Stillness, idle_s: float, now: float) -> list[Action]:
        idle = f"no rank has used a CPU or written anything for {idle_s:.1f} s"
        self._state = ScriptDiagnosing(
            until=now + self.policy.diagnosis_s, idle_since=stillness.moved_at, idle=idle
        )
        finished = tuple(sorted(self._exit_codes))
        return [
            DiagnoseHang(
                life=self.life,
                ranks=tuple(sorted(self._live)),
                finished=finished,
                because=f"{idle}; the stacks show which rank waits.",
            )
        ]

    def _hang_diagnosed(self, event: HangDiagnosed, now: float) -> list[Action]:
        if not isinstance(self._state, ScriptDiagnosing):
            return []
        return self._hung(self._state, event.suspects, event.because, event.evidence, now)

    def _hung(
        self,
        found: ScriptDiagnosing,
        suspects: tuple[int, ...],
        because: str,
        evidence: tuple[str, ...],
        now: float,
    ) -> list[Action]:
        rank = suspects[0] if len(suspects) == 1 else None
        what = f"hang at {names(suspects)}: {found.idle}" if suspects else f"hang: {found.idle}"
        return self._conclude([testimony.of_stillness(rank, what, because, found.idle_since, evidence)], now)

    # -------------------------------------------------------------- ending, and what then

    def _end_ranks(
        self, now: float, incident: ScriptIncident | None, cause: Witness | None, code: int, why: str
    ) -> list[Action]:
        if not self._live:
            return self._group_gone(incident, cause, code, now)
        # Who has raised has printed its traceback already; the cause may also end in peace.
        speaking = {rank for rank in self._raised & self._live if cause is not None and cause.rank == rank}
        self._state = ScriptEnding(
            incident=incident,
            cause=cause,
            exit_code=code,
            terminate_later=tuple(sorted(speaking)),
            terminate_at=now + self.policy.last_words_s,
            kill_at=now + self.policy.grace_s,
        )
        rest = tuple(sorted(self._live - speaking))
        if not rest:
            return []
        return [SignalRanks(ranks=rest, signal="SIGTERM", because=f"{why}; all ranks end together.")]

    def _someone_gone(self, ending: ScriptEnding, event: RankExited, now: float) -> list[Action]:
        is_ours = event.code in (-15, -9) or event.code == 0
        if ending.incident is not None and not is_ours and event.rank not in self._raised:
            testimony.add_evidence(ending.incident, f"then rank {event.rank} {event.reason}")
        if self._live:
            return []
        return self._group_gone(ending.incident, ending.cause, ending.exit_code, now)

    def _group_gone(
        self, incident: ScriptIncident | None, cause: Witness | None, code: int, now: float
    ) -> list[Action]:
        if incident is None or cause is None:
            return self._end_run(code, "Stopped by the user; every rank has ended.")
        if cause.rank in self._raised and self._exit_codes.get(cause.rank or 0, -1) > 0:
            code = self._exit_codes[cause.rank or 0]  # it has raised, and ended by itself
        refusal = self._restarts.refusal(cause, used=self.life)
        if refusal is not None:
            incident.remedy = "stop"
            return self._end_run(code, f"{_sentence(cause.what)} {refusal}")
        wait_s = self._restarts.wait_s(now - self._started_at)
        left = self.policy.max_restarts - self.life
        incident.remedy = f"restart of all {self.policy.ranks} ranks, {self.life + 1} of {left + self.life}"
        because = f"{cause.what}; {left} of {self.policy.max_restarts} restarts were left."
        self._state = ScriptResting(until=now + wait_s, incident=incident, because=because)
        return self._time_passed(now)

    def _time_passed(self, now: float) -> list[Action]:
        match self._state:
            case ScriptSettling() as settling if now >= settling.until:
                return self._conclude(settling.witnesses, now)
            case ScriptDiagnosing() as found if now >= found.until:
                return self._hung(found, (), "Stacks could not be collected in time.", (), now)
            case ScriptRunning(stillness=Stillness(stopped=stopped)) if stopped:
                return self._stopped_too_long(stopped, now)
            case ScriptEnding() as ending:
                return self._press(ending, now)
            case ScriptResting() as resting if now >= resting.until:
                self.life += 1
                resting.incident.restarted_at = now
                return self._start(now, resting.because)
            case _:
                return []

    def _press(self, ending: ScriptEnding, now: float) -> list[Action]:
        if now >= ending.kill_at and not ending.is_killed:
            ending.is_killed = True
            ending.kill_at = now
            because = f"not gone {self.policy.grace_s:g} s after SIGTERM."
            return [SignalRanks(ranks=tuple(sorted(self._live)), signal="SIGKILL", because=because)]
        if ending.is_killed and now >= ending.kill_at + _BURIAL_S:
            who = names(tuple(sorted(self._live)))
            self._live.clear()
            return self._end_run(ending.exit_code, f"Not even SIGKILL ends {who}: it hangs in the kernel.")
        if now < ending.terminate_at:
            return []
        late = tuple(rank for rank in ending.terminate_later if rank in self._live)
        ending.terminate_later = ()
        if late:
            because = f"has raised, and has not ended within {self.policy.last_words_s:g} s."
            return [SignalRanks(ranks=late, signal="SIGTERM", because=because)]
        return []

    def _interrupted(self, event: Interrupted, now: float) -> list[Action]:
        """Once: SIGTERM and the grace. Twice: SIGKILL."""
        if isinstance(self._state, ScriptEnding) and self._state.incident is None:
            self._state.is_killed, self._state.kill_at = True, now
            because = f"{event.signal} came a second time."
            return [SignalRanks(ranks=tuple(sorted(self._live)), signal="SIGKILL", because=because)]
        if not self._live:
            return self._end_run(event.code, f"{event.signal} came while no rank was running.")
        return self._end_ranks(now, None, None, event.code, f"{event.signal} came")

    def _end_run(self, code: int, because: str) -> list[Action]:
        self._state = ScriptEnded(code=code, because=because)
        return [EndRun(code=code, because=because)]


def _shell_code(code: int) -> int:
    """A signal as shells write it."""
    return 128 - code if code < 0 else code or 1


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# Is another start of a script useful, and how long to wait before it?
#
# There are `max_restarts`; the first comes at once, the next ones wait longer and longer unless the attempt
# before was long. Three things are never tried again: what needs other hardware (SEV1), a program that is
# wrong in the same way twice, and what an operator has stopped.


class Restarts:
    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._backoffs = 0
        self._program_error = ""  # of the attempt before

    def refusal(self, cause: Witness, *, used: int) -> str | None:
        """Why there is no restart; None if there is one."""
        before, self._program_error = self._program_error, cause.program_error
        if cause.judgement.severity is Severity.SEV1:
            return (
                f"This is {cause.judgement.kind} (SEV1): the same machine would fail again, so it is not "
                "restarted here; run it on another one."
            )
        if cause.program_error and cause.program_error == before:
            return (
                "The same error twice at the same line: the script or its input is wrong, so it is not "
                "restarted."
            )
        if used >= self._policy.max_restarts:
            allowed = self._policy.max_restarts
            return f"All {allowed} restarts are used up." if allowed else "No restarts are allowed."
        return None

    def wait_s(self, ran_s: float) -> float:
        """Before the next start, after an attempt of so many seconds."""
        if ran_s >= self._policy.long_life_s:
            self._backoffs = 0
        wait_s = self._policy.backoff_s * 2.0 ** (self._backoffs - 1) if self._backoffs else 0.0
        self._backoffs += 1
        return min(wait_s, self._policy.max_backoff_s)


# The states of a supervised script; `supervision` decides which one is next. Each has only its own data.


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
