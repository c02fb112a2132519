"""From any format to any other: find out what a folder is, read it lazily, rename if asked, write it.

Nothing is loaded as a whole: the readers give tensors that are places in files, the writers fetch them block
by block. What is written appears at once, by a rename, or not at all. Universal checkpoints are flushed to
disk before that, as always; other formats are left to the system, as `cp` leaves them: a conversion can be
repeated.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from everstep.checkpoint.formats import (
    dcp,
    deepspeed,
    deepspeed_universal,
    deepspeed_write,
    dialects,
    hf,
    megatron,
    universal,
)
from everstep.checkpoint.formats.dialects import Dialect, Heads
from everstep.checkpoint.parts import Progress
from everstep.checkpoint.state import State
from everstep.errors import UserError
from everstep.layout.layout import ITEM_BYTES
from everstep.layout.patterns import Patterns

Format = Literal["universal", "hf", "dcp", "deepspeed", "deepspeed-universal", "megatron", "megatron-legacy"]
FORMATS: tuple[Format, ...] = (
    "universal",
    "hf",
    "dcp",
    "deepspeed",
    "deepspeed-universal",
    "megatron",
    "megatron-legacy",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to write. `stage`, `world`: ZeRO's; `tp`, `pp`: legacy Megatron's."""

    format: Format
    names: Dialect | None = None
    heads: Heads | None = None
    stage: int = 1
    world: int = 1
    tp: int = 1
    pp: int = 1
    precision: str | None = None  # of DeepSpeed's working weights
    dtype: str | None = None  # of Hugging Face's weights
    with_optimizer: bool = True
    threads: int = 2

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"format {self.format!r} is not one of {', '.join(FORMATS)}.")
        if self.dtype is not None and self.dtype not in ITEM_BYTES:
            raise UserError(f"dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}.")


def detect(path: str | Path) -> Format:
    """What kind of checkpoint a folder is."""
    if "://" in str(path):
        return "universal"
    where = Path(path)
    if not where.is_dir():
        raise UserError(f"{path} is no folder; give the folder of a checkpoint.")
    checks: list[tuple[Format, Callable[[], bool]]] = [
        ("universal", lambda: universal.is_one(where)),
        ("deepspeed", lambda: deepspeed.folder_of(where) is not None),
        ("deepspeed-universal", lambda: deepspeed_universal.is_one(where)),
        ("megatron", lambda: megatron.folder_of(where) is not None),
        ("dcp", lambda: dcp.is_one(where)),
        ("hf", lambda: hf.is_one(where)),
    ]
    found = next((name for name, is_one in checks if is_one()), None)
    if found is None:
        raise UserError(f"{path} is no checkpoint of a kind we know ({', '.join(FORMATS)}).")
    return found


def read_state(
    path: str | Path,
    format: Format | None = None,
    *,
    patterns: Patterns | None = None,
    vocab: int | None = None,
) -> State:
    """All of a checkpoint of any kind we know, read as it is asked for; `detect` finds out which kind."""
    kind, where = format or detect(path), Path(path)
    match kind:
        case "universal":
            return universal.read(path)
        case "hf":
            return hf.read(where)
        case "dcp":
            return dcp.read(where)
        case "deepspeed":
            return deepspeed.read(where, patterns, vocab)
        case "deepspeed-universal":
            return deepspeed_universal.read(where)
        case "megatron" | "megatron-legacy":
            return megatron.read(where, patterns, vocab)


def write_state(
    path: str | Path, state: State, target: Target, progress: Progress = lambda count: None
) -> None:
    """Write all of it, or nothing under this name."""
    if target.names is not None:
        state = dialects.translated(state, target.names, target.heads)
    if not target.with_optimizer:
        state.tensors = {k: v for k, v in state.tensors.items() if not k.startswith("optimizer/")}
    if target.format == "universal":
        universal.write(path, state, threads=target.threads, progress=progress)
        return
    final = Path(path)
    if final.exists() and any(final.iterdir()):
        raise UserError(f"{path} is not empty; give a new folder, or remove it.")
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write(partial, state, target, progress)
        if final.exists():
            final.rmdir()
        os.rename(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(path: Path, state: State, target: Target, progress: Progress) -> None:
    match target.format:
        case "hf":
            hf.write(
                path,
                state,
                dtype=target.dtype,
                with_optimizer=target.with_optimizer,
                threads=target.threads,
                progress=progress,
            )
        case "dcp":
            dcp.write(path, state, progress)
        case "deepspeed":
            deepspeed_write.write(
                path,
                state,
                stage=target.stage,
                world=target.world,
                precision=target.precision,
                progress=progress,
            )
        case "deepspeed-universal":
            deepspeed_universal.write(path, state, precision=target.precision, progress=progress)
        case "megatron":
            megatron.write_dist(path, state, progress)
        case "megatron-legacy":
            megatron.write_legacy(path, state, tp=target.tp, pp=target.pp, progress=progress)
        case "universal":
            raise AssertionError("written elsewhere")
