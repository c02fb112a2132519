"""`everstep report`: goodput, and where the rest of the time went."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table
from rich.text import Text

from everstep.cli import render
from everstep.cli.client import DEFAULT_ADDRESS, Address, Ca, Client, Token
from everstep.cli.render import AsJson
from everstep.drive.goodput import HOUR_S, PRODUCTIVE, STEPS, Cause
from everstep.errors import UserError
from everstep.protocol.durations import duration

BAR = 40
COLOURS = {  # name in a terminal, in a picture
    PRODUCTIVE: ("green", "#009e73"),
    Cause.WAIT: ("bright_black", "#999999"),
    Cause.PAUSED: ("bright_black", "#bbbbbb"),
    Cause.START: ("cyan", "#56b4e9"),
    Cause.FAULT: ("red", "#d55e00"),
    Cause.REDUCED: ("yellow", "#0072b2"),
    Cause.SAVE: ("bright_blue", "#882255"),
    Cause.SLOW: ("yellow", "#6f4e37"),
}


def report_command(
    task: Annotated[str, typer.Argument(help="Only this task.", show_default="all")] = "",
    since: Annotated[str, typer.Option(help="How far back: 90min, 12h, 7d.")] = "7d",
    picture: Annotated[
        Path | None, typer.Option("--picture", "-o", help="Write an SVG: time by cause, hour by hour.")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Report goodput: productive time, and lost time by cause, per task; incidents; nodes that are kept out.

    All time from submission to end is in it, so the parts add up. docs/goodput.md says what each cause means.

    [bold]Examples[/bold]

      everstep report --since 7d

      everstep report llama-8b --since 12h --json

      everstep report --since 7d --picture week.svg
    """
    seconds, client = int(duration(since, "--since")), Client(address=address, token=token, ca=ca)
    document: dict[str, Any] = client.get(f"/v1/report?since_s={seconds}")
    if task:
        document["tasks"] = [row for row in document["tasks"] if row["task"] == task]
        if not document["tasks"]:
            raise UserError(f"task {task!r} had no time in the last {since}; leave the name out to see all.")
    if picture is not None:
        try:
            picture.write_text(svg(document["hours"]))
        except OSError as error:
            raise UserError(f"--picture {picture} cannot be written: {error.strerror}.") from None
        render.note(f"the picture is in {picture}")
    if as_json:
        render.emit(document)
        return 0
    render.show(_tasks(document["tasks"], document["total"] if not task else None))
    if document["incidents"]:
        render.show(_incidents(document["incidents"]))
    for node in document["nodes"]:
        times = f"isolated {render.count(node['isolations'], 'time')}"
        render.show(Text(f"node {node['node']} is {node['state']}, {times}: {node['because']}"))
    return 0


def history_command(
    text: Annotated[str, typer.Argument(help="Words to look for: a task, a node, an owner, an error.")] = "",
    since: Annotated[str, typer.Option(help="How far back: 12h, 7d.")] = "30d",
    last: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many of the newest.")] = 50,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """List tasks that have ended and incidents that are closed, also long ago.

    everstep explain NUMBER shows one of the incidents in full.

    [bold]Examples[/bold]

      everstep history

      everstep history node-7 --since 90d

      everstep history "ECC error" --json
    """
    query = f"text={quote(text)}&since_s={int(duration(since, '--since'))}&last={last}"
    rows: list[dict[str, Any]] = Client(address=address, token=token, ca=ca).get(f"/v1/history?{query}")
    if as_json:
        render.emit({"history": rows})
        return 0
    table = Table("time", "what", "about", "took", "result", box=None, pad_edge=False)
    for row in rows:
        when = f"{datetime.fromtimestamp(row['at']):%Y-%m-%d %H:%M}"
        if row["kind"] == "task":
            good = "" if row["goodput"] is None else f", goodput {row['goodput']:.1%}"
            took = _time(row["at"] - row["submitted_at"])
            done = f"{row['state']} at step {row['step']}{good}: {row['because']}"
            table.add_row(when, "task", f"{row['task']} ({row['owner']})", took, done)
        else:
            about = " ".join(filter(None, (row["task"], *row["workers"][:2], row["node"])))
            took = _time(row["closed_at"] - row["opened_at"])
            table.add_row(when, f"incident {row['number']}", about, took, row["what"])
    render.show(table)
    return 0


def _tasks(rows: list[dict[str, Any]], total: dict[str, Any] | None) -> Table:
    table = Table("task", "owner", "state", "time", "goodput", "", "lost to", box=None, pad_edge=False)
    every = list(rows)
    if total is not None and len(rows) != 1:
        every.append({"task": "all", "owner": "", "state": "", **total})
    for row in every:
        ratio = "-" if row["goodput"] is None else f"{row['goodput']:.1%}"
        lost = sorted(row["lost_s"].items(), key=lambda pair: -pair[1])
        words = ", ".join(f"{cause} {_time(amount)}" for cause, amount in lost[:4] if amount >= 0.05)
        table.add_row(
            row["task"], row["owner"], row["state"], _time(row["wall_s"]), ratio, _bar(row), words or "-"
        )
    return table


def _bar(row: dict[str, Any]) -> Text:
    parts = {PRODUCTIVE: row["productive_s"], **row["lost_s"]}
    text, done, filled = Text(), 0.0, 0
    for what in COLOURS:
        done += parts.get(what, 0.0)
        until = round(BAR * done / row["wall_s"]) if row["wall_s"] > 0 else 0
        text.append("█" * (until - filled), style=COLOURS[what][0])
        filled = max(filled, until)
    return text


def _incidents(rows: list[dict[str, Any]]) -> Table:
    table = Table("incidents", "severity", "kind", "recovered in", "longest", box=None, pad_edge=False)
    for row in rows:
        closed = row["count"] - row["open"]
        mean = _time(row["recovery_s"] / closed) if closed else "-"
        table.add_row(str(row["count"]), row["severity"], row["kind"], mean, _time(row["longest_s"]))
    return table


def _time(seconds: float) -> str:
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def svg(hours: list[dict[str, Any]]) -> str:
    """One column per hour, productive time at the bottom, causes above; its legend on the right."""
    width, height, left = 800, 240, 40
    first = hours[0]["at"] if hours else 0.0
    count = int((hours[-1]["at"] - first) / HOUR_S) + 1 if hours else 1
    most = max((sum(v for k, v in hour.items() if k not in ("at", STEPS)) for hour in hours), default=1.0)
    step = width / count
    parts = []
    for hour in hours:
        x, y = left + step * (hour["at"] - first) / HOUR_S, float(height)
        for what, (_, colour) in COLOURS.items():
            tall = height * max(0.0, hour.get(what, 0.0)) / (most or 1.0)
            y -= tall
            if tall > 0.05:
                box = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.5, step - 0.5):.1f}" height="{tall:.1f}"'
                parts.append(f'<rect {box} fill="{colour}"><title>{what}</title></rect>')
    for number, (what, (_, colour)) in enumerate(COLOURS.items()):
        y = 14 * number + 4
        parts.append(f'<rect x="{left + width + 10}" y="{y}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + width + 26}" y="{y + 9}">{what}</text>')
    words = f"{count} hours; a full column: {_time(most)} of all tasks"
    parts.append(f'<text x="{left}" y="{height + 16}">{words}</text>')
    size = f'width="{left + width + 110}" height="{height + 24}"'
    style = 'font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"
