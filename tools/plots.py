"""What Everstep costs, and how fast it recovers: pictures, drawn from bench/figures.json.

    python -m tools.plots docs/plots          every picture and the table of docs/why.md, from the figures
                                              that are kept (`make plots`)
    python -m tools.plots --measure           take all figures that this machine can give (`make figures`)
    python -m tools.plots --measure heal      take those of one bench
    python -m tools.plots --measure overhead --machine "16 x86 cores, idle"

Figures are kept as the benches print them with `--json`, each with its command, the machine and the date. No
figure is typed into a picture; a test draws the pictures again and compares them with those in docs/, and so
it does with what the README and docs/why.md say of costs and of the race. Figures of machines that are not at
hand have `source` instead: the page where they were written down, whose words must have the same numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "bench" / "figures.json"
RACE = ROOT / "bench" / "peers" / "race.json"
Figures = dict[str, dict[str, Any]]

_DDP = "bench/overhead.py --replicas 2 --stages 1 --microbatches 2 --reduce ddp --json"
COMMANDS = {  # by the name of the figures; what is not here was taken on another machine
    "overhead gpt-tiny, CPU": f"{_DDP} --preset gpt-tiny --steps 12 --turns 1",
    "overhead gpt-1m, CPU": f"{_DDP} --preset gpt-1m --steps 8 --turns 1",
    "overhead gpt-10m, CPU": f"{_DDP} --preset gpt-10m --steps 3 --turns 1",
    "heal gpt-tiny, CPU": "bench/heal.py --json --preset gpt-tiny --kills 6",
    "heal gpt-1m, CPU": "bench/heal.py --json --preset gpt-1m --kills 6",
    "heal gpt-10m, CPU": "bench/heal.py --json --preset gpt-10m --kills 6",
    "growth": "bench/heal.py --json --growth --kills 6",
    "size": "bench/size.py --json --workers 64 512 --scenes death",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    group: str  # bars of one group stand together
    name: str
    value: float
    low: float | None = None  # a whisker, where a figure has a spread
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    unit: str
    bars: list[Bar]
    line: float | None = None  # what it is compared with
    digits: int = 2


# ------------------------------------------------------------------ what each picture shows


def overhead(figures: Figures) -> Chart:
    bars = []
    for name, shown in _SUMS.items():
        for group, found in _of(figures, "overhead "):
            if row := _row(found, name):
                baseline = found[0]["contestants"][0]["steps_per_s"]
                bars.append(
                    Bar(group=group, name=shown, value=row.get("cpu_ratio") or baseline / row["steps_per_s"])
                )
        gpu = figures["beside DDP on a GPU"]["found"]
        if shown in gpu:
            bars.append(Bar(group="gpt-350m, GPU", name=shown, value=gpu[shown] / gpu["DDP"]))
    return Chart(
        title="A step while nothing fails, against the same training written with torch",
        unit="times torch's time per step (of CPUs: CPU time where others used them); less is better",
        bars=bars,
        line=1.0,
    )


def strict_sums(figures: Figures) -> Chart:
    bars = []
    plain, *exact = _SUMS
    for name in exact:
        for group, found in _of(figures, "overhead "):
            rows = [_row(found, one) for one in (name, plain)]
            times = [row.get("cpu_ms_per_step") or 1e3 / row["steps_per_s"] for row in rows if row]
            if len(times) == 2:
                bars.append(Bar(group=group, name=_SUMS[name], value=100 * (times[0] / times[1] - 1)))
        gpu = figures["sums on a GPU"]["found"]
        more = 100 * (gpu[_SUMS[name]] / gpu[_SUMS[plain]] - 1)
        bars.append(Bar(group="gpt-1b, GPU", name=_SUMS[name], value=more))
    return Chart(
        title="What exact sums of gradients add to a step",
        unit="% more than fp32 sums (of CPUs: CPU time where others used them)",
        bars=bars,
        line=0.0,
        digits=1,
    )


def recovery_by_size(figures: Figures) -> Chart:
    bars = [
        _spread(group, shown, document[key])
        for key, shown in (("noticed_ms", "noticed"), ("first_op_ms", "working again"))
        for group, document in _of(figures, "heal ")
        if key in document
    ]
    return Chart(
        title="From SIGKILL of a worker until its peers work again, by the size of the model",
        unit="ms: median (95 of 100 are below)",
        bars=bars,
        digits=0,
    )


def recovery_by_workers(figures: Figures) -> Chart:
    bars = [
        _spread(f"{math.prod(map(int, shape.split('x')))} workers", "working again", document["first_op_ms"])
        for shape, document in figures["growth"]["found"]["growth"].items()
    ]
    for row in figures["size"]["found"]["rows"]:
        group = f"{row['workers']:,} workers"
        bars.append(Bar(group=group, name="longest event of the coordinator", value=row["max_ms"]))
    return Chart(
        title="A death, by the number of workers: real processes, then virtual agents",
        unit="ms: median (95 of 100 are below); CPU ms for virtual agents",
        bars=bars,
        digits=0,
    )


# ------------------------------------------------------------------ what pages say


def costs(figures: Figures) -> list[str]:
    """The table of docs/why.md: the figures of the picture of costs."""
    chart = overhead(figures)
    names = list(dict.fromkeys(bar.name for bar in chart.bars))
    groups = list(dict.fromkeys(bar.group for bar in chart.bars))
    shown = {(bar.group, bar.name): f"{bar.value:.{chart.digits}f}" for bar in chart.bars}
    rows = [[group, *(shown.get((group, name), "") for name in names)] for group in groups]
    head = [COSTS, *(f"{name} (default)" if name == "strict sums" else name for name in names)]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


_PIPELINED = "overhead gpt-1m, 2 x 2"
COSTS = "times torch's time per step"


def pauses(race: dict[str, Any], figures: Figures) -> dict[str, str]:
    """The README's table: the longest time without a useful step after a SIGKILL, the least and the most.

    By a hyphen at which a browser breaks no line.
    """
    found = {}
    for result in race["systems"].values():
        stalls = [
            stall
            for fault, stall in zip(result["faults"], result["stalled_s"], strict=True)
            if fault["kind"] == "kill"
        ]
        found[result["name"].split()[0]] = stalls
    found["NVRx"].append(figures["NVRx in-process"]["found"]["past_s"])
    return {
        name: "\u2011".join(dict.fromkeys(f"{end:.{int(end < 10)}f}" for end in (min(stalls), max(stalls))))
        for name, stalls in found.items()
    }


def standstills(race: dict[str, Any]) -> str:
    """The README's caption of the race."""
    longest = {result["name"]: max(result["stalled_s"]) for result in race["systems"].values()}
    ours, torchft, script = (longest.pop(name) for name in ("Everstep", "torchft", "everstep run"))
    return (
        f"Everstep stood still for {ours:.1f} s at most, torchft for {torchft:.0f}, a plain script under "
        f"`everstep run` for {script:.0f}, the others for {min(longest.values()):.0f} to "
        f"{max(longest.values()):.0f} s."
    )


