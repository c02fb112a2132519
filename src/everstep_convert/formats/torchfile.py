"""Writing what `torch.load` reads, tensor by tensor, without ever holding the whole.

Tensors in the object are `Stored`: their bytes are fetched when their record is written. Classes of packages
that are not installed here are named by `Global`, and their objects by `PickledObject`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from everstep.layout.box import row_major
from everstep.layout.tensor import ITEM_BYTES
from everstep.store import dtypes
from everstep.store.parts import BLOCK_BYTES, Progress, block_of
from everstep.store.stored import Stored, num_bytes
from everstep_convert.formats.pickles import STORAGES
from everstep_convert.values import DtypeName, is_stored

_CLASS_OF = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}


@dataclass(frozen=True)
class Global:
    """A name in a module, which need not exist here."""

    module: str
    name: str

    def __call__(self) -> None:
        """Pickle wants what it calls to be callable; it is never called here."""


@dataclass(frozen=True)
class PickledObject:
    """An object: of a class with a state, or made by calling the class with arguments."""

    kind: Global
    state: dict[str, Any] | None = None
    args: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class _Record:
    key: str
    stored: Stored


def save(path: Path, value: Any, progress: Progress = lambda count: None) -> None:
    with open(path, "wb") as out:
        save_to(out, value, progress, stem=path.stem)


def save_to(
    out: BinaryIO, value: Any, progress: Progress = lambda count: None, stem: str = "archive"
) -> None:
    """From where the file is at on: a torch file may be a part of another file."""
    pickled, records = dumped(value)
    with zipfile.ZipFile(_FromHere(out), "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        archive.writestr(_info(f"{stem}/data.pkl"), pickled)
        archive.writestr(_info(f"{stem}/byteorder"), b"little")
        for record in records:
            size = num_bytes(record.stored)
            with archive.open(_info(f"{stem}/data/{record.key}"), "w", force_zip64=size >= 1 << 31) as into:
                for start in range(0, size, BLOCK_BYTES):
                    block = block_of(record.stored, start, min(start + BLOCK_BYTES, size))
                    into.write(block)
                    progress(len(block))
        archive.writestr(_info(f"{stem}/version"), b"3\n")


class _FromHere(io.RawIOBase):
    """A file whose beginning is where another one is at: a zip's offsets count from there."""

    def __init__(self, out: BinaryIO) -> None:
        super().__init__()
        self._out, self._base = out, out.tell()

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._out.tell() - self._base

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._out.seek(offset + self._base if whence == 0 else offset, whence) - self._base

    def write(self, data: Any) -> int:
        return self._out.write(data)


def dumped(value: Any) -> tuple[bytes, list[_Record]]:
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(value)
    return out.getvalue(), pickler.records


def _torch_dtype(name: str) -> Global:
    return Global("torch", dtypes.IN_TORCH[name])


def _info(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))


_PythonPickler: Any = pickle._Pickler  # the one in Python: its save_global can be replaced


class _Pickler(_PythonPickler):  # type: ignore[misc]
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=2)
        self.records: list[_Record] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Record):
            return None
        dtype, size = value.stored.dtype, num_bytes(value.stored)
        if dtype not in _CLASS_OF:  # torch has no class for such a storage: bytes, and the type beside them
            return ("storage", Global("torch.storage", "UntypedStorage"), value.key, "cpu", size)
        count = size // ITEM_BYTES[dtype]
        return ("storage", Global("torch", _CLASS_OF[dtype]), value.key, "cpu", count)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Global):
            return value.name
        if isinstance(value, PickledObject):
            if value.args is not None:
                return value.kind, value.args
            rebuild = Global("copyreg", "_reconstructor")
            return rebuild, (value.kind, Global("builtins", "object"), None), value.state
        if is_stored(value):
            record = _Record(str(len(self.records)), value)
            self.records.append(record)
            strides = row_major(value.shape)
            rest: tuple[Any, ...] = (record, 0, tuple(value.shape), strides, False, OrderedDict())
            if value.dtype in _CLASS_OF:
                return Global("torch._utils", "_rebuild_tensor_v2"), rest
            return Global("torch._utils", "_rebuild_tensor_v3"), (*rest, _torch_dtype(value.dtype))
        return NotImplemented

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        """A dtype is a string to us, which Python's pickler would write before it asks."""
        super().save(_torch_dtype(value) if isinstance(value, DtypeName) else value, save_persistent_id)

    def save_global(self, value: Any, name: str | None = None) -> None:
        if isinstance(value, Global):
            self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
            self.memoize(value)
            return
        super().save_global(value, name)
