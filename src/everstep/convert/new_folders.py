"""Folders that a conversion makes on its way: if it fails, those that were not there before go again."""

from __future__ import annotations

import contextlib
from pathlib import Path


class NewFolders:
    """`path` and its parents, as far as they do not exist now."""

    def __init__(self, path: str | Path) -> None:
        self._missing: list[Path] = []
        if "://" in str(path):
            return
        at = Path(path)
        while not at.exists() and at != at.parent:
            self._missing.append(at)
            at = at.parent

    def remove_empty(self) -> None:
        """Innermost first; what holds anything stays."""
        for folder in self._missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
