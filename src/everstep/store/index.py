"""The index of a checkpoint: what is in it, by logical name, and where; written once, believed never.

    {"xxh3": of the canonical text below,
     "index": {"format": "everstep-checkpoint", "version": 2, "step": 10,
               "meta":   {...}                          seed, rng, scheduler, data position: plain JSON
               "groups": [{"params": [...], "lr": ...}] the optimizer's groups, each with its own numbers
               "tied":   {"head.weight": "embed.weight"}
               "parts":  [{"file", "bytes", "chunk_bytes", "slices": [
                   {"tensor", "dtype", "shape", "start", "size", "at", "xxh3"}]}]}}

A slice is a box of a tensor, row-major from byte `at` of its file on; `xxh3` holds 16 hex digits for each
`chunk_bytes` of it. Slices of all parts together must cover every tensor, and may not overlap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import xxhash

from everstep.layout.box import Box, Shape, overlapping, uncovered
from everstep.layout.tensor import ITEM_BYTES

FORMAT, VERSION = "everstep-checkpoint", 2
MAX_INDEX_BYTES = 1 << 30
MAX_CHUNK_BYTES = 64 << 20
Part = dict[str, Any]  # JSON, as above
PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")
_HASHES = re.compile(r"(?:[0-9a-f]{16})*")


class Refused(Exception):
    """Why a checkpoint is not believed: a file and a reason."""


class CannotRead(Refused):
    """The system could not read it: nothing is known of what is written there."""


class UnknownVersion(Refused):
    """It is of a format that another Everstep writes."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a tensor in one file."""

    file: str
    box: Box
    at: int
    chunk_bytes: int
    hashes: str

    def hash_of(self, chunk: int) -> str:
        return self.hashes[16 * chunk : 16 * chunk + 16]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str
    shape: Shape
    slices: tuple[Slice, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    step: int
    meta: dict[str, Any]
    groups: list[dict[str, Any]]
    tied: dict[str, str]
    tensors: dict[str, TensorEntry]
    files: dict[str, int]  # file: bytes


def text_of(
    step: int,
    parts: Sequence[Part],
    meta: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] = (),
    tied: Mapping[str, str] | None = None,
) -> str:
    index = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "meta": dict(meta),
        "groups": [dict(group) for group in groups],
        "tied": dict(tied or {}),
        "parts": list(parts),
    }
    text = canonical(index)
    return f'{{"xxh3":"{digest(text.encode())}","index":{text}}}\n'


def parse(data: bytes) -> Index:
    """An index whose every claim fits every other; the files are looked at elsewhere."""
    index = _trusted(data)
    files: dict[str, int] = {}
    kinds: dict[str, tuple[str, Shape]] = {}
    slices: dict[str, list[Slice]] = {}
    for part in index["parts"]:
        file, size = _file(part, files)
        end_of_last = 8
        for row in part["slices"]:
            name, dtype, shape, one = _slice(row, file, part["chunk_bytes"])
            if kinds.setdefault(name, (dtype, shape)) != (dtype, shape):
                raise Refused(f"tensor {name!r} has two shapes or dtypes in index.json")
            length = one.box.volume * ITEM_BYTES[dtype]
            if one.at < end_of_last or one.at + length > size:
                raise Refused(f"index.json: tensor {name!r} lies outside {file} or on another tensor")
            end_of_last = one.at + length
            slices.setdefault(name, []).append(one)
        files[file] = size
    for name, (_, shape) in kinds.items():
        _check_boxes(name, shape, slices[name])
    for alias, name in index["tied"].items():
        if not isinstance(name, str):
            raise Refused(f"index.json ties {alias!r} to no name")
    return Index(
        step=index["step"],
        meta=index["meta"],
        groups=_groups(index["groups"]),
        tied=index["tied"],
        tensors={name: TensorEntry(*kinds[name], tuple(slices[name])) for name in kinds},
        files=files,
    )


def meta_of(data: bytes) -> dict[str, Any]:
    """The meta values alone, without a look at the tensors."""
    meta: dict[str, Any] = _trusted(data)["meta"]
    return meta


def in_file_name(tensor: str, box: Box, shape: Shape) -> str:
    """What a slice is called in its safetensors file: the tensor's own name when it is the whole."""
    return tensor if box.size == shape else f"{tensor}@{','.join(map(str, box.start))}"


