"""Layouts by the names people know: replicated, split, fused, experts, padded vocabulary, ZeRO's flat ranges.

`parts` is always a list of lists of holders: the holders of part 0, of part 1, and so on. Holders of one part
are replicas. A stage of a pipeline is the layout of its tensors over its holders; `merged` joins the stages.

A `Cut` is one part's share of one dimension: even, fused, by experts, padded. Cuts along several dimensions
make a grid of parts. A `Shard` is one part's share in the tensor's own number of dimensions: blocks of the
tensor, and where each begins in the shard. Shards become layouts by `laid_out` (each in a buffer of its own)
or by `flat` and `flat_by_tensor` (ranges of their concatenation: ZeRO over tensor parallelism over anything).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from everstep.errors import UserError
from everstep.layout.box import Box, Shape, flat_range, offset_of, row_major, whole
from everstep.layout.layout import Holder, Layout, Piece, Tensor

Parts = Sequence[Sequence[Holder]]


@dataclass(frozen=True, slots=True)
class Shard:
    """`blocks`: a box of the tensor, and the index of the shard at which its first element lies."""

    tensor: Tensor
    shape: Shape
    blocks: tuple[tuple[Box, Shape], ...]


@dataclass(frozen=True, slots=True)
class PartSpans:
    """`length` of a part along a dimension, and its spans: (start in the tensor, size, start in the part)."""

    length: int
    spans: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A sub-parameter along the split dimension: `split` over the parts, or whole in each of them; `widths`:
    what each part has of it, where that is not even.
    """

    size: int
    split: bool = True
    widths: tuple[int, ...] | None = None


def replicated(tensor: Tensor, holders: Sequence[Holder]) -> Layout:
    return laid_out(tensor, [holders], [whole_shard(tensor)])


def split(tensor: Tensor, dim: int, parts: Parts, sizes: Sequence[int] | None = None) -> Layout:
    """Cut along `dim`, evenly (the first parts one longer where it does not divide) or by `sizes`."""
    return laid_out(tensor, parts, split_shards(tensor, dim, len(parts), sizes))


def fused(tensor: Tensor, dim: int, segments: Sequence[Segment | int], parts: Parts) -> Layout:
    """Sub-parameters one after the other along `dim` (Q|K|V, gate|up); every part has some of each.

    For grouped heads give k and v their own sizes; where there are fewer of them than parts, `split=False`.
    """
    return laid_out(tensor, parts, fused_shards(tensor, dim, segments, len(parts)))


def experts(tensor: Tensor, num_experts: int, parts: Parts, inner_dim: int | None = None) -> Layout:
    """Experts along dimension 0, each whole on one part; or with `inner_dim`, each split over all parts.

    Dimension 0 is `num_experts` long, or a multiple of it (experts one after the other).
    """
    return laid_out(tensor, parts, expert_shards(tensor, num_experts, len(parts), inner_dim))


def padded(tensor: Tensor, dim: int, parts: Parts, multiple: int) -> Layout:
    """A vocabulary made longer to divide: shards are of the padded size, padding is no part of the tensor."""
    return laid_out(tensor, parts, padded_shards(tensor, dim, len(parts), multiple))


def transposed(tensor: Tensor, order: Sequence[int], holders: Sequence[Holder]) -> Layout:
    """Whole, in memory with the dimensions in another order."""
    shape = [tensor.shape[d] for d in order]
    strides = [0] * len(shape)
    for d, stride in zip(order, row_major(shape), strict=True):
        strides[d] = stride
    piece = Piece(
        tensor=tensor.name,
        box=whole(tensor.shape),
        holders=tuple(holders),
        buffer=tensor.name,
        offset=0,
        strides=tuple(strides),
    )
    return Layout(
        tensors={tensor.name: tensor},
        pieces=(piece,),
        buffers={(holder, tensor.name): tensor.num_elements for holder in holders},
    )


def tied(layout: Layout, pairs: Mapping[str, str]) -> Layout:
    """Other names for tensors that are there. The holders of a tied tensor are those of its pieces."""
    return Layout(tensors=layout.tensors, pieces=layout.pieces, buffers=layout.buffers, tied=dict(pairs))


# Shards.


