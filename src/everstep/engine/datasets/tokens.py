"""`everstep.tokens`: files of packed tokens, cut into rows, in shuffled epochs.

A file is one long line of tokens. Row w of it is tokens w x sequence up to (w + 1) x sequence, and its
targets are those one further on; so every token but a file's first is a target exactly once per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from everstep.engine.datasets.data import named_arguments
from everstep.engine.datasets.documents import positions_in_documents
from everstep.engine.datasets.order import RowOrder
from everstep.engine.layers.boundary import Value
from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.job.job import Job

TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_LLM_C_MAGIC, _LLM_C_HEADER = 20240520, 1024  # llm.c's .bin: 256 int32, then uint16 tokens
Files = str | Path | Sequence[str | Path]


@named_arguments
def tokens(
    files: Files,
    *,
    sequence: int,
    rows: int = 4,
    token: str = "uint16",
    document_end: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
) -> Tokens:
    """Packed tokens: a `.bin` as nanoGPT or llm.c write it, a `.npy`, several of them, or a folder of them.

    sequence      tokens in a row
    rows          in a microbatch
    token         type of a token in a .bin: uint8, uint16, uint32, int32 or int64
    document_end  the token that ends a document: attention then stays within a document, positions begin
                  again in each, and no token is to be told from another document's end
    shuffle       a new order of all rows in every epoch; each comes exactly once in each
    """
    if token not in TYPES:
        raise UserError(f"everstep.tokens has token={token!r}; use one of {', '.join(TYPES)}.")
    if sequence < 1 or rows < 1:
        raise UserError(f"everstep.tokens has sequence={sequence}, rows={rows}; both must be at least 1.")
    paths = tuple(_found(files))
    made = Tokens(
        paths=paths,
        sequence=sequence,
        rows=rows,
        token=token,
        document_end=document_end,
        shuffle=shuffle,
        seed=seed,
    )
    if made.num_rows == 0:
        raise UserError(f"{paths[0]} holds no row: a row needs {sequence + 1} tokens.")
    return made


@dataclass(frozen=True, kw_only=True)
class Tokens:
    paths: tuple[Path, ...]
    sequence: int
    rows: int
    token: str
    document_end: int | None
    shuffle: bool
    seed: int | None
    order: RowOrder | None = None

    in_a_thread = True  # draws nothing at random: may be loaded beside the computation

    def for_job(self, job: Job) -> Self:
        return replace(self, order=self.order_in(job.microbatches_in_step, job.seed))

    def order_in(self, microbatches: int, seed: int) -> RowOrder:
        return RowOrder(
            size=self.num_rows,
            rows=self.rows,
            microbatches=microbatches,
            seed=seed if self.seed is None else self.seed,
            shuffle=self.shuffle,
        )

    @cached_property
    def _files(self) -> list[np.ndarray]:
        return [_opened(path, self.token) for path in self.paths]

    @cached_property
    def _ends(self) -> np.ndarray:
        """How many rows the files up to each one hold."""
        return np.cumsum([max(0, len(file) - 1) // self.sequence for file in self._files])

    @property
    def num_rows(self) -> int:
        return int(self._ends[-1])

    def batch(self, step: int, microbatch: int) -> tuple[Value, Tensor]:
        order = self.order or self.order_in(1, 0)
        taken = torch.from_numpy(np.stack([self._row(row) for _, row in order.places(step, microbatch)]))
        inputs, targets = taken[:, :-1].contiguous(), taken[:, 1:].contiguous()
        if self.document_end is None:
            return inputs, targets
        ends = inputs == self.document_end
        return (
            {"input_ids": inputs, "position_ids": positions_in_documents(ends)},
            targets.masked_fill(ends, -100),
        )

    def _row(self, row: int) -> np.ndarray:
        file = int(np.searchsorted(self._ends, row, side="right"))
        start = (row - (int(self._ends[file - 1]) if file else 0)) * self.sequence
        return self._files[file][start : start + self.sequence + 1].astype(np.int64)


def _found(files: Files) -> list[Path]:
    given = [files] if isinstance(files, str | Path) else list(files)
    found: list[Path] = []
    for path in map(Path, given):
        here = sorted(p for p in path.glob("*") if p.suffix in (".bin", ".npy")) if path.is_dir() else [path]
        if not here or not here[0].is_file():
            raise UserError(f"{str(path)!r} is not a file of tokens, nor a folder with .bin or .npy files.")
        found += here
    if not found:
        raise UserError("everstep.tokens was given no file.")
    return found


def _opened(path: Path, token: str) -> np.ndarray:
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.ndim != 1 or array.dtype.kind not in "ui":
            raise UserError(
                f"{path} holds {array.dtype} of shape {array.shape}; it must be a line of tokens."
            )
        return array  # type: ignore[no-any-return]
    kind = np.dtype(token).newbyteorder("<")
    skip = _LLM_C_HEADER if _is_llm_c(path) else 0
    count = (path.stat().st_size - skip) // kind.itemsize
    if count <= 0:
        return np.empty(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r", offset=skip, shape=(count,))


def _is_llm_c(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(4)
    return path.stat().st_size > _LLM_C_HEADER and head == np.int32(_LLM_C_MAGIC).tobytes()
