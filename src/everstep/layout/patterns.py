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
    parts = [64, 16, 16]                        sub-parameters; "=16" stays whole in every part
    [[pattern]]
    match = '.*\\.experts\\.w1'
    kind = "fragment"
    experts = 8                                 experts dealt out; with dim: each split along it

    unique        on one holder, the first of the given ones       (a stage's own, ZeRO-1 partitions)
    replicated    the same values on all                           (norms under tensor parallelism)
    average       values of their own on all, one by their mean    (params_to_average)

A name that matches none, or two, is an error that says which: a silent default is how weights get lost.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from everstep.errors import UserError
from everstep.layout import builders as build
from everstep.layout.builders import Parts, Segment, Shard
from everstep.layout.layout import Holder, Layout, Tensor, merged

Kind = Literal["unique", "replicated", "fragment", "average"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    match: str
    kind: Kind
    dim: int | None = None
    sizes: tuple[int, ...] | None = None  # of an uneven split, one a holder
    parts: tuple[int | str, ...] | None = None  # sub-parameters; "=16" is not split
    pad_to: int | None = None
    experts: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UserError(
                f"pattern {self.match!r}: kind is {self.kind!r}; it is one of {', '.join(get_args(Kind))}."
            )
        try:
            re.compile(self.match)
        except re.error as error:
            raise UserError(f"pattern {self.match!r} is not a regular expression: {error}.") from None
        extras = [name for name in ("sizes", "parts", "pad_to", "experts") if getattr(self, name) is not None]
        if self.kind != "fragment" and (extras or self.dim is not None):
            raise UserError(f"pattern {self.match!r}: {[*extras, 'dim'][0]} is for fragments only.")
        if len(extras) > 1:
            raise UserError(f"pattern {self.match!r} has both {extras[0]} and {extras[1]}; give one of them.")
        if self.kind == "fragment" and self.dim is None and self.experts is None:
            raise UserError(f"pattern {self.match!r} is a fragment without dim; say along which it is split.")

    def shards(self, tensor: Tensor, count: int) -> list[Shard]:
        """What each of `count` parts has."""
        dim = self.dim or 0
        if self.kind != "fragment":
            return [build.whole_shard(tensor)] * count
        if self.experts is not None:
            return build.expert_shards(tensor, self.experts, count, self.dim)
        if self.pad_to is not None:
            return build.padded_shards(tensor, dim, count, self.pad_to)
        if self.parts is not None:
            return build.fused_shards(tensor, dim, [_segment(self.match, part) for part in self.parts], count)
        return build.split_shards(tensor, dim, count, self.sizes)


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

    def layout(self, tensors: Iterable[Tensor], parts: Parts) -> Layout:
        """Every tensor over the parts (each a list of replicas), as its pattern says."""
        return merged([self._one(tensor, parts) for tensor in tensors])

    def flat(
        self, tensors: Iterable[Tensor], parts: Parts, *, stage: Literal[1, 2, 3], align: int = 2
    ) -> Layout:
        """The same under ZeRO: the replicas of each part hold ranges of its shards, not copies."""
        shards = [(tensor, self.of(tensor.name).shards(tensor, len(parts))) for tensor in tensors]
        found = []
        for i, replicas in enumerate(parts):
            mine = [all_parts[i] for _, all_parts in shards]
            if stage == 3:
                found.append(build.flat_by_tensor(mine, replicas))
            else:
                found.append(build.flat(mine, replicas, align=align))
        return merged(found)

    def unused(self, names: Sequence[str]) -> list[str]:
        """Patterns that no name matches: often a typing error."""
        return [p.match for p in self.patterns if not any(re.fullmatch(p.match, name) for name in names)]

    def _one(self, tensor: Tensor, parts: Parts) -> Layout:
        pattern = self.of(tensor.name)
        holders: list[Holder] = [holder for part in parts for holder in part]
        if pattern.kind == "unique":
            return build.replicated(tensor, holders[:1])
        if pattern.kind == "replicated":
            return build.replicated(tensor, holders)
        if pattern.kind == "average":
            return build.replicated(replace(tensor, combine="mean"), holders)
        return build.laid_out(tensor, parts, pattern.shards(tensor, len(parts)))


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


_KINDS: Mapping[str, tuple[type, ...]] = {
    "match": (str,),
    "kind": (str,),
    "dim": (int,),
    "sizes": (list,),
    "parts": (list,),
    "pad_to": (int,),
    "experts": (int,),
}


def _pattern(row: Mapping[str, Any], where: str) -> Pattern:
    known = {f.name for f in fields(Pattern)}
    for key, value in row.items():
        if key not in known:
            raise UserError(f"{where}: {key} is not a key of a pattern; they are {', '.join(sorted(known))}.")
        if not isinstance(value, _KINDS[key]) or isinstance(value, bool):
            raise UserError(f"{where}: {key} is {value!r}, and must be {_KINDS[key][0].__name__}.")
    for key in ("match", "kind"):
        if key not in row:
            raise UserError(f"{where}: {key} is missing.")
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return Pattern(**{**row, **lists})


def _segment(match: str, part: int | str) -> Segment:
    if isinstance(part, int):
        return Segment(part)
    if not re.fullmatch(r"=\d+", part):
        raise UserError(f'pattern {match!r}: part {part!r} is not a number, nor one with "=" before it.')
    return Segment(int(part[1:]), split=False)


def _nearest(name: str, patterns: Sequence[Pattern]) -> str:
    """Does a pattern match the beginning? It was perhaps meant to match the whole."""
    close = next((p.match for p in patterns if re.match(p.match, name)), None)
    return f" (pattern {close!r} matches only its beginning)" if close else ""
