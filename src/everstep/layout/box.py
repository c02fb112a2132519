"""Boxes of indices: the one shape that all of layout's arithmetic is done on.

A box is a start and a size in every dimension of a tensor. Splits, sub-parameters and experts are boxes; a
flat range (ZeRO's) is a few of them: a ragged head, a full middle and a ragged tail in every dimension.

    range 3..11 of a 4 x 4 tensor     . . . a        a: one row's end
                                      b b b b        b: whole rows
                                      c c c .        c: a row's beginning
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from types import EllipsisType

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor: `size[d]` indices from `start[d]` on, in every dimension."""

    start: Shape
    size: Shape

    @property
    def volume(self) -> int:
        return prod(self.size)

    @property
    def stop(self) -> Shape:
        return tuple(a + n for a, n in zip(self.start, self.size, strict=True))

    def within(self, shape: Shape) -> bool:
        return len(self.start) == len(shape) and all(
            a >= 0 and n >= 0 and a + n <= s for a, n, s in zip(self.start, self.size, shape, strict=True)
        )

    def meet(self, other: Box) -> Box | None:
        """What both hold; None if nothing."""
        start = []
        size = []
        for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True):
            low = a if a > b else b
            high = min(a + n, b + m)
            if high <= low:
                return None
            start.append(low)
            size.append(high - low)
        return Box(tuple(start), tuple(size))

    def minus(self, other: Box) -> list[Box]:
        """This box without another, as boxes that do not overlap."""
        hole = self.meet(other)
        if hole is None:
            return [self] if self.volume else []
        left: list[Box] = []
        start, size = list(self.start), list(self.size)
        for d in range(len(start)):
            for low, high in (
                (start[d], hole.start[d]),
                (hole.start[d] + hole.size[d], start[d] + size[d]),
            ):
                if high > low:
                    left.append(
                        Box(
                            (*start[:d], low, *start[d + 1 :]),
                            (*size[:d], high - low, *size[d + 1 :]),
                        )
                    )
            start[d], size[d] = hole.start[d], hole.size[d]
        return left

    def moved(self, by: Sequence[int]) -> Box:
        return Box(tuple(a + b for a, b in zip(self.start, by, strict=True)), self.size)

    def slices(self) -> tuple[slice | EllipsisType, ...]:
        """To index an array with; the dots make it a view of a 0-dimensional array too."""
        return *(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True)), ...


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def row_major(shape: Sequence[int]) -> Shape:
    """Strides, in elements, of a tensor whose last dimension is contiguous."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(1, shape[d + 1])
    return tuple(strides)


def offset_of(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * s for i, s in zip(index, strides, strict=True))


def flat_range(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """The elements start..stop of a tensor in row-major order, as boxes, in that order."""
    if stop <= start:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last or len(shape) == 1:
        if len(shape) == 1:
            yield Box((start,), (stop - start,))
        else:
            for box in flat_range(shape[1:], start - first * inner, stop - first * inner):
                yield Box((first, *box.start), (1, *box.size))
        return
    if start > first * inner:
        for box in flat_range(shape[1:], start - first * inner, inner):
            yield Box((first, *box.start), (1, *box.size))
        first += 1
    full = stop // inner
    if full > first:
        yield Box((first, *(0,) * (len(shape) - 1)), (full - first, *shape[1:]))
    if stop > full * inner:
        for box in flat_range(shape[1:], 0, stop - full * inner):
            yield Box((full, *box.start), (1, *box.size))


def uncovered(shape: Shape, boxes: Sequence[Box]) -> Box | None:
    """A box of elements that no box covers; None when all are covered."""
    left = [whole(shape)] if prod(shape) else []
    for box in boxes:
        left = [rest for piece in left for rest in piece.minus(box)]
        if not left:
            return None
    return left[0] if left else None


def overlapping(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two boxes that share an element, by their places in the list; None if no two do."""
    order = sorted((i for i, box in enumerate(boxes) if box.volume), key=lambda i: boxes[i].start[:1] or (0,))
    for place, i in enumerate(order):
        for j in order[place + 1 :]:
            if boxes[i].start and boxes[j].start[0] >= boxes[i].start[0] + boxes[i].size[0]:
                break
            if boxes[i].meet(boxes[j]) is not None:
                return min(i, j), max(i, j)
    return None
