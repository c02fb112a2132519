"""The end of every conversion: what was written is read back and compared with what should be there.

By logical name, dtype, shape and hash. The source is hashed while it is read for writing, chunk by chunk;
what was written is read once more. Anything lost, added or changed is a `Change` with a name:

    lost:model/embed.weight         in the source and not in what was written, or not readable in the source
    added:optimizer/w/exp_avg       in what was written only
    type:model/w                    BF16 became F32
    value:model/w                   another shape, or other bytes; the same for step, groups and meta

A change is an error unless the user accepts it by name (`--accept lost:lr_scheduler`, patterns allowed).
A `value` change of a tensor is a bug of ours and cannot be accepted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np
import xxhash

from everstep.errors import InternalError, UserError
from everstep.layout.box import Box, Shape, offset_of, row_major
from everstep.layout.tensor import ITEM_BYTES
from everstep.store import dtypes
from everstep.store.dtypes import Array
from everstep.store.parts import BLOCK_BYTES, Progress, block_of
from everstep.store.stored import Held, Stored, num_bytes, read_both, read_range
from everstep_convert.state import TrainingState

CHUNK_BYTES = BLOCK_BYTES  # hashed as one: writers read blocks of this size, or ranges one after the other
PROVENANCE = ("format", "precision", "deepspeed_version", "deepspeed_patterns")  # of files, not of training
SHOWN = 3  # names of each kind in a sentence
KINDS = ("lost", "added", "type", "value")


@dataclass(frozen=True, slots=True)
class Change:
    """Something that is not as it was: what kind of change, of what, and how."""

    kind: str
    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" + (f" ({self.detail})" if self.detail else "")


# Hashes of the source, taken while it is read.


class Hashed:
    """A tensor that is hashed as it is read: in order within a chunk, the chunks in any order.

    A chunk that was read in another order, or not at all, is read again when its hash is asked for.
    """

    def __init__(self, source: Stored) -> None:
        self.source, self.dtype, self.shape = source, source.dtype, source.shape
        self._item = ITEM_BYTES[source.dtype]
        self._size = num_bytes(source)
        self._strides = row_major(source.shape)
        self._open: dict[int, tuple[int, Any]] = {}  # chunk: where it goes on, and its hash so far
        self._done: dict[int, int] = {}
        self._lock = threading.Lock()

    def read(self, box: Box, out: Array) -> None:
        self.source.read(box, out)
        if out.flags.c_contiguous and out.size and _is_range(box, self.shape):
            self._take(offset_of(box.start, self._strides) * self._item, dtypes.bytes_of(out))

    def hash_of(self, chunk: int) -> int:
        """Of the source's bytes."""
        if chunk not in self._done:
            start = chunk * CHUNK_BYTES
            stop = min(start + CHUNK_BYTES, self._size)
            self._done[chunk] = xxhash.xxh3_64_intdigest(block_of(self.source, start, stop))
        return self._done[chunk]

    def _take(self, start: int, data: memoryview) -> None:
        with self._lock:
            at = 0
            while at < len(data):
                chunk, inside = divmod(start + at, CHUNK_BYTES)
                end = min(CHUNK_BYTES, self._size - chunk * CHUNK_BYTES)
                count = min(end - inside, len(data) - at)
                self._add(chunk, inside, end, data[at : at + count])
                at += count

    def _add(self, chunk: int, inside: int, end: int, data: memoryview) -> None:
        if chunk in self._done:
            return
        if inside == 0 and len(data) == end:
            self._done[chunk] = xxhash.xxh3_64_intdigest(data)
            return
        expected, so_far = self._open.get(chunk, (0, None))
        if inside != expected:
            return
        so_far = so_far or xxhash.xxh3_64()
        so_far.update(data)
        if inside + len(data) == end:
            self._done[chunk] = so_far.intdigest()
            self._open.pop(chunk, None)
        else:
            self._open[chunk] = (inside + len(data), so_far)


def _is_range(box: Box, shape: Shape) -> bool:
    """Are the box's elements one after the other in the tensor?"""
    inner = 1
    for n, size in zip(reversed(box.size), reversed(shape), strict=True):
        if inner != 1 and n != 1:
            return False
        if n != size:
            inner = 2  # from here on outwards only single indices
    return True


def hashed(state: TrainingState) -> TrainingState:
    """The state with every tensor hashed as it is read; what is in memory is hashed at the end."""
    return replace(
        state,
        tensors={
            name: stored if isinstance(stored, Held) else Hashed(stored)
            for name, stored in state.tensors.items()
        },
    )


