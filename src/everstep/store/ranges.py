"""Byte ranges of files, local or behind any fsspec URL, read by pread or mmap. Every byte asked for counts.

`RangeFile.read(offset, out)` fills `out` or raises; there are no short reads. Threads may share one.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from pathlib import Path
from typing import Any, Literal, Protocol

Access = Literal["pread", "mmap"]


class EndedEarly(OSError):
    """The file is shorter than what is to be read of it: not a fault of the disk."""


class RangeFile(Protocol):
    bytes_read: int

    def size(self) -> int: ...
    def read(self, offset: int, out: memoryview) -> None: ...
    def close(self) -> None: ...


class LocalFile:
    """A local file, opened at the first read."""

    def __init__(self, path: str | Path, access: Access = "pread") -> None:
        self.path, self.access = Path(path), access
        self.bytes_read = 0
        self._number: int | None = None
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return str(self.path)

    def size(self) -> int:
        return os.fstat(self._open()).st_size

    def read(self, offset: int, out: memoryview) -> None:
        number = self._open()
        done, total = 0, len(out)
        if self._map is not None:
            out[:] = self._mapped(offset, total)
            done = total
        while done < total:
            count = os.preadv(number, [out[done:]], offset + done)
            if count <= 0:
                raise EndedEarly(f"{self.path.name} ends {total - done} bytes too early")
            done += count
        self.bytes_read += total  # a statistic: two threads may lose a count, never a byte

    def _mapped(self, offset: int, length: int) -> memoryview:
        assert self._map is not None
        if offset < 0 or offset + length > len(self._map):
            raise EndedEarly(f"{self.path.name} ends before byte {offset + length}")
        return memoryview(self._map)[offset : offset + length]

    def _open(self) -> int:
        with self._lock:
            if self._number is None:
                self._number = _opened(self.path)
                if self.access == "mmap" and os.fstat(self._number).st_size:
                    self._map = mmap.mmap(self._number, 0, prot=mmap.PROT_READ)
            return self._number

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._number is not None:
            os.close(self._number)
            self._number = None

    def __del__(self) -> None:
        self.close()


def _opened(path: Path) -> int:
    """Files only: the opening of a pipe would wait for a writer."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return number


class UrlFile:
    """A file of an fsspec file system; one range request per read."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._name = fs, path
        self.bytes_read = 0

    def __str__(self) -> str:
        return self._name

    def size(self) -> int:
        return int(self._fs.size(self._name))

    def read(self, offset: int, out: memoryview) -> None:
        data = self._fs.cat_file(self._name, start=offset, end=offset + len(out)) if len(out) else b""
        if len(data) != len(out):
            raise EndedEarly(f"{self._name} ends {len(out) - len(data)} bytes too early")
        out[:] = data
        self.bytes_read += len(out)

    def close(self) -> None:
        """Nothing is kept open."""
