"""Where checkpoints are kept: a local folder, or any URL fsspec knows. How each makes a step appear at once.

    local    <root>/step-00000010.partial/ is filled and flushed, then renamed: complete or not there
    remote   <url>/step-00000010/ is filled, its index.json last: a folder without one is not a checkpoint

Object stores have no rename, but a put is atomic, and the index is the one file a reader looks for.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from everstep.errors import InternalError, UserError
from everstep.store import index as indexes
from everstep.store import parts
from everstep.store.index import CannotRead, Part, Refused
from everstep.store.parts import CHUNK_BYTES, PlannedSlice, Progress
from everstep.store.ranges import Access, LocalFile, RangeFile, UrlFile

STEP = re.compile(r"step-(\d{8,18})")
PARTIAL = re.compile(r"step-(\d{8,18})(?:\.old)?\.partial")
_STAGING = re.compile(r"step-(\d{8,18})\.partial")
_SET_ASIDE = re.compile(r"step-\d{8,18}\.(corrupt|unreadable|unknown)(-\d+)?")
_RENAME_EXCHANGE = 2


def step_name(step: int) -> str:
    return f"step-{step:08d}"


class Place(Protocol):
    """A folder of checkpoints, wherever it is."""

    def complete(self) -> list[tuple[int, str]]:
        """The steps that were committed, oldest first; not yet verified."""

    def set_aside(self) -> list[str]:
        """Checkpoints that were found to be of no use, and kept for an operator to look at."""

    def put_aside(self, folder: str, why: str) -> str:
        """By one rename, out of the readers' sight; its new name."""

    def file(self, folder: str, name: str, access: Access = "pread") -> RangeFile: ...

    def write_part(
        self,
        step: int,
        name: str,
        slices: Sequence[PlannedSlice],
        *,
        threads: int = 1,
        chunk_bytes: int = CHUNK_BYTES,
        progress: Progress = lambda count: None,
    ) -> Part:
        """Into the step's staging folder."""

    def write_description(self, step: int, name: str, text: bytes) -> None:
        """Beside part `name`, in the staging folder, until the step is committed."""

    def staging_name(self, step: int) -> str:
        """The folder that a step's parts are in until it is committed."""

    def staged(self) -> list[tuple[int, list[str]]]:
        """The steps that were written and not committed, oldest first, with the files of each."""

    def commit(self, step: int, text: str, files: dict[str, int]) -> str:
        """Make a step with this index visible at once; its folder. Two processes may do it at one time: the
        one that comes second finds nothing to commit (FileNotFoundError), and the step is complete.
        """

    def discard(self, step: int, part: str | None = None) -> None:
        """Remove the parts of a step that was not committed, or one of them."""

    def remove(self, folder: str) -> None:
        """Gone at once for readers, whatever happens half-way."""

    def clean(self, *, before: int | None = None, keep: Collection[int] = ()) -> list[Path]:
        """Remove what a crash left half written: of steps below `before` (None: of all), and not of `keep`.
        Nothing complete, and not while one of these checkpoints is being written.
        """


def _steps(folders: list[str]) -> list[tuple[int, str]]:
    return sorted((int(match[1]), name) for name in folders if (match := STEP.fullmatch(name)) is not None)


def _is_left(step: int, before: int | None, keep: Collection[int]) -> bool:
    return step not in keep and (before is None or step < before)


def _aside(folders: list[str]) -> list[str]:
    return sorted(name for name in folders if _SET_ASIDE.fullmatch(name))


def _aside_name(folders: list[str], folder: str, why: str) -> str:
    names = (f"{folder}.{why}" + (f"-{count}" if count > 1 else "") for count in itertools.count(1))
    return next(name for name in names if name not in folders)


