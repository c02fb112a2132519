"""What a checkpoint format is to the rest of the program: one row of the table in `known_formats.py`.

A new format is a module with `FORMAT = Format(…)` and one line in that table. Command-line help, detection,
the self-check and the table in docs/checkpoint-format.md follow from the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from everstep.errors import UserError
from everstep.layout.tensor import ITEM_BYTES
from everstep.store.parts import Progress
from everstep_convert.formats.dialects import Dialect, Heads
from everstep_convert.patterns import Patterns
from everstep_convert.state import TrainingState


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to read what a checkpoint does not say about itself.

    `buffers`, `frozen`: patterns of names, for formats that do not tell buffers from parameters. `keys`: what
    a DCP calls its model, optim and step.
    """

    patterns: Patterns | None = None
    vocab: int | None = None
    buffers: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    keys: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to write. `patterns`: how a universal folder's tensors are to be split over tensor-parallel ranks.
    `share`: (i, n) writes the i-th (from 1) of n shares, and the checkpoint appears with the last of them.
    `keys`: as of `Reading`.
    """

    format: str
    names: Dialect | None = None
    heads: Heads | None = None
    patterns: Patterns | None = None
    precision: str | None = None  # of DeepSpeed's working weights
    dtype: str | None = None  # of the weights; the source's if not given
    shard_bytes: int = 5 << 30  # of Hugging Face's files
    with_optimizer: bool = True
    threads: int = 2
    share: tuple[int, int] | None = None
    keys: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.share is not None and self.format != "universal":
            raise UserError(f"--share is for universal checkpoints, not for {self.format}; leave it out.")
        if self.dtype is not None and self.dtype not in ITEM_BYTES:
            raise UserError(f"dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}.")


class Staging(Protocol):
    """A checkpoint that is written and not yet visible under its name."""

    def write(self, state: TrainingState, target: Target, progress: Progress) -> None: ...
    def read(self) -> TrainingState:
        """What was written, read back from there."""

    def commit(self) -> None:
        """Make it visible, at once."""

    def discard(self) -> None:
        """Remove what is left; harmless after `commit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """`detects`: is a folder of this format? `write` fills an empty folder; a format that makes its files
    visible in another way gives `staged` instead, one that is read only gives neither. `completed`: a state
    with what the format asks for besides.
    """

    name: str
    title: str
    reads: str
    writes: str
    optimizer: str
    read: Callable[[str | Path, Reading], TrainingState]
    detects: Callable[[Path], bool]
    completed: Callable[[TrainingState, Target], TrainingState] | None = None
    write: Callable[[Path, TrainingState, Target, Progress], None] | None = None
    staged: Callable[[str | Path], Staging] | None = None

    @property
    def is_written(self) -> bool:
        return self.write is not None or self.staged is not None
