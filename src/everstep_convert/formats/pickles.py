"""Pickles of frameworks: tensors become places in files, objects become records.

`torch.save` writes a zip: `data.pkl` and one stored record per storage. Few names are known here, all of
harmless constructors; every other class becomes an `Opaque`, a record of its name, arguments and state, whose
code is never looked for. DeepSpeed and Megatron need not be installed, and a hostile pickle gets nothing to
call, nor more memory or time than `bounded_pickle` allows. Tensors are `Pieces` of the file: nothing is read
until a box is asked for.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep import bounded_pickle
from everstep.bounded_pickle import BadPickleError
from everstep.errors import UserError
from everstep.layout.box import whole
from everstep.layout.tensor import ITEM_BYTES
from everstep.store import dtypes
from everstep.store.index import Refused
from everstep.store.ranges import LocalFile, RangeFile
from everstep.store.stored import FilePiece, Pieces
from everstep_convert import numpy_pickles
from everstep_convert.values import DtypeName

MAX_PICKLE_BYTES = bounded_pickle.MOST_BYTES
RANK = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)")
STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "ComplexFloatStorage": "C64", "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16",
    "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL", "UntypedStorage": "U8",
}  # fmt: skip
_TORCH_DTYPES = {word: name for name, word in dtypes.IN_TORCH.items()}


class Opaque:
    """An object of a class that is not ours to run: what it is called, and what it was given."""

    module = name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Opaque:
        made = object.__new__(cls)
        made.__dict__["args"] = args
        made.__dict__["kwargs"] = kwargs
        made.__dict__["state"] = {}
        made.__dict__["items"] = []
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """What was given is kept by `__new__`."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__["items"].append((key, value))

    def append(self, value: Any) -> None:
        self.__dict__["items"].append(value)

    def extend(self, values: Any) -> None:
        self.__dict__["items"].extend(values)

    def get(self, key: str, default: Any = None) -> Any:
        state = self.__dict__["state"]
        return state.get(key, default) if isinstance(state, dict) else default

    def __hash__(self) -> int:
        return id(self)


class _Storage:
    """Bytes of a file, of a type."""

    def __init__(self, file: RangeFile, offset: int, num_bytes: int, dtype: str) -> None:
        self.file, self.offset, self.num_bytes, self.dtype = file, offset, num_bytes, dtype


def load(path: str | Path) -> Any:
    """The object of a torch file. A sentence if it is not one."""
    file = LocalFile(path)
    try:
        return load_range(file, 0, file.size(), name=Path(path).name)
    except Refused as refused:
        raise UserError(f"{path} cannot be read: {refused}.") from refused
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def load_range(file: RangeFile, start: int, length: int, *, name: str = "") -> Any:
    """The object of a torch file that is a part of another file; `name`: of a file of its own."""
    window = _Window(file, start, length)
    try:
        archive = zipfile.ZipFile(window)
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
        raise Refused(f"it is not a file of torch.save: {error}") from error
    records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    _require_rank(name, next((info.filename.partition("/")[0] for info in archive.infolist()), ""))
    if "data.pkl" not in records:
        raise Refused("it is not a file of torch.save: data.pkl is missing")
    if records["data.pkl"].file_size > MAX_PICKLE_BYTES:
        raise Refused("its pickle is larger than any we read")
    if records["data.pkl"].compress_type != zipfile.ZIP_STORED:
        raise Refused("its pickle is packed, as torch.save never writes one")
    order = records.get("byteorder")
    if order is not None and archive.read(order) != b"little":
        raise Refused("it was written on a machine of another byte order")

    def persistent(pid: Any) -> _Storage:
        if (
            not isinstance(pid, tuple)
            or len(pid) != 5
            or pid[0] != "storage"
            or not isinstance(pid[1], DtypeName)
        ):
            raise Refused("its pickle refers to something that is not a storage")
        _, kind, key, _, count = pid
        record = records.get(f"data/{key}")
        if record is None or record.compress_type != zipfile.ZIP_STORED:
            raise Refused(f"its storage {key!r} is missing or packed")
        size = record.file_size
        if type(count) is not int or count < 0 or count * ITEM_BYTES[kind] > size:
            raise Refused(f"its storage {key!r} claims more than the file has")
        at = start + _data_offset(window, record)
        if at + size > start + length:
            raise Refused(f"its storage {key!r} reaches outside the file")
        return _Storage(file, at, size, str(kind))

    return _unpickled(archive.read(records["data.pkl"]), persistent)


