"""What commands print: notes on stderr, one JSON document on stdout."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import rich.console
import typer
from rich.console import RenderableType
from rich.segment import Segment
from rich.text import Text

from everstep import log
from everstep.errors import printable

if TYPE_CHECKING:
    from everstep.job.job import Job
    from everstep.launch.local.run import Watcher


note = log.say
UNCUT = 100_000  # columns

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
LOG_FORMAT = typer.Option("--log-format", help="Lines on stderr: text, or one JSON object each.")
LOG_LEVEL = typer.Option("--log-level", help="The least severe lines on stderr.")


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    INFO = "info"
    WARNING = "warning"


class Console(rich.console.Console):
    """Of rich, for names that come from files and from other people's programs."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)  # before its width is measured

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def echo(text: str) -> None:
    """A line on stdout, with such names."""
    print(printable(text))


def emit(document: Mapping[str, Any]) -> None:
    """The one JSON document. A number that is none (NaN) is null."""
    print(json.dumps(_plain(document), indent=2), flush=True)


def count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def parameters(number: int) -> str:
    """Adapters are small: they are not 0.00 M."""
    unit, size = ("M", 1e6) if number >= 1e5 else ("k", 1e3)
    return f"{number / size:.2f} {unit} parameters"


def show(picture: RenderableType) -> None:
    """Print a table: as wide as the terminal, or as wide as it is where a program or a file reads it."""
    if sys.stdout.isatty():
        Console(highlight=False).print(picture)
        return
    console = Console(highlight=False, width=UNCUT)
    with console.capture() as captured:
        console.print(picture)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


@contextlib.contextmanager
def watching(
    job: Job, *, as_json: bool, decisions: bool = False, every: int | None = None
) -> Iterator[Watcher]:
    """One live line on a terminal; lines elsewhere, and where every decision is asked for."""
    from everstep.launch.local.plain_lines import LiveLine, PlainLines

    if as_json or decisions or every is not None or not sys.stderr.isatty():
        yield PlainLines(job, decisions=decisions, every=every)
        return
    with LiveLine(job) as line:
        yield line


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
