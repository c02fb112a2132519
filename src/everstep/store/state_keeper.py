"""Where a worker's states go and come from: the checkpoint folder on disk, and copies in the memory of nodes.

Training stands still for one copy of the state, nothing else: hashing, writing and sending happen behind its
back, one state after the other, and two at most wait for the disk and two for memory (see `store.saver`).
Storage that does not answer costs saves, which are reported, and never training.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from everstep.core.worker.control import StateDirections
from everstep.core.worker.copy_holders import CopyHolders
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.state.optimizer_state import BESIDE
from everstep.engine.state.sharded import ChunkSlice
from everstep.errors import UserError, clipped
from everstep.job.job import Job
from everstep.layout.box import Box, whole
from everstep.log import warn
from everstep.protocol.messages import (
    MemoryAddress,
    PartWritten,
    SaveFailed,
    Sender,
    StateFetched,
    WorkerReport,
)
from everstep.store import folder, memory
from everstep.store.copied_state import CopiedState
from everstep.store.folder import parameter_of
from everstep.store.memory_server import token_of
from everstep.store.reader import Checkpoint
from everstep.store.saver import AsyncSaver, Write, share_of

LOOK_S = 1.0
LAST_STALL_S = 60.0  # at the end of training: without a written byte, before the last states are given up
STORAGE_IS_SILENT = "the checkpoint storage does not answer"  # `core.faults.symptoms` knows this sentence
Say = Callable[[WorkerReport], None]
Slice = tuple[str, tuple[int, ...], Box, Tensor]  # a logical tensor, its shape, and values of a box of it


class States:
    def __init__(
        self,
        me: Sender,
        job: Job,
        *,
        node: str,
        memory_root: Path,
        secret: str,
        say: Say,
        cut: Cut | None = None,
    ) -> None:
        """`cut`: which part of every tensor is this shard's, if the worker has shards."""
        self._task, self._me, self._incarnation = me
        self._job, self._node, self._memory_root = job, node, memory_root
        self._token = token_of(secret)
        self._say = say
        self._cut = cut or Cut({})
        self._written_bytes = 0
        self._to_disk = AsyncSaver(num_written=lambda: self._written_bytes)
        self._to_memory = AsyncSaver()
        self._under_way: dict[int, int] = {}  # step -> attempt, of saves to disk without an answer yet

    # -------------------------------------------------------------- out

    def save(
        self,
        step: int,
        attempt: int,
        share: tuple[int, int],
        state: Mapping[str, Tensor],
        groups: list[dict[str, Any]],
    ) -> None:
        """A share of this stage's part of the checkpoint on disk, and the optimizer's groups."""
        self._save(
            step,
            attempt,
            share_of(self._own(state), *share),
            lambda step, tensors: self._write_to_disk(step, attempt, share, tensors, groups),
        )

    def save_chunks(
        self,
        step: int,
        attempt: int,
        count: int,
        chunks: Mapping[int, Sequence[ChunkSlice]],
        groups: list[dict[str, Any]],
    ) -> None:
        """Sharded: the chunks of this stage that are this worker's, one part each."""

        def write(step: int, tensors: dict[str, Tensor]) -> None:
            for chunk in chunks:
                slices = self._of_logical(_copied(chunks, chunk, tensors))
                share = chunk * self._cut.count + self._cut.index, count * self._cut.count
                self._write_chunk(step, attempt, share, slices, groups)

        self._save(step, attempt, _to_copy(chunks), write)

    def _save(self, step: int, attempt: int, state: Mapping[str, Tensor], write: Write) -> None:
        def answered(step: int, tensors: dict[str, Tensor]) -> None:
            write(step, tensors)
            self._under_way.pop(step, None)

        self._under_way[step] = attempt
        if self._to_disk.save(step, state, write=answered) is None:
            del self._under_way[step]
            self._not_saved(
                step, attempt, f"{STORAGE_IS_SILENT}; step {min(self._under_way)} is still being written"
            )

    def copy_chunks(
        self,
        step: int,
        attempt: int,
        leaving: bool,
        count: int,
        chunks: Mapping[int, Sequence[ChunkSlice]],
        directions: StateDirections,
    ) -> None:
        """Sharded: copies of these chunks in memory. No other worker has all of them, so this one leaves its
        own behind whatever its node keeps of others.
        """

        def write(step: int, tensors: dict[str, Tensor]) -> None:
            for chunk in chunks:
                slices = self._of_logical(_copied(chunks, chunk, tensors))
                name = f"stage-{self._me.stage}-chunk-{chunk}-{self._me.replica}{self._of_shard}"
                put = partial(memory.put, self._memory_root, self._task, step, name, slices)
                self._put_copies(step, attempt, (chunk, count), put, directions, leaving)

        self._copy(step, attempt, _to_copy(chunks), write)

    def _write_chunk(
        self,
        step: int,
        attempt: int,
        share: tuple[int, int],
        slices: Sequence[Slice],
        groups: list[dict[str, Any]],
    ) -> None:
        name = f"stage-{self._me.stage}-chunk-{share[0]}-of-{share[1]}-i{self._incarnation}"
        try:
            part = folder.write_slices(self._root, step, name, slices, progress=self._progressed)
        except Exception as error:  # whatever a disk or a store can say: training goes on
            self._not_saved(step, attempt, f"{type(error).__name__}: {error}")
            return
        self._say(self._written(step, attempt, part | self._told_once(step, share, groups), share=share))

    def copy_to_memory(
        self,
        step: int,
        attempt: int,
        leaving: bool,
        state: Mapping[str, Tensor],
        directions: StateDirections,
    ) -> None:
        """A copy in memory: on this node, and on another unless this worker ends anyway."""
        if leaving and not directions.copy_at_end:
            return
        self._copy(
            step,
            attempt,
            self._own(state),
            lambda step, tensors: self._write_copies(step, attempt, tensors, directions, leaving),
        )

    def _copy(self, step: int, attempt: int, state: Mapping[str, Tensor], write: Write) -> None:
        if self._to_memory.save(step, state, write=write) is None:
            self._not_saved(step, attempt, "the memory of nodes takes no more bytes", memory_of=self._node)

    def finish(self, alive: Callable[[], None] = lambda: None) -> None:
        """Until everything is written. `alive` is called as long as bytes are: a slow disk is no hang. States
        that a silent storage does not take are reported as not saved.
        """
        seen, since = self._written_bytes, time.monotonic()
        while not (self._to_disk.finish(LOOK_S) and self._to_memory.finish(LOOK_S)):
            if self._written_bytes != seen:
                seen, since = self._written_bytes, time.monotonic()
                alive()
            elif time.monotonic() - since > LAST_STALL_S:
                break
        for step, attempt in list(self._under_way.items()):
            self._not_saved(step, attempt, f"{STORAGE_IS_SILENT} for {LAST_STALL_S:.0f} s")

    def _write_to_disk(
        self,
        step: int,
        attempt: int,
        share: tuple[int, int],
        tensors: dict[str, Tensor],
        groups: list[dict[str, Any]],
    ) -> None:
        # By its incarnation: a process that was given up may still write, and not over another's file.
        share = share[0] * self._cut.count + self._cut.index, share[1] * self._cut.count
        name = f"stage-{self._me.stage}-{share[0] + 1}-of-{share[1]}-i{self._incarnation}"
        try:
            part = folder.write_slices(
                self._root, step, name, self._slices(tensors), progress=self._progressed
            )
        except Exception as error:  # whatever a disk or a store can say: training goes on
            self._not_saved(step, attempt, f"{type(error).__name__}: {error}")
            return
        self._say(self._written(step, attempt, part | self._told_once(step, share, groups), share=share))

    def _told_once(self, step: int, share: tuple[int, int], groups: list[dict[str, Any]]) -> dict[str, Any]:
        """Peers know the same: one of each stage tells its groups, and one of all what the run is."""
        if share[0]:
            return {}
        run = {} if self._me.stage else {"meta": self._job.checkpoint_meta(step)}
        return {"groups": groups, **run}

    def _written(
        self,
        step: int,
        attempt: int,
        part: Any,
        *,
        memory_of: str | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> PartWritten:
        stage = self._me.stage
        return PartWritten(
            task=self._task,
            step=step,
            stage=stage,
            attempt=attempt,
            part=part,
            memory_of=memory_of,
            share=share,
        )

    def _write_copies(
        self, step: int, attempt: int, tensors: dict[str, Tensor], directions: StateDirections, leaving: bool
    ) -> None:
        name = f"stage-{self._me.stage}-{self._me.replica}{self._of_shard}"
        put = partial(memory.put, self._memory_root, self._task, step, name, self._slices(tensors))
        self._put_copies(step, attempt, (0, 1), put, directions, leaving)

    def _put_copies(
        self,
        step: int,
        attempt: int,
        share: tuple[int, int],
        put: Callable[[], memory.Label],
        directions: StateDirections,
        leaving: bool,
    ) -> None:
        node: str | None = None
        try:
            label = put()
            self._say(self._written(step, attempt, label, memory_of=self._node, share=share))
            stays = leaving and not directions.copy_away
            if stays or directions.copy_to is None or directions.copy_to.node == self._node:
                return
            node, host, port = directions.copy_to
            memory.send(self._memory_root, label, memory.Remote(host, port, self._token), self._task, step)
            self._say(self._written(step, attempt, label, memory_of=node, share=share))
        except OSError as error:
            if node is None:
                self._not_saved(step, attempt, f"{type(error).__name__}: {error}", memory_of=self._node)
            else:  # that node may be dying: an incident of its own, if it is
                warn(f"no copy of step {step} on node {node}: {error}")

    def _not_saved(self, step: int, attempt: int, because: str, memory_of: str | None = None) -> None:
        failed = SaveFailed(
            task=self._task, step=step, attempt=attempt, because=clipped(because), memory_of=memory_of
        )
        with contextlib.suppress(OSError):  # the agent is gone too
            self._say(failed)
        warn(f"the state of step {step} is not saved: {because}")

    def _progressed(self, num_bytes: int) -> None:
        self._written_bytes += num_bytes

    # -------------------------------------------------------------- in

    def load(
        self, step: int, names: Sequence[str], directions: StateDirections
    ) -> Mapping[str, Tensor] | None:
        """The tensors of these parameters; None: no holder of a part in memory could be read."""
        wanted = set(names)
        if not directions.copies:
            checkpoint = folder.open_step(self._root, f"step-{step:08d}")
            return dict(self._read(checkpoint, wanted))
        began = time.monotonic()
        holders = CopyHolders(directions)
        copied = CopiedState(self._task, step, holders, self._source)
        found = copied.read(lambda checkpoint, done: self._read(checkpoint, wanted, done))
        fetched = StateFetched(
            task=self._task,
            worker=self._me,
            step=step,
            bytes_here=copied.bytes_here,
            bytes_elsewhere=copied.bytes_elsewhere,
            seconds=time.monotonic() - began,
            failed=holders.failed(),
        )
        self._say(fetched)
        return found

    # -------------------------------------------------------------- shards

    def _own(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this shard writes: its parts; what all shards have whole is the first one's."""
        return {
            name: tensor
            for name, tensor in state.items()
            if self._cut.index == 0 or self._is_split(name, tensor)
        }

    def _slices(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, tuple[int, ...], Box, Tensor]]:
        """Each tensor as a box of the logical one: (name, whole shape, box, values)."""
        found = []
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            split = self._cut.split_of_part(parameter_of(name), shape) if _per_element(name, shape) else None
            at = (shape, whole(shape)) if split is None else (split.whole, split.box)
            found.append((name, *at, tensor))
        return found

    def _of_logical(self, slices: Sequence[Slice]) -> list[Slice]:
        """What this shard writes of a chunk: boxes of its part as boxes of the logical tensors."""
        found = []
        for name, shape, box, values in slices:
            split = self._cut.split_of_part(parameter_of(name), tuple(shape)) if shape else None
            if split is not None:
                start = tuple(a + b for a, b in zip(split.box.start, box.start, strict=True))
                found.append((name, split.whole, Box(start, box.size), values))
            elif self._cut.index == 0:
                found.append((name, tuple(shape), box, values))
        return found

    @property
    def _of_shard(self) -> str:
        return f"-shard-{self._cut.index}" if self._cut.count > 1 else ""

    def _is_split(self, name: str, tensor: Tensor) -> bool:
        return _per_element(name, tensor.shape) and self._cut.is_split(parameter_of(name))

    def _read(
        self, checkpoint: Checkpoint, wanted: set[str], done: Container[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Tensor by tensor; `done`: those that are here already."""
        for name in [
            name for name in checkpoint.tensors if parameter_of(name) in wanted and name not in done
        ]:
            shape = checkpoint.tensors[name].shape
            split = self._cut.split(parameter_of(name), shape) if _per_element(name, shape) else None
            yield name, checkpoint.read_box(name, None if split is None else split.box)

    def _source(self, address: MemoryAddress) -> Path | memory.Remote:
        if address.node == self._node:
            return self._memory_root
        return memory.Remote(address.host, address.port, self._token)

    @property
    def _root(self) -> str | Path:
        if self._job.checkpoint is None:
            raise UserError("the job names no checkpoint folder, and no state is in memory.")
        return folder.root_of(self._job.base, self._job.checkpoint.folder)


def _to_copy(chunks: Mapping[int, Sequence[ChunkSlice]]) -> dict[str, Tensor]:
    return {f"{chunk}/{i}": one.values for chunk, slices in chunks.items() for i, one in enumerate(slices)}


def _values(
    chunks: Mapping[int, Sequence[ChunkSlice]], chunk: int, tensors: Mapping[str, Tensor]
) -> list[Tensor]:
    return [tensors[f"{chunk}/{i}"] for i in range(len(chunks[chunk]))]


def _copied(
    chunks: Mapping[int, Sequence[ChunkSlice]], chunk: int, tensors: Mapping[str, Tensor]
) -> list[Slice]:
    values = _values(chunks, chunk, tensors)
    return [(s.tensor, s.shape, s.box, copy) for s, copy in zip(chunks[chunk], values, strict=True)]


def _per_element(name: str, shape: Sequence[int]) -> bool:
    """Not an optimizer's counters, nor what it keeps besides, nor the limits of sums."""
    return len(shape) > 0 and not name.startswith(BESIDE)