# The comparison.


def changes(
    expected: TrainingState,
    found: TrainingState,
    *,
    threads: int = 2,
    progress: Progress = lambda count: None,
) -> list[Change]:
    """What is not as it should be; `expected` may be `hashed`. `progress` is told of compared bytes."""
    rows = [Change("lost", name) for name in expected.lost]
    wanted, there = _with_aliases(expected), _with_aliases(found)
    rows += [Change("lost", name) for name in wanted if name not in there]
    rows += [Change("added", name) for name in there if name not in wanted]
    both = [name for name in wanted if name in there]
    for name in both:
        a, b = wanted[name], there[name]
        if a.dtype != b.dtype:
            rows.append(Change("type", name, f"{a.dtype} became {b.dtype}"))
        if a.shape != b.shape:
            rows.append(Change("value", name, f"{list(a.shape)} became {list(b.shape)}"))
    alike = [n for n in both if (wanted[n].dtype, wanted[n].shape) == (there[n].dtype, there[n].shape)]
    names = list({(id(wanted[name]), id(there[name])): name for name in alike}.values())  # not aliases twice
    with ThreadPoolExecutor(threads, thread_name_prefix="check") as pool:
        same = pool.map(lambda name: _same_bytes(wanted[name], there[name], progress), names)
        rows += [
            Change("value", name, _how_different(wanted[name], there[name]))
            for name, is_same in zip(names, same, strict=True)
            if not is_same
        ]
    rows += [
        Change("value", name, "cast to another value")
        for name in both
        if wanted[name].dtype != there[name].dtype
        and wanted[name].shape == there[name].shape
        and not _same_values(wanted[name], there[name])
    ]
    return [*rows, *_other_changes(expected, found)]


def differences(a: TrainingState, b: TrainingState, *, progress: Progress) -> list[Change]:
    """Of two checkpoints that are to hold the same: what runs note of themselves is not compared."""
    rows = changes(a, b, progress=progress)
    return [row for row in rows if not row.name.startswith("meta/")]


def _with_aliases(state: TrainingState) -> dict[str, Stored]:
    """Tied names stand for the tensor they are tied to."""
    names = dict(state.tensors)
    for alias, name in state.tied.items():
        if f"model/{name}" in names:
            names.setdefault(f"model/{alias}", names[f"model/{name}"])
    return names


def _same_bytes(a: Stored, b: Stored, progress: Progress) -> bool:
    size = num_bytes(a)
    for chunk, start in enumerate(range(0, size, CHUNK_BYTES)):
        stop = min(start + CHUNK_BYTES, size)
        written = xxhash.xxh3_64_intdigest(block_of(b, start, stop))
        if isinstance(a, Hashed):
            source = a.hash_of(chunk)
        else:
            source = xxhash.xxh3_64_intdigest(block_of(a, start, stop))
        if written != source:
            return False
        progress(stop - start)
    return True


def _how_different(a: Stored, b: Stored) -> str:
    """Of two tensors of one type and shape whose bytes differ."""
    elements, largest = 0, 0.0
    for x, y in read_both(a, b):
        if unequal := int((x != y).sum()):
            elements += unequal
            wide = [dtypes.cast(part, a.dtype, "F64").view(np.float64) for part in (x, y)]
            largest = max(largest, float(np.abs(wide[0] - wide[1]).max()))
    return f"{elements} of {prod(a.shape)} elements differ, by {largest:.3g} at most"


def _same_values(a: Stored, b: Stored) -> bool:
    """Does a tensor of another type hold the same numbers? NaN is NaN."""
    step = CHUNK_BYTES // max(ITEM_BYTES[a.dtype], ITEM_BYTES[b.dtype])
    total = prod(a.shape)
    for start in range(0, total, step):
        stop = min(total, start + step)
        x, y = (np.empty(stop - start, dtypes.raw(one.dtype)) for one in (a, b))
        read_range(a, start, stop, x)
        read_range(b, start, stop, y)
        p, q = (dtypes.tensor_of(x, a.dtype), dtypes.tensor_of(y, b.dtype))
        wide = dtypes.in_torch("I64" if not dtypes.is_trainable(a.dtype) else "F64")
        if a.dtype == "C64" or b.dtype == "C64":
            return False
        p, q = p.to(wide), q.to(wide)
        if not bool(((p == q) | ((p != p) & (q != q))).all()):
            return False
    return True


