"""The checkpoint folder of a job: complete or not there, and never trusted without its hashes.

    <root>/step-00000010/            complete: it got this name by one rename
        index.json                   step, meta, groups, and of every tensor: file, place, dtype, hashes
        <part>.safetensors           written by one worker each
    <root>/step-00000020.partial/    being written, or left by a crash; readers do not see it
        <part>.json                  what is in a part, until the index says it

Tensors are named logically ("model/embed.tokens.weight"), never by stage or rank: a reader of another shape
finds what it needs by name. Writers flush their parts to disk before `commit` names them, and `commit`
flushes the index before the rename, so a crash at any moment leaves the previous checkpoint as the newest. A
reader believes nothing: names, sizes, shapes and hashes are checked, and what fails is refused with a
sentence. No pickle. `root` may be any fsspec URL; see `places`. The format is docs/checkpoint-format.md.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.errors import InternalError, UserError, clipped
from everstep.layout.box import Box
from everstep.store import index as indexes
from everstep.store.index import Part, Refused
from everstep.store.parts import CHUNK_BYTES, Label, PlannedSlice, Progress, labelled, plan_whole, stored_of
from everstep.store.places import place_of, root_of
from everstep.store.ranges import Access
from everstep.store.reader import Checkpoint, UnusableCheckpointError, open_in, read_small, unusable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Checkpoint",
    "clean",
    "commit",
    "complete_steps",
    "newest_valid",
    "open_checkpoint",
    "parameter_of",
    "root_of",
    "write_part",
    "write_slices",
]


def parameter_of(tensor: str) -> str:
    """`model/embed.weight`, `optimizer/embed.weight/exp_avg` and `extra/grid/embed.weight` are all of
    embed.weight. A parameter's name may have slashes, an optimizer's key has none.
    """
    kind, _, rest = tensor.partition("/")
    if kind == "optimizer":
        return rest.rpartition("/")[0]
    return rest.partition("/")[2] if kind == "extra" else rest


# Writing.


def write_part(
    root: str | Path,
    step: int,
    name: str,
    tensors: Mapping[str, Tensor],
    *,
    progress: Progress = lambda count: None,
) -> Part:
    """Write whole tensors to part `name` of a step, flushed to disk; what to tell `commit`."""
    stored = {key: stored_of(key, tensor) for key, tensor in tensors.items()}
    return place_of(root).write_part(step, name, plan_whole(stored), progress=progress)


def write_slices(
    root: str | Path,
    step: int,
    name: str,
    slices: Iterable[tuple[str, Sequence[int], Box, Tensor]],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress = lambda count: None,
) -> Part:
    """Write what this worker owns: (tensor, its whole shape, the box, the box's values)."""
    planned = [
        PlannedSlice(key, tuple(shape), box, stored_of(key, values)) for key, shape, box, values in slices
    ]
    return place_of(root).write_part(step, name, planned, chunk_bytes=chunk_bytes, progress=progress)


def write_description(root: str | Path, step: int, name: str, part: Part) -> Label:
    """What is in part `name`, as a file beside it until `commit`; returns what a report says of it."""
    text, label = labelled(name, part)
    place_of(root).write_description(step, name, text)
    return label


def read_description(root: str | Path, step: int, label: Label) -> Part:
    """What `write_description` wrote, and nothing else."""
    name, place = str(label["name"]), place_of(root)
    if not indexes.PART_NAME.fullmatch(f"{name}.safetensors"):
        raise UserError(f"{clipped(repr(name), 100)} is not a name for a part of a checkpoint.")
    file = place.file(place.staging_name(step), f"{name}.json")
    try:
        text = read_small(file, f"{name}.json", indexes.MAX_INDEX_BYTES)
    finally:
        file.close()
    if indexes.digest(memoryview(text)) != label["xxh3"]:
        raise Refused(f"{name}.json fails its checksum")
    part: Part = json.loads(text)
    return part


def commit(
    root: str | Path,
    step: int,
    parts: Sequence[Part],
    meta: Mapping[str, Any],
    keep: int | None = 3,
    *,
    keep_every: int = 0,
    groups: Sequence[Mapping[str, Any]] = (),
    tied: Mapping[str, str] | None = None,
) -> str:
    """Make a step whose parts are all written the newest checkpoint; of older ones, `keep` - 1 stay."""
    place = place_of(root)
    text = indexes.text_of(step, parts, meta, groups, tied)
    try:
        index = indexes.parse(text.encode())
    except Refused as refused:
        raise InternalError(f"the parts of the checkpoint of step {step} do not fit: {refused}.") from refused
    name = place.commit(step, text, index.files)
    if keep is not None:
        done = [number for number, _ in place.complete() if number <= step]
        for number in doomed(done, keep, keep_every):
            with contextlib.suppress(OSError):  # the new one is committed, whatever becomes of old ones
                place.remove(f"step-{number:08d}")
    return name


def doomed(steps: Sequence[int], keep: int, keep_every: int = 0) -> list[int]:
    """The steps to remove: all but the `keep` newest and the multiples of `keep_every`."""
    old = sorted(steps)[:-keep] if keep else sorted(steps)
    return [step for step in old if not keep_every or step % keep_every]


def prune(root: str | Path, *, keep: int, keep_every: int = 0, dry_run: bool = False) -> list[int]:
    """Remove old checkpoints now; never the newest one that passes every check. The steps removed."""
    place = place_of(root)
    gone = doomed([number for number, _ in place.complete()], keep, keep_every)
    if gone:
        newest, refused = newest_valid(root)
        if newest is None:
            raise UserError(f"no checkpoint in {place} passes its checks, so all stay: {refused[0]}")
        gone = [step for step in gone if step != newest.step]
    for step in () if dry_run else gone:
        place.remove(f"step-{step:08d}")
    return gone


def discard(root: str | Path, step: int, keep: Collection[int] = ()) -> None:
    """Remove the parts of a step that will not be complete, and of older ones except `keep`."""
    place = place_of(root)
    place.discard(step)
    place.clean(before=step, keep=keep)


def clean(root: str | Path) -> list[Path]:
    """Remove what a crash left half written. Not while a checkpoint is being written."""
    return place_of(root).clean()


# Reading.


def complete_steps(root: str | Path) -> list[int]:
    """The steps that were committed, oldest first; not yet verified."""
    return [number for number, _ in place_of(root).complete()]


def open_checkpoint(folder: str | Path, access: Access = "pread") -> Checkpoint:
    """One checkpoint by its folder, its index checked against its files; a sentence if they do not fit."""
    root, _, name = str(folder).rstrip("/").rpartition("/")
    return open_step(root or ".", name, access)


def open_step(root: str | Path, name: str, access: Access = "pread") -> Checkpoint:
    place = place_of(root)
    try:
        return open_in(place, name, access)
    except Refused as refused:
        raise unusable(f"{place}/{name}", refused) from refused


def newest_valid(root: str | Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that passes every check, all bytes read; and why each newer one does not."""
    refused: list[str] = []
    for _, name in reversed(place_of(root).complete()):
        try:
            found = open_step(root, name)
            found.verify()
            return found, refused
        except UnusableCheckpointError as error:
            refused.append(str(error))
    return None, refused
