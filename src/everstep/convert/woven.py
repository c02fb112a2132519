"""Tensors made of other stored tensors, without reading any of them before they are asked for.

Woven     boxes of others: fused, split, stacked, transposed, padded
Cast      another type, converted block by block
Flat      ranges of others one after the other, and zeros: a rank's flat buffer
Mean      the mean of several that should be one
Copies    several that must be one: all are read, and a difference is refused by name
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from everstep.errors import UserError
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


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of one tensor. `places` and `cure` are for the sentence of the refusal."""

    what: str
    places: tuple[str, ...]
    cure: str
    sources: tuple[Stored, ...]

    @property
    def dtype(self) -> str:
        return self.sources[0].dtype

    @property
    def shape(self) -> Shape:
        return self.sources[0].shape

    def read(self, box: Box, out: Array) -> None:
        self.sources[0].read(box, out)
        held: Array = np.empty(box.size, out.dtype)
        for place, other in zip(self.places[1:], self.sources[1:], strict=True):
            other.read(box, held)
            if not np.array_equal(held, out):
                first = next(i for i, same in np.ndenumerate(held == out) if not same)
                at = [int(a + b) for a, b in zip(box.start, first, strict=True)]
                raise UserError(
                    f"{self.what} is read as copies, and {self.places[0]} and {place} hold other values from "
                    f"index {at} on; {self.cure}."
                )


def copies(what: str, places: Sequence[str], sources: Sequence[Stored], cure: str) -> Stored:
    """One tensor that is there several times: taking one of them unread is how data gets lost."""
    kinds = {(one.dtype, one.shape) for one in sources}
    if len(kinds) > 1:
        told = " and ".join(f"{dtype} {list(shape)}" for dtype, shape in sorted(kinds))
        raise UserError(f"{what} is read as copies, and they are {told}; {cure}.")
    return sources[0] if len(sources) == 1 else Copies(what, tuple(places), cure, tuple(sources))


def one_type(what: str, sources: Sequence[Stored]) -> str:
    """The type of tensors that are made one, by their bytes."""
    kinds = sorted({one.dtype for one in sources})
    if len(kinds) > 1:
        raise UserError(f"{what} is made of parts of {' and '.join(kinds)}; convert them to one type first.")
    return kinds[0]
