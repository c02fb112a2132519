"""A tensor that is somewhere else: in files, in pieces, transposed, as another type. Read by boxes.

`read(box, out)` fills an array of raw elements with one box of the tensor. The kinds:

    Held      in memory
    Pieces    strided boxes of files: every format on disk is a layout whose holders are files
    Woven, Cast, Flat, Mean     made of other stored tensors, see `woven`

Reading is bounded: a strided box is fetched in bands of at most BAND_BYTES, whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from everstep.layout.box import Box, Shape, flat_range, offset_of, whole
from everstep.layout.tensor import ITEM_BYTES
from everstep.store import dtypes
from everstep.store.dtypes import Array
from everstep.store.ranges import RangeFile

BAND_BYTES = 16 << 20
RUN_BYTES = 4 << 10  # shorter runs than this are read together with what lies between them


class Stored(Protocol):
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    def read(self, box: Box, out: Array) -> None: ...


def num_bytes(stored: Stored) -> int:
    return prod(stored.shape) * ITEM_BYTES[stored.dtype]


def read_all(stored: Stored) -> Array:
    out: Array = np.empty(stored.shape, dtypes.raw(stored.dtype))
    stored.read(whole(stored.shape), out)
    return out


def read_range(stored: Stored, start: int, stop: int, out: Array) -> None:
    """Elements start..stop in row-major order, into a flat array."""
    at = 0
    for box in flat_range(stored.shape, start, stop):
        stored.read(box, out[at : at + box.volume].reshape(box.size))
        at += box.volume


def read_both(a: Stored, b: Stored, block_bytes: int = 4 << 20) -> Iterator[tuple[Array, Array]]:
    """Two tensors of one type and shape, block by block, each as a flat array."""
    step, total = block_bytes // ITEM_BYTES[a.dtype], prod(a.shape)
    for start in range(0, total, step):
        stop = min(total, start + step)
        x: Array = np.empty(stop - start, dtypes.raw(a.dtype))
        y = np.empty_like(x)
        read_range(a, start, stop, x)
        read_range(b, start, stop, y)
        yield x, y


@dataclass(frozen=True, slots=True)
class Held:
    dtype: str
    array: Array

    @property
    def shape(self) -> Shape:
        return tuple(self.array.shape)

    def read(self, box: Box, out: Array) -> None:
        out[...] = self.array[box.slices()]


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A box whose first element is at byte `offset` of a file; strides in elements."""

    box: Box
    file: RangeFile
    offset: int
    strides: Shape


@dataclass(frozen=True, slots=True)
class Pieces:
    dtype: str
    shape: Shape
    pieces: tuple[FilePiece, ...]

    def read(self, box: Box, out: Array) -> None:
        left = box.volume
        for piece in self.pieces:
            shared = box.meet(piece.box)
            if shared is None:
                continue
            left -= shared.volume
            by = [a - b for a, b in zip(shared.start, piece.box.start, strict=True)]
            at = piece.offset + offset_of(by, piece.strides) * ITEM_BYTES[self.dtype]
            corner = [-a for a in box.start]
            _fetch(piece, at, shared.size, out[shared.moved(corner).slices()], ITEM_BYTES[self.dtype])
        if left > 0:
            raise OSError(f"{left} elements of a tensor are in no file")


def _fetch(piece: FilePiece, at: int, size: Shape, out: Array, item: int) -> None:
    """One strided box of a file into an array."""
    if out.size == 0:
        return
    run = _run(size, piece.strides)
    if run == out.size and out.flags.c_contiguous:
        piece.file.read(at, dtypes.bytes_of(out))
        return
    for box in bands(whole(size), piece.strides, BAND_BYTES // item):
        offset = at + offset_of(box.start, piece.strides) * item
        view = out[box.slices()]
        if _run(box.size, piece.strides) * item >= RUN_BYTES:
            for run_at, place in _runs(box.size, piece.strides):
                held: Array = np.empty(_run(box.size, piece.strides), out.dtype)
                piece.file.read(offset + run_at * item, dtypes.bytes_of(held))
                view[place] = held.reshape(view[place].shape)
            continue
        span = 1 + sum((n - 1) * s for n, s in zip(box.size, piece.strides, strict=True))
        between: Array = np.empty(span, out.dtype)
        piece.file.read(offset, dtypes.bytes_of(between))
        view[...] = np.lib.stride_tricks.as_strided(between, box.size, [s * item for s in piece.strides])


def _run(size: Shape, strides: Shape) -> int:
    """How many elements of a box lie one after the other, in the array's order and the file's alike."""
    run = 1
    for n, stride in zip(reversed(size), reversed(strides), strict=True):
        if n == 1:
            continue
        if stride != run:
            break
        run *= n
    return run


def _runs(size: Shape, strides: Shape) -> Iterator[tuple[int, tuple[int | slice, ...]]]:
    """The runs of a box: where each begins, and which part of the array it is."""
    run, inner = 1, len(size)
    while inner and (size[inner - 1] == 1 or strides[inner - 1] == run):
        inner -= 1
        run *= size[inner]
    for index in np.ndindex(*size[:inner]):
        yield offset_of(index, strides[:inner]), (*index, *(slice(None) for _ in size[inner:]))


def bands(box: Box, strides: Shape, limit: int) -> Iterator[Box]:
    """A box in parts that each span at most `limit` elements, gaps included, cut along the longest stride."""
    todo = [box]
    while todo:
        one = todo.pop()
        span = 1 + sum((n - 1) * s for n, s in zip(one.size, strides, strict=True))
        longest = max((d for d, n in enumerate(one.size) if n > 1), key=lambda d: strides[d], default=None)
        if span <= limit or longest is None:
            yield one
            continue
        half = one.size[longest] // 2
        for low, high in ((half, one.size[longest]), (0, half)):
            todo.append(
                Box(
                    tuple(a + low * (d == longest) for d, a in enumerate(one.start)),
                    tuple(high - low if d == longest else n for d, n in enumerate(one.size)),
                )
            )
