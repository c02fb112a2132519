"""Tensor-parallel shards of one parameter made whole again, by the rules a checkpoint or a user gives.

`ShardRules.whole(name, shards)` weaves the shards of all tensor-parallel ranks into the logical tensor. The
rules are our patterns, or the regular expressions of DeepSpeed's `universal_checkpoint_info`. Where they say
that all ranks hold the same, all are read and compared: a wrong rule is refused by the parameter's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from everstep.errors import UserError
from everstep.layout.box import Box, Shape, overlapping, row_major, uncovered, whole
from everstep.layout.tensor import Tensor
from everstep.store.stored import Stored
from everstep_convert.cuts import Shard
from everstep_convert.patterns import Pattern, Patterns
from everstep_convert.woven import Mean, Twice, Woven, WovenBlock, copies, one_type, viewed


@dataclass(frozen=True)
class ShardRules:
    """How parameters lie over tensor-parallel ranks; `vocab`: the real length of padded dimensions."""

    patterns: Patterns | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    vocab: int | None = None

    def pattern(self, name: str, shards: Sequence[Stored]) -> Pattern:
        if self.patterns is not None:
            return self.patterns.of(name)
        if self.info:
            rows = sum(shard.shape[0] for shard in shards) if shards[0].shape else 0
            return _of_deepspeed(self.info, name, rows)
        raise UserError(
            f"parameter {name!r} is split over {len(shards)} tensor-parallel ranks, and the checkpoint does "
            "not say how; give --patterns."
        )

    def whole(self, name: str, held: Mapping[int, Stored], ranks: int, key: str = "") -> Stored:
        """`held`: the shard of every rank that has one; `key`: of an optimizer's state, for messages."""
        shards = list(held.values())
        if ranks == 1:
            return self._stripped(name, shards[0])
        what = f"{key} of parameter {name!r}" if key else f"parameter {name!r}"
        places = [f"tensor-parallel rank {rank}" for rank in held]
        if self.patterns is None and len(held) == ranks and shards[0].shape:
            require_known(self.info)
            made = _by_map(self.info, name, shards) or _by_sub_params(self.info, name, shards)
            if made is not None:
                return self._stripped(name, made)
        pattern = self.pattern(name, shards)
        alone = pattern.kind == "unique" or (self.patterns is None and pattern.kind == "replicated")
        if len(held) < ranks and not alone:
            raise UserError(
                f"{what} is on {len(held)} of {ranks} tensor-parallel ranks, and its pattern says "
                f'{pattern.kind}; give it a pattern of kind = "unique", or restore the other files.'
            )
        if pattern.kind in ("replicated", "unique") or not shards[0].shape:  # no shape: a count of steps
            return copies(what, places, shards, 'give it a pattern of kind = "fragment" or "average"')
        if pattern.kind == "average":
            one_type(what, shards)
            return Mean(tuple(shards))
        return self._stripped(name, _woven(name, pattern, shards))

    def _stripped(self, name: str, stored: Stored) -> Stored:
        """Without the padding of the vocabulary."""
        length = self.vocab or self.info.get("original_vocab_size")
        known = self.info.get("vocabulary_parameter_patterns") or ()
        padded = bool(_matched(known, name)) or (
            self.patterns is not None and self.vocab is not None and self.patterns.of(name).pads_rows
        )
        if not padded or not length or not stored.shape or stored.shape[0] <= length:
            return stored
        shape = (int(length), *stored.shape[1:])
        axes = tuple(range(len(shape)))
        return Woven(stored.dtype, shape, (WovenBlock(whole(shape), stored, (0,) * len(shape), axes),))


def _woven(name: str, pattern: Pattern, shards: Sequence[Stored]) -> Stored:
    shape, sized = pattern.resized([shard.shape for shard in shards])
    tensor = Tensor(name=name, shape=shape, dtype=one_type(f"parameter {name!r}", shards))
    return _joined(tensor, sized.shards(tensor, len(shards)), shards, f"its pattern {pattern.match!r}")


def _joined(tensor: Tensor, layout: Sequence[Shard], shards: Sequence[Stored], by: str) -> Stored:
    """The whole of what the ranks hold. Sub-parameters that several hold are compared."""
    blocks: list[WovenBlock] = []
    places: list[str] = []
    axes = tuple(range(len(tensor.shape)))
    for rank, (mine, shard) in enumerate(zip(layout, shards, strict=True)):
        if mine.shape != shard.shape:
            raise UserError(
                f"parameter {tensor.name!r} has shards of shape {list(shard.shape)}, and {by} says "
                f"{list(mine.shape)}."
            )
        blocks += [WovenBlock(box, shard, corner, axes) for box, corner in mine.blocks if box.volume]
        places += [f"tensor-parallel rank {rank}" for box, _ in mine.blocks if box.volume]
    boxes = [block.box for block in blocks]
    if uncovered(tensor.shape, boxes) is not None:
        raise UserError(f"parameter {tensor.name!r} is not whole by {by}: no rank holds some of it.")
    twice = Twice(f"parameter {tensor.name!r}", tuple(places), f"{by} is not that of these files")
    return Woven(
        tensor.dtype, tensor.shape, tuple(blocks), twice=twice if overlapping(boxes) is not None else None
    )


