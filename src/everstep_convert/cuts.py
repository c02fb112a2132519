"""Which elements of a tensor each of several parts has: split, fused, by experts, padded.

A cut is one part's share of one dimension. Cuts along several dimensions make a grid of parts. A `Shard` is
one part's share in the tensor's own number of dimensions: blocks of the tensor, and where each begins in the
shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from everstep.errors import UserError
from everstep.layout.box import Box, Shape, whole
from everstep.layout.tensor import Tensor


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


def whole_shard(tensor: Tensor) -> Shard:
    return Shard(tensor, tensor.shape, ((whole(tensor.shape), (0,) * len(tensor.shape)),))


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
