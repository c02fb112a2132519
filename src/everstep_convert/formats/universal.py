"""Our own format as one of the formats: a step's folder, or the newest complete step of a folder of them.

Several processes may write one checkpoint together, each a share of its tensors. There is no coordinator: a
share is a part with a description, as workers write them, and the process that finds all shares described
commits the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from everstep.errors import InternalError, UserError
from everstep.layout.tensor import ITEM_BYTES
from everstep.store import dtypes, folder, reader
from everstep.store import index as indexes
from everstep.store.folder import SavedPart
from everstep.store.index import Part, Refused
from everstep.store.parts import PlannedSlice, Progress, chunk_bytes_of, plan_whole
from everstep.store.places import place_of
from everstep.store.reader import Checkpoint
from everstep.store.stored import num_bytes, read_range
from everstep_convert.formats.format import Format, Reading, Target
from everstep_convert.state import TrainingState

PART_BYTES = 8 << 30  # a few large files, not many small ones
SAMPLE_BYTES = 1 << 10  # of every tensor: tells two sources of equal shapes apart


def is_one(path: Path) -> bool:
    return (path / "index.json").is_file() or bool(place_of(path).complete())


def read(path: str | Path, reading: Reading) -> TrainingState:
    return state_of(folder.find(path))


def state_of(checkpoint: Checkpoint) -> TrainingState:
    meta = dict(checkpoint.meta)
    return TrainingState(
        step=checkpoint.step,
        tensors={name: checkpoint.stored(name) for name in checkpoint.tensors},
        groups=[dict(group) for group in checkpoint.index.groups],
        tied=dict(checkpoint.index.tied),
        frozen=list(meta.pop("frozen", [])),
        meta=meta,
    )


class UniversalStaging:
    """A new step under a root: its parts first, its index last. Nothing older is removed."""

    def __init__(self, root: str | Path) -> None:
        self._place = place_of(root)
        self._step: int | None = None
        self._text = ""

    def write(
        self,
        state: TrainingState,
        target: Target,
        progress: Progress,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._step = state.step

        failed: list[BaseException] = []  # in order of time: a part that fails takes the folder from others

        def write_one(numbered: tuple[int, list[PlannedSlice]]) -> Part | None:
            i, slices = numbered
            try:
                return self._place.write_part(state.step, f"part-{i:03d}", slices, progress=progress)
            except BaseException as error:
                failed.append(error)
                return None

        with ThreadPoolExecutor(target.threads, thread_name_prefix="part") as pool:
            made = list(pool.map(write_one, enumerate(_dealt(state, target.threads, part_bytes))))
        if failed:
            raise failed[0]
        self._text = _index_text(state, [part for part in made if part is not None])

    def read(self) -> TrainingState:
        assert self._step is not None
        name = self._place.staging_name(self._step)
        return state_of(reader.opened(self._place, name, indexes.parse(self._text.encode())))

    def commit(self) -> None:
        assert self._step is not None
        try:
            files = indexes.parse(self._text.encode()).files
        except Refused as refused:
            raise InternalError(f"the parts of step {self._step} do not fit: {refused}.") from refused
        self._place.commit(self._step, self._text, files)
        self._step = None

    def discard(self) -> None:
        if self._step is not None:
            self._place.discard(self._step)


class ShareStaging:
    """Share i of n (from 1) of a new step under a root; `commit` commits the step if all shares are there.

    A described share is complete: a process that is started again checks it and does not write it again.
    """

    def __init__(self, root: str | Path, whole: TrainingState, share: tuple[int, int]) -> None:
        self._root, self._place, self._whole = root, place_of(root), whole
        index, count = share
        self._name = f"share-{index}-of-{count}"
        if whole.step in folder.complete_steps(root):
            raise UserError(f"{root} already has step {whole.step}; give a new folder, or remove that step.")
        run = identity_of(whole)
        self._save = SavedPart(run=run, attempt=0, stage=0, stages=1, share=(index - 1, count), settled=True)
        found = dict(folder.staged_saves(self._place, whole.step))
        if any((one.run, one.share[1]) != (run, count) for one in found):
            raise UserError(
                f"{root}/{self._place.staging_name(whole.step)} has parts of another conversion or run; "
                f"every share needs the same source, options and number of shares ({count}); remove it, or "
                "give a new folder."
            )
        self._part = found.get(self._save)
        self._described = self._part is not None

    def write(self, state: TrainingState, target: Target, progress: Progress) -> None:
        """`state`: the tensors of this share."""
        if self._part is None:
            self._part = self._place.write_part(
                state.step,
                self._name,
                plan_whole(state.tensors),
                threads=target.threads,
                chunk_bytes=chunk_bytes_of(state.num_bytes()),
                progress=progress,
            )

    def read(self) -> TrainingState:
        assert self._part is not None
        index = indexes.parse(_index_text(self._whole, [self._part]).encode())
        return state_of(reader.opened(self._place, self._place.staging_name(self._whole.step), index))

    def commit(self) -> None:
        assert self._part is not None
        step = self._whole.step
        if not self._described:
            folder.write_description(self._root, step, self._name, self._part, self._save)
            self._described = True
        parts = folder.staged_parts(self._place, step, self._save.run)
        if parts is not None:
            groups, tied = self._whole.groups, self._whole.tied
            with contextlib.suppress(FileNotFoundError):  # the process of another share was first
                folder.commit(self._root, step, parts, _meta(self._whole), None, groups=groups, tied=tied)

    def discard(self) -> None:
        """Of this share alone: others write in that folder."""
        if not self._described:
            self._place.discard(self._whole.step, self._name)


def missing_shares(root: str | Path, step: int, count: int) -> list[int]:
    """The shares without which the step is not committed; none: it is."""
    if step in folder.complete_steps(root):
        return []
    there = {save.share[0] for save, _ in folder.staged_saves(place_of(root), step)}
    return [index + 1 for index in range(count) if index not in there]


def shared(state: TrainingState, share: tuple[int, int]) -> TrainingState:
    """The tensors of one share, about as many bytes in each: the largest first, to the smallest share."""
    index, count = share
    sizes, mine = [0] * count, set()
    for name in sorted(state.tensors, key=lambda name: (-num_bytes(state.tensors[name]), name)):
        least = min(range(count), key=lambda i: sizes[i])
        sizes[least] += num_bytes(state.tensors[name])
        if least == index - 1:
            mine.add(name)
    return replace(state, tensors={name: one for name, one in state.tensors.items() if name in mine})


def identity_of(state: TrainingState) -> str:
    """Of what is converted: shares of two different states must not become one checkpoint."""
    seen = xxhash.xxh3_64(_index_text(state, []).encode())
    for name in sorted(state.tensors):
        one = state.tensors[name]
        count = min(SAMPLE_BYTES, num_bytes(one)) // ITEM_BYTES[one.dtype]
        out = np.empty(count, dtypes.raw(one.dtype))
        read_range(one, 0, count, out)
        seen.update(f"{name} {one.dtype} {one.shape}".encode())
        seen.update(dtypes.bytes_of(out))
    return seen.hexdigest()


def _meta(state: TrainingState) -> dict[str, Any]:
    return {**state.meta, **({"frozen": state.frozen} if state.frozen else {})}


def _index_text(state: TrainingState, parts: Sequence[Part]) -> str:
    return indexes.text_of(state.step, parts, _meta(state), state.groups, state.tied)


def _dealt(state: TrainingState, threads: int, part_bytes: int) -> Sequence[list[PlannedSlice]]:
    """A file for every thread, as a file takes one write at a time; more where they would grow too large."""
    limit = min(part_bytes, -(-state.num_bytes() // threads))
    files: list[list[PlannedSlice]] = [[]]
    size = 0
    for planned in plan_whole(state.tensors):
        if size >= limit and files[-1]:
            files.append([])
            size = 0
        files[-1].append(planned)
        size += num_bytes(planned.source)
    return files


FORMAT = Format(
    name="universal",
    title="Everstep universal",
    reads="yes, also any fsspec URL",
    writes="yes, also any fsspec URL",
    optimizer="yes",
    detects=is_one,
    read=read,
    staged=UniversalStaging,
)
