"""What `everstep ckpt` prints: documents, tables, pictures, and a progress bar."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from everstep.cli import render
from everstep.cli.render import Console, note
from everstep.errors import UserError
from everstep.layout.box import Box

if TYPE_CHECKING:
    from everstep_convert.state import TrainingState


@contextlib.contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """On stderr, and only on a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def document(path: str, kind: str, state: TrainingState, match: str) -> dict[str, Any]:
    from everstep.store.stored import num_bytes

    try:
        wanted = re.compile(match)
    except re.error as error:
        raise UserError(f"--match {match!r} is not a regular expression: {error}.") from None
    tensors = [
        {"name": name, "dtype": stored.dtype, "shape": list(stored.shape), "bytes": num_bytes(stored)}
        for name, stored in state.tensors.items()
        if not match or wanted.search(name)
    ]
    return {
        "path": path,
        "format": kind,
        "step": state.step,
        "bytes": state.num_bytes(),
        "parameters": sum(num_bytes(s) // _item(s) for s in state.parameters().values()),
        "groups": state.groups,
        "tied": state.tied,
        "frozen": state.frozen,
        "meta": state.meta,
        "notes": state.notes,
        "cannot_be_read": state.lost,
        "tensors": tensors,
        "parts": _parts(path, kind),
    }


def _item(stored: Any) -> int:
    from everstep.layout.tensor import ITEM_BYTES

    return ITEM_BYTES[stored.dtype]


def _parts(path: str, kind: str) -> list[dict[str, Any]]:
    """The files of a universal checkpoint and the slices in each."""
    if kind != "universal":
        return []
    from everstep.store.folder import find

    found = find(path)
    rows: dict[str, dict[str, Any]] = {
        file: {"file": file, "bytes": size, "slices": []} for file, size in found.index.files.items()
    }
    for name, entry in found.tensors.items():
        for one in entry.slices:
            rows[one.file]["slices"].append(
                {"tensor": name, "start": list(one.box.start), "size": list(one.box.size)}
            )
    return list(rows.values())


def picture(path: str, kind: str) -> list[str]:
    if kind != "universal":
        return []
    from everstep.store.folder import find

    held: dict[str, dict[str, list[Box]]] = {}
    tensors = find(path).tensors
    for name, entry in tensors.items():
        for one in entry.slices:
            held.setdefault(one.file, {}).setdefault(name, []).append(one.box)
    return [
        "",
        "which file contains what (a column is one or more tensors; a full block is a whole tensor):",
        *grid(held, {name: prod(entry.shape) for name, entry in tensors.items()}),
    ]


def show(doc: dict[str, Any], limit: int) -> None:
    console = Console(highlight=False, markup=False)
    console.print(
        f"{doc['path']}: {doc['format']}, step {doc['step']}, {doc['parameters']:,} parameters, "
        f"{size_text(doc['bytes'])} in {len(doc['tensors'])} tensors",
        soft_wrap=True,
    )
    for i, group in enumerate(doc["groups"]):
        numbers = ", ".join(f"{k}={v}" for k, v in group.items() if k != "params" and v is not None)
        console.print(f"group {i}: {len(group['params'])} parameters, {numbers}", soft_wrap=True)
    for name, other in doc["tied"].items():
        console.print(f"tied: {name} is {other}")
    if doc["frozen"]:
        console.print(f"frozen: {', '.join(doc['frozen'])}", soft_wrap=True)
    table = Table("tensor", "dtype", "shape", "size")
    rows = doc["tensors"]
    for row in rows[: limit or None]:
        shape = " x ".join(map(str, row["shape"]))
        table.add_row(escape(row["name"]), row["dtype"], shape, size_text(row["bytes"]))
    render.show(table)
    if limit and len(rows) > limit:
        console.print(f"… and {len(rows) - limit} more; --limit 0 lists all.")
    if doc["cannot_be_read"]:
        console.print(f"cannot be read: {', '.join(doc['cannot_be_read'])}", soft_wrap=True)
    for sentence in doc["notes"]:
        note(f"note: {sentence}")


def show_difference(doc: dict[str, Any]) -> None:
    for side in ("only_in_a", "only_in_b"):
        for name in doc[side]:
            render.echo(f"{side.replace('_', ' ')}: {name}")
    for row in doc["different"]:
        render.echo(f"{row['tensor']}: {row['because']}")
    for sentence in doc["elsewhere"]:
        render.echo(sentence)
    if doc["same"]:
        render.echo(f"identical: {doc['equal']} tensors, {size_text(doc['bytes'])}")


def size_text(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


# Who holds what, drawn as text: a row a holder, a column a tensor, a block for what is there.

_BLOCKS = " ▁▂▃▄▅▆▇█"


def share(boxes: Sequence[Box], volume: int) -> str:
    """A block as high as the part of a tensor that is held."""
    held = min(volume, sum(box.volume for box in boxes))
    if not held or not volume:
        return "·"
    return _BLOCKS[max(1, round(8 * held / volume))]


def grid(
    held: Mapping[str, Mapping[str, Sequence[Box]]], volumes: Mapping[str, int], columns: int = 64
) -> list[str]:
    """One line a holder. More tensors than columns: neighbours share a column."""
    names = list(volumes)
    step = -(-len(names) // columns) if names else 1
    wide = max((len(holder) for holder in held), default=0)
    lines = []
    for holder, mine in held.items():
        row = ""
        for at in range(0, len(names), step):
            group = names[at : at + step]
            boxes = [box for name in group for box in mine.get(name, ())]
            row += share(boxes, sum(volumes[name] for name in group))
        lines.append(f"{holder:>{wide}} {row}")
    return lines
