"""Is another start of a script useful, and how long to wait before it?

There are `max_restarts`; the first comes at once, the next ones wait longer and longer unless the attempt
before was long. Three things are never tried again: what needs other hardware (SEV1), a program that is wrong
in the same way twice, and what an operator has stopped.
"""

from __future__ import annotations

from everstep.core.faults.severity import Severity
from everstep.ranks.testimony import Witness
from everstep.ranks.words import RestartPolicy


class Restarts:
    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._backoffs = 0
        self._program_error: str | None = None  # of the attempt before

    def refusal(self, cause: Witness, *, used: int) -> str | None:
        """Why there is no restart; None if there is one."""
        before, self._program_error = self._program_error, cause.program_error
        if cause.judgement.severity is Severity.SEV1:
            return (
                f"This is {cause.judgement.kind} (SEV1): the same machine would fail again, so it is not "
                "restarted here; run it on another one."
            )
        if cause.program_error is not None and cause.program_error == before:
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
