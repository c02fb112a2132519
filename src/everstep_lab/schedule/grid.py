"""A schedule as a worker x time grid of characters, for a terminal.

    0:0 |F0 F1 F2 F3 .  .  I0 W0 I1 ...
    0:1 |.  F0 F1 f2 ...

A column is one tick. With unit times a tick is one op; else the tick is chosen so that the grid fits the
width, and an op covers as many columns as its time. Re-routed work is in small letters, idle time is a dot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from everstep.protocol.ops import Kind, Worker
from everstep.schedule.instance import Instance
from everstep.schedule.schedule import Planned, Timed


class GridCell(NamedTuple):
    text: str
    kind: Kind | None  # None: idle
    rerouted: bool


class Grid(NamedTuple):
    tick: float
    rows: list[tuple[Worker, list[GridCell]]]

    def text(self) -> str:
        label = max((len(str(worker)) for worker, _ in self.rows), default=0)
        return "\n".join(
            f"{worker!s:>{label}} |{''.join(cell.text for cell in cells)}".rstrip()
            for worker, cells in self.rows
        )


def draw(instance: Instance, planned: Planned, *, columns: int = 160, most_rows: int = 64) -> Grid:
    """The grid of the first `most_rows` workers, in at most `columns` characters if a tick allows it."""
    workers = sorted(planned.schedule.ops)[:most_rows]
    shown = set(workers)
    width = len(str(instance.microbatches - 1)) + 2
    shortest = min(
        (t for w in workers for k in (Kind.F, Kind.I, Kind.W) if (t := instance.time(k, w)) > 0), default=1.0
    )
    span = max(planned.makespan, shortest)
    if span / shortest * width > columns:
        width = 1
        shortest = max(shortest, span / columns)
    num_ticks = int(span / shortest - 1e-9) + 1
    rows: dict[Worker, list[GridCell]] = {
        w: [GridCell(".".ljust(width), None, False)] * num_ticks for w in workers
    }
    for timed in planned.timeline(instance.time):
        if timed.worker in shown and timed.end > timed.start:
            for tick, cell in _cells(timed, shortest, width):
                if tick < num_ticks:
                    rows[timed.worker][tick] = cell
    return Grid(shortest, list(rows.items()))


def _cells(timed: Timed, tick: float, width: int) -> Iterator[tuple[int, GridCell]]:
    op = timed.op
    rerouted = op.microbatch is not None and op.microbatch.home != timed.worker.replica
    letter = op.kind.lower() if rerouted else str(op.kind)
    first, last = round(timed.start / tick), max(round(timed.end / tick), round(timed.start / tick) + 1)
    for position in range(first, last):
        number = "" if op.microbatch is None or width == 1 else str(op.microbatch.number)
        text = (letter + number if position == first else letter).ljust(width)[:width]
        yield position, GridCell(text, op.kind, rerouted)