def _other_changes(expected: TrainingState, found: TrainingState) -> Iterable[Change]:
    if expected.step != found.step:
        yield Change("value", "step", f"{expected.step} became {found.step}")
    for alias, name in expected.tied.items():
        if found.tied.get(alias) != name:
            yield Change("lost", f"tied/{alias}")
    for name in sorted(_frozen(expected) ^ _frozen(found)):
        yield Change("value", f"frozen/{name}", "frozen in one of the two only")
    yield from _group_changes(expected.groups, found.groups)
    yield from _table_changes("meta", _meta(expected), _meta(found))


def _frozen(state: TrainingState) -> set[str]:
    """With groups, whatever is in none of them does not change."""
    if not state.groups:
        return set(state.frozen)
    trained = {name for group in state.groups for name in group["params"]}
    return {name for name in state.parameters() if name not in trained} - set(state.tied)


def _meta(state: TrainingState) -> dict[str, Any]:
    return {key: value for key, value in state.meta.items() if key not in PROVENANCE}


def _group_changes(expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> Iterable[Change]:
    for g in range(max(len(expected), len(found))):
        if g >= len(found):
            yield Change("lost", f"groups/{g}")
        elif g >= len(expected):
            yield Change("added", f"groups/{g}")
        else:
            yield from _table_changes(f"groups/{g}", expected[g], found[g])


def _table_changes(where: str, expected: dict[str, Any], found: dict[str, Any]) -> Iterable[Change]:
    for key in expected:
        if key not in found:
            yield Change("lost", f"{where}/{key}")
        elif isinstance(expected[key], dict) and isinstance(found[key], dict):
            yield from _table_changes(f"{where}/{key}", expected[key], found[key])
        elif expected[key] != found[key]:
            yield Change("value", f"{where}/{key}")
    for key in found:
        if key not in expected:
            yield Change("added", f"{where}/{key}")


# What the user accepts.


@dataclass(frozen=True, slots=True)
class Accepted:
    """Patterns such as `lost:lr_scheduler*`; `asked`: what other options of the command ask for."""

    patterns: tuple[str, ...] = ()
    asked: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            kind, colon, name = pattern.partition(":")
            if kind not in KINDS or not colon or not name:
                raise UserError(
                    f"--accept {pattern!r} is not KIND:NAME; KIND is one of {', '.join(KINDS)}, and NAME may "
                    "hold * and ?."
                )

    def covers(self, change: Change) -> bool:
        text = f"{change.kind}:{change.name}"
        return any(fnmatchcase(text, pattern) for pattern in (*self.patterns, *self.asked))


def require(rows: Sequence[Change], accepted: Accepted, target: str) -> list[Change]:
    """Refuse what is not accepted, in one sentence; what was accepted is returned, to be listed."""
    tensors = ("model/", "buffer/", "optimizer/", "extra/")
    broken = [row for row in rows if row.kind == "value" and row.name.startswith(tensors)]
    if broken:
        raise InternalError(f"{target} was not written as it should be: {_listed(broken)}.")
    refused = [row for row in rows if not accepted.covers(row)]
    if refused:
        flags = " ".join(f"--accept {_quoted(pattern)}" for pattern in _patterns(refused))
        raise UserError(
            f"{target} is not written, because the conversion is not exact: {_listed(refused)}; to accept "
            f"this, give {flags}."
        )
    return list(rows)


def _listed(rows: Sequence[Change]) -> str:
    words = []
    for kind in KINDS:
        mine = [row for row in rows if row.kind == kind]
        names = [row.name + (f" ({row.detail})" if row.detail else "") for row in mine[:SHOWN]]
        more = f" and {len(mine) - SHOWN} more" if len(mine) > SHOWN else ""
        verb = {"lost": "lost", "added": "added", "type": "changed in type", "value": "changed"}[kind]
        words += [f"{verb}: {', '.join(names)}{more}"] if mine else []
    return "; ".join(words)


def _patterns(rows: Sequence[Change]) -> list[str]:
    """The shortest list that names them: each by itself if they are few, else by their beginning."""
    found: list[str] = []
    for kind in KINDS:
        names = [row.name for row in rows if row.kind == kind]
        if len(names) > SHOWN:
            starts = (name.partition("/")[0] + "/*" if "/" in name else name for name in names)
            names = list(dict.fromkeys(starts))
        found += [f"{kind}:{name}" for name in names]
    return found


def _quoted(pattern: str) -> str:
    return f"'{pattern}'" if any(letter in pattern for letter in "*?[ ") else pattern