def against_others(race: dict[str, Any], figures: Figures) -> list[str]:
    """What docs/why.md says below its table."""
    plain, tuned = (row["steps_per_s"] for row in figures[_PIPELINED]["found"][0]["contestants"][:2])
    ours, torchft = (race["systems"][name]["healthy_step_s"] for name in ("everstep", "torchft"))
    return [
        f"with our allocator settings torch's would take {plain / tuned:.2f} of its time",
        f"our step takes {ours / torchft:.2f} times torchft's",
    ]


PICTURES: dict[str, tuple[Callable[[Figures], Chart], tuple[str, ...]]] = {  # and the figures it is made of
    "overhead.svg": (overhead, ("overhead", "beside DDP")),
    "strict-sums.svg": (strict_sums, ("overhead", "sums")),
    "recovery-by-size.svg": (recovery_by_size, ("heal ",)),
    "recovery-by-workers.svg": (recovery_by_workers, ("growth", "size")),
}


_SUMS = {  # as bench/overhead.py calls them; the first is what torch does
    "everstep, sums in fp32": "fp32 sums",
    "everstep, strict sums (default)": "strict sums",
    "everstep, strict sums in 4 bytes": "strict sums in 4 bytes",
}


def _of(figures: Figures, kind: str) -> Iterator[tuple[str, Any]]:
    """The figures of a kind, by what they are of."""
    return (
        (name.removeprefix(kind), kept["found"]) for name, kept in figures.items() if name.startswith(kind)
    )


def _row(found: Any, name: str) -> dict[str, Any] | None:
    return next((row for row in found[0]["contestants"] if row["name"] == name), None)


def _spread(group: str, name: str, found: dict[str, float]) -> Bar:
    return Bar(group=group, name=name, value=found["p50"], low=found["p50"], high=found["p95"])


# ------------------------------------------------------------------ drawing


_STYLE = """<style>
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .small { font-size: 10.5px; fill: #59636e }
  .b0 { fill: #8c959f } .b1 { fill: #1a7f37 } .b2 { fill: #0969da }
  .base { stroke: #d0d7de } .line { stroke: #cf222e }
  .whisker { stroke: #1f2328 } .title { font-weight: 600 } .end { text-anchor: end }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 }
    .b0 { fill: #6e7681 } .b1 { fill: #3fb950 } .b2 { fill: #58a6ff }
    .base { stroke: #3d444d } .line { stroke: #f85149 }
    .whisker { stroke: #e6edf3 }
  }
</style>"""
_COLOURS = {  # one name, one colour in all pictures
    "fp32 sums": 0,
    "noticed": 0,
    "strict sums": 1,
    "working again": 1,
    "strict sums in 4 bytes": 2,
    "longest event of the coordinator": 2,
}
_LEFT, _RIGHT, _WIDTH, _BAR = 120, 640, 760, 14


