"""A rank that runs: its process, its line to us, its output, and the files it writes."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.ranks import looks as rank_looks
from everstep.ranks import words
from everstep.ranks.fork_server import RankProcess
from everstep.ranks.output import OutputStream
from everstep.stack_text import STACKS_FILE


@dataclass(slots=True, kw_only=True)
class RunningRank:
    process: RankProcess
    line: socket.socket
    stdout: OutputStream
    stderr: OutputStream
    folder: Path
    family_cpu_s: float = 0.0
    has_torch: bool = False
    is_recorded: bool = False  # its collectives, since it was last asked
    entered: dict[str, int] | None = None  # by process group: how many collectives, as it said last

    @property
    def has_answered(self) -> bool:
        return bool(self.stacks()) and (self.is_recorded or not self.has_torch)

    def look(self) -> words.Look | None:
        written = self.stdout.num_bytes + self.stderr.num_bytes
        return rank_looks.look(
            self.process.pid, output_bytes=written, family_cpu_s=self.family_cpu_s, entered=self.entered
        )

    def ask(self, **question: Any) -> None:
        """What the thread in the rank answers, once torch is loaded there."""
        with contextlib.suppress(OSError):
            self.line.send(json.dumps(question).encode())

    def stacks(self) -> str:
        try:
            return (self.folder / STACKS_FILE).read_text(errors="replace")
        except OSError:
            return ""

    def record_path(self, number: int) -> Path:
        """A name that `everstep diagnose` understands."""
        return self.folder / f"collectives_rank_{number}.json"

    def record(self, number: int) -> bytes:
        """Of its collectives, if it has written one since it was asked."""
        try:
            return self.record_path(number).read_bytes() if self.is_recorded else b""
        except OSError:
            return b""

    def recorded_error(self) -> tuple[str, str] | None:
        """What torchelastic's @record has written: error and traceback."""
        message = (_json(self.folder / "error.json") or {}).get("message")
        if isinstance(message, str):
            return message[:2000], ""
        if not isinstance(message, dict):
            return None
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
        return str(message.get("message", "an exception"))[:2000], str(stack)


def _json(path: Path) -> Any:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
