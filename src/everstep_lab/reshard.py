"""From one layout to another: who sends what to whom, with the fewest bytes.

Every holder of the target needs its boxes. What it has already it copies within its own memory; the rest
comes, every element once, from the nearest holder that has it. Among equally near ones a large box is cut
into as many parts as there are holders, and a small one comes from the holder that has sent least so far.

    needed by w = boxes of w in b  -  boxes of w in a      this is the least anyone can move, and it is moved

A tensor that is combined by mean has no single right holder: every holder of an element sends its share, the
target adds the shares up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from everstep.errors import UserError
from everstep.layout.box import Box, Shape
from everstep.layout.tensor import ITEM_BYTES, Tensor
from everstep_lab.layout import Holder, Layout, Piece

Distance = Callable[[Holder, Holder], float]
CUT_ELEMENTS = 1 << 14  # below this a box is not worth cutting


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A strided copy from one buffer to another. `share` (i, n): add value / n; the first of n sets."""

    tensor: str
    size: Shape
    source: Holder
    source_buffer: str
    source_offset: int
    source_strides: Shape
    target: Holder
    target_buffer: str
    target_offset: int
    target_strides: Shape
    num_bytes: int
    share: tuple[int, int] = (0, 1)

    @property
    def is_local(self) -> bool:
        return self.source == self.target

    @property
    def stays(self) -> bool:
        """The same place of the same buffer: nothing to do, if the buffer itself stays."""
        return (
            self.is_local
            and self.share == (0, 1)
            and (self.source_buffer, self.source_offset, self.source_strides)
            == (self.target_buffer, self.target_offset, self.target_strides)
        )


@dataclass(frozen=True, slots=True)
class Transfers:
    """All that has to be copied to get from one layout to another."""

    transfers: tuple[Transfer, ...]

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self.transfers)

    @property
    def moved_bytes(self) -> int:
        """Between different holders."""
        return sum(t.num_bytes for t in self.transfers if not t.is_local)

    def sent_bytes(self) -> dict[Holder, int]:
        sent: dict[Holder, int] = {}
        for t in self.transfers:
            if not t.is_local:
                sent[t.source] = sent.get(t.source, 0) + t.num_bytes
        return sent

    def received_bytes(self) -> dict[Holder, int]:
        received: dict[Holder, int] = {}
        for t in self.transfers:
            if not t.is_local:
                received[t.target] = received.get(t.target, 0) + t.num_bytes
        return received


def reshard(a: Layout, b: Layout, distance: Distance = lambda source, target: 1.0) -> Transfers:
    """The transfers that turn buffers laid out as `a` into buffers laid out as `b`."""
    sources = {name: Sources(a, name) for name in {a.tied.get(n, n) for n in b.tensors}}
    sent: dict[Holder, int] = {}
    found: list[Transfer] = []
    for piece in b.pieces:
        name = a.tied.get(piece.tensor, piece.tensor)
        tensor = _same_tensor(a, b, name, piece.tensor)
        if tensor.combine == "mean" and b.tensors[piece.tensor].combine == "same":
            found += _averaged(sources[name], piece, tensor)
            continue
        for target in piece.holders:
            for box, source, holder in _fetched(sources[name], piece.box, target, distance, sent):
                num_bytes = box.volume * ITEM_BYTES[tensor.dtype]
                if holder != target:
                    sent[holder] = sent.get(holder, 0) + num_bytes
                found.append(_transfer(box, source, holder, piece, target, num_bytes))
    return Transfers(tuple(found))


def least_bytes(a: Layout, b: Layout) -> int:
    """What must cross between holders, however it is done: for each, what it needs and has not."""
    total = 0
    for piece in b.pieces:
        name = a.tied.get(piece.tensor, piece.tensor)
        for target in piece.holders:
            left = [piece.box]
            for source in a.of(name):
                if target in source.holders:
                    left = [rest for box in left for rest in box.minus(source.box)]
            total += sum(box.volume for box in left) * ITEM_BYTES[b.tensors[piece.tensor].dtype]
    return total


class Sources:
    """The pieces of one tensor, found by their first dimension."""

    def __init__(self, layout: Layout, name: str) -> None:
        pieces = [piece for piece in layout.of(name) if piece.box.volume]
        self.pieces = sorted(pieces, key=lambda piece: piece.box.start[:1])
        self.starts = [piece.box.start[0] if piece.box.start else 0 for piece in self.pieces]
        self.longest = max((piece.box.size[0] for piece in pieces if piece.box.size), default=1)

    def meeting(self, box: Box) -> Iterator[tuple[Box, Piece]]:
        if not box.volume:
            return
        low, high = 0, len(self.pieces)
        if box.start:
            low = bisect_left(self.starts, box.start[0] - self.longest + 1)
            high = bisect_right(self.starts, box.start[0] + box.size[0] - 1)
        for piece in self.pieces[low:high]:
            shared = box.meet(piece.box)
            if shared is not None:
                yield shared, piece


