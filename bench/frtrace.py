"""What PyTorch's own `torchfrtrace` makes of Flight Recorder dumps, to be set beside ours.

It is asked twice about gloo's dumps. As they are it fails: gloo writes its groups' names and members under an
empty name, and the tool looks them up by the name that the entries have. So it is asked again with that
repaired, which is more than a person would do: the groups written in from the entries, and what gloo calls
`retired` called `completed`. It reads pickles only; dumps in JSON are written as such.
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAMED = re.compile(r"missing ranks: \{([\d, ]*)\}|Culprit rank (\d+)")


@dataclass(frozen=True)
class Answer:
    ranks: tuple[int, ...]  # that it calls missing or culprit
    reports: int
    failure: str = ""

    def __str__(self) -> str:
        if self.failure:
            return self.failure
        return f"ranks {list(self.ranks)} in {self.reports} reports" if self.reports else "nothing"


def ask(dumps: dict[int, bytes], *, repaired: bool = False) -> Answer:
    """By rank, the content of its dump, pickle or JSON."""
    read = {rank: _read(content) for rank, content in dumps.items()}
    if repaired:
        _repair(read)
    with tempfile.TemporaryDirectory() as folder:
        for rank, dump in read.items():
            (Path(folder) / f"t_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
        tool = Path(sys.executable).parent / "torchfrtrace"
        done = subprocess.run(
            [str(tool), folder, "-p", "t_"], capture_output=True, text=True, timeout=120, check=False
        )
    if done.returncode:
        return Answer((), 0, (done.stderr.strip().splitlines() or ["failed"])[-1][:60])
    found = _NAMED.findall(done.stdout + done.stderr)
    ranks = {
        int(rank) for missing, culprit in found for rank in (culprit or missing).split(",") if rank.strip()
    }
    return Answer(tuple(sorted(ranks)), len(found))


def of_folder(folder: Path) -> dict[int, bytes]:
    """The dumps of a folder whose names end in a rank."""
    found = {}
    for file in folder.iterdir():
        number = re.fullmatch(r"(?:fr_rank_|.*?)(\d+)(?:\.json)?", file.name)
        if number and (file.name.startswith("fr_rank_") or file.read_bytes()[:1] == b"\x80"):
            found[int(number[1])] = file.read_bytes()
    return found


def _read(content: bytes) -> dict[str, Any]:
    dump: dict[str, Any] = pickle.loads(content) if content[:1] == b"\x80" else json.loads(content)
    for entry in dump.setdefault("entries", []):
        entry["process_group"] = tuple(entry["process_group"])
    return dump


def _repair(dumps: dict[int, dict[str, Any]]) -> None:
    members: dict[tuple[str, str], set[int]] = {}
    for rank, dump in dumps.items():
        for entry in dump["entries"]:
            members.setdefault(entry["process_group"], set()).add(rank)
            entry["state"] = "completed" if entry["retired"] else entry["state"]
    for dump in dumps.values():
        dump["pg_config"] = {
            name: {
                "name": name,
                "desc": about,
                "ranks": str(sorted(dumps if about == "default_pg" else ranks)),
            }
            for (name, about), ranks in members.items()
        }
