"""A layout: which elements of which logical tensors each holder has, and where in its memory.

A piece is a box of a tensor's elements
in the memory of one or more holders:

    logical   box.start, box.size                     in the tensor's own indices
    local     buffer, offset, strides (in elements)   element i of the box is at offset + i . strides

A piece with several holders lies at the same place of each one's buffer: replicas. Strides let a piece lie
transposed or interleaved with others; a flat buffer may hold pieces of many tensors, with padding between.
Holders are names of any kind: workers, ranks, files.

The rejected alternative is the general affine map (strides on the logical side too): two such maps meet in
number theory, two boxes in a comparison. What it would add (rows dealt out like cards) is a list of boxes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.errors import UserError
from everstep.layout.box import Box, Shape, offset_of, uncovered
from everstep.layout.tensor import ITEM_BYTES, Tensor

Holder = Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor in a buffer of each of its holders, from element `offset` on, with these strides."""

    tensor: str
    box: Box
    holders: tuple[Holder, ...]
    buffer: str
    offset: int
    strides: Shape

    def at(self, box: Box) -> int:
        """Where in the buffer a box inside this piece begins."""
        return self.offset + offset_of(
            [a - b for a, b in zip(box.start, self.box.start, strict=True)], self.strides
        )

    @property
    def last(self) -> int:
        """The buffer's last element that the piece touches."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.box.size, self.strides, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which elements of which tensors every holder has, and where in its flat buffers they lie."""

    tensors: Mapping[str, Tensor]
    pieces: tuple[Piece, ...]
    buffers: Mapping[tuple[Holder, str], int]  # elements, padding included
    tied: Mapping[str, str] = field(default_factory=dict)  # another name -> the tensor it is

    def of(self, name: str) -> list[Piece]:
        """The pieces of a tensor, by its own name or one that is tied to it."""
        name = self.tied.get(name, name)
        return [piece for piece in self.pieces if piece.tensor == name]

    @property
    def holders(self) -> list[Holder]:
        return list(dict.fromkeys(holder for holder, _ in self.buffers))

    def held_bytes(self) -> dict[Holder, int]:
        """What each holder has, padding not counted."""
        total: dict[Holder, int] = dict.fromkeys(self.holders, 0)
        for piece in self.pieces:
            for holder in piece.holders:
                total[holder] += piece.box.volume * ITEM_BYTES[self.tensors[piece.tensor].dtype]
        return total

    def validate(self) -> None:
        """Every element is held by someone; nothing lies outside its buffer or on top of another."""
        check_places(self)
        for name, tensor in self.tensors.items():
            hole = uncovered(tensor.shape, [piece.box for piece in self.of(name)])
            if hole is not None:
                raise UserError(
                    f"no worker holds {hole.volume} elements of tensor {name!r}, from {list(hole.start)} on; "
                    "give them a holder."
                )
        for alias, name in self.tied.items():
            if name not in self.tensors or alias in self.tensors:
                raise UserError(f"{alias!r} is tied to {name!r}, which must be a tensor, and {alias!r} not.")


def check_places(layout: Layout) -> None:
    """Every piece inside its tensor and its buffer, and no two of a holder's on one place."""
    places: dict[tuple[Holder, str], list[Piece]] = {}
    for piece in layout.pieces:
        tensor = layout.tensors.get(piece.tensor)
        if tensor is None or not piece.box.within(tensor.shape):
            raise UserError(f"a piece of {piece.tensor!r} reaches outside the tensor: {piece.box}.")
        for holder in piece.holders:
            size = layout.buffers.get((holder, piece.buffer))
            if size is None or (piece.box.volume and not 0 <= piece.offset <= piece.last < size):
                raise UserError(
                    f"a piece of {piece.tensor!r} lies outside buffer {piece.buffer!r} of {holder}: "
                    f"elements {piece.offset} to {piece.last} of {size}."
                )
            places.setdefault((holder, piece.buffer), []).append(piece)
    for (holder, buffer), pieces in places.items():
        pair = _colliding([piece for piece in pieces if piece.box.volume])
        if pair is not None:
            raise UserError(
                f"pieces of {pair[0].tensor!r} and {pair[1].tensor!r} lie on one place of buffer "
                f"{buffer!r} of {holder}."
            )


def _colliding(pieces: list[Piece]) -> tuple[Piece, Piece] | None:
    """Two pieces on one place. Address ranges first; where they cross, the addresses themselves."""
    order = sorted(pieces, key=lambda piece: piece.offset)
    for place, piece in enumerate(order):
        if not _injective(piece):
            return piece, piece
        for other in order[place + 1 :]:
            if other.offset > piece.last:
                break
            if _share_an_address(piece, other):
                return piece, other
    return None


def _injective(piece: Piece) -> bool:
    """No two elements of the piece at one address: each stride steps over all that is inside it."""
    reach = 0
    for stride, size in sorted(zip(piece.strides, piece.box.size, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def _share_an_address(a: Piece, b: Piece) -> bool:
    strides = sorted({*a.strides, *b.strides} - {0}, reverse=True)
    boxes = _as_coordinates(a, strides), _as_coordinates(b, strides)
    if boxes[0] is not None and boxes[1] is not None:
        return boxes[0].meet(boxes[1]) is not None
    return bool(_addresses(a) & _addresses(b))


def _as_coordinates(piece: Piece, strides: Sequence[int]) -> Box | None:
    """The piece as a box in the mixed-radix digits of its addresses; None when a digit would carry."""
    start, size, rest = [], [], piece.offset
    for place, stride in enumerate(strides):
        digit, rest = divmod(rest, stride)
        count = max((n for s, n in zip(piece.strides, piece.box.size, strict=True) if s == stride), default=1)
        if place and (digit + count) * stride > strides[place - 1]:
            return None
        start.append(digit)
        size.append(count)
    seen = [s for s, n in zip(piece.strides, piece.box.size, strict=True) if n > 1]
    return None if rest or len(seen) != len(set(seen)) else Box(tuple(start), tuple(size))


def _addresses(piece: Piece) -> set[int]:
    found = {piece.offset}
    for n, stride in zip(piece.box.size, piece.strides, strict=True):
        found = {a + i * stride for a in found for i in range(n)}
    return found


def merged(layouts: Iterable[Layout]) -> Layout:
    """Several layouts as one: the stages of a pipeline, the buffers of a model and its optimizer."""
    tensors: dict[str, Tensor] = {}
    pieces: list[Piece] = []
    buffers: dict[tuple[Holder, str], int] = {}
    tied: dict[str, str] = {}
    for layout in layouts:
        for name, tensor in layout.tensors.items():
            if tensors.setdefault(name, tensor) != tensor:
                raise UserError(f"tensor {name!r} has two shapes or dtypes in the layouts to be merged.")
        for key, size in layout.buffers.items():
            if buffers.setdefault(key, size) != size:
                raise UserError(f"buffer {key[1]!r} of {key[0]} has two sizes in the layouts to be merged.")
        pieces += layout.pieces
        tied |= layout.tied
    return Layout(tensors=tensors, pieces=tuple(dict.fromkeys(pieces)), buffers=buffers, tied=tied)
