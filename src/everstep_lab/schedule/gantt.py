"""A schedule as a Gantt chart.

A row is a worker, a band of rows a replica. Colour says the kind of op; re-routed work is darker, with a bold
frame, and names its home; what shows through between the boxes is idle time, which is what the planner
fights. Dead workers keep their row, crossed out: an empty row says more than a missing one. The lower bound
is a dashed line, right or left of the last op.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.diagnose.drawing import INK, DrawnBox, Line, Picture, Word
from everstep.protocol.ops import Kind, Worker
from everstep.schedule.instance import Instance
from everstep.schedule.modes import MODES
from everstep.schedule.schedule import Planned

COLOURS = {
    Kind.F: "#8ecae6",
    Kind.I: "#ffb703",
    Kind.W: "#95d5b2",
    Kind.B: "#fb8500",
    Kind.R: "#b8a9c9",
    Kind.U: "#7d6b91",
}
REROUTED = {Kind.F: "#1d6fa3", Kind.I: "#c26a00", Kind.W: "#2d7a4f", Kind.B: "#b04a00"}
NAMES = {
    Kind.F: "forward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.B: "backward",
    Kind.R: "reduce",
    Kind.U: "update",
}
PALE, IDLE, FRAME = "#6c757d", "#f1f3f5", "#11111f"
WIDTH, LEFT, TOP, ROW, GAP, FOOT = 1280.0, 74.0, 92.0, 22.0, 10.0, 46.0
MOST_ROWS = 48


def picture(instance: Instance, planned: Planned, *, title: str = "", most_rows: int = MOST_ROWS) -> Picture:
    """Lay the chart out. Beyond `most_rows` workers the broken replicas come first: they are of interest."""
    rows = _rows(instance, most_rows)
    span = max(planned.makespan, planned.lower_bound)
    scale = (WIDTH - LEFT - 24) / span if span else 1.0
    bottom = max(rows.values()) + ROW
    drawing = Picture(WIDTH, bottom + FOOT)
    for worker, y in rows.items():
        drawing.words.append(Word(LEFT - 8, y + ROW * 0.7, str(worker), 10.5, PALE, "end"))
        dead = worker in instance.dead
        drawing.boxes.append(
            DrawnBox(LEFT, y, span * scale, ROW - 2, "#fbe9e7" if dead else IDLE, "none", 0.0)
        )
        if dead:
            middle = y + ROW / 2 - 1
            drawing.lines.append(Line(LEFT + 44, middle, LEFT + span * scale, middle, "#e5989b"))
            drawing.words.append(Word(LEFT + 8, y + ROW * 0.68, "dead", 10.5, "#c1121f", bold=True))
    for timed in planned.timeline(instance.time):
        if timed.worker not in rows or timed.end <= timed.start:
            continue
        op, y = timed.op, rows[timed.worker]
        away = op.microbatch is not None and op.microbatch.home != timed.worker.replica
        width = (timed.end - timed.start) * scale
        box = DrawnBox(
            LEFT + timed.start * scale,
            y,
            width,
            ROW - 2,
            (REROUTED if away else COLOURS)[op.kind],
            FRAME if away else "#ffffff",
            1.3 if away else 0.7,
            f"{op} on {timed.worker}, {timed.start:g} to {timed.end:g}",
        )
        drawing.boxes.append(box)
        label = "" if op.microbatch is None else str(op.microbatch) if away else str(op.microbatch.number)
        if width > 6.2 * len(label) + 2:
            drawing.words.append(
                Word(
                    box.x + width / 2, y + ROW * 0.66, label, 9.5, "#ffffff" if away else INK, "middle", away
                )
            )
    _furniture(instance, planned, drawing, title, bottom, scale)
    return drawing


def _rows(instance: Instance, most_rows: int) -> dict[Worker, float]:
    rows: dict[Worker, float] = {}
    y = TOP
    broken = {w.replica for w in instance.dead}
    order = sorted(range(instance.replicas), key=lambda k: (k not in broken, k))
    shown = sorted(order[: max(1, most_rows // instance.stages)])
    for replica in shown:
        for stage in range(instance.stages):
            rows[Worker(replica, stage)] = y
            y += ROW
        y += GAP
    return rows


def _furniture(
    instance: Instance, planned: Planned, drawing: Picture, title: str, bottom: float, scale: float
) -> None:
    """Title, legend, axis, bound."""
    staggered = MODES[planned.mode].staggered
    distance = "the best possible" if planned.gap < 1e-9 else f"at most {planned.gap:.1%} above the best"
    measure = "period" if staggered else "makespan"
    heading = title or f"{planned.mode}: {measure} {planned.value:g}, {distance}"
    drawing.words.append(Word(LEFT, 30, heading, 18, INK, bold=True))
    shape = (
        f"{instance.replicas} replicas x {instance.stages} stages x "
        f"{instance.microbatches} microbatches, {len(instance.dead)} dead, {planned.rerouted} re-routed"
    )
    drawing.words.append(Word(LEFT, 50, shape, 12, PALE))
    x = LEFT
    used = {op.kind for ops in list(planned.schedule.ops.values())[:1] for op in ops}
    for kind in (k for k in Kind if k in used and (k not in (Kind.R, Kind.U) or instance.closing(0))):
        drawing.boxes.append(DrawnBox(x, 62, 14, 14, COLOURS[kind]))
        drawing.words.append(Word(x + 19, 73, NAMES[kind], 11.5))
        x += 32 + 6.6 * len(NAMES[kind])
    for name, box in (("re-routed (home.number)", DrawnBox(x, 62, 14, 14, REROUTED[Kind.F], FRAME, 1.3)),):
        drawing.boxes.append(box)
        drawing.words.append(Word(x + 19, 73, name, 11.5))
        x += 32 + 6.6 * len(name)
    drawing.boxes.append(DrawnBox(x, 62, 14, 14, IDLE, "#ced4da", 0.7))
    drawing.words.append(Word(x + 19, 73, "idle", 11.5))
    span = max(planned.makespan, planned.lower_bound)
    for tick in _ticks(span):
        at = LEFT + tick * scale
        drawing.lines.append(Line(at, bottom, at, bottom + 5, PALE))
        drawing.words.append(Word(at, bottom + 18, f"{tick:g}", 10.5, PALE, "middle"))
    if not staggered:
        at = LEFT + planned.lower_bound * scale
        drawing.lines.append(Line(at, TOP - 6, at, bottom, "#c1121f", dashed=True))
        drawing.words.append(
            Word(
                at - 4,
                bottom + 34,
                f"no schedule can end before {planned.lower_bound:g}",
                10.5,
                "#c1121f",
                "end",
            )
        )
    else:
        best = "no schedule can do better" if planned.gap < 1e-9 else f"the bound is {planned.lower_bound:g}"
        note = f"a stage starts its next step when its own update is done, every {planned.period:g}; {best}"
        drawing.words.append(Word(LEFT, bottom + 34, note, 10.5, PALE))


def _ticks(span: float) -> Iterator[float]:
    step = 10.0 ** len(str(int(span))) / 100 if span >= 1 else span / 10
    for factor in (1, 2, 5, 10, 20, 50):
        if span / (step * factor) <= 16:
            step *= factor
            break
    count = int(span / step + 1e-9)
    return (round(i * step, 9) for i in range(count + 1))
