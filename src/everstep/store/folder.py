"""The checkpoint folder of a job: complete or not there, and never trusted without its hashes.

    <root>/step-00000010/            complete: it got this name by one rename
        index.json                   step, meta, groups, and of every tensor: file, place, dtype, hashes
        <part>.safetensors           written by one worker each
    <root>/step-00000020.partial/    being written, or left by a crash; readers do not see it
        <part>.json                  what is in a part, until the index says it, and of which save it is:
                                     the one that finds all parts of a save may commit it

Tensors are named logically ("model/embed.tokens.weight"), never by stage or rank: a reader of another shape
finds what it needs by name. Writers flush their parts to disk before `commit` names them, and `commit`
flushes the index before the rename, so a crash at any moment leaves the previous checkpoint as the newest. A
reader believes nothing: names, sizes, shapes and hashes are checked, and what fails is refused with a
sentence. No pickle. `root` may be any fsspec URL; see `places`. The format is docs/checkpoint-format.md.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.errors import InternalError, UserError, clipped
from everstep.layout.box import Box
from everstep.protocol.work import WrittenParts
from everstep.store import index as indexes
from everstep.store.index import CannotRead, Part, Refused
from everstep.store.parts import (
    Label,
    PlannedSlice,
    Progress,
    chunk_bytes_of,
    labelled,
    plan_whole,
    stored_of,
)
from everstep.store.places import STEP, Place, place_of, root_of
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
    chunk_bytes: int | None = None,
    progress: Progress = lambda count: None,
) -> Part:
    """Write what this worker owns: (tensor, its whole shape, the box, the box's values)."""
    planned = [
        PlannedSlice(key, tuple(shape), box, stored_of(key, values)) for key, shape, box, values in slices
    ]
    chunk = chunk_bytes or chunk_bytes_of(sum(one.num_bytes for one in planned))
    return place_of(root).write_part(step, name, planned, chunk_bytes=chunk, progress=progress)


def write_description(
    root: str | Path, step: int, name: str, part: Part, save: SavedPart | None = None
) -> Label:
    """What is in part `name`, as a file beside it until `commit`; returns what a report says of it."""
    text, label = labelled(name, part if save is None else part | {"save": save.to_json()})
    place_of(root).write_description(step, name, text)
    return label


def read_description(root: str | Path, step: int, label: Label) -> Part:
    """What `write_description` wrote, and nothing else."""
    name = str(label["name"])
    if not indexes.PART_NAME.fullmatch(f"{name}.safetensors"):
        raise UserError(f"{clipped(repr(name), 100)} is not a name for a part of a checkpoint.")
    text = _description(place_of(root), step, f"{name}.json")
    if indexes.digest(memoryview(text)) != label["xxh3"]:
        raise Refused(f"{name}.json fails its checksum")
    part: Part = json.loads(text)
    return part


def _description(place: Place, step: int, name: str) -> bytes:
    file = place.file(place.staging_name(step), name)
    try:
        return read_small(file, name, indexes.MAX_INDEX_BYTES)
    finally:
        file.close()


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
    data = text.encode()
    if len(data) > indexes.MAX_INDEX_BYTES:  # it could not be read, and older ones would be removed for it
        raise InternalError(f"the index of the checkpoint of step {step} would have {len(data)} bytes.")
    try:
        index = indexes.parse(data)
    except Refused as refused:
        raise InternalError(f"the parts of the checkpoint of step {step} do not fit: {refused}.") from refused
    name = place.commit(step, text, index.files)
    if keep is not None:
        done = [number for number, _ in place.complete() if number <= step]
        for number in doomed(done, keep, keep_every):
            with contextlib.suppress(OSError):  # the new one is committed, whatever becomes of old ones
                place.remove(f"step-{number:08d}")
    return name


def commit_described(
    root: str | Path, step: int, described: Sequence[Part], keep: int, loss: float | None = None
) -> None:
    """Commit the parts of a step by their descriptions: what each tells of the optimizer and of the run
    goes into the index. Incomplete checkpoints of earlier steps are removed.
    """
    groups = merged(group for part in described for group in part.get("groups", ()))
    meta = {key: value for part in described for key, value in part.get("meta", {}).items()}
    if (source := _source_before(place_of(root), step)) is not None:
        meta["source"] = source
    if loss is not None and math.isfinite(loss):
        meta["loss"] = loss
    commit(root, step, [_undescribed(part) for part in described], meta, keep, groups=groups)
    place_of(root).clean(before=step)  # what is not whole by now never will be


def _source_before(place: Place, step: int) -> Any:
    """What a conversion wrote of the checkpoint's origin, for a conversion back: a run that resumes from it
    hands it on, from each checkpoint to the next.
    """
    older = [name for number, name in place.complete() if number < step]
    try:
        file = place.file(older[-1], "index.json")
        try:
            return indexes.meta_of(read_small(file, "index.json", indexes.MAX_INDEX_BYTES)).get("source")
        finally:
            file.close()
    except (IndexError, Refused, OSError):
        return None


def merged(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups of all stages: those of the same numbers are one."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        numbers = {key: value for key, value in group.items() if key != "params"}
        key = json.dumps(numbers, sort_keys=True)
        found.setdefault(key, {"params": [], **numbers})["params"].extend(group["params"])
    return list(found.values())


# Commits without a coordinator: from what the parts say of themselves.


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """Which save a part belongs to. Parts of two runs, or of two attempts at a step, are not one checkpoint.

    A worker writes its part when every stage has sealed the step: a whole set is a state that counts. Where
    peers vote on what they compute, they compare this state in the next step: `settled` says that this state
    needs no such comparison (there are no votes, or no next step).
    """

    run: str
    attempt: int
    stage: int
    stages: int
    share: tuple[int, int]
    settled: bool

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @staticmethod
    def from_json(data: Any) -> SavedPart | None:
        try:
            index, count = data["share"]
            stages = int(data["stages"])
            found = SavedPart(
                run=str(data["run"]),
                attempt=int(data["attempt"]),
                stage=int(data["stage"]),
                stages=stages,
                share=(int(index), int(count)),
                settled=data["settled"] is True,
            )
        except (KeyError, TypeError, ValueError):
            return None
        return found if 0 <= found.stage < stages and 0 <= found.share[0] < found.share[1] else None


@dataclass(slots=True)
class StagedStep:
    """What of a step is written and not committed."""

    step: int
    parts: list[Part] | None = None  # of its newest attempt that is whole
    settled: bool = False
    of_run: bool = False  # at least one part is of this run
    unreadable: str = ""  # a description could not be read: nothing is known of the step


@dataclass(slots=True)
class Adopted:
    """What `commit_whole` did: the steps it committed, and those it must not remove, each with the reason."""

    committed: list[int] = field(default_factory=list)
    kept: dict[int, str] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)  # steps of this run that are not whole, or not settled


def commit_whole(root: str | Path, *, run: str, keep: int, sealed: int = 0) -> Adopted:
    """Commit every step of this run whose parts are all there, the `keep` newest of them. Others may do the
    same at the same time. `sealed`: a step that a stage of the run is known to have sealed; before it can,
    every stage has compared the states that step `sealed` - 2 ended with.
    """
    place, found = place_of(root), Adopted()
    steps = [_staged(place, step, names, run) for step, names in place.staged()]
    sealed = max([sealed, *(one.step for one in steps if one.of_run)])
    whole = [one for one in steps if one.parts and (one.settled or one.step + 2 <= sealed)]
    for one in whole[-max(keep, 1) :]:
        try:
            assert one.parts is not None
            commit_described(root, one.step, one.parts, keep)
            found.committed.append(one.step)
        except FileNotFoundError:  # another process has committed it
            pass
        except (OSError, InternalError) as error:
            found.kept[one.step] = f"it cannot be committed: {error}"
    newest = max(found.committed, default=0)
    found.kept |= {one.step: one.unreadable for one in steps if one.unreadable and one.step > newest}
    found.left = [
        one.step for one in steps if one.of_run and one.step > newest and one.step not in found.kept
    ]
    return found


def staged_saves(place: Place, step: int) -> Iterator[tuple[SavedPart, Part]]:
    """The parts of a step that are described, and which save each belongs to."""
    for name in dict(place.staged()).get(step, ()):
        if name.endswith(".json") and name != "index.json":
            part, save = _read_saved(place, step, name)
            if part is not None and save is not None:
                yield save, _undescribed(part)


def staged_parts(place: Place, step: int, run: str) -> list[Part] | None:
    """The parts of a step of this run, if all are there, as `commit` takes them."""
    described = _staged(place, step, dict(place.staged()).get(step, ()), run).parts
    return None if described is None else [_undescribed(part) for part in described]


def _undescribed(part: Part) -> Part:
    """Without what a description tells of the whole checkpoint."""
    return {key: value for key, value in part.items() if key not in ("groups", "meta", "save")}


def _staged(place: Place, step: int, names: Sequence[str], run: str) -> StagedStep:
    found, saves = StagedStep(step), dict[tuple[int, int], WrittenParts]()
    unsettled: set[tuple[int, int]] = set()
    try:
        for name in names:
            if not name.endswith(".json") or name == "index.json":
                continue
            part, save = _read_saved(place, step, name)
            if part is None or save is None or save.run != run:
                continue
            found.of_run = True
            which = (save.attempt, save.stages)
            saves.setdefault(which, WrittenParts(save.attempt)).add(save.stage, save.share, part)
            if not save.settled:
                unsettled.add(which)
    except (CannotRead, OSError) as error:
        found.unreadable = str(error)
        return found
    for which in sorted(saves, reverse=True):
        if (parts := saves[which].whole(which[1])) is not None:
            found.parts, found.settled = list(parts), which not in unsettled
            break
    return found


def _read_saved(place: Place, step: int, name: str) -> tuple[Part | None, SavedPart | None]:
    """None: it was committed meanwhile, or a crash has left half of it."""
    try:
        part = json.loads(_description(place, step, name))
    except CannotRead:
        raise
    except (Refused, ValueError, RecursionError):
        return None, None
    if not isinstance(part, dict):
        return None, None
    return part, SavedPart.from_json(part.get("save"))


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


def find(path: str | Path) -> Checkpoint:
    """The checkpoint at a path or URL: a step's own folder, or the newest step of a root, by its index."""
    text = str(path).rstrip("/")
    if STEP.fullmatch(text.rpartition("/")[2]):
        return open_checkpoint(text)
    steps = place_of(path).complete()
    if not steps:
        raise UserError(f"{path} has no checkpoint; give a folder with step-… folders, or one of these.")
    return open_step(path, steps[-1][1])