def whole_shard(tensor: Tensor) -> Shard:
    return Shard(tensor, tensor.shape, ((whole(tensor.shape), (0,) * len(tensor.shape)),))


def split_shards(tensor: Tensor, dim: int, count: int, sizes: Sequence[int] | None = None) -> list[Shard]:
    return cut_shards(tensor, {dim: split_cuts(tensor, dim, count, sizes)})


def fused_shards(tensor: Tensor, dim: int, segments: Sequence[Segment | int], count: int) -> list[Shard]:
    return cut_shards(tensor, {dim: fused_cuts(tensor, dim, segments, count)})


def expert_shards(tensor: Tensor, num_experts: int, count: int, inner_dim: int | None = None) -> list[Shard]:
    dim = inner_dim or 0
    return cut_shards(tensor, {dim: expert_cuts(tensor, num_experts, count, inner_dim)})


def padded_shards(tensor: Tensor, dim: int, count: int, multiple: int) -> list[Shard]:
    return cut_shards(tensor, {dim: padded_cuts(tensor, dim, count, multiple)})


def cut_shards(tensor: Tensor, cuts: Mapping[int, Sequence[PartSpans]]) -> list[Shard]:
    """The grid of parts of the dimensions' cuts, the part number of the last one changing fastest."""
    shards = []
    for chosen in product(*cuts.values()):
        mine = dict(zip(cuts, chosen, strict=True))
        each = [mine.get(d, PartSpans(n, ((0, n, 0),))) for d, n in enumerate(tensor.shape)]
        blocks = []
        for spans in product(*(cut.spans for cut in each)):
            start, size, at = zip(*spans, strict=True) if spans else ((), (), ())
            blocks.append((Box(start, size), at))
        shards.append(Shard(tensor, tuple(cut.length for cut in each), tuple(blocks)))
    return shards


def split_cuts(tensor: Tensor, dim: int, count: int, sizes: Sequence[int] | None = None) -> list[PartSpans]:
    length = _length(tensor, dim)
    each = list(sizes) if sizes is not None else _even(length, count)
    if len(each) != count or sum(each) != length or min(each, default=0) < 0:
        raise UserError(
            f"tensor {tensor.name!r} has {length} along dimension {dim}; sizes {each} do not add up to it "
            f"over {count} parts."
        )
    return [_joined([(sum(each[:i]), size)]) for i, size in enumerate(each)]


def fused_cuts(tensor: Tensor, dim: int, segments: Sequence[Segment | int], count: int) -> list[PartSpans]:
    kinds = [segment if isinstance(segment, Segment) else Segment(segment) for segment in segments]
    if sum(segment.size for segment in kinds) != _length(tensor, dim):
        raise UserError(
            f"tensor {tensor.name!r} has {tensor.shape[dim]} along dimension {dim}; its sub-parameters "
            f"{[segment.size for segment in kinds]} do not add up to it."
        )
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    begin = 0
    for segment in kinds:
        widths = list(segment.widths or _even(segment.size, count))
        if len(widths) != count or sum(widths) != segment.size:
            raise UserError(
                f"tensor {tensor.name!r}: widths {widths} are not {segment.size} over {count} parts."
            )
        for i, mine in enumerate(ranges):
            mine.append((begin + sum(widths[:i]), widths[i]) if segment.split else (begin, segment.size))
        begin += segment.size
    return [_joined(mine) for mine in ranges]


def expert_cuts(
    tensor: Tensor, num_experts: int, count: int, inner_dim: int | None = None
) -> list[PartSpans]:
    if _length(tensor, 0) % num_experts:
        raise UserError(
            f"tensor {tensor.name!r} has {tensor.shape[0]} rows, which are not {num_experts} experts' alike."
        )
    rows = tensor.shape[0] // num_experts
    if inner_dim is None:
        return split_cuts(tensor, 0, count, [n * rows for n in _even(num_experts, count)])
    if inner_dim == 0:
        return fused_cuts(tensor, 0, [rows] * num_experts, count)
    return split_cuts(tensor, inner_dim, count)


