"""The checkpoint folder of a job: complete or not there, and never trusted without its hashes.

    <root>/step-00000010/            complete: it got this name by one rename
        index.json                   step, meta, and of every tensor: file, dtype, shape, hash
        <part>.safetensors           written by one worker each
    <root>/step-00000020.partial/    being written, or left by a crash; readers do not see it

Tensors are named logically ("model/embed.tokens.weight"), never by stage or rank: a reader of another shape
finds what it needs by name. Writers flush their parts to disk before `commit` names them, and `commit`
flushes the index before the rename, so a crash at any moment leaves the previous checkpoint as the newest. A
reader believes nothing: names, sizes, shapes and hashes are checked, and what fails is refused with a
sentence. No pickle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from everstep.errors import InternalError, UserError

FORMAT, VERSION = "everstep-checkpoint", 1
MAX_INDEX_BYTES = 256 << 20
Part = dict[str, Any]  # JSON: {"file", "bytes", "tensors": {name: {"dtype", "shape", "xxh3"}}}

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_STEP = re.compile(r"step-(\d{8,18})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")


class _Refused(Exception):
    """Why a checkpoint is not believed: a file and a reason."""


# Writing.


def partial(root: str | Path, step: int) -> Path:
    """Where the parts of a step are written until it is committed."""
    return Path(root) / f"step-{step:08d}.partial"


def write_part(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> Part:
    """Write one worker's tensors to `<folder>/<name>.safetensors`, flushed to disk; what to tell `commit`."""
    file = f"{name}.safetensors"
    if not _FILE.fullmatch(file):
        raise InternalError(f"{name!r} is no name for a part of a checkpoint.")
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    offset = 0
    for key, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise UserError(f"tensor {key!r} is of {tensor.dtype}, which a checkpoint does not hold.")
        size = tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    entries = {}
    with open(folder / file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for key, tensor in tensors.items():  # one at a time through host memory
            data = _bytes(tensor)
            out.write(data)
            entries[key] = {"dtype": header[key]["dtype"], "shape": header[key]["shape"], "xxh3": _hash(data)}
        out.flush()
        os.fsync(out.fileno())
    return {"file": file, "bytes": 8 + len(text) + offset, "tensors": entries}


def commit(
    root: str | Path, step: int, parts: Sequence[Part], meta: Mapping[str, Any], keep: int = 3
) -> Path:
    """Make a step whose parts are all written the newest checkpoint; of older ones, `keep` - 1 stay."""
    source, target = partial(root, step), Path(root) / f"step-{step:08d}"
    names = [name for part in parts for name in part["tensors"]]
    if len(names) != len(set(names)) or len(parts) != len({part["file"] for part in parts}):
        raise InternalError(f"two parts of the checkpoint of step {step} hold one name.")
    for part in parts:
        if (source / part["file"]).stat().st_size != part["bytes"]:
            raise InternalError(f"{source / part['file']} is not as long as its writer said.")
    index = {"format": FORMAT, "version": VERSION, "step": step, "meta": dict(meta), "parts": list(parts)}
    text = _canonical(index)
    with open(source / "index.json", "w", encoding="utf-8") as out:
        out.write(f'{{"xxh3":"{_hash(text.encode())}","index":{text}}}\n')
        out.flush()
        os.fsync(out.fileno())
    _fsync_folder(source)
    if target.exists():  # a refused checkpoint of this step, which a restarted run has now made again
        _remove(target)
    os.rename(source, target)
    _fsync_folder(Path(root))
    older = [path for number, path in _complete(root) if number <= step]
    for path in older[:-keep]:
        _remove(path)
    return target


def clean(root: str | Path) -> list[Path]:
    """Remove what a crash left half written. Not while a checkpoint is being written."""
    left = [path for path in sorted(Path(root).glob("step-*.partial")) if not path.is_symlink()]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return left


def _remove(folder: Path) -> None:
    """Gone at once for readers, whatever happens half-way."""
    doomed = folder.with_name(folder.name + ".old.partial")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


# Reading.


class Entry(NamedTuple):
    file: str
    dtype: str
    shape: tuple[int, ...]
    xxh3: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose index and files fit together; `read` checks the bytes of what it returns."""

    folder: Path
    step: int
    meta: dict[str, Any]
    tensors: dict[str, Entry]

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Tensors by logical name, on the CPU, each checked against its hash."""
        wanted = list(self.tensors if names is None else names)
        missing = next((name for name in wanted if name not in self.tensors), None)
        if missing is not None:
            raise UserError(
                f"checkpoint {self.folder} holds no tensor {missing!r}; was it saved from another model?"
            )
        try:
            found = {
                name: tensor
                for file in dict.fromkeys(self.tensors[name].file for name in wanted)
                for name, tensor in self._read_file(file, set(wanted)).items()
            }
        except _Refused as refused:
            raise UserError(f"checkpoint {self.folder} is damaged: {refused}.") from refused
        return {name: found[name] for name in wanted}

    def verify(self) -> None:
        """Read everything."""
        self.read()

    def _read_file(self, file: str, wanted: set[str]) -> dict[str, Tensor]:
        found = {}
        try:
            with safe_open(self.folder / file, framework="pt") as opened:
                for name, entry in self.tensors.items():
                    if entry.file == file and name in wanted:
                        tensor = opened.get_tensor(name)
                        if _hash(_bytes(tensor)) != entry.xxh3:
                            raise _Refused(f"{file}: tensor {name!r} has not the bytes that were written")
                        found[name] = tensor
        except (OSError, SafetensorError) as error:
            raise _Refused(f"{file} cannot be read: {error}") from error
        return found


def complete_steps(root: str | Path) -> list[int]:
    """The steps that were committed, oldest first; not yet verified."""
    return [number for number, _ in _complete(root)]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """One checkpoint by its folder, its index checked against its files; a sentence if they do not fit."""
    try:
        return _opened(Path(folder))
    except _Refused as refused:
        raise UserError(f"checkpoint {folder} is damaged: {refused}.") from refused


def newest_valid(root: str | Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that passes every check, all bytes read; and why each newer one does not."""
    refused: list[str] = []
    for _, folder in reversed(_complete(root)):
        try:
            found = open_checkpoint(folder)
            found.verify()
            return found, refused
        except UserError as error:
            refused.append(str(error))
    return None, refused


def _complete(root: str | Path) -> list[tuple[int, Path]]:
    found = []
    for path in Path(root).glob("step-*"):
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.append((int(match[1]), path))
    return sorted(found)


def _opened(folder: Path) -> Checkpoint:
    index = _index(folder)
    match = _STEP.fullmatch(folder.name)
    if match is None or index["step"] != int(match[1]):
        raise _Refused(f"index.json is of step {index['step']}, which is not the folder's")
    tensors: dict[str, Entry] = {}
    for part in index["parts"]:
        for name, entry in _part(folder, part).items():
            if name in tensors:
                raise _Refused(f"tensor {name!r} is in both {tensors[name].file} and {entry.file}")
            tensors[name] = entry
    return Checkpoint(folder, index["step"], index["meta"], tensors)


def _index(folder: Path) -> dict[str, Any]:
    path = folder / "index.json"
    _regular(path)
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise _Refused("index.json is larger than any index we write")
    try:
        outer = json.loads(path.read_bytes(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _Refused(f"index.json is not JSON: {str(error).splitlines()[0]}") from error
    index = outer.get("index") if isinstance(outer, dict) else None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise _Refused("index.json is not the index of an Everstep checkpoint")
    if outer.get("xxh3") != _hash(_canonical(index).encode()):
        raise _Refused("index.json has not the bytes that were written")
    if index.get("version") != VERSION:
        raise _Refused(f"index.json is of version {index.get('version')}, and we read version {VERSION}")
    shape = {"step": int, "meta": dict, "parts": list}
    wrong = next((key for key, kind in shape.items() if not isinstance(index.get(key), kind)), None)
    if wrong is not None:
        raise _Refused(f"index.json has no {wrong}")
    return index


def _part(folder: Path, part: Any) -> dict[str, Entry]:
    """The tensors of one file, as the index tells them, if the file's own header tells the same."""
    file = part.get("file") if isinstance(part, dict) else None
    if not isinstance(file, str) or not _FILE.fullmatch(file):
        raise _Refused(f"index.json names {file!r}, which is no file of this folder")
    _regular(folder / file)
    size = (folder / file).stat().st_size
    if size != part.get("bytes"):
        raise _Refused(f"{file} has {size} bytes, and {part.get('bytes')} were written")
    try:
        told = {
            name: Entry(file, entry["dtype"], tuple(entry["shape"]), entry["xxh3"])
            for name, entry in part["tensors"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise _Refused(f"index.json does not describe the tensors of {file}") from error
    try:
        with safe_open(folder / file, framework="pt") as opened:
            held = {
                name: (opened.get_slice(name).get_dtype(), tuple(opened.get_slice(name).get_shape()))
                for name in opened.keys()
            }
    except (OSError, SafetensorError) as error:
        raise _Refused(f"{file} cannot be read: {error}") from error
    if held != {name: (entry.dtype, entry.shape) for name, entry in told.items()}:
        raise _Refused(f"{file} holds other tensors than index.json says")
    return told


def _regular(path: Path) -> None:
    """A plain file of this folder: a link could lead anywhere."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise _Refused(f"{path.name} is missing") from None
    if not stat.S_ISREG(mode):
        raise _Refused(f"{path.name} is not a plain file")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key is there twice")
    return table


def _canonical(index: Mapping[str, Any]) -> str:
    return json.dumps(index, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _bytes(tensor: Tensor) -> memoryview:
    host = tensor.detach().to("cpu").contiguous()
    return memoryview(host.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _hash(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _fsync_folder(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
