"""Which link is slow: hot cells of the delay matrix, or a link that was faster before.

    one cell, or a cell and its mirror     that link
    the whole row of a rank                its sending side
    the whole column                       its receiving side

A cell is hot when messages of the same size take several times longer there than in the middle cell, or than
they took there before, and the difference costs a tenth of a step. A row or a column needs two cells: one
alone cannot tell a link from a side of a rank, and is called a link.
"""

from __future__ import annotations

import numpy as np

from everstep_diagnose.change import change_point
from everstep_diagnose.comm_record import UNKNOWN
from everstep_diagnose.finding import Finding, RuledOut, Suspect, Syndrome, Where, ranks_text
from everstep_diagnose.message_delays import DelayMatrix, Pairs, delay_matrix

_HOT = 3.0
_WORTH = 0.10
_LEAST = 5  # messages in a cell
Cell = tuple[int, int]


def find_slow_links(
    pairs: Pairs, offsets: dict[int, int], *, step_s: float, hosts: dict[int, str] | None = None
) -> list[Finding]:
    """By the messages of the size that most bytes travel in."""
    delay = pairs.delays_ns(offsets)
    rows = (delay != UNKNOWN) & (pairs.bytes == _main_size(pairs))
    matrix = delay_matrix(pairs, offsets, rows)
    hot = _hot_cells(pairs, delay, rows, matrix, step_s)
    return [_finding(matrix, where, cells, hot, hosts or {}) for where, cells in _places(matrix, hot)]


def _main_size(pairs: Pairs) -> int:
    sizes, counts = np.unique(pairs.bytes, return_counts=True)
    return int(sizes[np.argmax(sizes * counts)]) if len(sizes) else UNKNOWN


def _hot_cells(
    pairs: Pairs, delay: np.ndarray, rows: np.ndarray, matrix: DelayMatrix, step_s: float
) -> dict[Cell, tuple[float, str]]:
    """Hot cells with how many times too slow, and compared with what."""
    hot: dict[Cell, tuple[float, str]] = {}
    cells = [
        (a, b)
        for i, a in enumerate(matrix.ranks)
        for j, b in enumerate(matrix.ranks)
        if matrix.counts[i, j] >= _LEAST
    ]
    if len(cells) < 2:
        return {}
    middle = float(np.median([matrix.cell(*cell) for cell in cells]))
    begin, end = float(pairs.sent_ns[rows].min()), float(pairs.sent_ns[rows].max())
    steps = max((end - begin) / 1e9 / step_s, 1.0) if step_s > 0 else 1.0
    for a, b in cells:
        mine = rows & (pairs.sender == a) & (pairs.receiver == b)
        order = np.argsort(pairs.sent_ns[mine])
        series = delay[mine][order] / 1e9
        since = change_point(series)
        now = float(np.median(series[since:]))
        before = float(np.median(series[:since])) if since else middle
        a_step = len(series) / steps
        for reference, words in ((middle, "the middle link"), (before, "itself before")):
            if now > _HOT * max(reference, 1e-6) and (now - reference) * a_step > _WORTH * step_s:
                hot[a, b] = now / max(reference, 1e-6), words
                break
    return hot if len(hot) * 2 <= len(cells) else {}


def _places(matrix: DelayMatrix, hot: dict[Cell, tuple[float, str]]) -> list[tuple[Where, list[Cell]]]:
    """Whole rows and columns first, strongest first; what is left are links."""
    left = set(hot)
    sides: list[tuple[int, Where, list[Cell]]] = []
    for i, rank in enumerate(matrix.ranks):
        row = [(rank, b) for j, b in enumerate(matrix.ranks) if matrix.counts[i, j] >= _LEAST]
        column = [(a, rank) for j, a in enumerate(matrix.ranks) if matrix.counts[j, i] >= _LEAST]
        for where, cells in ((Where.SENDER, row), (Where.RECEIVER, column)):
            if len(cells) >= 2 and all(cell in hot for cell in cells):
                sides.append((len(cells), where, cells))
    places = []
    for _, where, cells in sorted(sides, key=lambda side: -side[0]):
        if all(cell in left for cell in cells):
            places.append((where, cells))
            left -= set(cells)
    while left:
        cell = min(left)
        both = [c for c in (cell, cell[::-1]) if c in left]
        places.append((Where.LINK, both))
        left -= set(both)
    return places


def _finding(
    matrix: DelayMatrix,
    where: Where,
    cells: list[Cell],
    hot: dict[Cell, tuple[float, str]],
    hosts: dict[int, str],
) -> Finding:
    said = "; ".join(
        f"messages from rank {a} to rank {b} take {matrix.cell(a, b) * 1e3:.1f} ms, "
        f"{hot[a, b][0]:.1f} times {hot[a, b][1]}"
        for a, b in cells
    )
    confidence = float(min(0.95, 0.6 + 0.05 * min(hot[cell][0] for cell in cells)))
    if where is Where.LINK:
        a, b = cells[0]
        suspects = [Suspect(rank=a, peer=b, confidence=confidence, evidence=said, node=hosts.get(a, ""))]
        what = (
            f"the link between rank {a} and rank {b}"
            if len(cells) == 2
            else f"the link from rank {a} to rank {b}"
        )
    else:
        rank = cells[0][0] if where is Where.SENDER else cells[0][1]
        suspects = [Suspect(rank=rank, confidence=confidence, evidence=said, node=hosts.get(rank, ""))]
        what = f"the {where} of rank {rank}"
    involved = {rank for cell in cells for rank in cell}
    calm = sorted(set(matrix.ranks) - involved)
    ruled_out = [RuledOut(what="late ranks", because="delays are counted from when both sides were ready")]
    if calm:
        ruled_out.append(
            RuledOut(what=f"rank {ranks_text(calm)}", because="its messages take the usual time")
        )
    return Finding(
        syndrome=Syndrome.COMMUNICATION_SLOW,
        where=where,
        suspects=tuple(suspects),
        victims=tuple(calm),
        ruled_out=tuple(ruled_out),
        because=f"{what} is slow: {said}.",
    )
