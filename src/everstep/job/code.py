"""A job's own code, packed when it is submitted: every worker that is started later runs the same.

    BASE/.everstep/code/3f9c1a…/mine.py              a copy, named by its hash
                               /corpus.bin -> …      what is no code, or is large, is linked

The folder is beside the job file, where all nodes find the job's other files. Workers import from it and
refuse it if its files are not those of its name. Rejected: sending the code through the coordinator; a job's
paths are valid on every node anyway, and a journal is no place for files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from everstep.errors import UserError
from everstep.job.job import Job

FOLDER = ".everstep/code"
MOST_FILES, MOST_ENTRIES, MOST_BYTES = 2_000, 20_000, 64 << 20
_SUFFIXES = {".py", ".pyi", ".json", ".toml", ".yaml", ".yml", ".cfg", ".ini", ".jinja", ".cu", ".cpp", ".h"}
_SMALL = 1 << 20  # other than Python: larger ones are data


class UnpackableError(UserError):
    """There is too much beside the job file, or no place for a copy."""


def names_code(job: Job) -> bool:
    """Does the job name functions of its own?"""
    evaluation = job.evaluation
    named = [job.model.build, job.model.options.get("prepare"), job.data.build, job.optimizer.build]
    named += [job.optimizer.schedule, *job.callbacks]
    if evaluation is not None:
        named += [evaluation.data.build, *evaluation.metrics]
    return any(isinstance(name, str) and ":" in name for name in named)


def pack(job: Job) -> str:
    """Copy the code beside the job file; returns where, seen from there (`Job.code`)."""
    base = Path(job.base)
    outputs = [job.path(name) for name in (job.log, job.checkpoint and job.checkpoint.folder) if name]
    copied, linked = _sorted_out(base, [path.resolve() for path in outputs])
    name = f"{FOLDER}/{_hash(base, copied)}"
    target = base / name
    if target.is_dir():
        verify(target)
        return name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=target.parent, prefix=".new-"))
        made.chmod(0o755)
        for file in copied:
            (made / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(base / file, made / file)
        for entry in linked:
            (made / entry).parent.mkdir(parents=True, exist_ok=True)
            (made / entry).symlink_to((base / entry).resolve())
        try:
            made.rename(target)
        except OSError:  # packed by another submission meanwhile
            shutil.rmtree(made)
    except OSError as error:
        raise UnpackableError(f"the code in {base} cannot be copied to {target.parent}: {error}.") from None
    verify(target)
    return name


@cache
def verify(folder: Path) -> None:
    """Once per process: the files are those that were packed."""
    if not folder.is_dir():
        raise UserError(f"the packed code {folder} is not there; submit the job again.")
    copied = [
        (Path(root) / name).relative_to(folder)
        for root, folders, names in os.walk(folder)
        if _keep_packed(folders)
        for name in names
        if not (Path(root) / name).is_symlink()
    ]
    if _hash(folder, sorted(copied)) != folder.name:
        raise UserError(f"the packed code in {folder} was changed since it was packed; submit the job again.")


def _keep_packed(folders: list[str]) -> bool:
    """Without what Python adds when it imports."""
    folders[:] = [name for name in folders if name != "__pycache__"]
    return True


def _sorted_out(base: Path, outputs: list[Path]) -> tuple[list[Path], list[Path]]:
    """What is copied and what is linked, seen from `base`; a folder without code is one link."""
    num_entries, num_bytes = 0, 0

    def within(folder: Path) -> tuple[list[Path], list[Path]]:
        nonlocal num_entries, num_bytes
        copied: list[Path] = []
        linked: list[Path] = []
        for entry in sorted(os.scandir(base / folder), key=lambda entry: entry.name):
            path = folder / entry.name
            num_entries += 1
            if entry.name.startswith(".") or entry.name == "__pycache__":
                continue
            if entry.is_dir(follow_symlinks=False):
                is_whole = Path(base / path).resolve() in outputs or (base / path / "pyvenv.cfg").exists()
                code, rest = ([], []) if is_whole else within(path)
                copied += code
                linked += rest if code else [path]
            elif _is_code(entry):
                num_bytes += entry.stat().st_size
                copied.append(path)
            else:
                linked.append(path)
            if num_entries > MOST_ENTRIES or len(copied) > MOST_FILES or num_bytes > MOST_BYTES:
                raise UnpackableError(
                    f"there is too much beside the job file in {base} to pack its code; move the job file "
                    "and its code to a folder of their own, or submit with --no-pack."
                )
        return copied, linked

    return within(Path())


def _is_code(entry: os.DirEntry[str]) -> bool:
    if not entry.is_file():
        return False
    suffix = Path(entry.name).suffix
    return suffix == ".py" or (suffix in _SUFFIXES and entry.stat().st_size <= _SMALL)


def _hash(base: Path, files: list[Path]) -> str:
    found = hashlib.sha256()
    for file in sorted(files):
        content = hashlib.sha256((base / file).read_bytes()).hexdigest()
        found.update(f"{file.as_posix()}\0{content}\n".encode())
    return found.hexdigest()[:24]
