"""Writing one file of a checkpoint: plain safetensors, hashed chunk by chunk on the way, several threads.

The header comes first and says where everything will lie, so any thread can write any block at its place:
read, hash while it is in the cache, pwrite. Memory is one block a thread, whatever the tensors' sizes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from everstep.errors import InternalError, UserError
from everstep.layout.box import Box, Shape, whole
from everstep.layout.tensor import ITEM_BYTES
from everstep.store import dtypes
from everstep.store.index import PART_NAME, Part, digest, in_file_name, num_chunks
from everstep.store.stored import Held, Stored, read_range

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 128 << 10  # hashed as one: what a partial read may read too much, at either end
HASHES = 1 << 13  # of one part, about; 16 bytes each in the index, which holds all parts of a checkpoint
BLOCK_BYTES = 4 << 20  # read and written as one; a multiple of any chunk size we write
Progress = Callable[[int], None]  # bytes done since the last call
Label = dict[str, Any]  # JSON: name, bytes, index_bytes, xxh3
_TRIES = 8  # to make a folder that others remove
_mine = threading.local()


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """A slice to be written: `source` is the box alone, not the whole tensor."""

    tensor: str
    shape: Shape
    box: Box
    source: Stored

    @property
    def num_bytes(self) -> int:
        return self.box.volume * ITEM_BYTES[self.source.dtype]


def plan_whole(tensors: Mapping[str, Stored]) -> list[PlannedSlice]:
    return [PlannedSlice(name, stored.shape, whole(stored.shape), stored) for name, stored in tensors.items()]


def stored_of(name: str, tensor: Tensor) -> Stored:
    dtype = dtypes.name_of(tensor.dtype)
    if dtype is None:
        raise UserError(f"tensor {name!r} is of {tensor.dtype}, which a checkpoint does not hold.")
    return Held(dtype, dtypes.array_of(tensor))


def chunk_bytes_of(part_bytes: int) -> int:
    """Larger chunks for larger parts: the index of a checkpoint must stay one that is read back."""
    chunk = CHUNK_BYTES
    while chunk < BLOCK_BYTES and part_bytes > HASHES * chunk:
        chunk *= 2
    return chunk


def write_part(
    folder: Path,
    name: str,
    slices: Sequence[PlannedSlice],
    *,
    threads: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress = lambda count: None,
) -> Part:
    """Write `<folder>/<name>.safetensors`, flushed to disk; what to tell `commit`."""
    file = f"{name}.safetensors"
    if not PART_NAME.fullmatch(file):
        raise InternalError(f"{name!r} is not a name for a part of a checkpoint.")
    if BLOCK_BYTES % chunk_bytes:
        raise InternalError(f"a chunk of {chunk_bytes} bytes does not divide a block of {BLOCK_BYTES}.")
    head, places, total = header(slices)
    try:
        with _new_file(folder, file) as out:
            hashes = write_file(out, head, slices, places, threads, chunk_bytes, progress)
            out.truncate(total)  # a tail of empty tensors writes nothing
            os.fsync(out.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            (folder / file).unlink()  # a full disk must not stay full
            folder.rmdir()  # unless others write there
        raise
    return describe(file, slices, places, hashes, total, chunk_bytes)


def _new_file(folder: Path, file: str) -> FileIO:
    """A part that fails removes the folder, if it is empty just then: also before the eyes of another."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            return open(folder / file, "wb", buffering=0)
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / file, "wb", buffering=0)


def describe(
    file: str,
    slices: Sequence[PlannedSlice],
    places: Sequence[int],
    hashes: Sequence[str],
    total: int,
    chunk_bytes: int,
) -> Part:
    rows = [
        {
            "tensor": one.tensor,
            "dtype": one.source.dtype,
            "shape": list(one.shape),
            "start": list(one.box.start),
            "size": list(one.box.size),
            "at": at,
            "xxh3": text,
        }
        for one, at, text in zip(slices, places, hashes, strict=True)
    ]
    return {"file": file, "bytes": total, "chunk_bytes": chunk_bytes, "slices": rows}


def labelled(name: str, part: Part) -> tuple[bytes, Label]:
    """A part's description as it is written beside the part, and what a report says of it. A description has
    16 bytes for every chunk: 2 MiB for 16 GiB, more than a journal entry or an order may hold.
    """
    text = json.dumps(part, separators=(",", ":")).encode()
    label = {"name": name, "bytes": part["bytes"], "index_bytes": len(text), "xxh3": digest(memoryview(text))}
    return text, label


def header(
    slices: Sequence[PlannedSlice], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int], int]:
    """The beginning of a safetensors file; where each slice begins; the file's length."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset, begins = 0, []
    for one in slices:
        begins.append(offset)
        table[in_file_name(one.tensor, one.box, one.shape)] = {
            "dtype": one.source.dtype,
            "shape": list(one.box.size),
            "data_offsets": [offset, offset + one.num_bytes],
        }
        offset += one.num_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [start + at for at in begins], start + offset


def write_file(
    out: BinaryIO,
    head: bytes,
    slices: Sequence[PlannedSlice],
    places: Sequence[int],
    threads: int,
    chunk_bytes: int,
    progress: Progress,
) -> list[str]:
    """Header and data at their places; the hashes of every slice."""
    number = out.fileno()
    write_at(number, memoryview(head), 0)
    hashes: list[list[str]] = [[""] * num_chunks(one.num_bytes, chunk_bytes) for one in slices]

    def write(task: tuple[int, int, int]) -> None:
        which, start, stop = task
        block = block_of(slices[which].source, start, stop)
        for at in range(0, len(block), chunk_bytes):
            hashes[which][(start + at) // chunk_bytes] = digest(block[at : at + chunk_bytes])
        write_at(number, block, places[which] + start)
        _start_flushing(number, places[which] + start, len(block))
        progress(len(block))

    if threads == 1:
        for task in _tasks(slices):
            write(task)
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="part") as pool:
            for _ in pool.map(write, _tasks(slices)):
                pass
    return ["".join(texts) for texts in hashes]


def block_of(source: Stored, start: int, stop: int) -> memoryview:
    """Bytes start..stop of a tensor in row-major order; good until this thread's next block.

    A view of the tensor's own memory where it is in memory; else of one buffer a thread, so that no block
    costs fresh pages.
    """
    item = ITEM_BYTES[source.dtype]
    if isinstance(source, Held) and source.array.flags.c_contiguous:
        return dtypes.bytes_of(source.array.reshape(-1)[start // item : stop // item])
    if not hasattr(_mine, "block"):
        _mine.block = np.empty(BLOCK_BYTES, np.uint8)
    out = _mine.block[: stop - start].view(dtypes.raw(source.dtype))
    read_range(source, start // item, stop // item, out)
    return dtypes.bytes_of(out)


def write_at(number: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(number, data[done:], offset + done)


def _start_flushing(number: int, offset: int, length: int) -> None:
    """Let the disk begin early: the flush at the end then has less left. A hint; failing is fine."""
    if _libc is not None:
        _libc.sync_file_range(number, ctypes.c_int64(offset), ctypes.c_int64(length), 2)


def _find_libc() -> Any:
    libc: Any = ctypes.CDLL(None)
    return libc if hasattr(libc, "sync_file_range") else None


_libc = _find_libc()


def _tasks(slices: Sequence[PlannedSlice]) -> Iterator[tuple[int, int, int]]:
    for which, one in enumerate(slices):
        for start in range(0, one.num_bytes, BLOCK_BYTES):
            yield which, start, min(start + BLOCK_BYTES, one.num_bytes)