class LocalPlace:
    """A folder of this machine's file system; a step is committed by a rename."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def __str__(self) -> str:
        return str(self.root)

    def complete(self) -> list[tuple[int, str]]:
        return _steps(self._folders())

    def set_aside(self) -> list[str]:
        return _aside(self._folders())

    def put_aside(self, folder: str, why: str) -> str:
        name = _aside_name(self._folders(), folder, why)
        os.rename(self.root / folder, self.root / name)
        _fsync_folder(self.root)
        return name

    def _folders(self) -> list[str]:
        """The folders here; none if the root is not there, and an OSError if it cannot be read."""
        try:
            with os.scandir(self.root) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            if self.root.is_symlink():
                raise  # what it leads to may come back
            return []

    def file(self, folder: str, name: str, access: Access = "pread") -> RangeFile:
        """A plain file of this folder: a link could lead anywhere."""
        path = self.root / folder / name
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            raise Refused(f"{name} is missing") from None
        except OSError as error:
            raise CannotRead(f"{name} cannot be read: {error}") from error
        if not stat.S_ISREG(mode):
            raise Refused(f"{name} is not a plain file")
        return LocalFile(path, access)

    def write_part(
        self,
        step: int,
        name: str,
        slices: Sequence[PlannedSlice],
        *,
        threads: int = 1,
        chunk_bytes: int = CHUNK_BYTES,
        progress: Progress = lambda count: None,
    ) -> Part:
        folder = self.root / self.staging_name(step)
        return parts.write_part(
            folder, name, slices, threads=threads, chunk_bytes=chunk_bytes, progress=progress
        )

    def write_description(self, step: int, name: str, text: bytes) -> None:
        with open(self.root / self.staging_name(step) / f"{name}.json", "wb") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())

    def staging_name(self, step: int) -> str:
        return f"{step_name(step)}.partial"

    def discard(self, step: int, part: str | None = None) -> None:
        folder = self.root / self.staging_name(step)
        if part is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            (folder / f"{part}.safetensors").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()  # unless others write there

    def staged(self) -> list[tuple[int, list[str]]]:
        found = [(int(m[1]), name) for name in self._folders() if (m := _STAGING.fullmatch(name)) is not None]
        return [(step, self._files(name)) for step, name in sorted(found)]

    def _files(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.root / folder))
        except FileNotFoundError:  # it was committed meanwhile
            return []

    def commit(self, step: int, text: str, files: dict[str, int]) -> str:
        source, target = self.root / self.staging_name(step), self.root / step_name(step)
        for file, size in files.items():
            if (source / file).stat().st_size != size:
                raise InternalError(f"{source / file} is not as long as its writer said.")
        # Under a name of its own: another process may commit the same step, or have just done so.
        index = source / f"index.json.{secrets.token_hex(4)}"
        with open(index, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(index, source / "index.json")
        for path in source.iterdir():
            if path.name not in files and not path.name.startswith("index.json"):
                path.unlink(missing_ok=True)  # of an attempt that others have written since
        _fsync_folder(source)
        if target.exists():  # a run that went back has made this step again: at no moment is there none
            if not _exchange(source, target):
                self._replace(source, target)
            shutil.rmtree(source, ignore_errors=True)
        else:
            os.rename(source, target)
        _fsync_folder(self.root)
        return target.name

    def _replace(self, source: Path, target: Path) -> None:
        """Where names cannot be exchanged at once. If `source` is gone, another has committed it."""
        old = self.root / f"{target.name}.old.partial"
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
        try:
            os.rename(source, target)
        except OSError:
            os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def remove(self, folder: str) -> None:
        doomed = self.root / f"{folder}.old.partial"
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(self.root / folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def clean(self, *, before: int | None = None, keep: Collection[int] = ()) -> list[Path]:
        found = [(PARTIAL.fullmatch(path.name), path) for path in sorted(self.root.glob("step-*.partial"))]
        left = [
            path
            for match, path in found
            if match is not None and not path.is_symlink() and _is_left(int(match[1]), before, keep)
        ]
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        return left


class UrlPlace:
    """Any fsspec URL; fsspec is imported here and not before."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise UserError(
                f"{url} needs fsspec; pip install fsspec and the package of its scheme."
            ) from None
        try:
            self._fs, path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UserError(f"{url} is not a place fsspec knows: {error}.") from None
        self._url, self._path = url.rstrip("/"), str(path).rstrip("/")

    def __str__(self) -> str:
        return self._url

    def complete(self) -> list[tuple[int, str]]:
        return [(step, name) for step, name in _steps(self._folders()) if self._has_index(name)]

    def set_aside(self) -> list[str]:
        return _aside(self._folders())

    def put_aside(self, folder: str, why: str) -> str:
        """A copy and a removal, where a store has no rename."""
        name = _aside_name(self._folders(), folder, why)
        self._fs.mv(f"{self._path}/{folder}", f"{self._path}/{name}", recursive=True)
        return name

    def _folders(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return [path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._path, detail=False)]
        except FileNotFoundError:
            return []
        except ValueError as error:  # of a URL that is none
            raise UserError(f"{self} is not a place fsspec knows: {error}.") from None

    def _has_index(self, folder: str) -> bool:
        return self._kind(f"{self._path}/{folder}/index.json") == "file"

    def _kind(self, path: str) -> str | None:
        """None: not there. Not `exists` or `isfile`: they say no when the store does not answer."""
        try:
            return str(self._fs.info(path)["type"])
        except FileNotFoundError:
            return None

    def file(self, folder: str, name: str, access: Access = "pread") -> RangeFile:
        path = f"{self._path}/{folder}/{name}"
        try:
            kind = self._kind(path)
        except OSError as error:
            raise CannotRead(f"{name} cannot be read: {error}") from error
        if kind != "file":
            raise Refused(f"{name} is missing")
        return UrlFile(self._fs, path)

    def write_part(
        self,
        step: int,
        name: str,
        slices: Sequence[PlannedSlice],
        *,
        threads: int = 1,
        chunk_bytes: int = CHUNK_BYTES,
        progress: Progress = lambda count: None,
    ) -> Part:
        """In one stream; object stores take no writes at a place."""
        folder, file = f"{self._path}/{step_name(step)}", f"{name}.safetensors"
        if not indexes.PART_NAME.fullmatch(file):
            raise InternalError(f"{name!r} is not a name for a part of a checkpoint.")
        self._fs.makedirs(folder, exist_ok=True)
        head, places, total = parts.header(slices)
        hashes = []
        with self._fs.open(f"{folder}/{file}", "wb") as out:
            out.write(head)
            for one in slices:
                texts = []
                for start in range(0, one.num_bytes, parts.BLOCK_BYTES):
                    block = parts.block_of(one.source, start, min(start + parts.BLOCK_BYTES, one.num_bytes))
                    texts += [
                        indexes.digest(block[at : at + chunk_bytes])
                        for at in range(0, len(block), chunk_bytes)
                    ]
                    out.write(bytes(block))
                    progress(len(block))
                hashes.append("".join(texts))
        return parts.describe(file, slices, places, hashes, total, chunk_bytes)

    def write_description(self, step: int, name: str, text: bytes) -> None:
        self._fs.pipe_file(f"{self._path}/{step_name(step)}/{name}.json", text)

    def staging_name(self, step: int) -> str:
        return step_name(step)

    def discard(self, step: int, part: str | None = None) -> None:
        folder = f"{self._path}/{step_name(step)}"
        if not self._has_index(step_name(step)):
            with contextlib.suppress(FileNotFoundError):
                if part is None:
                    self._fs.rm(folder, recursive=True)
                else:
                    self._fs.rm_file(f"{folder}/{part}.safetensors")

    def staged(self) -> list[tuple[int, list[str]]]:
        found = [(step, name) for step, name in _steps(self._folders()) if not self._has_index(name)]
        listed = [(step, self._fs.ls(f"{self._path}/{name}", detail=False)) for step, name in found]
        return [(step, sorted(str(path).rpartition("/")[2] for path in paths)) for step, paths in listed]

    def commit(self, step: int, text: str, files: dict[str, int]) -> str:
        folder = f"{self._path}/{step_name(step)}"
        for file, size in files.items():
            if self._fs.size(f"{folder}/{file}") != size:
                raise InternalError(f"{folder}/{file} is not as long as its writer said.")
        self._fs.pipe_file(f"{folder}/index.json", text.encode())
        for file in files:
            with contextlib.suppress(OSError):  # it is in the index now
                self._fs.rm_file(f"{folder}/{file.removesuffix('.safetensors')}.json")
        return step_name(step)

    def remove(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._path}/{folder}/index.json")
        self._fs.rm(f"{self._path}/{folder}", recursive=True)

    def clean(self, *, before: int | None = None, keep: Collection[int] = ()) -> list[Path]:
        steps = [(step, name) for step, name in _steps(self._folders()) if _is_left(step, before, keep)]
        left = [name for _, name in steps if not self._has_index(name)]
        for name in left:
            self._fs.rm(f"{self._path}/{name}", recursive=True)
        return [Path(self._path, name) for name in left]


def place_of(root: str | Path) -> Place:
    text = str(root)
    if text.startswith("file://"):
        return LocalPlace(text.removeprefix("file://"))
    return UrlPlace(text) if "://" in text else LocalPlace(root)


def root_of(base: str | Path, folder: str) -> str | Path:
    """A job's checkpoint folder: a URL as it is, a path from the job's own folder."""
    return folder if "://" in folder else Path(base, folder)


def _exchange(a: Path, b: Path) -> bool:
    """Two names change places in one moment, where the system can do it."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    at_cwd = -100
    return bool(libc.renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), _RENAME_EXCHANGE) == 0)


def _fsync_folder(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
