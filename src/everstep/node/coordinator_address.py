"""Where a coordinator is: an address, or `@FILE` for a file that says so now.

A coordinator that moves to another node writes its address into a file on a shared folder; who looks for it
reads that file again at every attempt.
"""

from __future__ import annotations

from pathlib import Path

MAX_BYTES = 4096


def current(place: str) -> str:
    """The address now; empty while the file is not there."""
    if not place.startswith("@"):
        return place
    try:
        with Path(place[1:]).open("rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
