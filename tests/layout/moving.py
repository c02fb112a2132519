"""Transfers carried out on numpy buffers of one process: what any transport must do, in its plainest form."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.layout.box import Shape
from everstep_lab.layout import Holder, Layout, Piece
from everstep_lab.reshard import Transfers

Array = NDArray[Any]
Buffers = Mapping[tuple[Holder, str], Array]  # one-dimensional


def view(buffer: Array, offset: int, size: Shape, strides: Shape) -> Array:
    """The elements of a strided box in a flat buffer, as an array that shares its memory."""
    if prod(size) == 0:
        return np.empty(size, buffer.dtype)
    last = offset + sum((n - 1) * s for n, s in zip(size, strides, strict=True))
    if offset < 0 or last >= buffer.size or min(strides, default=0) < 0:
        raise IndexError(f"elements {offset} to {last} of a buffer of {buffer.size}")
    step = buffer.strides[0]
    return np.lib.stride_tricks.as_strided(buffer[offset:], size, [s * step for s in strides])


def move(transfers: Transfers, source: Buffers, target: Buffers) -> None:
    for t in transfers:
        given = view(source[t.source, t.source_buffer], t.source_offset, t.size, t.source_strides)
        taken = view(target[t.target, t.target_buffer], t.target_offset, t.size, t.target_strides)
        index, count = t.share
        if count == 1:
            taken[...] = given
        elif index == 0:
            taken[...] = given / count
        else:
            taken[...] += given / count


def placed(layout: Layout, values: Mapping[str, Array], dtype: Any = None) -> dict[tuple[Holder, str], Array]:
    """Buffers of every holder with the tensors' values in their places, padding zero."""
    kind = dtype or next(iter(values.values())).dtype
    buffers = {key: np.zeros(size, kind) for key, size in layout.buffers.items()}
    for piece in layout.pieces:
        for holder in piece.holders:
            _of(buffers[holder, piece.buffer], piece)[...] = values[piece.tensor][piece.box.slices()]
    return buffers


def gathered(layout: Layout, buffers: Buffers) -> dict[str, Array]:
    """The tensors' values from the first holder of each element."""
    kind = next(iter(buffers.values())).dtype
    found = {name: np.zeros(tensor.shape, kind) for name, tensor in layout.tensors.items()}
    for piece in reversed(layout.pieces):
        found[piece.tensor][piece.box.slices()] = _of(buffers[piece.holders[0], piece.buffer], piece)
    return found


def _of(buffer: Array, piece: Piece) -> Array:
    return view(buffer, piece.offset, piece.box.size, piece.strides)
