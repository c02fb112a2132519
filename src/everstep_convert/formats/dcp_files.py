"""The files of PyTorch's distributed checkpoints: `.metadata`, a pickle, and `__R_N.distcp`, torch files.

Read without running the pickle, and without reading whole chunks: a chunk is a torch file inside another
file, so its tensor is a place in that file. Written as `torch.distributed.checkpoint.save` of one process
lays them out. What the keys mean is for `dcp` and `megatron` to say.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from everstep.errors import UserError
from everstep.layout.box import Box, overlapping, uncovered
from everstep.store import dtypes
from everstep.store.index import Refused
from everstep.store.parts import Progress
from everstep.store.ranges import LocalFile
from everstep.store.stored import FilePiece, Pieces, Stored, num_bytes
from everstep_convert.formats import pickles, torchfile
from everstep_convert.values import DtypeName, is_stored

FILE = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,200}\.distcp")
FILE_BYTES = 8 << 30


@dataclass(slots=True)
class SavedKeys:
    """The keys of a checkpoint as they are: tensors, and values that are none."""

    tensors: dict[str, Stored] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # as the saver recorded them


def is_one(path: Path) -> bool:
    return (path / ".metadata").is_file()


def read_keys(path: Path) -> SavedKeys:
    try:
        return _read_keys(path)
    except Refused as refused:
        raise UserError(f"{path} cannot be read: {refused}.") from refused
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def _read_keys(path: Path) -> SavedKeys:
    metadata = pickles.load_plain((path / ".metadata").read_bytes())
    try:
        table, storage = metadata.get("state_dict_metadata"), metadata.get("storage_data")
        places = {
            (index.get("fqn"), tuple(index.get("offset") or ())): info for index, info in storage.items()
        }
    except AttributeError as error:
        raise Refused(".metadata is not the metadata of a distributed checkpoint") from error
    files: dict[str, LocalFile] = {}

    def blob(key: str, offset: tuple[int, ...]) -> Any:
        info = places.get((key, offset))
        if info is None:
            raise Refused(f".metadata does not say where {key!r} is")
        if info.get("transform_descriptors"):
            raise Refused(f"{key!r} is stored transformed, which is not supported")
        name = str(info.get("relative_path"))
        if not FILE.fullmatch(name) or name.startswith(".."):
            raise Refused(f".metadata names {name!r}, which is not a file of this folder")
        file = files.setdefault(name, LocalFile(path / name))
        start, length = info.get("offset"), info.get("length")
        if (
            type(start) is not int
            or type(length) is not int
            or not 0 <= start <= start + length <= file.size()
        ):
            raise Refused(f".metadata points outside {name}")
        return pickles.load_range(file, start, length)

    saved = SavedKeys()
    planned = metadata.get("planner_data") or {}
    for key, described in table.items():
        found = planned.get(key) if isinstance(planned, dict) else None
        saved.paths[key] = tuple(found) if isinstance(found, tuple | list) and found else ()
        if described.get("chunks") is None:
            saved.values[key] = blob(key, ())
        else:
            saved.tensors[key] = _chunked(key, described, blob)
    return saved


def _chunked(key: str, described: Any, blob: Any) -> Stored:
    shape = tuple(described.get("size"))
    pieces: list[FilePiece] = []
    kinds: set[str] = set()
    for chunk in described.get("chunks"):
        offsets, sizes = tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))
        box = Box(offsets, sizes)
        if not box.within(shape):
            raise Refused(f"a chunk of {key!r} reaches outside it")
        tensor = blob(key, offsets)
        if not isinstance(tensor, Pieces) or (tensor.shape != sizes and box.volume):
            raise Refused(f"a chunk of {key!r} is not the tensor .metadata describes")
        kinds.add(tensor.dtype)
        if not box.volume:  # a rank without elements; FSDP2 over tensor parallelism saves another empty shape
            continue
        (piece,) = tensor.pieces
        pieces.append(FilePiece(box, piece.file, piece.offset, piece.strides))
    boxes = [piece.box for piece in pieces]
    if overlapping(boxes) is not None or uncovered(shape, boxes) is not None:
        raise Refused(f"the chunks of {key!r} overlap, or do not cover it")
    if not kinds:  # nothing was saved of a tensor without elements
        state = described.get("properties").__dict__.get("state")
        kinds = (
            {str(one) for one in state if isinstance(one, DtypeName)} if isinstance(state, tuple) else kinds
        )
    if len(kinds) != 1:
        raise Refused(f"the chunks of {key!r} are of {len(kinds)} dtypes")
    return Pieces(kinds.pop(), shape, tuple(pieces))


# Writing.


def write_keys(
    path: Path,
    keys: Mapping[str, Any],
    progress: Progress = lambda count: None,
    *,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Any table of tensors and values. `aliases`: other keys of the same bytes, which are written once."""
    from torch.distributed.checkpoint import metadata as torch_metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    path.mkdir(parents=True, exist_ok=True)
    table: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    others: dict[str, list[str]] = {}
    for alias, key in (aliases or {}).items():
        others.setdefault(key, []).append(alias)
    for name, out, key, value in _dealt(path, keys):
        start = out.tell()
        torchfile.save_to(out, value, progress)
        place = _StorageInfo(relative_path=name, offset=start, length=out.tell() - start)
        offset = _size([0] * len(value.shape)) if is_stored(value) else None
        described = _described(value) if is_stored(value) else torch_metadata.BytesStorageMetadata()
        for one in (key, *others.get(key, ())):
            table[one] = described
            storage[torch_metadata.MetadataIndex(one, offset)] = place
    planner = {key: _written_path(key) for key in table}
    whole = torch_metadata.Metadata(state_dict_metadata=table, planner_data=planner, storage_data=storage)
    partial = path / ".metadata.tmp"
    with open(partial, "wb") as file:
        pickle.dump(whole, file)
    os.rename(partial, path / ".metadata")


def _dealt(path: Path, keys: Mapping[str, Any]) -> Iterator[tuple[str, BinaryIO, str, Any]]:
    """Every key with the file it goes to; files are closed when they are full."""
    number, room = -1, 0
    out: BinaryIO | None = None
    try:
        for key, value in keys.items():
            size = num_bytes(value) if is_stored(value) else 0
            if out is None or room < size:
                if out is not None:
                    out.close()
                number, room = number + 1, FILE_BYTES
                out = open(path / f"__0_{number}.distcp", "wb")  # noqa: SIM115 - closed when full, or below
            room -= size
            yield f"__0_{number}.distcp", out, key, value
    finally:
        if out is not None:
            out.close()


def _written_path(key: str) -> tuple[Any, ...]:
    first, _, rest = key.partition(".")
    return (first, rest) if rest else (first,)


def _size(values: Any) -> Any:
    import torch

    return torch.Size(values)


def _described(stored: Stored) -> Any:
    from torch.distributed.checkpoint import metadata as torch_metadata

    chunk = torch_metadata.ChunkStorageMetadata(
        offsets=_size([0] * len(stored.shape)), sizes=_size(stored.shape)
    )
    properties = torch_metadata.TensorProperties(dtype=dtypes.in_torch(stored.dtype))
    return torch_metadata.TensorStorageMetadata(
        properties=properties, size=_size(stored.shape), chunks=[chunk]
    )
