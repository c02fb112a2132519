"""Tensors made of other stored tensors, without reading any of them before they are asked for.

Woven     boxes of others: fused, split, stacked, transposed, padded
Cast      another type, converted block by block
Mean      the mean of several that should be one
Viewed    another shape with the same elements in the same order

Where boxes overlap (copies of a tensor, or of a part of it), all are read, and a difference is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from everstep.errors import UserError
from everstep.layout.box import Box, Shape, offset_of, row_major, whole
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
class Twice:
    """Blocks may overlap, and must agree where they do. For the refusal: of what, whose each block is, and
    what to do.
    """

    what: str
    places: tuple[str, ...]
    cure: str


@dataclass(frozen=True, slots=True)
class Woven:
    dtype: str
    shape: Shape
    blocks: tuple[WovenBlock, ...]
    padded: bool = False  # where no block is, there are zeros
    twice: Twice | None = None  # no element is in two blocks

    def read(self, box: Box, out: Array) -> None:
        if self.padded:
            out[...] = 0
        owners: Array | None = None if self.twice is None else np.full(box.size, -1, np.int32)
        for i, block in enumerate(self.blocks):
            shared = box.meet(block.box)
            if shared is None:
                continue
            place = shared.moved([-a for a in box.start]).slices()
            if owners is None:
                _weave(block, shared, out[place])
                continue
            held: Array = np.empty(shared.size, out.dtype)
            _weave(block, shared, held)
            self._compare(held, out[place], owners[place], i, shared.start)
            out[place] = held
            owners[place] = i

    def _compare(self, held: Array, known: Array, owners: Array, block: int, start: Shape) -> None:
        assert self.twice is not None
        wrong = np.argwhere((owners >= 0) & (held != known))
        if len(wrong):
            first = tuple(wrong[0])
            at = [int(a + b) for a, b in zip(start, first, strict=True)]
            before, here = (self.twice.places[i] for i in (int(owners[first]), block))
            raise UserError(
                f"{self.twice.what} is read as copies, and {before} and {here} hold other values from index "
                f"{at} on; {self.twice.cure}."
            )


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


def copies(what: str, places: Sequence[str], sources: Sequence[Stored], cure: str) -> Stored:
    """One tensor that is there several times: taking one of them unread is how data gets lost."""
    kinds = {(one.dtype, one.shape) for one in sources}
    if len(kinds) > 1:
        told = " and ".join(f"{dtype} {list(shape)}" for dtype, shape in sorted(kinds))
        raise UserError(f"{what} is read as copies, and they are {told}; {cure}.")
    if len(sources) == 1:
        return sources[0]
    dtype, shape = kinds.pop()
    axes = tuple(range(len(shape)))
    blocks = tuple(WovenBlock(whole(shape), source, (0,) * len(shape), axes) for source in sources)
    return Woven(dtype, shape, blocks, twice=Twice(what, tuple(places), cure))


def one_type(what: str, sources: Sequence[Stored]) -> str:
    """The type of tensors that are made one, by their bytes."""
    kinds = sorted({one.dtype for one in sources})
    if len(kinds) > 1:
        raise UserError(f"{what} is made of parts of {' and '.join(kinds)}; convert them to one type first.")
    return kinds[0]


@dataclass(frozen=True, slots=True)
class Viewed:
    source: Stored
    shape: Shape

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def read(self, box: Box, out: Array) -> None:
        """Run by run: the last dimensions that are whole, and the one before them."""
        inner = len(self.shape)
        while inner and box.size[inner - 1] == self.shape[inner - 1]:
            inner -= 1
        inner = max(0, inner - 1)
        strides = row_major(self.shape)
        count = prod(box.size[inner:])
        held: Array = np.empty(count, out.dtype)
        for index in np.ndindex(*box.size[:inner]):
            at = offset_of(
                [*(a + i for a, i in zip(box.start, index, strict=False)), *box.start[inner:]], strides
            )
            read_range(self.source, at, at + count, held)
            out[index] = held.reshape(box.size[inner:])


def viewed(stored: Stored, shape: Shape) -> Stored:
    return stored if stored.shape == shape else Viewed(stored, shape)
