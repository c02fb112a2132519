"""Layouts by the names people know: replicated, split, fused, experts, padded vocabulary, ZeRO's flat ranges;
and those of patterns.

`parts` is always a list of lists of holders: the holders of part 0, of part 1, and so on. Holders of one part
are replicas. A stage of a pipeline is the layout of its tensors over its holders; `merged` joins the stages.

Shards become layouts by `laid_out` (each in a buffer of its own) or by `flat` and `flat_by_tensor` (ranges of
their concatenation: ZeRO over tensor parallelism over anything).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Literal

from everstep.layout.box import Box, flat_range, offset_of, row_major, whole
from everstep.layout.tensor import Tensor
from everstep_convert import cuts
from everstep_convert.cuts import Segment, Shard, cut_shards, whole_shard
from everstep_convert.patterns import Patterns
from tests.layout.layout import Holder, Layout, Piece, merged

Parts = Sequence[Sequence[Holder]]


def replicated(tensor: Tensor, holders: Sequence[Holder]) -> Layout:
    return laid_out(tensor, [holders], [whole_shard(tensor)])


def split(tensor: Tensor, dim: int, parts: Parts, sizes: Sequence[int] | None = None) -> Layout:
    """Cut along `dim`, evenly (the first parts one longer where it does not divide) or by `sizes`."""
    return laid_out(tensor, parts, cut_shards(tensor, {dim: cuts.split_cuts(tensor, dim, len(parts), sizes)}))


def fused(tensor: Tensor, dim: int, segments: Sequence[Segment | int], parts: Parts) -> Layout:
    """Sub-parameters one after the other along `dim` (Q|K|V, gate|up); every part has some of each.

    For grouped heads give k and v their own sizes; where there are fewer of them than parts, `split=False`.
    """
    return laid_out(tensor, parts, fused_shards(tensor, dim, segments, len(parts)))


def experts(tensor: Tensor, num_experts: int, parts: Parts, inner_dim: int | None = None) -> Layout:
    """Experts along dimension 0, each whole on one part; or with `inner_dim`, each split over all parts.

    Dimension 0 is `num_experts` long, or a multiple of it (experts one after the other).
    """
    return laid_out(
        tensor,
        parts,
        cut_shards(tensor, {inner_dim or 0: cuts.expert_cuts(tensor, num_experts, len(parts), inner_dim)}),
    )


def padded(tensor: Tensor, dim: int, parts: Parts, multiple: int) -> Layout:
    """A vocabulary made longer to divide: shards are of the padded size, padding is no part of the tensor."""
    return laid_out(
        tensor, parts, cut_shards(tensor, {dim: cuts.padded_cuts(tensor, dim, len(parts), multiple)})
    )


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


def fused_shards(tensor: Tensor, dim: int, segments: Sequence[Segment | int], count: int) -> list[Shard]:
    return cut_shards(tensor, {dim: cuts.fused_cuts(tensor, dim, segments, count)})


def of_patterns(patterns: Patterns, tensors: Iterable[Tensor], parts: Parts) -> Layout:
    """Every tensor over the parts (each a list of replicas), as its pattern says."""
    return merged([_of_pattern(patterns, tensor, parts) for tensor in tensors])


def _of_pattern(patterns: Patterns, tensor: Tensor, parts: Parts) -> Layout:
    pattern = patterns.of(tensor.name)
    holders: list[Holder] = [holder for part in parts for holder in part]
    if pattern.kind == "unique":
        return replicated(tensor, holders[:1])
    if pattern.kind == "replicated":
        return replicated(tensor, holders)
    if pattern.kind == "average":
        return replicated(replace(tensor, combine="mean"), holders)
    return laid_out(tensor, parts, pattern.shards(tensor, len(parts)))


def flat_of_patterns(
    patterns: Patterns, tensors: Iterable[Tensor], parts: Parts, *, stage: Literal[1, 2, 3], align: int = 2
) -> Layout:
    """The same under ZeRO: the replicas of each part hold ranges of its shards, not copies."""
    shards = [patterns.of(tensor.name).shards(tensor, len(parts)) for tensor in tensors]
    found = []
    for i, replicas in enumerate(parts):
        mine = [all_parts[i] for all_parts in shards]
        if stage == 3:
            found.append(flat_by_tensor(mine, replicas))
        else:
            found.append(flat(mine, replicas, align=align))
    return merged(found)


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
