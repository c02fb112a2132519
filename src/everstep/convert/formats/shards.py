"""Tensor-parallel shards of one parameter made whole again, by the rules a checkpoint or a user gives.

`ShardRules.whole(name, shards)` weaves the shards of all tensor-parallel ranks into the logical tensor. The
rules are our patterns, or the regular expressions of DeepSpeed's `universal_checkpoint_info`. Where they say
that all ranks hold the same, all are read and compared: a wrong rule is refused by the parameter's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.convert.woven import Mean, Woven, WovenBlock, copies, one_type
from everstep.errors import UserError
from everstep.layout.box import Box, whole
from everstep.layout.builders import Shard
from everstep.layout.layout import Tensor
from everstep.layout.patterns import Pattern, Patterns
from everstep.store.stored import Stored


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
            return _of_deepspeed(self.info, name, shards)
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
        pattern = self.pattern(name, shards)
        if len(held) < ranks and pattern.kind != "unique":
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
        known = self.info.get("vocabulary_parameter_patterns", [])
        padded = any(re.match(p, name) for p in known) or (
            self.patterns is not None and self.vocab is not None and self.patterns.of(name).pad_to is not None
        )
        if not padded or not length or stored.shape[0] <= length:
            return stored
        shape = (int(length), *stored.shape[1:])
        axes = tuple(range(len(shape)))
        return Woven(stored.dtype, shape, (WovenBlock(whole(shape), stored, (0,) * len(shape), axes),))


def _woven(name: str, pattern: Pattern, shards: Sequence[Stored]) -> Stored:
    first = shards[0]
    one_type(f"parameter {name!r}", shards)
    dim = pattern.dim or 0
    length = sum(shard.shape[dim] for shard in shards)
    if pattern.parts is not None:
        length = sum(part if isinstance(part, int) else int(part[1:]) for part in pattern.parts)
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    if pattern.pad_to is not None:  # the whole is the padded one here; its padding goes later
        pattern = replace(pattern, pad_to=None)
    if pattern.experts is None and pattern.parts is None:
        pattern = replace(pattern, sizes=tuple(shard.shape[dim] for shard in shards))
    tensor = Tensor(name=name, shape=shape, dtype=first.dtype)
    blocks: list[WovenBlock] = []
    for mine, shard in zip(pattern.shards(tensor, len(shards)), shards, strict=True):
        if mine.shape != shard.shape:
            raise UserError(
                f"parameter {name!r} has shards of shape {list(shard.shape)}, and its pattern "
                f"{pattern.match!r} says {list(mine.shape)}."
            )
        blocks += blocks_of(mine, shard)
    return Woven(first.dtype, shape, tuple(blocks))


def blocks_of(shard: Shard, stored: Stored) -> list[WovenBlock]:
    axes = tuple(range(len(shard.shape)))
    return [WovenBlock(box, stored, corner, axes) for box, corner in shard.blocks]


def cut_for(shard: Shard, stored: Stored) -> Stored:
    """A shard of a whole tensor, padding zero: the other way round."""
    axes = tuple(range(len(shard.shape)))
    blocks = tuple(WovenBlock(Box(corner, box.size), stored, box.start, axes) for box, corner in shard.blocks)
    return Woven(stored.dtype, shard.shape, blocks, padded=True)


def _of_deepspeed(info: Mapping[str, Any], name: str, shards: Sequence[Stored]) -> Pattern:
    def matches(key: str) -> bool:
        return any(re.match(pattern, name) for pattern in info.get(key, []))

    exact = re.escape(name)
    if matches("tp_replicated_parameter_patterns"):
        return Pattern(match=exact, kind="replicated")
    if matches("parameter_to_average_patterns"):
        return Pattern(match=exact, kind="average")
    total = sum(shard.shape[0] for shard in shards) if shards[0].shape else 0
    if matches("parameter_with_2_sub_params_cat_dim_0"):
        return Pattern(match=exact, kind="fragment", dim=0, parts=(total // 2, total // 2))
    for row in info.get("parameter_with_sub_params", []):
        table = row if isinstance(row, Mapping) else row.__dict__["state"]
        if any(re.match(pattern, name) for pattern in table["patterns"]):
            dim = int(table["partition_dim"])
            sizes = table["shape"][dim]
            parts = tuple(sizes) if isinstance(sizes, list | tuple) else None
            return Pattern(match=exact, kind="fragment", dim=dim, parts=parts)
    dim = 1 if matches("parameter_with_row_parallelism_patterns") else 0
    return Pattern(match=exact, kind="fragment", dim=dim)
