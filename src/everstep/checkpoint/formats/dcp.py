"""PyTorch's distributed checkpoints: `.metadata`, a pickle, and `__R_N.distcp`, torch files end to end.

Read without running the pickle, and without reading whole chunks: a chunk is a torch file inside another
file, so its tensor is a place in that file. Keys are split by the paths the saver recorded:

    model.<parameter>                          model/<parameter>
    optimizer.state.<parameter>.<key>          optimizer/<parameter>/<key>
    optimizer.param_groups.<parameter>.<n>     the parameter's group (flattened, as pipelines need it)
    everstep.<...>                             ours: step, groups, meta
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from everstep.checkpoint.formats import pickles, torchfile
from everstep.checkpoint.index import Refused
from everstep.checkpoint.parts import Progress
from everstep.checkpoint.ranges import RangeFile
from everstep.checkpoint.state import State, plain
from everstep.checkpoint.stored import FilePiece, Pieces, Stored, num_bytes
from everstep.errors import UserError
from everstep.layout.box import Box, overlapping, uncovered

FILE = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,200}\.distcp")
FILE_BYTES = 8 << 30
_MODEL, _OPTIMIZER = ("model", "module"), ("optimizer", "optim")


@dataclass(slots=True)
class Saved:
    """The keys of a checkpoint as they are: tensors, and values that are none."""

    tensors: dict[str, Stored] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)


def is_one(path: Path) -> bool:
    return (path / ".metadata").is_file()


def read(path: Path) -> State:
    saved = read_keys(path)
    state = State()
    prefixed = any(saved.paths[key][0] in _MODEL for key in saved.tensors)
    flat: dict[str, Stored] = {}
    values: dict[str, Any] = {}
    for key, stored in saved.tensors.items():
        place = saved.paths[key]
        if place[0] in _OPTIMIZER:
            flat[".".join(map(str, place[1:]))] = stored
            if len(place) == 4 and place[1] == "state":
                state.tensors[f"optimizer/{place[2]}/{place[3]}"] = stored
                flat.popitem()
        elif not prefixed or place[0] in _MODEL:
            name = ".".join(map(str, place[1:] if prefixed else place))
            state.tensors[f"model/{name}"] = stored
        else:
            state.tensors[f"extra/{key}"] = stored
    for key, value in saved.values.items():
        values[".".join(map(str, saved.paths[key]))] = value
    _split_optimizer(state, flat)
    _take_values(state, values)
    return state


def read_keys(path: Path) -> Saved:
    try:
        return _read_keys(path)
    except Refused as refused:
        raise UserError(f"{path} cannot be read: {refused}.") from refused
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def _read_keys(path: Path) -> Saved:
    metadata = pickles.load_plain((path / ".metadata").read_bytes())
    try:
        table, storage = metadata.get("state_dict_metadata"), metadata.get("storage_data")
        places = {
            (index.get("fqn"), tuple(index.get("offset") or ())): info for index, info in storage.items()
        }
    except AttributeError as error:
        raise Refused(".metadata is no metadata of a distributed checkpoint") from error
    files: dict[str, RangeFile] = {}

    def blob(key: str, offset: tuple[int, ...]) -> Any:
        info = places.get((key, offset))
        if info is None:
            raise Refused(f".metadata does not say where {key!r} is")
        if info.get("transform_descriptors"):
            raise Refused(f"{key!r} is stored transformed, which we do not undo")
        name = str(info.get("relative_path"))
        if not FILE.fullmatch(name) or name.startswith(".."):
            raise Refused(f".metadata names {name!r}, which is no file of this folder")
        file = files.setdefault(name, RangeFile(path / name))
        start, length = info.get("offset"), info.get("length")
        if (
            type(start) is not int
            or type(length) is not int
            or not 0 <= start <= start + length <= file.size()
        ):
            raise Refused(f".metadata points outside {name}")
        return pickles.load_range(file, start, length)

    saved = Saved()
    planned = metadata.get("planner_data") or {}
    for key, told in table.items():
        saved.paths[key] = _path_of(key, planned)
        if told.get("chunks") is None:
            saved.values[key] = blob(key, ())
            continue
        saved.tensors[key] = _chunked(key, told, blob)
    return saved


def _path_of(key: str, planned: Any) -> tuple[Any, ...]:
    found = planned.get(key) if isinstance(planned, dict) else None
    if isinstance(found, tuple | list) and found:
        return tuple(found)
    for name in (*_MODEL, *_OPTIMIZER):
        if key.startswith(f"{name}."):
            return (name, key[len(name) + 1 :])
    return (key,)


def _chunked(key: str, told: Any, blob: Any) -> Stored:
    shape = tuple(told.get("size"))
    pieces: list[FilePiece] = []
    dtype = "F32"
    for chunk in told.get("chunks"):
        offsets, sizes = tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))
        box = Box(offsets, sizes)
        if not box.within(shape):
            raise Refused(f"a chunk of {key!r} reaches outside it")
        tensor = blob(key, offsets)
        if not isinstance(tensor, Pieces) or tensor.shape != sizes:
            raise Refused(f"a chunk of {key!r} is not the tensor .metadata says")
        dtype = tensor.dtype
        (piece,) = tensor.pieces
        pieces.append(FilePiece(box, piece.file, piece.offset, piece.strides))
    boxes = [piece.box for piece in pieces]
    if overlapping(boxes) is not None or uncovered(shape, boxes) is not None:
        raise Refused(f"the chunks of {key!r} overlap, or do not cover it")
    return Pieces(dtype, shape, tuple(pieces))


def _split_optimizer(state: State, flat: dict[str, Stored]) -> None:
    """Flattened keys state.<parameter>.<key>: both may have dots; parameters are known."""
    parameters = state.parameters()
    for key, stored in flat.items():
        found = _split(key, "state.", parameters)
        if found is None:
            state.tensors[f"extra/optimizer.{key}"] = stored
        else:
            state.tensors[f"optimizer/{found[0]}/{found[1]}"] = stored


def _split(key: str, prefix: str, parameters: Any) -> tuple[str, str] | None:
    if not key.startswith(prefix):
        return None
    rest = key[len(prefix) :]
    at = rest.rfind(".")
    while at > 0:
        if rest[:at] in parameters:
            return rest[:at], rest[at + 1 :]
        at = rest.rfind(".", 0, at)
    name, _, last = rest.rpartition(".")
    return (name, last) if name else None


def _take_values(state: State, values: dict[str, Any]) -> None:
    lost: list[str] = []
    ours = values.pop("everstep", None) or values.pop("everstep.state", None)
    numbers: dict[str, dict[str, Any]] = {}
    listed: dict[int, dict[str, Any]] = {}
    extra = {}
    for key, value in values.items():
        bare = re.sub(r"^(optimizer|optim)\.", "", key)
        match = re.fullmatch(r"param_groups\.(\d+)\.(\w+)", bare)
        found = _split(bare, "param_groups.", state.parameters())
        if bare == "param_groups" and isinstance(value, list):
            listed |= dict(enumerate(value))
        elif match:
            listed.setdefault(int(match[1]), {})[match[2]] = value
        elif found is not None:
            numbers.setdefault(found[0], {})[found[1]] = value
        elif (scalar_key := _split(bare, "state.", state.parameters())) is not None and bare != key:
            extra[f"{scalar_key[0]}/{scalar_key[1]}"] = plain(value, lost, key)
        else:
            extra[key] = plain(value, lost, key)
    if isinstance(ours, str):
        table = json.loads(ours)
        state.step, state.groups, state.meta = table["step"], table["groups"], table["meta"]
        state.tied, state.frozen = table["tied"], table["frozen"]
    elif numbers:
        state.groups = _grouped(numbers, lost)
    elif listed:
        state.groups = [plain(listed[i], lost, "param_groups") for i in sorted(listed)]
    if extra:
        state.meta["extra"] = extra
        told = (extra.get(key) for key in ("step", "iteration", "global_step", "train_state.step"))
        state.step = state.step or next((value for value in told if type(value) is int and value >= 0), 0)
    state.notes += [f"{name} is no plain value and is left out" for name in lost]


def _grouped(numbers: dict[str, dict[str, Any]], lost: list[str]) -> list[dict[str, Any]]:
    """Parameters with the same numbers are a group."""
    found: dict[str, dict[str, Any]] = {}
    for name, table in numbers.items():
        told = plain({k: v for k, v in table.items() if k != "params"}, lost, "param_groups")
        found.setdefault(json.dumps(told, sort_keys=True), {"params": [], **told})["params"].append(name)
    return list(found.values())


# Writing.


def write(path: Path, state: State, progress: Progress = lambda count: None) -> None:
    keys: dict[str, Any] = {}
    for name, stored in state.tensors.items():
        keys[_key(name)] = stored
    for group in state.groups:
        for name in group["params"]:
            for number, value in group.items():
                if number != "params":
                    keys[f"optimizer.param_groups.{name}.{number}"] = value
    keys["everstep.state"] = json.dumps(
        {
            "step": state.step,
            "groups": state.groups,
            "tied": state.tied,
            "frozen": state.frozen,
            "meta": state.meta,
        }
    )
    write_keys(path, keys, progress)


def _key(name: str) -> str:
    kind, _, rest = name.partition("/")
    if kind == "optimizer":
        parameter, _, key = rest.rpartition("/")
        return f"optimizer.state.{parameter}.{key}"
    return f"model.{rest}" if kind in ("model", "buffer") else rest


def write_keys(path: Path, keys: dict[str, Any], progress: Progress = lambda count: None) -> None:
    """Any table of tensors and values, as `torch.distributed.checkpoint.save` of one process lays it out."""
    from torch.distributed.checkpoint import metadata as torch_metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    path.mkdir(parents=True, exist_ok=True)
    table: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for name, out, key, value in _dealt(path, keys):
        start = out.tell()
        torchfile.save_to(out, value, progress)
        offset = None
        if torchfile.is_stored(value):
            offset = _size([0] * len(value.shape))
            table[key] = _told(value)
        else:
            table[key] = torch_metadata.BytesStorageMetadata()
        index = torch_metadata.MetadataIndex(key, offset)
        storage[index] = _StorageInfo(relative_path=name, offset=start, length=out.tell() - start)
    planner = {key: _written_path(key) for key in keys}
    whole = torch_metadata.Metadata(state_dict_metadata=table, planner_data=planner, storage_data=storage)
    partial = path / ".metadata.tmp"
    with open(partial, "wb") as file:
        pickle.dump(whole, file)
    os.rename(partial, path / ".metadata")


def _dealt(path: Path, keys: dict[str, Any]) -> Iterator[tuple[str, BinaryIO, str, Any]]:
    """Every key with the file it goes to; files are closed when they are full."""
    number, room = -1, 0
    out: BinaryIO | None = None
    try:
        for key, value in keys.items():
            size = num_bytes(value) if torchfile.is_stored(value) else 0
            if out is None or room < size:
                _close(out)
                number, room = number + 1, FILE_BYTES
                out = open(path / f"__0_{number}.distcp", "wb")  # noqa: SIM115 - closed when full, or below
            room -= size
            yield f"__0_{number}.distcp", out, key, value
    finally:
        _close(out)


def _close(out: BinaryIO | None) -> None:
    if out is not None:
        out.close()


def _written_path(key: str) -> tuple[Any, ...]:
    first, _, rest = key.partition(".")
    return (first, rest) if rest else (first,)


def _size(values: Any) -> Any:
    import torch

    return torch.Size(values)


def _told(stored: Stored) -> Any:
    from torch.distributed.checkpoint import metadata as torch_metadata

    from everstep.checkpoint.dtypes import in_torch

    chunk = torch_metadata.ChunkStorageMetadata(
        offsets=_size([0] * len(stored.shape)), sizes=_size(stored.shape)
    )
    properties = torch_metadata.TensorProperties(dtype=in_torch(stored.dtype))
    return torch_metadata.TensorStorageMetadata(
        properties=properties, size=_size(stored.shape), chunks=[chunk]
    )
