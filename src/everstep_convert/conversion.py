"""From any format to any other: detect what a folder is, read it lazily, rename if asked, write it, check it.

Nothing is loaded as a whole: the readers give tensors that are places in files, the writers fetch them block
by block. What was written is read back and compared (see `selfcheck`) before it appears at once, by a rename.
Universal checkpoints are flushed to disk before that, as always; other formats are left to the system, as
`cp` leaves them: a conversion can be repeated.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

from everstep.errors import UserError
from everstep.store import dtypes
from everstep.store.parts import Progress
from everstep_convert import selfcheck
from everstep_convert.formats import dialects, universal
from everstep_convert.formats.format import Format, Reading, Staging, Target
from everstep_convert.formats.known_formats import FORMATS
from everstep_convert.selfcheck import Accepted, Change
from everstep_convert.state import TrainingState
from everstep_convert.woven import as_dtype

__all__ = ["FORMATS", "Accepted", "Reading", "Target", "detect", "read_state", "write_state"]


DAMAGE = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError, OSError)


def format_named(name: str) -> Format:
    if name not in FORMATS:
        raise UserError(f"format {name!r} is not one of {', '.join(FORMATS)}.")
    return FORMATS[name]


def written_format(name: str) -> Format:
    row = format_named(name)
    if not row.is_written:
        written = ", ".join(row.name for row in FORMATS.values() if row.is_written)
        raise UserError(f"{row.title} checkpoints are read and not written; write one of {written}.")
    return row


def detect(path: str | Path) -> str:
    """The format of a checkpoint, by looking at its folder."""
    if "://" in str(path):
        return "universal"
    where = Path(path)
    if not where.is_dir():
        raise UserError(f"{path} is not a directory; give the folder of a checkpoint.")
    for row in FORMATS.values():
        if row.detects(where):
            return row.name
    raise UserError(f"{path} is not a checkpoint of a known format ({', '.join(FORMATS)}).")


def read_state(path: str | Path, format: str | None = None, reading: Reading | None = None) -> TrainingState:
    """All of a checkpoint of any known format, read as it is asked for; `detect` finds out which."""
    row = format_named(format or detect(path))
    try:
        return row.read(path, reading or Reading())
    except DAMAGE as error:  # foreign structures: a key may be missing anywhere
        what = f"{type(error).__name__} {error}".strip()
        raise UserError(
            f"{path} cannot be read as {row.name}: {what}; it is damaged, mixed from several checkpoints or "
            "of a version that is not known."
        ) from error


def write_state(
    path: str | Path,
    state: TrainingState,
    target: Target,
    progress: Progress = lambda count: None,
    *,
    accepted: Accepted | None = None,
    check: bool = True,
) -> list[Change]:
    """Write all of it, or nothing under this name; a share becomes visible with the last of all shares. The
    changes that were accepted.
    """
    row = written_format(target.format)
    wanted, asked = _wanted(state, target)
    _require_folder(path)
    new = NewFolders(path)
    staging: Staging | None = None
    try:
        if target.share is not None:
            staging = universal.ShareStaging(path, wanted, target.share)
            wanted = universal.shared(wanted, target.share)
        else:
            staging = row.staged(path) if row.staged is not None else FolderStaging(path, row)
        source = selfcheck.hashed(wanted) if check else wanted
        staging.write(source, target, progress)
        state.notes += [note for note in source.notes if note not in state.notes]
        rows = []
        if check:
            rows = selfcheck.changes(source, staging.read(), threads=target.threads)
            patterns = () if accepted is None else accepted.patterns
            rows = selfcheck.require(rows, Accepted(patterns, asked), str(path))
        staging.commit()
    except BaseException as error:
        if staging is not None:
            staging.discard()
        new.remove_empty()
        if isinstance(error, OSError):
            raise UserError(f"{path} is not written: {error}.") from error
        raise
    return rows


def _require_folder(path: str | Path) -> None:
    if "://" not in str(path):
        at = next(at for at in (Path(path), *Path(path).parents) if os.path.lexists(at))
        if not at.is_dir():
            raise UserError(f"{at} is not a directory; give a new folder to write to.")


def _wanted(state: TrainingState, target: Target) -> tuple[TrainingState, tuple[str, ...]]:
    """The state that should be in the target, and the changes that the user's options ask for."""
    if target.names is not None:
        state = dialects.translated(state, target.names, target.heads)
    asked: tuple[str, ...] = ()
    if not target.with_optimizer:
        asked = ("lost:optimizer*", "lost:groups*", "lost:legacy optimizer")
        tensors = {n: s for n, s in state.tensors.items() if not n.startswith("optimizer/")}
        state = replace(state, tensors=tensors, groups=[] if target.format == "hf" else state.groups)
    if target.dtype is not None:
        tensors = {
            name: as_dtype(stored, target.dtype)
            if name.startswith(("model/", "buffer/")) and dtypes.is_trainable(stored.dtype)
            else stored
            for name, stored in state.tensors.items()
        }
        state = replace(state, tensors=tensors)
    if (completed := format_named(target.format).completed) is not None:
        state = completed(state, target)
    return state, asked


class FolderStaging:
    """A folder of another name beside the target, renamed when it is complete."""

    def __init__(self, path: str | Path, row: Format) -> None:
        if "://" in str(path):
            raise UserError(f"{path} is a URL; only universal checkpoints are written to URLs.")
        self._final, self._row = Path(path), row
        self._partial = self._final.with_name(self._final.name + ".partial")
        if self._final.exists() and any(self._final.iterdir()):
            raise UserError(f"{path} is not empty; give a new folder, or remove it.")

    def write(self, state: TrainingState, target: Target, progress: Progress) -> None:
        assert self._row.write is not None
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._row.write(self._partial, state, target, progress)

    def read(self) -> TrainingState:
        return self._row.read(self._partial, Reading())

    def commit(self) -> None:
        if self._final.exists():
            self._final.rmdir()
        os.rename(self._partial, self._final)

    def discard(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)


# ------------------------------------------------------------------
# Folders that a conversion makes on its way: if it fails, those that were not there before go again.


class NewFolders:
    """`path` and its parents, as far as they do not exist now."""

    def __init__(self, path: str | Path) -> None:
        self._missing: list[Path] = []
        if "://" in str(path):
            return
        at = Path(path)
        while not at.exists() and at != at.parent:
            self._missing.append(at)
            at = at.parent

    def remove_empty(self) -> None:
        """Innermost first; what holds anything stays."""
        for folder in self._missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
