"""What commands print: notes on stderr, one JSON document on stdout, and curves as text."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    """Live on a terminal; lines elsewhere, and where every decision is asked for."""
    if as_json or decisions or every is not None or not sys.stderr.isatty():
        from everstep.launch.local.plain_lines import PlainLines

        yield PlainLines(job, decisions=decisions, every=every)
        return
    from everstep.cli.live import LiveView

    with LiveView(job) as view:
        yield view


def plot(
    first: Mapping[int, float],
    second: Mapping[int, float],
    *,
    marks: Mapping[int, str] | None = None,
    width: int = 64,
    height: int = 11,
) -> list[str]:
    """Two curves over steps in one picture of text: · first, ○ second, ● both in the same place."""
    steps = sorted({*first, *second})
    values = [v for v in (*first.values(), *second.values()) if math.isfinite(v)]
    if not steps or not values:
        return []
    low, high = min(values), max(values)
    span = max(1, steps[-1] - steps[0])

    def cells(curve: Mapping[int, float]) -> set[tuple[int, int]]:
        """In every column the value of the step nearest to it."""
        found = ((x, curve.get(steps[0] + round(x / (width - 1) * span), math.nan)) for x in range(width))
        return {
            (round((high - v) / ((high - low) or 1) * (height - 1)), x) for x, v in found if math.isfinite(v)
        }

    ours, theirs = cells(first), cells(second)
    lines = []
    for y in range(height):
        label = f"{high - (high - low) * y / (height - 1):8.3f} ┤" if y % 5 == 0 else f"{'':8} │"
        row = "".join(" ·○●"[((y, x) in ours) + 2 * ((y, x) in theirs)] for x in range(width))
        lines.append(label + row.rstrip())
    marked = {round((step - steps[0]) / span * (width - 1)): mark for step, mark in (marks or {}).items()}
    return [*lines, f"{'':8} └{_axis(marked, width)}", _labels(steps, width)]


def _axis(marks: Mapping[int, str], width: int) -> str:
    return "".join(marks.get(x, "─") for x in range(width))


def _labels(steps: Sequence[int], width: int) -> str:
    return f"{'':10}{'step ' + str(steps[0]):<{max(0, width - len(str(steps[-1])))}}{steps[-1]}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
