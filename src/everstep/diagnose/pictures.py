"""Four pictures of a diagnosis; each is there when there is something to draw.

    waiting    who waits for whom, from the suspects outward
    timeline   what each rank was in, around the fault; what never ended is red
    delays     the delay matrix: row sends, column receives
    pace       own work of each rank in each step, against the middle of its role

Boxes, lines and words are those of the schedule's chart, so SVG and PNG are written by the same code and
cannot differ.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from everstep.diagnose.case import Case
from everstep.diagnose.comm_record import COMPUTE, RECV, SEND, UNKNOWN
from everstep.diagnose.drawing import DrawnBox, Line, Picture, Word, png, svg
from everstep.diagnose.finding import Finding
from everstep.diagnose.verdict import Analysis

__all__ = ["all_of", "png", "svg"]
_RED, _INK, _PALE, _GREY = "#c1121f", "#22223b", "#6c757d", "#f1f3f5"
_LEAST_STEPS = 5  # for a picture of them
_MOST = 48  # ranks in one picture; suspects are never left out
_LEFT, _TOP, _ROW = 84.0, 64.0, 18.0
_COLOURS = {SEND: "#8ecae6", RECV: "#ffb703", COMPUTE: "#95d5b2"}


def all_of(analysis: Analysis) -> dict[str, Picture]:
    pictures = {}
    hung = next((finding for finding in analysis.diagnosis.incidents if finding.waits), None)
    if hung is not None:
        pictures["waiting"] = _waiting(hung)
    if analysis.case is not None and (analysis.case.log.enqueued_ns != UNKNOWN).any():
        pictures["timeline"] = _timeline(analysis.case, analysis)
    if analysis.delays is not None and len(analysis.delays.ranks) > 1:
        pictures["delays"] = _delays(analysis)
    if any(len(role.steps) >= _LEAST_STEPS for role in analysis.roles):
        pictures["pace"] = _pace(analysis)
    return pictures


def _suspects(analysis: Analysis) -> list[int]:
    found = []
    for finding in analysis.diagnosis.incidents:
        for suspect in finding.suspects:
            found += [suspect.rank] + ([suspect.peer] if suspect.peer is not None else [])
    return list(dict.fromkeys(found))


def _chosen(ranks: list[int], first: list[int]) -> list[int]:
    some = [r for r in first if r in ranks] + [r for r in ranks if r not in first]
    return sorted(some[:_MOST])


# ------------------------------------------------------------------ waiting


def _waiting(finding: Finding) -> Picture:
    """Columns by distance: the suspects, who waits for them, who waits for those."""
    suspects = [suspect.rank for suspect in finding.suspects]
    waiters: dict[int, set[int]] = defaultdict(set)
    for waiter, target, _ in finding.waits:
        waiters[target].add(waiter)
    column = dict.fromkeys(suspects, 0)
    layer = list(suspects)
    while layer:
        layer = [w for target in layer for w in sorted(waiters[target]) if column.setdefault(w, -1) == -1]
        depth = max(column.values()) + 1
        column |= dict.fromkeys(layer, depth)
    places: dict[int, tuple[float, float]] = {}
    height: dict[int, int] = defaultdict(int)
    for rank, at in sorted(column.items(), key=lambda item: (item[1], item[0])):
        if height[at] < _MOST:
            places[rank] = 40 + at * 240.0, _TOP + height[at] * 30.0
            height[at] += 1
    drawing = Picture(
        320 + 240.0 * max(column.values(), default=0), _TOP + 30.0 * max(height.values(), default=1) + 24
    )
    drawing.words.append(Word(24, 30, f"{finding.syndrome}: who waits for whom", 15, _INK, bold=True))
    said: set[tuple[int, int]] = set()
    for waiter, target, _ in finding.waits:
        if waiter in places and target in places and (waiter, target) not in said:
            said.add((waiter, target))
            (x1, y1), (x2, y2) = places[waiter], places[target]
            drawing.lines.append(Line(x1, y1 + 11, x2 + 110, y2 + 11, "#adb5bd"))
    at_what = {waiter: what for waiter, _, what in finding.waits}
    for rank, (x, y) in places.items():
        guilty = rank in suspects
        fill = "#fbe9e7" if guilty else _GREY
        drawing.boxes.append(
            DrawnBox(x, y, 110, 22, fill, _RED if guilty else "#adb5bd", 1.2, at_what.get(rank, ""))
        )
        drawing.words.append(
            Word(x + 55, y + 15, f"rank {rank}", 11, _RED if guilty else _INK, "middle", guilty)
        )
    return drawing


# ------------------------------------------------------------------ timeline


def _timeline(case: Case, analysis: Analysis) -> Picture:
    log, width = case.log, 1180.0
    ranks = _chosen(list(case.ranks), _suspects(analysis))
    known = log.enqueued_ns != UNKNOWN
    pending = known & (log.done == 0)
    last = int(max(log.enqueued_ns.max(), log.ended_ns.max()))
    middle = int(log.enqueued_ns[pending].min()) if pending.any() else last
    step_ns = int(1e9 * max((role.step_s for role in analysis.roles), default=0.5))
    begin, end = middle - 3 * step_ns, max(last, middle + step_ns)
    scale = (width - _LEFT - 20) / max(end - begin, 1)
    drawing = Picture(width, _TOP + _ROW * len(ranks) + 40)
    drawing.words.append(Word(24, 30, "what each rank was in; red never ended", 15, _INK, bold=True))
    guilty = set(_suspects(analysis))
    for at, rank in enumerate(ranks):
        y = _TOP + at * _ROW
        ink = _RED if rank in guilty else _PALE
        drawing.words.append(Word(_LEFT - 8, y + 12, f"rank {rank}", 10.5, ink, "end", rank in guilty))
        drawing.boxes.append(DrawnBox(_LEFT, y, width - _LEFT - 20, _ROW - 3, _GREY, "none", 0.0))
        rows = np.flatnonzero(
            (log.rank == rank) & known & (np.maximum(log.ended_ns, log.enqueued_ns) >= begin)
        )
        for row in rows[-400:].tolist():
            record = log.row(row)
            open_ = record.done is False
            stop = end if open_ else max(record.ended_ns, record.enqueued_ns + step_ns // 200)
            x = _LEFT + max(record.enqueued_ns - begin, 0) * scale
            colour = _RED if open_ else _COLOURS.get(record.kind, "#b8a9c9")
            tip = f"{record.kind} {record.seq} of {case.name(record.group)}"
            box = DrawnBox(
                x, y, max(_LEFT + (stop - begin) * scale - x, 1.0), _ROW - 3, colour, "#ffffff", 0.4, tip
            )
            drawing.boxes.append(box)
    foot = _TOP + _ROW * len(ranks) + 20
    drawing.words.append(Word(_LEFT, foot, f"{(begin - middle) / 1e6:.0f} ms", 10, _PALE))
    drawing.words.append(Word(width - 20, foot, f"+{(end - middle) / 1e6:.0f} ms", 10, _PALE, "end"))
    return drawing


# ------------------------------------------------------------------ heat maps


def _delays(analysis: Analysis) -> Picture:
    matrix = analysis.delays
    assert matrix is not None
    ranks = _chosen(list(matrix.ranks), _suspects(analysis))
    values = np.array([[matrix.cell(a, b) * 1e3 for b in ranks] for a in ranks])
    return _heat(
        "delay of a message, ms; row sends, column receives",
        values,
        [f"rank {rank}" for rank in ranks],
        [str(rank) for rank in ranks],
        reference=float(np.nanmedian(values)),
    )


def _pace(analysis: Analysis) -> Picture:
    rows, names = [], []
    steps = min(60, min(len(role.steps) for role in analysis.roles if len(role.steps) >= _LEAST_STEPS))
    chosen = _chosen([rank for role in analysis.roles for rank in role.ranks], _suspects(analysis))
    for role in analysis.roles:
        if len(role.steps) < _LEAST_STEPS:
            continue
        recent = role.own_s[-steps:]
        middle = np.maximum(np.median(recent), 1e-9)
        for at, rank in enumerate(role.ranks):
            if rank in chosen:
                rows.append(recent[:, at] / middle)
                names.append(f"rank {rank}")
    values = np.array(rows)
    numbers = next(role.steps[-steps:] for role in analysis.roles if len(role.steps) >= _LEAST_STEPS)
    columns = [str(step) if at % 10 == 0 else "" for at, step in enumerate(numbers)]
    return _heat("own work of a step, against the middle of its role", values, names, columns, reference=1.0)


def _heat(
    title: str, values: np.ndarray, rows: list[str], columns: list[str], *, reference: float
) -> Picture:
    """White where a value is the reference or less, dark red at five times as much."""
    size = 34.0 if len(columns) <= 24 else 16.0
    drawing = Picture(max(_LEFT + size * len(columns) + 40, 560), _TOP + size * len(rows) + 36)
    drawing.words.append(Word(24, 28, title, 14, _INK, bold=True))
    for j, name in enumerate(columns):
        drawing.words.append(Word(_LEFT + size * (j + 0.5), _TOP - 6, name, 9.5, _PALE, "middle"))
    for i, name in enumerate(rows):
        drawing.words.append(Word(_LEFT - 8, _TOP + size * (i + 0.62), name, 10, _PALE, "end"))
        for j in range(len(columns)):
            value = float(values[i, j])
            empty = bool(np.isnan(value))
            heat = (
                0.0
                if empty
                else float(np.clip(np.log(max(value / max(reference, 1e-12), 1)) / np.log(5), 0, 1))
            )
            tip = "" if empty else f"{name}, {columns[j]}: {value:.3g}"
            colour = _GREY if empty else _shade(heat)
            drawing.boxes.append(
                DrawnBox(_LEFT + size * j, _TOP + size * i, size - 1, size - 1, colour, "none", 0.0, tip)
            )
            if size > 20 and not empty:
                ink = "#ffffff" if heat > 0.6 else _INK
                x, y = _LEFT + size * (j + 0.5), _TOP + size * (i + 0.6)
                drawing.words.append(Word(x, y, f"{value:.2g}", 9, ink, "middle"))
    return drawing


def _shade(heat: float) -> str:
    low, high = (255, 247, 236), (153, 0, 0)
    return "#" + "".join(f"{round(a + (b - a) * heat):02x}" for a, b in zip(low, high, strict=True))