def padded_cuts(tensor: Tensor, dim: int, count: int, multiple: int) -> list[PartSpans]:
    length = _length(tensor, dim)
    step = multiple * count
    each = -(-length // step) * step // count
    return [
        PartSpans(each, _joined([(i * each, max(0, min(each, length - i * each)))]).spans)
        for i in range(count)
    ]


# From shards to layouts.


def laid_out(tensor: Tensor, parts: Parts, shards: Sequence[Shard]) -> Layout:
    """Every shard in a row-major buffer of its own, named as the tensor."""
    pieces: list[Piece] = []
    buffers: dict[tuple[Holder, str], int] = {}
    for holders, shard in zip(parts, shards, strict=True):
        strides = row_major(shard.shape)
        buffers |= {(holder, tensor.name): prod(shard.shape) for holder in holders}
        pieces += [
            Piece(
                tensor=tensor.name,
                box=box,
                holders=tuple(holders),
                buffer=tensor.name,
                offset=offset_of(at, strides),
                strides=strides,
            )
            for box, at in shard.blocks
            if box.volume
        ]
    return Layout(tensors={tensor.name: tensor}, pieces=tuple(pieces), buffers=buffers)


def flat(
    given: Sequence[Shard | Tensor], holders: Sequence[Holder], *, align: int = 1, buffer: str = "flat"
) -> Layout:
    """ZeRO-1 and 2: all shards one after the other, padded to `align` x holders, in equal ranges."""
    shards = _shards(given)
    total = sum(prod(shard.shape) for shard in shards)
    step = align * len(holders)
    each = -(-total // step) * step // len(holders)
    pieces: list[Piece] = []
    begin = 0
    for shard in shards:
        size = prod(shard.shape)
        for rank, holder in enumerate(holders):
            low, high = max(begin, rank * each), min(begin + size, (rank + 1) * each)
            pieces += _ranged(shard, holder, buffer, low - begin, high - begin, low - rank * each)
        begin += size
    tensors = {shard.tensor.name: shard.tensor for shard in shards}
    return Layout(
        tensors=tensors, pieces=tuple(pieces), buffers={(holder, buffer): each for holder in holders}
    )


def flat_by_tensor(
    given: Sequence[Shard | Tensor], holders: Sequence[Holder], *, buffer: str = "flat"
) -> Layout:
    """ZeRO-3: every shard in equal ranges, padded alone; a holder's ranges lie one after the other."""
    shards = _shards(given)
    pieces: list[Piece] = []
    at = 0
    for shard in shards:
        size = prod(shard.shape)
        each = -(-size // len(holders))
        for rank, holder in enumerate(holders):
            pieces += _ranged(shard, holder, buffer, rank * each, min(size, (rank + 1) * each), at)
        at += each
    tensors = {shard.tensor.name: shard.tensor for shard in shards}
    return Layout(tensors=tensors, pieces=tuple(pieces), buffers={(holder, buffer): at for holder in holders})


def _shards(given: Sequence[Shard | Tensor]) -> list[Shard]:
    return [one if isinstance(one, Shard) else whole_shard(one) for one in given]


def _ranged(shard: Shard, holder: Holder, buffer: str, low: int, high: int, at: int) -> Iterable[Piece]:
    """The elements low..high of a shard, which lie from `at` on in the holder's buffer."""
    strides = row_major(shard.shape)
    for local in flat_range(shard.shape, low, high):
        for box, corner in shard.blocks:
            shared = local.meet(Box(corner, box.size)) if box.volume else None
            if shared is None:
                continue
            by = [a - b for a, b in zip(box.start, corner, strict=True)]
            yield Piece(
                tensor=shard.tensor.name,
                box=shared.moved(by),
                holders=(holder,),
                buffer=buffer,
                offset=at + offset_of(shared.start, strides) - low,
                strides=strides,
            )


def _joined(ranges: Sequence[tuple[int, int]]) -> PartSpans:
    """Ranges of a dimension, one after the other."""
    spans, at = [], 0
    for start, size in ranges:
        spans += [(start, size, at)] if size else []
        at += size
    return PartSpans(at, tuple(spans))


def _even(length: int, count: int) -> list[int]:
    return [length // count + (i < length % count) for i in range(count)]


def _length(tensor: Tensor, dim: int) -> int:
    if not 0 <= dim < len(tensor.shape):
        raise UserError(f"tensor {tensor.name!r} has {len(tensor.shape)} dimensions, and no dimension {dim}.")
    return tensor.shape[dim]
