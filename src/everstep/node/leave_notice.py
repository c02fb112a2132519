"""A notice that this machine will be taken away, as a file that a provider's tools or a small script write.

    120                                                      seconds from when it was written
    2min
    {"action": "terminate", "time": "2026-05-04T08:22:00Z"}  as spot/instance-action of EC2 answers

An agent looks at it twice per second. What cannot be read is said once, and changes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from everstep.errors import UserError
from everstep.protocol.durations import duration
from everstep.protocol.messages import LeaveNoticed

LOOK_S = 0.5
MOST_BYTES = 4096
MOST_S = 365 * 86_400.0


@dataclass(slots=True)
class LeaveNotice:
    """The file, and what it said when it was last looked at."""

    path: Path
    say: Callable[[str], None]
    _seen: bytes = b""

    def look(self) -> LeaveNoticed | None:
        """A notice that is new."""
        try:
            with self.path.open("rb") as file:
                text = file.read(MOST_BYTES)
            written = self.path.stat().st_mtime
        except OSError:
            self._seen = b""
            return None
        if not text.strip() or text == self._seen:
            return None
        self._seen = text
        try:
            seconds = leaves_in_s(text.decode(errors="replace"), written=written, now=time.time())
        except UserError as error:
            self.say(f"{self.path}: {error}")
            return None
        return LeaveNoticed(leaves_in_s=seconds, by=f"the notice in {self.path.name}")


def leaves_in_s(text: str, *, written: float, now: float) -> float:
    text = text.strip()
    if text.startswith("{"):
        try:
            at = datetime.fromisoformat(str(json.loads(text)["time"]))
        except (ValueError, KeyError, RecursionError):
            raise UserError('a notice in JSON needs "time", such as "2026-05-04T08:22:00Z".') from None
        at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        return max(0.0, at.timestamp() - now)
    seconds = float(text) if text.replace(".", "", 1).isdecimal() else duration(text, "the notice")
    if seconds > MOST_S:
        raise UserError(f"the notice is {text[:40]!r}; a machine that leaves within a year needs one.")
    return max(0.0, seconds - max(0.0, now - written))