def _require_rank(name: str, written_as: str) -> None:
    """torch.save keeps the name a file was written under: one rank's file must not stand for another's."""
    ours, theirs = RANK.search(name), RANK.search(written_as)
    if ours and theirs and [*map(_number, ours.groups())] != [*map(_number, theirs.groups())]:
        raise Refused(f"it was written as {written_as}.pt, another rank's; restore the file of this rank")


def _number(digits: str | None) -> int:
    return int(digits or 0)


def load_plain(data: bytes, known: dict[tuple[str, str], Any] | None = None) -> Any:
    """A pickle without storages; `known` adds classes that may be made."""

    def persistent(pid: Any) -> Any:
        raise Refused("its pickle refers to storages")

    return _unpickled(data, persistent, known)


def _unpickled(
    data: bytes, persistent: Callable[[Any], Any], known: dict[tuple[str, str], Any] | None = None
) -> Any:
    try:
        return bounded_pickle.load(data, find=_Names(known or {}).find, persistent=persistent)
    except BadPickleError as error:
        raise Refused(f"its pickle is broken: {error}") from error


class _Names:
    """What stands for the names of one pickle: every class that is not known here becomes an `Opaque`."""

    def __init__(self, known: dict[tuple[str, str], Any]) -> None:
        self._known = known
        self._opaque: dict[tuple[str, str], type] = {}

    def find(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        if (module, name) in _CALLABLE:
            return _CALLABLE[module, name]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return DtypeName(STORAGES[name])
        if module == "torch" and name in _TORCH_DTYPES:
            return DtypeName(_TORCH_DTYPES[name])
        made = self._opaque.get((module, name))
        if made is None:
            made = self._opaque[module, name] = type("Opaque", (Opaque,), {"module": module, "name": name})
        return made


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> Pieces:
    dtype = next((str(extra) for extra in rest if isinstance(extra, DtypeName)), None)
    if not isinstance(storage, _Storage):
        raise Refused("a tensor of its pickle has no storage")
    kind = dtype or storage.dtype
    shape, strides = tuple(size), tuple(stride)
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or any(type(n) is not int or n < 0 for n in numbers):
        raise Refused("a tensor of its pickle has no shape")
    item = ITEM_BYTES[kind]
    if 0 not in shape:
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if (last + 1) * item > storage.num_bytes:
            raise Refused("a tensor of its pickle reaches outside its storage")
    piece = FilePiece(whole(shape), storage.file, storage.offset + offset * item, strides)
    return Pieces(kind, shape, (piece,))


def _parameter(data: Any, *rest: Any) -> Any:
    return data


def _subclass(rebuild: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor with attributes of its own, which are not of interest."""
    if rebuild not in (_tensor, _parameter) or not isinstance(args, tuple):
        raise Refused("its pickle rebuilds a tensor in a way we do not know")
    return rebuild(*args)


def _reconstructed(kind: Any, base: Any, state: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Opaque):
        return kind.__new__(kind)
    raise Refused("its pickle rebuilds a class that is not allowed")


def _size(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


_CALLABLE: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    ("torch", "Size"): _size,
    **bounded_pickle.HARMLESS,
    **numpy_pickles.CALLABLE,
    ("copyreg", "_reconstructor"): _reconstructed,
    ("copy_reg", "_reconstructor"): _reconstructed,
}


class _Window(io.RawIOBase):
    """A part of a file, as a file: for zipfile, which reads its directory and little else."""

    def __init__(self, file: RangeFile, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._at, self._length)[whence]
        if base + offset < 0:
            raise ValueError("a place before the file")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        data = bytearray(count)
        self._file.read(self._start + self._at, memoryview(data))
        self._at += count
        return bytes(data)


def _data_offset(window: _Window, record: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin: behind its local header, whose length is its own affair."""
    window.seek(record.header_offset)
    head = window.read(30)
    if len(head) != 30 or head[:4] != b"PK\x03\x04":
        raise Refused("its directory points to no record")
    return (
        record.header_offset
        + 30
        + int.from_bytes(head[26:28], "little")
        + int.from_bytes(head[28:30], "little")
    )