def _same_tensor(a: Layout, b: Layout, name: str, wanted: str) -> Tensor:
    tensor, goal = a.tensors.get(name), b.tensors[wanted]
    if tensor is None:
        raise UserError(f"tensor {wanted!r} is not in the layout to start from; add it or rename it.")
    if (tensor.shape, tensor.dtype) != (goal.shape, goal.dtype):
        raise UserError(
            f"tensor {wanted!r} is {tensor.dtype} {list(tensor.shape)} in one layout and {goal.dtype} "
            f"{list(goal.shape)} in the other; reshard moves elements, it does not convert them."
        )
    return tensor


def _fetched(
    sources: Sources, wanted: Box, target: Holder, distance: Distance, sent: dict[Holder, int]
) -> Iterator[tuple[Box, Piece, Holder]]:
    """Boxes that make up `wanted`, each with the piece and the holder it comes from."""
    left = [wanted] if wanted.volume else []
    for near in _by_distance(sources, wanted, target, distance):
        again: list[Box] = []
        for box in left:
            rests = [box]
            for piece, holders in sorted(near, key=lambda n: min(sent.get(h, 0) for h in n[1])):
                kept: list[Box] = []
                for rest in rests:
                    shared = rest.meet(piece.box)
                    if shared is None:
                        kept.append(rest)
                        continue
                    yield from _spread(shared, piece, holders, target, sent)
                    kept += rest.minus(shared)
                rests = kept
            again += rests
        left = again
        if not left:
            return
    if left:
        raise UserError(f"no worker holds the elements from {list(left[0].start)} on that {target} needs.")


def _by_distance(
    sources: Sources, wanted: Box, target: Holder, distance: Distance
) -> Iterator[list[tuple[Piece, list[Holder]]]]:
    """The pieces that meet a box, nearest holders first; each time all that are equally near."""
    rings: dict[float, list[tuple[Piece, list[Holder]]]] = {}
    for _, piece in sources.meeting(wanted):
        own: dict[float, list[Holder]] = {}
        for holder in piece.holders:
            own.setdefault(-1.0 if holder == target else distance(holder, target), []).append(holder)
        for ring, holders in own.items():
            rings.setdefault(ring, []).append((piece, holders))
    for ring in sorted(rings):
        yield rings[ring]


def _spread(
    box: Box, piece: Piece, holders: list[Holder], target: Holder, sent: dict[Holder, int]
) -> Iterator[tuple[Box, Piece, Holder]]:
    cuts = _cut(box, len(holders)) if box.volume >= CUT_ELEMENTS and len(holders) > 1 else [box]
    idlest = sorted(holders, key=lambda holder: sent.get(holder, 0))
    for i, cut in enumerate(cuts):
        yield cut, piece, idlest[i % len(idlest)]


def _averaged(sources: Sources, piece: Piece, tensor: Tensor) -> Iterator[Transfer]:
    """Shares of every holder. All holders of an element must hold the same box of it."""
    groups: dict[Box, list[tuple[Piece, Holder]]] = {}
    for shared, source in sources.meeting(piece.box):
        groups.setdefault(shared, []).extend((source, holder) for holder in source.holders)
    boxes = list(groups)
    if any(x.meet(y) is not None for i, x in enumerate(boxes) for y in boxes[:i]):
        raise UserError(f"tensor {tensor.name!r} is to be averaged, but its holders hold different parts.")
    for box, holders in groups.items():
        num_bytes = box.volume * ITEM_BYTES[tensor.dtype]
        for target in piece.holders:
            for i, (source, holder) in enumerate(holders):
                yield _transfer(box, source, holder, piece, target, num_bytes, share=(i, len(holders)))


def _transfer(
    box: Box,
    source: Piece,
    holder: Holder,
    piece: Piece,
    target: Holder,
    num_bytes: int,
    share: tuple[int, int] = (0, 1),
) -> Transfer:
    return Transfer(
        tensor=piece.tensor,
        size=box.size,
        source=holder,
        source_buffer=source.buffer,
        source_offset=source.at(box),
        source_strides=source.strides,
        target=target,
        target_buffer=piece.buffer,
        target_offset=piece.at(box),
        target_strides=piece.strides,
        num_bytes=num_bytes,
        share=share,
    )


def _cut(box: Box, parts: int) -> list[Box]:
    """Up to `parts` boxes of nearly the same size, cut along the first dimension that allows it."""
    d = next((i for i, n in enumerate(box.size) if n >= parts), None)
    if d is None or parts < 2:
        return [box]
    edges = [box.size[d] * i // parts for i in range(parts + 1)]
    return [
        Box(
            (*box.start[:d], box.start[d] + low, *box.start[d + 1 :]),
            (*box.size[:d], high - low, *box.size[d + 1 :]),
        )
        for low, high in pairwise(edges)
    ]
