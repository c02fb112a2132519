"""Our own format as one of the formats: a step's folder, or the newest whole step of a folder of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from everstep.checkpoint import folder
from everstep.checkpoint.index import Part
from everstep.checkpoint.parts import Planned, Progress, plan_whole
from everstep.checkpoint.places import STEP, place_of
from everstep.checkpoint.reader import Checkpoint
from everstep.checkpoint.state import State
from everstep.checkpoint.stored import num_bytes
from everstep.errors import UserError

PART_BYTES = 8 << 30  # a few large files, not many small ones


def find(path: str | Path) -> Checkpoint:
    """The checkpoint at a path or URL: a step's own folder, or the newest step of a root, by its index."""
    text = str(path).rstrip("/")
    if STEP.fullmatch(text.rpartition("/")[2]):
        return folder.open_checkpoint(text)
    steps = place_of(path).complete()
    if not steps:
        raise UserError(f"{path} holds no checkpoint; give a folder with step-… folders, or one of these.")
    return folder.open_step(path, steps[-1][1])


def is_one(path: str | Path) -> bool:
    text = str(path).rstrip("/")
    if "://" in text:
        return True
    where = Path(text)
    return (where / "index.json").is_file() or bool(place_of(where).complete())


def read(path: str | Path) -> State:
    return state_of(find(path))


def state_of(checkpoint: Checkpoint) -> State:
    meta = dict(checkpoint.meta)
    return State(
        step=checkpoint.step,
        tensors={name: checkpoint.stored(name) for name in checkpoint.tensors},
        groups=[dict(group) for group in checkpoint.index.groups],
        tied=dict(checkpoint.index.tied),
        frozen=list(meta.pop("frozen", [])),
        meta=meta,
    )


def write(
    root: str | Path,
    state: State,
    *,
    threads: int = 2,
    part_bytes: int = PART_BYTES,
    progress: Progress = lambda count: None,
) -> str:
    """A new step under a root; nothing older is removed. The step's folder."""
    place = place_of(root)

    def write_one(numbered: tuple[int, list[Planned]]) -> Part:
        i, slices = numbered
        return place.write_part(state.step, f"part-{i:03d}", slices, progress=progress)

    with ThreadPoolExecutor(threads, thread_name_prefix="part") as pool:
        parts = list(pool.map(write_one, enumerate(_dealt(state, threads, part_bytes))))
    meta: dict[str, Any] = {**state.meta, **({"frozen": state.frozen} if state.frozen else {})}
    name = folder.commit(root, state.step, parts, meta, None, groups=state.groups, tied=state.tied)
    return f"{str(root).rstrip('/')}/{name}"


def _dealt(state: State, threads: int, part_bytes: int) -> list[list[Planned]]:
    """A file for every thread, as a file takes one write at a time; more where they would grow too large."""
    limit = min(part_bytes, -(-state.num_bytes() // threads))
    files: list[list[Planned]] = [[]]
    size = 0
    for planned in plan_whole(state.tensors):
        if size >= limit:
            files.append([])
            size = 0
        files[-1].append(planned)
        size += num_bytes(planned.source)
    return files