# DeepSpeed's universal_checkpoint_info.

KNOWN = {
    "universal_checkpoint_version", "original_vocab_size", "padded_vocab_size",
    "vocabulary_parameter_patterns", "pipeline_replicated_parameter_patterns",
    "tp_replicated_parameter_patterns", "parameter_to_average_patterns",
    "parameter_with_row_parallelism_patterns", "parameter_with_2_sub_params_cat_dim_0",
    "parameter_with_sub_params", "sub_param_shard_widths", "affine_map",
    "autotp_unsupported_parameter_patterns", "expert_parameter_patterns", "ds_autoep_layers",
}  # fmt: skip
AFFINE_VERSION = 1


def require_known(info: Mapping[str, Any]) -> None:
    """A key of a later version could change what the others mean."""
    unknown = sorted(set(info) - KNOWN)
    if unknown:
        raise UserError(f"universal_checkpoint_info has {unknown[0]!r}, which is not known; give --patterns.")


def _matched(patterns: Iterable[str], name: str) -> list[str]:
    return [pattern for pattern in patterns if re.match(pattern, name)]


def _of_deepspeed(info: Mapping[str, Any], name: str, rows: int) -> Pattern:
    """The rule of a name; DeepSpeed's own order of precedence. `rows`: of the whole tensor."""

    def matches(key: str) -> bool:
        return bool(_matched(info.get(key) or (), name))

    exact = re.escape(name)
    if matches("autotp_unsupported_parameter_patterns"):
        raise UserError(f"DeepSpeed could not say how parameter {name!r} is split; give --patterns.")
    if matches("tp_replicated_parameter_patterns"):
        return Pattern(match=exact, kind="replicated")
    if matches("parameter_to_average_patterns"):
        return Pattern(match=exact, kind="average")
    if matches("parameter_with_2_sub_params_cat_dim_0"):
        return Pattern(match=exact, kind="fragment", dim=0, parts=(rows // 2, rows // 2))
    dim = 1 if matches("parameter_with_row_parallelism_patterns") else 0
    return Pattern(match=exact, kind="fragment", dim=dim)


def carried_pattern(info: Mapping[str, Any], name: str, shape: Shape) -> Pattern:
    """The rule of a name for a whole tensor: how it is split again, over another number of ranks."""
    exact = re.escape(name)
    for row in info.get("parameter_with_sub_params") or ():
        table = row if isinstance(row, Mapping) else row.__dict__["state"]
        if _matched(table["patterns"], name):
            dim, spec = int(table["partition_dim"]), list(table["shape"])
            if len(spec) != len(shape):
                raise UserError(f"{name!r} is split in a view of other dimensions; give --to-patterns.")
            count = spec[dim]
            sizes = count if isinstance(count, list | tuple) else (shape[dim] // count,) * count
            return Pattern(match=exact, kind="fragment", dim=dim, parts=tuple(sizes))
    rule = _of_deepspeed(info, name, shape[0] if shape else 0)
    params = (info.get("affine_map") or {}).get("params") or {}
    if rule.kind == "fragment" and (found := _matched(params, name)):
        rule = replace(rule, dim=_split_dim(name, params[found[0]]))
    if rule.kind == "fragment" and _matched(info.get("vocabulary_parameter_patterns") or (), name):
        rule = replace(rule, pad_to=1)
    return rule


def _split_dim(name: str, entry: Mapping[str, Any]) -> int:
    """Along which an affine map splits, if every rank has one box."""
    whole_, ranks = list(entry["logical_shape"]), list(entry["ranks"].values())
    shapes = [list(rank["shard_shape"]) for rank in ranks]
    dims = {d for shape in shapes for d, (n, m) in enumerate(zip(whole_, shape, strict=True)) if n != m}
    if len(dims) != 1 or any(len(rank["pieces"]) > 1 for rank in ranks):
        raise UserError(f"{name!r} is split by an affine_map for other ranks; give --to-patterns.")
    return dims.pop()


def _by_map(info: Mapping[str, Any], name: str, shards: Sequence[Stored]) -> Stored | None:
    """By the parameter's affine map: boxes of the whole, and where each lies in a rank's shard."""
    table = info.get("affine_map") or {}
    found = _matched(table.get("params") or {}, name)
    if not found:
        return None
    if int(table.get("version") or 1) > AFFINE_VERSION:
        raise UserError(f"its affine_map is of version {table['version']}; known is {AFFINE_VERSION}.")
    entry = table["params"][found[0]]
    dtype = one_type(f"parameter {name!r}", shards)
    tensor = Tensor(name=name, shape=tuple(entry["logical_shape"]), dtype=dtype)
    ranks = {int(rank): one for rank, one in entry["ranks"].items()}
    if sorted(ranks) != list(range(len(shards))):
        raise UserError(
            f"the affine_map of {name!r} is of ranks {sorted(ranks)}, and there are {len(shards)}."
        )
    layout = []
    for rank, shard in enumerate(shards):
        shape = tuple(ranks[rank]["shard_shape"])
        blocks = [_box_of(piece, tensor, shape) for piece in ranks[rank]["pieces"] if prod(piece["shape"])]
        if prod(shape) == prod(shard.shape):  # an empty shard may be of any shape
            shape = shard.shape if not prod(shape) else shape
        layout.append(Shard(tensor, shape, tuple(blocks)))
    return _joined(tensor, layout, shards, "its affine_map")


def _box_of(piece: Mapping[str, Any], tensor: Tensor, shard: Shape) -> tuple[Box, Shape]:
    """An affine piece has strides on both sides; DeepSpeed writes those of boxes."""
    size = tuple(piece["shape"])
    where = f"the affine_map of {tensor.name!r}"
    corners = []
    for (offset, strides), shape in ((piece["source"], tensor.shape), (piece["dest"], shard)):
        usual = row_major(shape)
        if len(size) != len(shape) or any(
            n > 1 and a != b for n, a, b in zip(size, strides, usual, strict=True)
        ):
            raise UserError(f"{where} has a piece that is not a box; give --patterns.")
        corners.append(tuple(offset // b % n if n else 0 for b, n in zip(usual, shape, strict=True)))
    if float(piece.get("scale", 1.0)) != 1.0:
        raise UserError(f"{where} scales it, which its optimizer state cannot follow; give --patterns.")
    if not (Box(corners[0], size).within(tensor.shape) and Box(corners[1], size).within(shard)):
        raise UserError(f"{where} has a piece that reaches outside; give --patterns.")
    return Box(corners[0], size), corners[1]


def _by_sub_params(info: Mapping[str, Any], name: str, shards: Sequence[Stored]) -> Stored | None:
    """Sub-parameters along a dimension of a view, which may have more dimensions than the parameter."""
    for row in info.get("parameter_with_sub_params") or ():
        table = row if isinstance(row, Mapping) else row.__dict__["state"]
        found = _matched(table["patterns"], name)
        if not found:
            continue
        dim, spec = (
            int(table["partition_dim"]),
            [tuple(n) if isinstance(n, list) else n for n in table["shape"]],
        )
        widths = (info.get("sub_param_shard_widths") or {}).get(found[0])
        sizes: Any = spec[dim]
        if widths is not None:
            sizes = tuple(tuple(one) for one in widths)
        elif not isinstance(sizes, tuple):  # before version 0.4: how many there are, of one size
            sizes = (sum(shard.shape[dim] for shard in shards) // sizes,) * sizes
        return _by_parts(name, spec, dim, sizes, shards)
    return None


def _by_parts(
    name: str, spec: list[Any], dim: int, parts: tuple[Any, ...], shards: Sequence[Stored]
) -> Stored:
    sizes = [n if isinstance(n, int) else sum(n) for n in parts]
    view = [sum(n) if isinstance(n, tuple) else n for n in spec]
    view[dim] = sum(sizes)
    rest = prod(n for n in view if n >= 0)
    view = [_numel(shards) // rest if n < 0 else n for n in view]
    inner = prod(view[dim + 1 :])
    rows = prod(view[:dim]) * inner
    locals_ = []
    for shard in shards:
        if not rows or prod(shard.shape) % rows:
            raise UserError(f"parameter {name!r} of shape {list(shard.shape)} is not a part of {view}.")
        locals_.append(viewed(shard, (*view[:dim], prod(shard.shape) // rows, *view[dim + 1 :])))
    pattern = Pattern(match=re.escape(name), kind="fragment", dim=dim, parts=parts)
    made = _woven(name, pattern, locals_)
    own = shards[0].shape
    grown = next(d for d in range(len(own)) if prod(own[d + 1 :]) <= inner)
    return viewed(made, (*own[:grown], _numel(shards) // (prod(own) // own[grown]), *own[grown + 1 :]))


def _numel(shards: Sequence[Stored]) -> int:
    return sum(prod(shard.shape) for shard in shards)