def svg(chart: Chart, notes: list[str]) -> str:
    """Horizontal bars: a group per model or size, one bar per name; below it what was measured, and where."""
    names = list(dict.fromkeys(bar.name for bar in chart.bars))
    colours = {name: _COLOURS.get(name, number) for number, name in enumerate(names)}
    groups = list(dict.fromkeys(bar.group for bar in chart.bars))
    top = max((bar.high or bar.value) for bar in chart.bars) * 1.02
    low = min(0.0, *(bar.value for bar in chart.bars))

    def x(value: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (value - low) / (top - low), 1)

    parts = [f'<text x="10" y="18" class="title">{escape(chart.title)}</text>']
    parts.append(f'<text x="10" y="35" class="small">{escape(chart.unit)}</text>')
    for number, name in enumerate(names):
        parts.append(
            f'<rect x="{10 + 200 * number}" y="45" width="10" height="10" class="b{colours[name]}"/>'
        )
        parts.append(f'<text x="{26 + 200 * number}" y="54" class="small">{escape(name)}</text>')
    y = first = 68
    for group in groups:
        of = [bar for bar in chart.bars if bar.group == group]
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + _BAR * len(of) / 2 + 4:g}" class="end">{escape(group)}</text>'
        )
        for bar in of:
            ends = sorted((x(0.0), x(bar.value)))
            parts.append(
                f'<rect x="{ends[0]}" y="{y + 1}" width="{max(0.5, ends[1] - ends[0]):.1f}" '
                f'height="{_BAR - 2}" class="b{colours[bar.name]}"/>'
            )
            end, shown = ends[1], f"{bar.value:.{chart.digits}f}"
            if bar.low is not None and bar.high is not None:
                end, middle, shown = x(bar.high), y + _BAR / 2, f"{shown} ({bar.high:.{chart.digits}f})"
                parts.append(f'<path d="M{x(bar.low)} {middle}H{end}M{end} {middle - 4}v8" class="whisker"/>')
            if chart.line is not None and end < x(chart.line) < end + 45:
                end = x(chart.line)  # no line through a label
            parts.append(f'<text x="{end + 5:.1f}" y="{y + _BAR - 3}" class="small">{shown}</text>')
            y += _BAR
        y += 10
    for value, style in ((0.0, "base"), (chart.line, "line")):
        if value is not None:
            parts.append(f'<path d="M{x(value)} {first - 4}V{y - 6}" class="{style}"/>')
    for note in notes:
        y += 14
        parts.append(f'<text x="10" y="{y}" class="small">{escape(note)}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 10}" width="{_WIDTH}" '
        'role="img">\n'
        f"<title>{escape(chart.title)}</title>"
    )
    return "\n".join([head, _STYLE, *parts, "</svg>", ""])


def notes(figures: Figures, kinds: tuple[str, ...]) -> list[str]:
    """Where the figures of a picture come from: one line per machine and day."""
    found: dict[str, list[str]] = {}
    for name, kept in figures.items():
        if name.startswith(kinds):
            found.setdefault(f"{kept['machine']}; {kept['taken']}", []).append(kept["command"].split()[0])
    return [f"{', '.join(dict.fromkeys(of))}: {where}" for where, of in found.items()]


def pictures(figures: Figures) -> dict[str, str]:
    return {name: svg(chart(figures), notes(figures, kinds)) for name, (chart, kinds) in PICTURES.items()}


# ------------------------------------------------------------------ measuring


def measured(name: str, machine: str) -> dict[str, Any]:
    command = COMMANDS[name]
    print(f"{name}: python {command}", file=sys.stderr, flush=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    ran = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, check=True
    )
    return {
        "command": command,
        "machine": machine,
        "taken": time.strftime("%Y-%m-%d"),
        "found": json.loads(ran.stdout),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "plots")
    parser.add_argument(
        "--measure", nargs="?", const="", metavar="NAME", help="figures that begin so; all if no name"
    )
    parser.add_argument("--machine", default="", help="in words; the load is added")
    given = parser.parse_args()
    figures: Figures = json.loads(FIGURES.read_text())
    if given.measure is not None:
        wanted = [name for name in COMMANDS if name.startswith(given.measure)]
        if not wanted:
            parser.error(f"no figures begin with {given.measure!r}; there are: {', '.join(COMMANDS)}")
        machine = given.machine or f"{os.cpu_count()} {platform.machine()} cores"
        for name in wanted:
            load = os.getloadavg()[0]
            figures[name] = measured(name, f"{machine}, load {load:.0f} before" if load >= 1 else machine)
            FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, text in pictures(figures).items():
        (given.folder / name).write_text(text)
        print(given.folder / name)
    page = ROOT / "docs" / "why.md"
    page.write_text(
        re.sub(rf"\| {COSTS} .*?\n\n", "\n".join(costs(figures)) + "\n\n", page.read_text(), flags=re.S)
    )
    print(page)


if __name__ == "__main__":
    main()
