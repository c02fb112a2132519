"""Tensors made of other stored tensors, without reading any of them before they are asked for.

Woven     boxes of others: fused, split, stacked, transposed, padded
Cast      another type, converted block by block
Flat      ranges of others one after the other, and zeros: a rank's flat buffer
Mean      the mean of several that should be one
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everstep.layout.box import Box, Shape
from everstep.store import dtypes
from everstep.store.dtypes import Array
from everstep.store.stored import Stored, read_range


@dataclass(frozen=True, slots=True)
class WovenBlock:
    """`box` of the new tensor is a box of `source` from `start` on; dimension i is source's axes[i]."""

    box: Box
    source: Stored
    start: Shape
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Woven:
    dtype: str
    shape: Shape
    blocks: tuple[WovenBlock, ...]
    padded: bool = False  # where no block is, there are zeros

    def read(self, box: Box, out: Array) -> None:
        if self.padded:
            out[...] = 0
        for block in self.blocks:
            shared = box.meet(block.box)
            if shared is not None:
                place = shared.moved([-a for a in box.start]).slices()
                _weave(block, shared, out[place])


def _weave(block: WovenBlock, shared: Box, out: Array) -> None:
    start, size = list(block.start), [1] * len(block.start)
    for i, axis in enumerate(block.axes):
        start[axis] += shared.start[i] - block.box.start[i]
        size[axis] = shared.size[i]
    source = Box(tuple(start), tuple(size))
    if list(block.axes) == sorted(block.axes) and out.flags.c_contiguous:
        block.source.read(source, out.reshape(source.size))
        return
    held: Array = np.empty(source.size, out.dtype)
    block.source.read(source, held)
    rest = [axis for axis in range(len(size)) if axis not in block.axes]
    out[...] = held.transpose([*block.axes, *rest]).reshape(shared.size)


@dataclass(frozen=True, slots=True)
class Cast:
    source: Stored
    dtype: str

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def read(self, box: Box, out: Array) -> None:
        held: Array = np.empty(box.size, dtypes.raw(self.source.dtype))
        self.source.read(box, held)
        out[...] = dtypes.cast(held, self.source.dtype, self.dtype)


def as_dtype(stored: Stored, dtype: str) -> Stored:
    return stored if stored.dtype == dtype else Cast(stored, dtype)


@dataclass(frozen=True, slots=True)
class Flat:
    """Ranges of stored tensors one after the other, and zeros: a rank's flat buffer.

    `ranges`: (tensor or None for zeros, its first element, how many).
    """

    dtype: str
    ranges: tuple[tuple[Stored | None, int, int], ...]

    @property
    def shape(self) -> Shape:
        return (sum(count for _, _, count in self.ranges),)

    def read(self, box: Box, out: Array) -> None:
        at, low, high = 0, box.start[0], box.start[0] + box.size[0]
        for stored, first, count in self.ranges:
            begin, end = max(low, at), min(high, at + count)
            if begin < end:
                place = out[begin - low : end - low]
                if stored is None:
                    place[...] = 0
                else:
                    read_range(stored, first + begin - at, first + end - at, place)
            at += count


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of tensors that should be one: Universal Checkpointing's params_to_average."""

    sources: tuple[Stored, ...]

    @property
    def dtype(self) -> str:
        return self.sources[0].dtype

    @property
    def shape(self) -> Shape:
        return self.sources[0].shape

    def read(self, box: Box, out: Array) -> None:
        held: Array = np.empty(box.size, out.dtype)
        import torch

        total = torch.zeros(box.size, dtype=torch.float64)
        for source in self.sources:
            source.read(box, held)
            total += dtypes.tensor_of(held, self.dtype).to(torch.float64)
        out[...] = dtypes.array_of((total / len(self.sources)).to(dtypes.in_torch(self.dtype)))
