"""What `everstep ckpt` prints: documents, tables, and a progress bar."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
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


def size_text(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
