"""Reading a checkpoint: whole tensors or boxes of them, every byte checked, no more bytes than needed.

A box is fetched from the slices that meet it. Checked reading takes whole chunks, so at most two chunks too
much for every contiguous stretch; unchecked reading takes the bytes of the box alone (a column of a matrix
would otherwise mean all of it). Memory: the result and one band.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from everstep.errors import UserError
from everstep.layout.box import Box, offset_of, row_major, whole
from everstep.layout.tensor import ITEM_BYTES
from everstep.store import dtypes
from everstep.store.dtypes import Array
from everstep.store.index import (
    MAX_INDEX_BYTES,
    CannotRead,
    Index,
    Refused,
    Slice,
    TensorEntry,
    UnknownVersion,
    digest,
    in_file_name,
    no_duplicates,
    parse,
)
from everstep.store.parts import BLOCK_BYTES, Progress
from everstep.store.places import STEP, Place
from everstep.store.ranges import Access, EndedEarly, RangeFile
from everstep.store.stored import BAND_BYTES, FilePiece, Pieces, Stored, bands

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER_BYTES = 100 << 20
_Row = tuple[str, list[int], int, int]  # dtype, shape, begin and end in the file


class UnusableCheckpointError(UserError):
    """Why a checkpoint cannot be loaded. Only a corrupt one is known to be of no use."""

    def __init__(
        self, sentence: str, kind: Literal["corrupt", "unreadable", "unknown"], file: str = ""
    ) -> None:
        """`file`: the one of its files that is to blame, where that is known."""
        super().__init__(sentence)
        self.kind, self.file = kind, file


class FileSource(Protocol):
    """Where a checkpoint's files are opened: a place, or the memory of several nodes."""

    def file(self, folder: str, name: str, access: Access = "pread") -> RangeFile: ...


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint whose index and files fit together; reading checks the bytes of what it returns."""

    place: FileSource
    name: str
    index: Index
    access: Access = "pread"
    _files: dict[str, RangeFile] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.place}/{self.name}"

    @property
    def step(self) -> int:
        return self.index.step

    @property
    def meta(self) -> dict[str, Any]:
        return self.index.meta

    @property
    def compiled(self) -> bool | None:
        """Were the layers of its run? None: no run of ours has written it, so no bits are to be kept. Those
        of earlier versions do not say; false was their default.
        """
        return self.meta.get("compile") is True if {"compile", "rng"} & self.meta.keys() else None

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        return self.index.tensors

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files.values())

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Tensors by logical name, on the CPU, each checked against its hashes."""
        wanted = list(self.tensors if names is None else names)
        for name in wanted:
            self._entry(name)
        return {name: self.read_box(name) for name in wanted}

    def read_box(self, name: str, box: Box | None = None, *, checked: bool = True) -> Tensor:
        """A box of a tensor, or all of it."""
        import torch

        entry = self._entry(name)
        box = box or whole(entry.shape)
        if not box.within(entry.shape):
            raise UserError(f"tensor {name!r} is of shape {list(entry.shape)}; {box} reaches outside it.")
        found = torch.empty(box.size, dtype=dtypes.in_torch(entry.dtype))
        if found.numel():
            raw: Array = found.reshape(-1).view(torch.uint8).numpy().view(dtypes.raw(entry.dtype))
            self.stored(name, checked=checked).read(box, raw.reshape(box.size))
        return found

    def stored(self, name: str, *, checked: bool = True) -> Stored:
        """A tensor to be read by boxes."""
        entry = self._entry(name)
        if checked:
            return _Checked(self, name)
        return Pieces(
            entry.dtype,
            entry.shape,
            tuple(
                FilePiece(one.box, self.file(one.file), one.at, row_major(one.box.size))
                for one in entry.slices
            ),
        )

    def verify(self, threads: int = 2, progress: Progress = lambda count: None) -> None:
        """Read everything."""

        def check(task: tuple[str, Slice, int, int]) -> None:
            name, one, start, stop = task
            block = np.empty(stop - start, np.uint8)
            self._checked(name, one, start, dtypes.bytes_of(block))
            progress(stop - start)

        with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
            for _ in pool.map(check, self._blocks()):
                pass

    def file(self, name: str) -> RangeFile:
        found = self._files.get(name)
        if found is None:
            try:
                found = self._files[name] = self.place.file(self.name, name, self.access)
            except Refused as refused:
                raise unusable(str(self), refused, name) from refused
        return found

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _blocks(self) -> Iterator[tuple[str, Slice, int, int]]:
        for name, entry in self.tensors.items():
            for one in entry.slices:
                size = one.box.volume * ITEM_BYTES[entry.dtype]
                step = max(one.chunk_bytes, BLOCK_BYTES // one.chunk_bytes * one.chunk_bytes)
                for start in range(0, size, step):
                    yield name, one, start, min(start + step, size)

    def _entry(self, name: str) -> TensorEntry:
        entry = self.tensors.get(name)
        if entry is None:
            raise UserError(f"checkpoint {self} holds no tensor {name!r}; was it saved from another model?")
        return entry

    def _checked(self, name: str, one: Slice, start: int, out: memoryview) -> None:
        """Whole chunks of a slice from byte `start` on, or a sentence."""
        try:
            self.file(one.file).read(one.at + start, out)
        except OSError as error:
            raise unusable(str(self), failed_read(one.file, error), one.file) from error
        for at in range(0, len(out), one.chunk_bytes):
            chunk = (start + at) // one.chunk_bytes
            if digest(out[at : at + one.chunk_bytes]) != one.hash_of(chunk):
                because = f"{one.file}: tensor {name!r} fails its checksum, in its chunk {chunk}"
                raise unusable(str(self), Refused(because), one.file)


@dataclass(frozen=True)
class _Checked:
    """A tensor of a checkpoint, read chunk by chunk with its hashes."""

    checkpoint: Checkpoint
    name: str

    @cached_property
    def _entry(self) -> TensorEntry:
        return self.checkpoint.tensors[self.name]

    @property
    def dtype(self) -> str:
        return self._entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._entry.shape

    def read(self, box: Box, out: Array) -> None:
        for one in self._entry.slices:
            shared = box.meet(one.box)
            if shared is not None:
                place = shared.moved([-a for a in box.start]).slices()
                self._read_slice(one, shared.moved([-a for a in one.box.start]), out[place])

    def _read_slice(self, one: Slice, wanted: Box, out: Array) -> None:
        """A box of a slice, in the slice's own indices."""
        item, strides = ITEM_BYTES[self.dtype], row_major(one.box.size)
        size = one.box.volume * item
        for band in bands(wanted, strides, BAND_BYTES // item):
            start = offset_of(band.start, strides) * item
            span = 1 + sum((n - 1) * s for n, s in zip(band.size, strides, strict=True))
            low = start // one.chunk_bytes * one.chunk_bytes
            high = min(size, -(-(start + span * item) // one.chunk_bytes) * one.chunk_bytes)
            view = out[band.moved([-a for a in wanted.start]).slices()]
            if (low, high) == (start, start + view.nbytes) and view.flags.c_contiguous:
                self.checkpoint._checked(self.name, one, low, dtypes.bytes_of(view))
                continue
            held = np.empty(high - low, np.uint8)
            self.checkpoint._checked(self.name, one, low, dtypes.bytes_of(held))
            elements = held[start - low : start - low + span * item].view(out.dtype)
            view[...] = np.lib.stride_tricks.as_strided(elements, band.size, [s * item for s in strides])


def open_in(place: Place, name: str, access: Access = "pread") -> Checkpoint:
    """A checkpoint whose index fits its files' sizes and headers; else `Refused`."""
    file = place.file(name, "index.json")
    try:
        index = parse(read_small(file, "index.json", MAX_INDEX_BYTES))
    finally:
        file.close()
    match = STEP.fullmatch(name)
    if match is None or index.step != int(match[1]):
        raise Refused(f"index.json is of step {index.step}, which is not the folder's")
    return opened(place, name, index, access)


def opened(place: Place, name: str, index: Index, access: Access = "pread") -> Checkpoint:
    """A checkpoint whose files are as the index says, by their sizes and headers."""
    found = Checkpoint(place, name, index, access)
    described: dict[str, dict[str, _Row]] = {file: {} for file in index.files}
    for tensor, entry in index.tensors.items():
        for one in entry.slices:
            key = in_file_name(tensor, one.box, entry.shape)
            end = one.at + one.box.volume * ITEM_BYTES[entry.dtype]
            described[one.file][key] = (entry.dtype, list(one.box.size), one.at, end)
    for part, size in index.files.items():
        opened = found._files[part] = place.file(name, part, access)
        _check_part(opened, part, size, described[part])
    return found


def _check_part(file: RangeFile, name: str, size: int, described: dict[str, _Row]) -> None:
    try:
        actual = file.size()
        if actual != size:
            raise Refused(f"{name} has {actual} bytes, and {size} were written")
        header, start = read_header(file, name)
    except OSError as error:
        raise failed_read(name, error) from error
    try:
        held = {
            key: (row["dtype"], row["shape"], *(start + at for at in row["data_offsets"]))
            for key, row in header.items()
            if key != "__metadata__"
        }
    except (KeyError, TypeError, IndexError) as error:
        raise Refused(f"{name} cannot be read: its header is not a safetensors header") from error
    if held != described:
        raise Refused(f"{name} holds other tensors than index.json says")


def read_header(file: RangeFile, name: str) -> tuple[dict[str, Any], int]:
    """A safetensors header, and where the data begins."""
    size = file.size()
    first = bytearray(8)
    if size < 8:
        raise Refused(f"{name} cannot be read: it is too short for a header")
    file.read(0, memoryview(first))
    length = int.from_bytes(first, "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise Refused(f"{name} cannot be read: its header claims {length} bytes")
    text = bytearray(length)
    file.read(8, memoryview(text))
    try:
        header = json.loads(bytes(text), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{name} cannot be read: its header is not JSON") from error
    if not isinstance(header, dict):
        raise Refused(f"{name} cannot be read: its header is not a table")
    return header, 8 + length


def safetensors_in(file: RangeFile, name: str) -> dict[str, Stored]:
    """The tensors of a safetensors file from anywhere, every claim of its header checked."""
    header, start = read_header(file, name)
    size = file.size()
    found: dict[str, Stored] = {}
    ends: list[tuple[int, int, str]] = []
    for key, row in header.items():
        if key == "__metadata__":
            continue
        try:
            dtype, shape, (low, high) = row["dtype"], row["shape"], row["data_offsets"]
            fits = all(type(n) is int and n >= 0 for n in (*shape, low, high))
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise Refused(f"{name}: tensor {key!r} is not described in its header")
        if dtype not in ITEM_BYTES:
            raise Refused(f"{name}: tensor {key!r} is of {dtype!r}, which we do not know")
        if high - low != prod(shape) * ITEM_BYTES[dtype] or start + high > size:
            raise Refused(f"{name}: tensor {key!r} lies outside the file, or is not as long as its shape")
        ends.append((low, high, key))
        found[key] = Pieces(
            dtype, tuple(shape), (FilePiece(whole(shape), file, start + low, row_major(shape)),)
        )
    ends.sort()
    for (_, high, a), (low, _, b) in pairwise(ends):
        if low < high:
            raise Refused(f"{name}: tensors {a!r} and {b!r} lie on one place")
    return found


def read_small(file: RangeFile, name: str, limit: int) -> bytes:
    """All of a file that may not be large."""
    try:
        size = file.size()
        if size > limit:
            raise Refused(f"{name} is larger than any we write")
        data = bytearray(size)
        file.read(0, memoryview(data))
    except OSError as error:
        raise failed_read(name, error) from error
    return bytes(data)


def failed_read(name: str, error: OSError) -> Refused:
    """A file that ends early is damaged; of one the system cannot read, nothing is known."""
    kind = Refused if isinstance(error, EndedEarly) else CannotRead
    return kind(f"{name} cannot be read: {error}")


def unusable(checkpoint: str, refused: Refused, file: str = "") -> UnusableCheckpointError:
    match refused:
        case CannotRead():
            sentence = f"checkpoint {checkpoint} cannot be read: {refused}."
            return UnusableCheckpointError(sentence, "unreadable", file)
        case UnknownVersion():
            sentence = f"checkpoint {checkpoint} cannot be read: {refused}."
            return UnusableCheckpointError(sentence, "unknown", file)
        case _:
            sentence = f"checkpoint {checkpoint} is damaged: {refused}."
            return UnusableCheckpointError(sentence, "corrupt", file)
