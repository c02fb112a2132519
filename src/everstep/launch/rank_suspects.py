"""Who looks guilty of a hang, from what can be had without the script's help.

Three witnesses, the best first: PyTorch's record of collectives (a rank that has not entered the collective
in which the others sit is the one they wait for); the Python stacks (a rank outside torch while the others
are inside it, or have ended); a rank that has ended while all others are inside torch. Everybody in the same
collective: then nobody is named.

This is the place for `everstep.diagnose`: it may take the same records and say more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_OURS = ("/everstep/launch/rank_", "<frozen runpy>", "/runpy.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    ranks: tuple[int, ...]
    because: str
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.name}"

    @property
    def is_torch(self) -> bool:
        return "/torch/" in self.file


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """The last collective that a rank has entered in its first process group."""

    number: int
    name: str
    is_done: bool

    def __str__(self) -> str:
        return f"{self.name} number {self.number}" + (", done" if self.is_done else ", not done")


def suspect(*, stacks: Mapping[int, str], records: Mapping[int, Any], finished: tuple[int, ...]) -> Suspicion:
    frames = {rank: found for rank, text in stacks.items() if (found := main_frames(text))}
    entered = {rank: last for rank, record in records.items() if (last := last_entered(record))}
    evidence = tuple(
        f"rank {rank} {_standing(frames.get(rank), entered.get(rank))}"
        for rank in sorted({*frames, *entered})
    )
    ranks, because = _behind(entered) or _outside(frames, finished) or _ended(finished) or _unknown(frames)
    return Suspicion(ranks=ranks, because=because, evidence=evidence)


_Named = tuple[tuple[int, ...], str]


def _ended(finished: tuple[int, ...]) -> _Named | None:
    if not finished:
        return None
    return finished, f"{_names(finished)} ended with code 0 while the others still wait."


def _behind(entered: Mapping[int, Entered]) -> _Named | None:
    if len({each.number for each in entered.values()}) < 2:
        return None
    least = min(each.number for each in entered.values())
    behind = tuple(sorted(rank for rank, each in entered.items() if each.number == least))
    ahead = max(entered.values(), key=lambda each: each.number)
    return behind, f"{_names(behind)} never entered {ahead.name} number {ahead.number}, where others wait."


def _outside(frames: Mapping[int, list[Frame]], finished: tuple[int, ...]) -> _Named | None:
    outside = tuple(sorted(rank for rank, found in frames.items() if not found[0].is_torch))
    if not outside or (len(outside) == len(frames) and not finished):
        return None
    at = f"{_names(outside)} is at {frames[outside[0]][0]}, outside torch"
    if len(outside) < len(frames):
        return outside, f"{at}; the others wait inside it."
    return outside, f"{at}; the others have ended."


def _unknown(frames: Mapping[int, list[Frame]]) -> _Named:
    if not frames:
        return (), "No rank could say where it is."
    return (), "All ranks sit in the same kind of place, so none is named."


def _standing(frames: list[Frame] | None, entered: Entered | None) -> str:
    parts = []
    if frames:
        script = next((frame for frame in frames if not frame.is_torch), frames[0])
        inner = frames[0]
        parts.append(f"is at {script}" + (f", in torch's {inner.name}" if inner.is_torch else ""))
    if entered:
        parts.append(f"last entered {entered}")
    return "; ".join(parts)


def main_frames(text: str) -> list[Frame]:
    """Of the main thread, innermost first, in the newest dump: faulthandler writes it last."""
    sections = [
        part for part in re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.M) if part.strip()
    ]
    found = [match for line in (sections or [""])[-1].splitlines() if (match := _FRAME.match(line))]
    frames = [Frame(file=m["file"], line=int(m["line"]), name=m["name"]) for m in found]
    return [frame for frame in frames if not any(ours in frame.file for ours in _OURS)]


def last_entered(record: Any) -> Entered | None:
    entries = record.get("entries") if isinstance(record, dict) else None
    if not isinstance(entries, list):
        return None
    calls = [e for e in entries if isinstance(e, dict) and not e.get("is_p2p") and "collective_seq_id" in e]
    if not calls:
        return None
    group = calls[-1].get("pg_id")
    last = max((e for e in calls if e.get("pg_id") == group), key=lambda e: e["collective_seq_id"])
    done = bool(last.get("retired")) or last.get("state") == "completed"
    return Entered(number=last["collective_seq_id"], name=str(last.get("profiling_name", "?")), is_done=done)


def _names(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
