"""What faulthandler writes of a rank's stacks, read back."""

from __future__ import annotations

import re
from dataclasses import dataclass

STACKS_FILE = "stacks.txt"  # in the folder of a rank
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_OURS = ("/everstep/ranks/rank_main", "<frozen runpy>", "/runpy.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.short_file}:{self.line} in {self.name}"

    @property
    def short_file(self) -> str:
        """With its package, if the name alone says nothing."""
        return "/".join(self.file.split("/")[-2 if self.file.endswith("/__init__.py") else -1 :])

    @property
    def is_torch(self) -> bool:
        return "/torch/" in self.file

    @property
    def is_import(self) -> bool:
        return self.file.startswith("<frozen importlib")


def main_frames(text: str) -> list[Frame]:
    """Of the main thread, innermost first, in the newest dump: faulthandler writes it last."""
    sections = [
        part for part in re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.M) if part.strip()
    ]
    found = [match for line in (sections or [""])[-1].splitlines() if (match := _FRAME.match(line))]
    frames = [Frame(file=m["file"], line=int(m["line"]), name=m["name"]) for m in found]
    return [frame for frame in frames if not any(ours in frame.file for ours in _OURS)]


def of_script(frames: list[Frame]) -> Frame | None:
    """Where the script itself is: the innermost line outside of torch."""
    return next((frame for frame in frames if not frame.is_torch), frames[0] if frames else None)
