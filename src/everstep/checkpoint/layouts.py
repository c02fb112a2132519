"""Saving from one layout and loading into another: the engine-independent way in and out of a checkpoint.

    part    = save_part(root, step, layout, rank, buffers)     on every rank: its share, not its replica
    commit(root, step, parts, meta)                            once
    buffers = load_part(checkpoint, other_layout, rank)        on every rank of any other shape

A holder's buffers are flat tensors, as the layout says. Loading reads the boxes the holder needs and no
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from everstep.checkpoint import dtypes
from everstep.checkpoint.dtypes import Array
from everstep.checkpoint.index import Part
from everstep.checkpoint.parts import CHUNK_BYTES, PlannedSlice
from everstep.checkpoint.places import place_of
from everstep.checkpoint.reader import Checkpoint
from everstep.checkpoint.stored import Held
from everstep.errors import UserError
from everstep.layout.layout import Holder, Layout
from everstep.layout.moving import view
from everstep.layout.sharing import writing_shares


def save_part(
    root: str | Path,
    step: int,
    layout: Layout,
    holder: Holder,
    buffers: Mapping[str, Tensor],
    *,
    threads: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
) -> Part:
    """Write what this holder owns: its share of what it holds, so that replicas share the work."""
    planned = []
    raw = {name: _flat(tensor) for name, tensor in buffers.items()}
    for share in writing_shares(layout)[holder]:
        tensor = layout.tensors[share.tensor]
        values = view(raw[share.buffer], share.offset, share.box.size, share.strides)
        planned.append(PlannedSlice(share.tensor, tensor.shape, share.box, Held(tensor.dtype, values)))
    name = f"rank-{layout.holders.index(holder):05d}"
    return place_of(root).write_part(step, name, planned, threads=threads, chunk_bytes=chunk_bytes)


def load_part(
    checkpoint: Checkpoint, layout: Layout, holder: Holder, *, checked: bool = True
) -> dict[str, Tensor]:
    """The buffers of one holder of a layout, padding zero, read box by box."""
    kinds: dict[str, str] = {}
    for piece in layout.pieces:
        if holder in piece.holders:
            dtype = layout.tensors[piece.tensor].dtype
            if kinds.setdefault(piece.buffer, dtype) != dtype:
                raise UserError(f"buffer {piece.buffer!r} of {holder} holds two dtypes; give each its own.")
    found = {
        name: torch.zeros(layout.buffers[holder, name], dtype=dtypes.in_torch(dtype))
        for name, dtype in kinds.items()
    }
    for piece in layout.pieces:
        if holder in piece.holders and piece.box.volume:
            tensor = layout.tensors[piece.tensor]
            entry = checkpoint.tensors.get(piece.tensor)
            if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                told = "is not there" if entry is None else f"is {entry.dtype} {list(entry.shape)}"
                raise UserError(f"tensor {piece.tensor!r} {told} in {checkpoint}; the layout wants {tensor}.")
            stored = checkpoint.stored(piece.tensor, checked=checked)
            place = view(_flat(found[piece.buffer]), piece.offset, piece.box.size, piece.strides)
            stored.read(piece.box, place)
    return found


def _flat(tensor: Tensor) -> Array:
    """Raw elements of a contiguous tensor, shared with it."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise UserError("a buffer to save or load must be contiguous and on the CPU.")
    return dtypes.array_of(tensor).reshape(-1)
