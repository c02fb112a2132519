"""A race as SVG: for every system a strip with its useful steps per second over time, faults marked.

Colours follow the reader's light or dark setting; text is text.
"""

from __future__ import annotations

from html import escape
from typing import Any

from harness.race_score import rates

WIDTH, LEFT, RIGHT, TOP, STRIP, GAP = 760, 134, 96, 46, 44, 12
BIN_S = 2.5
MARKS = {"kill": "kill", "hang": "hang", "node": "node lost", "slow": "slow"}
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .small { font-size: 10.5px; fill: #59636e }
  .ours { fill: #1a7f37 } .theirs { fill: #8c959f } .base { stroke: #d0d7de } .fault { stroke: #cf222e }
  .name { font-weight: 600 } .mid { text-anchor: middle } .end { text-anchor: end }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 }
    .ours { fill: #3fb950 } .theirs { fill: #6e7681 } .base { stroke: #3d444d } .fault { stroke: #f85149 }
  }"""


def picture(document: dict[str, Any]) -> str:
    systems = [result for result in document["systems"].values() if "useful_at" in result]
    seconds = document["seconds"]
    scale = (WIDTH - LEFT - RIGHT) / seconds
    top_rate = max((1 / result["healthy_step_s"] for result in systems), default=1.0)
    height = TOP + len(systems) * (STRIP + GAP) + 22
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"<title>Useful steps per second of {len(systems)} systems under the same faults</title>",
        f"<style>{STYLE}\n</style>",
        f'<text x="{LEFT}" y="14" class="small">useful steps per second, two workers, the same faults; '
        f"top of a strip: {top_rate:.{int(top_rate < 3)}f} per second</text>",
    ]
    for number, result in enumerate(systems):
        parts += strip(result, TOP + number * (STRIP + GAP), scale, seconds, top_rate)
    faults = systems[0]["faults"] if systems else []
    for fault in faults:
        x = LEFT + fault["planned_s"] * scale
        parts.append(f'<text x="{x:.1f}" y="{TOP - 12}" class="small mid">{MARKS[fault["kind"]]}</text>')
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 24}" class="fault" '
            'stroke-width="1" stroke-dasharray="2 3"/>'
        )
    for mark in range(0, int(seconds) + 1, 50 if seconds < 400 else 100):
        x = LEFT + mark * scale
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" class="small mid">{mark} s</text>')
    return "\n".join([*parts, "</svg>", ""])


def strip(result: dict[str, Any], top: float, scale: float, seconds: float, top_rate: float) -> list[str]:
    base = top + STRIP
    path = [f"M{LEFT} {base:.0f}"]
    for number, rate in enumerate(rates(result["useful_at"], seconds, BIN_S)):
        begin, end = LEFT + number * BIN_S * scale, LEFT + (number + 1) * BIN_S * scale
        y = base - STRIP * min(1.0, rate / top_rate)
        path.append(f"L{begin:.1f} {y:.1f}L{end:.1f} {y:.1f}")
    right = LEFT + seconds * scale
    path.append(f"L{right:.1f} {base:.0f}Z")
    kind = "ours" if result["name"] == "Everstep" else "theirs"
    redone = result["redone_steps"]
    return [
        f'<text x="{LEFT - 8}" y="{top + 20}" class="name end">{escape(result["name"])}</text>',
        f'<text x="{LEFT - 8}" y="{top + 35}" class="small end">{escape(result["version"])}</text>',
        f'<path d="{"".join(path)}" class="{kind}"/>',
        f'<line x1="{LEFT}" x2="{right:.1f}" y1="{base}" y2="{base}" class="base"/>',
        f'<text x="{right + 8:.1f}" y="{top + 20}" class="name">{result["useful_steps"]} steps</text>',
        f'<text x="{right + 8:.1f}" y="{top + 35}" class="small">{redone} redone</text>',
    ]