def num_chunks(num_bytes: int, chunk_bytes: int) -> int:
    return -(-num_bytes // chunk_bytes)


def canonical(index: Mapping[str, Any]) -> str:
    return json.dumps(index, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key is there twice")
    return table


def _trusted(data: bytes) -> dict[str, Any]:
    try:
        outer = json.loads(data, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise Refused(f"index.json is not JSON: {str(error).splitlines()[0]}") from error
    index = outer.get("index") if isinstance(outer, dict) else None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise Refused("index.json is not the index of an Everstep checkpoint")
    version = index.get("version")
    if type(version) is int and version != VERSION:
        raise UnknownVersion(f"index.json is of version {version}, and we read version {VERSION}")
    try:
        text = canonical(index)
    except (ValueError, RecursionError) as error:
        raise Refused(f"index.json holds what no index holds: {error}") from error
    if outer.get("xxh3") != digest(text.encode("utf-8", "surrogatepass")):
        raise Refused("index.json fails its checksum")
    if version != VERSION:
        raise Refused(f"index.json is of version {version!r}, which is not a number")
    shape = {"step": int, "meta": dict, "groups": list, "tied": dict, "parts": list}
    wrong = next((key for key, kind in shape.items() if not isinstance(index.get(key), kind)), None)
    if wrong is not None:
        raise Refused(f"index.json has no {wrong}")
    return index


def _file(part: Any, known: Mapping[str, int]) -> tuple[str, int]:
    file = part.get("file") if isinstance(part, dict) else None
    if not isinstance(file, str) or not PART_NAME.fullmatch(file):
        raise Refused(f"index.json names {file!r}, which is not in this folder")
    if file in known:
        raise Refused(f"index.json names {file} twice")
    size, chunk = part.get("bytes"), part.get("chunk_bytes")
    if type(size) is not int or size < 8 or type(chunk) is not int or not 0 < chunk <= MAX_CHUNK_BYTES:
        raise Refused(f"index.json has no sizes of {file}")
    if not isinstance(part.get("slices"), list):
        raise Refused(f"index.json does not describe the tensors of {file}")
    return file, size


def _slice(row: Any, file: str, chunk_bytes: int) -> tuple[str, str, Shape, Slice]:
    try:
        name, dtype, hashes, at = row["tensor"], row["dtype"], row["xxh3"], row["at"]
        shape, start, size = (tuple(row[key]) for key in ("shape", "start", "size"))
    except (KeyError, TypeError) as error:
        raise Refused(f"index.json does not describe the tensors of {file}") from error
    numbers = (at, *shape, *start, *size)
    if not isinstance(name, str) or any(type(n) is not int or n < 0 for n in numbers):
        raise Refused(f"index.json does not describe the tensors of {file}")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise Refused(f"tensor {name!r} is of {dtype!r} in index.json, which we do not know")
    box = Box(start, size)
    if len(start) != len(size) or not box.within(shape):
        raise Refused(f"a slice of tensor {name!r} reaches outside it in index.json")
    chunks = num_chunks(box.volume * ITEM_BYTES[dtype], chunk_bytes)
    if not isinstance(hashes, str) or len(hashes) != 16 * chunks or not _HASHES.fullmatch(hashes):
        raise Refused(f"tensor {name!r} does not have a hash for every chunk in index.json")
    return name, dtype, shape, Slice(file, box, at, chunk_bytes, hashes)


def _check_boxes(name: str, shape: Shape, slices: Sequence[Slice]) -> None:
    boxes = [one.box for one in slices]
    pair = overlapping(boxes)
    if pair is None and not prod(shape) and len(boxes) > 1:
        pair = (0, 1)
    if pair is not None:
        a, b = slices[pair[0]].file, slices[pair[1]].file
        raise Refused(f"tensor {name!r} is in both {a} and {b}" if a != b else f"{a} has {name!r} twice")
    if uncovered(shape, boxes) is not None:
        raise Refused(f"elements of tensor {name!r} are in no file")


def _groups(groups: list[Any]) -> list[dict[str, Any]]:
    for group in groups:
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Refused("index.json has a group of parameters without their names")
    return groups
