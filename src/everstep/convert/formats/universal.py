"""Our own format as one of the formats: a step's folder, or the newest complete step of a folder of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from everstep.convert.formats.format import Format, Reading, Target
from everstep.convert.state import TrainingState
from everstep.errors import InternalError, UserError
from everstep.store import folder, reader
from everstep.store import index as indexes
from everstep.store.index import Part, Refused
from everstep.store.parts import PlannedSlice, Progress, plan_whole
from everstep.store.places import STEP, place_of
from everstep.store.reader import Checkpoint
from everstep.store.stored import num_bytes

PART_BYTES = 8 << 30  # a few large files, not many small ones


def find(path: str | Path) -> Checkpoint:
    """The checkpoint at a path or URL: a step's own folder, or the newest step of a root, by its index."""
    text = str(path).rstrip("/")
    if STEP.fullmatch(text.rpartition("/")[2]):
        return folder.open_checkpoint(text)
    steps = place_of(path).complete()
    if not steps:
        raise UserError(f"{path} has no checkpoint; give a folder with step-… folders, or one of these.")
    return folder.open_step(path, steps[-1][1])


def is_one(path: Path) -> bool:
    return (path / "index.json").is_file() or bool(place_of(path).complete())


def read(path: str | Path, reading: Reading) -> TrainingState:
    return state_of(find(path))


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
        parts = [part for part in made if part is not None]
        meta = {**state.meta, **({"frozen": state.frozen} if state.frozen else {})}
        self._text = indexes.text_of(state.step, parts, meta, state.groups, state.tied)

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
