"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from typing import Any


class bar:
    def __init__(self, total: int, *, quiet: bool, title: str) -> None:
        self.total, self.title = total, title
        self.quiet = quiet or not sys.stderr.isatty()

    def __enter__(self) -> Any:
        if self.quiet:
            return lambda: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        self.progress = Progress(
            self.title, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)
        )
        self.progress.start()
        task = self.progress.add_task(self.title, total=self.total)
        return lambda: self.progress.advance(task)

    def __exit__(self, *_: object) -> None:
        if not self.quiet:
            self.progress.stop()
