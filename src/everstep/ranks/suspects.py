"""Who looks guilty of a hang, from what can be had without the script's help.

Three witnesses, the best first: PyTorch's record of collectives, read by `everstep.diagnose` (a rank that has
not entered the collective in which the others sit is the one they wait for); the Python stacks (a rank
outside torch while the others are inside it, or have ended); a rank that has ended while all others are
inside torch. If all ranks are in the same place, none is named.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_OURS = ("/everstep/ranks/rank_main", "<frozen runpy>", "/runpy.py")


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


def suspect(
    *, stacks: Mapping[int, str], records: Mapping[int, bytes], finished: tuple[int, ...]
) -> Suspicion:
    """`records`: dumps of the flight recorder, of ranks that could write one."""
    frames = {rank: found for rank, text in stacks.items() if (found := main_frames(text))}
    diagnosed = _diagnosed(records)
    named = (
        diagnosed
        if diagnosed is not None and diagnosed[0]
        else _outside(frames, finished) or _ended(finished)
    )
    ranks, because = named or diagnosed or _unknown(frames)
    evidence = tuple(f"rank {rank} {_position(found)}" for rank, found in sorted(frames.items()))
    return Suspicion(ranks=ranks, because=because, evidence=evidence)


_Named = tuple[tuple[int, ...], str]


def _diagnosed(records: Mapping[int, bytes]) -> _Named | None:
    """May name no rank and still give a reason."""
    from everstep.diagnose import Syndrome, UnusableFileError, analyse, read  # numpy takes a moment

    parts = []
    for rank, content in sorted(records.items()):
        with contextlib.suppress(UnusableFileError):
            parts.append(read(f"collectives_rank_{rank}.json", content))
    try:
        findings = analyse(parts).diagnosis.incidents
    except Exception:  # a diagnosis that fails must not keep the ranks from being started again
        return None
    hangs = (Syndrome.NON_COMMUNICATION_HANG, Syndrome.COMMUNICATION_HANG)
    found = next((each for each in findings if each.syndrome in hangs and each.suspects), None)
    if found is None:
        return None
    # A link has two ends, and what is as likely as not is no suspicion: then only the sentence is of use.
    sure = [each for each in found.suspects if each.peer is None and each.confidence > 0.5]
    if not sure:
        return (), found.because
    return tuple(sorted({each.rank for each in sure})), f"{found.because} {sure[0].evidence[:300]}."


def _ended(finished: tuple[int, ...]) -> _Named | None:
    if not finished:
        return None
    return finished, f"{_names(finished)} ended with code 0 while the others still wait."


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
        return (), "No rank reported its stack."
    return (), "All ranks are in the same kind of place, so none is named."


def _position(frames: list[Frame]) -> str:
    script = next((frame for frame in frames if not frame.is_torch), frames[0])
    inner = frames[0]
    return f"is at {script}" + (f", in torch's {inner.name}" if inner.is_torch else "")


def main_frames(text: str) -> list[Frame]:
    """Of the main thread, innermost first, in the newest dump: faulthandler writes it last."""
    sections = [
        part for part in re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.M) if part.strip()
    ]
    found = [match for line in (sections or [""])[-1].splitlines() if (match := _FRAME.match(line))]
    frames = [Frame(file=m["file"], line=int(m["line"]), name=m["name"]) for m in found]
    return [frame for frame in frames if not any(ours in frame.file for ours in _OURS)]


def _names(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
