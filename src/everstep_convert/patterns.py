"""Universal Checkpointing's pattern language: a few lines that say how parameters are laid out.

    [[pattern]]                                 every tensor must match exactly one
    match = 'embed\\.weight'                     a regular expression for the whole name
    kind = "fragment"                           unique | replicated | fragment | average
    dim = 0
    pad_to = 128                                padded vocabulary

    [[pattern]]
    match = '.*\\.qkv\\.weight'
    kind = "fragment"
    dim = 0
    parts = [64, 16, 16]                        sub-parameters; "=16" stays whole in every part, and
                                                [10, 6] is split by these widths
    [[pattern]]
    match = '.*\\.experts\\.w1'
    kind = "fragment"
    experts = 8                                 experts dealt out; with dim: each split along it

    [[pattern]]
    match = '.*\\.experts\\.w2'
    kind = "fragment"
    splits = [{dim = 0, over = 4}, {dim = 2, over = 2}]     a grid of 8 parts: part 3 is 1 along dimension 0
                                                and 1 along 2; each has sizes, parts, pad_to, experts too

    unique        on one holder, the first of the given ones       (a stage's own, ZeRO-1 partitions)
    replicated    the same values on all                           (norms under tensor parallelism)
    average       values of their own on all, one by their mean    (params_to_average)

A name that matches none, or two, is an error that says which: a silent default is how weights get lost.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Literal, get_args

from everstep.errors import UserError
from everstep.layout.box import Shape
from everstep.layout.tensor import Tensor
from everstep_convert import cuts
from everstep_convert.cuts import PartSpans, Segment, Shard

Kind = Literal["unique", "replicated", "fragment", "average"]
_ONE_SPLIT = ("dim", "sizes", "parts", "pad_to", "experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class DimensionSplit:
    """Along one dimension, over so many parts: evenly, or as one of the others says."""

    dim: int | None = None  # with `experts` alone: dimension 0
    over: int | None = None  # all the parts that there are
    sizes: tuple[int, ...] | None = None  # of an uneven split, one per part
    parts: tuple[int | str | tuple[int, ...], ...] | None = None  # sub-parameters
    pad_to: int | None = None
    experts: int | None = None

    def check(self, where: str) -> None:
        extras = [name for name in ("sizes", "parts", "pad_to", "experts") if getattr(self, name) is not None]
        if len(extras) > 1:
            raise UserError(f"{where} has both {extras[0]} and {extras[1]}; give one of them.")
        if self.dim is None and self.experts is None:
            raise UserError(f"{where} is a fragment without dim; say along which it is split.")

    def cuts(self, tensor: Tensor, count: int) -> list[PartSpans]:
        dim = self.dim or 0
        if self.experts is not None:
            return cuts.expert_cuts(tensor, self.experts, count, self.dim)
        if self.pad_to is not None:
            return cuts.padded_cuts(tensor, dim, count, self.pad_to)
        if self.parts is not None:
            return cuts.fused_cuts(tensor, dim, [_segment(tensor.name, part) for part in self.parts], count)
        return cuts.split_cuts(tensor, dim, count, self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A fragment has `splits`, or the keys of its only one."""

    match: str
    kind: Kind
    dim: int | None = None
    sizes: tuple[int, ...] | None = None
    parts: tuple[int | str | tuple[int, ...], ...] | None = None
    pad_to: int | None = None
    experts: int | None = None
    splits: tuple[DimensionSplit, ...] = ()

    def __post_init__(self) -> None:
        where = f"pattern {self.match!r}"
        if self.kind not in get_args(Kind):
            raise UserError(f"{where}: kind is {self.kind!r}; it is one of {', '.join(get_args(Kind))}.")
        try:
            re.compile(self.match)
        except re.error as error:
            raise UserError(f"{where} is not a regular expression: {error}.") from None
        keys = [key for key in (*_ONE_SPLIT, "splits") if getattr(self, key) not in (None, ())]
        if self.kind != "fragment" and keys:
            raise UserError(f"{where}: {keys[0]} is for fragments only.")
        if self.splits and len(keys) > 1:
            raise UserError(f"{where} has both splits and {keys[0]}; give one of them.")
        if self.kind == "fragment":
            for split in self.splits or self.split_over(1):
                split.check(where)
        dims = [split.dim or 0 for split in self.splits]
        if len(dims) != len(set(dims)) or any((split.over or 0) < 1 for split in self.splits):
            raise UserError(f"{where}: each of splits needs a dim of its own and over, its number of parts.")

    @property
    def pads_rows(self) -> bool:
        own = self.pad_to is not None and not self.dim
        return own or any(split.pad_to is not None and not split.dim for split in self.splits)

    def split_over(self, count: int) -> tuple[DimensionSplit, ...]:
        """The splits of `count` parts, each with its number of them."""
        if not self.splits:
            return (DimensionSplit(over=count, **{key: getattr(self, key) for key in _ONE_SPLIT}),)
        grid = [split.over for split in self.splits]
        if prod(n for n in grid if n is not None) != count:
            raise UserError(f"pattern {self.match!r} is a grid of {grid}, and there are {count} parts.")
        return self.splits

    def shards(self, tensor: Tensor, count: int) -> list[Shard]:
        """What each of `count` parts has."""
        if self.kind != "fragment":
            return [cuts.whole_shard(tensor)] * count
        splits = self.split_over(count)
        return cuts.cut_shards(
            tensor, {split.dim or 0: split.cuts(tensor, split.over or 1) for split in splits}
        )

    def resized(self, shapes: Sequence[Shape]) -> tuple[Shape, Pattern]:
        """The whole tensor's shape, and the pattern with the sizes that these shards have. Padding is part of
        the whole here.
        """
        found, stride = list(shapes[0]), len(shapes)
        splits = []
        for split in self.split_over(len(shapes)):
            dim, over = split.dim or 0, split.over or 1
            if not 0 <= dim < len(found):
                raise UserError(f"pattern {self.match!r} splits dimension {dim} of a tensor of {len(found)}.")
            stride //= over
            sizes = tuple(shapes[i * stride][dim] for i in range(over))
            segments = [_segment(self.match, part) for part in split.parts or ()]
            if split.experts is not None and dim == 0 and split.dim is not None:  # each expert split
                segments = [Segment(sum(sizes) // split.experts)] * split.experts
                split = replace(split, experts=None, parts=tuple(segment.size for segment in segments))
            if segments:
                found[dim] = sum(segment.size for segment in segments)
                splits.append(split)
            else:
                found[dim] = sum(sizes)
                splits.append(replace(split, sizes=sizes, pad_to=None, experts=None, dim=dim))
        return tuple(found), Pattern(match=self.match, kind=self.kind, splits=tuple(splits))


@dataclass(frozen=True, slots=True)
class Patterns:
    patterns: tuple[Pattern, ...]

    def of(self, name: str) -> Pattern:
        """The one pattern of a name."""
        found = [pattern for pattern in self.patterns if re.fullmatch(pattern.match, name)]
        if not found:
            near = _nearest(name, self.patterns)
            raise UserError(f"parameter {name!r} matches no pattern; add one{near}.")
        if len(found) > 1:
            raise UserError(
                f"parameter {name!r} matches two patterns, {found[0].match!r} and {found[1].match!r}; "
                "make one of them narrower."
            )
        return found[0]


def read_patterns(text: str, source: str = "patterns") -> Patterns:
    """From TOML."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{source} is not TOML: {error}.") from None
    rows = table.get("pattern")
    if not isinstance(rows, list) or not rows or set(table) != {"pattern"}:
        raise UserError(f"{source} must be [[pattern]] tables and nothing else.")
    return Patterns(tuple(_pattern(row, f"{source}, pattern {i + 1}") for i, row in enumerate(rows)))


_KINDS: Mapping[str, type] = {
    "match": str,
    "kind": str,
    "dim": int,
    "over": int,
    "sizes": list,
    "parts": list,
    "pad_to": int,
    "experts": int,
    "splits": list,
}


def _pattern(row: Mapping[str, Any], where: str) -> Pattern:
    table = _checked(row, Pattern, "a pattern", where)
    for key in ("match", "kind"):
        if key not in row:
            raise UserError(f"{where}: {key} is missing.")
    splits = [_checked(one, DimensionSplit, "one of splits", where) for one in row.get("splits", [])]
    return Pattern(**{**table, "splits": tuple(DimensionSplit(**one) for one in splits)})


def _checked(row: Any, kind: type, called: str, where: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: {called} is {row!r}, and must be a table.")
    known = {f.name for f in fields(kind)}
    for key, value in row.items():
        if key not in known:
            raise UserError(f"{where}: {key} is not a key of {called}; they are {', '.join(sorted(known))}.")
        if not isinstance(value, _KINDS[key]) or isinstance(value, bool):
            raise UserError(f"{where}: {key} is {value!r}, and must be {_KINDS[key].__name__}.")
    return {
        key: tuple(tuple(one) if isinstance(one, list) else one for one in value)
        if isinstance(value, list)
        else value
        for key, value in row.items()
    }


def _segment(match: str, part: int | str | tuple[int, ...]) -> Segment:
    if isinstance(part, int):
        return Segment(part)
    if isinstance(part, tuple):
        return Segment(sum(part), widths=part)
    if not re.fullmatch(r"=\d+", part):
        raise UserError(f'pattern {match!r}: part {part!r} is not a number, nor one with "=" before it.')
    return Segment(int(part[1:]), split=False)


def _nearest(name: str, patterns: Sequence[Pattern]) -> str:
    """Does a pattern match the beginning? It was perhaps meant to match the whole."""
    close = next((p.match for p in patterns if re.match(p.match, name)), None)
    return f" (pattern {close!r} matches only its beginning)" if close else ""
