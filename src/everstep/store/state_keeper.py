"""Where a worker's states go and come from: the checkpoint folder on disk, and copies in the memory of nodes.

A state is copied between two updates, first of all while the worker waits for others; an update waits for
what is left of it, and for nothing else. Hashing, writing and sending happen behind the training's back, one
state after the other, and two at most wait for the disk and two for memory (see `store.saver`). What goes to
the memory of other nodes is sent in the same bubbles. Storage that does not answer costs saves, which are
reported, and never training. The last state of a task is tried again until the storage takes it, for as long
as `LAST_STALL_S` after the last byte that it took.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from everstep.core.worker.copy_holders import CopyHolders
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.state.optimizer_state import BESIDE
from everstep.engine.state.sharded import StateSlice, StoredState
from everstep.engine.worker.ports import Groups, State, StateParts
from everstep.errors import UserError, clipped
from everstep.job.job import Job
from everstep.layout.box import Box
from everstep.log import say, warn
from everstep.protocol.messages import (
    MemoryAddress,
    PartWritten,
    SaveFailed,
    Sender,
    StateFetched,
    Unsaved,
    WorkerReport,
    run_of,
)
from everstep.protocol.work import SaveCheckpoint, StateDirections, StoreCopy
from everstep.store import folder, memory
from everstep.store.folder import parameter_of
from everstep.store.index import TensorEntry
from everstep.store.reader import Checkpoint, UnusableCheckpointError
from everstep.store.saver import STALL_S, AsyncSaver, Bubbles

LOOK_S = 1.0
LAST_STALL_S = 60.0  # at the end of training: without a written byte, before the last states are given up
# Of a stage's state on one node: what its own worker keeps, what it keeps for another one, what is under way.
MOST_STATES = 3 + 3 + 2
MOST_OF_FREE = 0.5  # of a node's memory that copies nobody asked for may take
STORAGE_IS_SILENT = "the checkpoint storage does not answer"
Say = Callable[[WorkerReport], None]
T = TypeVar("T")


@dataclass(slots=True)
class _Save:
    """A state on its way to disk."""

    step: int
    attempt: int
    refused: str = ""  # what the storage answered last; empty: nothing
    reason: Unsaved = Unsaved.UNKNOWN


class StateKeeper:
    """Of one worker, or of one of its shards. `say` reaches the agent."""

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
        slots: int = 1,
    ) -> None:
        """`cut`: which part of every tensor is this shard's, if it has shards. `slots`: its node's."""
        self._task, self._me, self._incarnation = me
        self._job, self._node, self._memory_root = job, node, memory_root
        self._memory_key, self._run = memory.memory_key(secret), run_of(secret)
        self._say = say
        self._cut = cut or Cut({})
        self._written_bytes = 0
        self._bubbles = Bubbles()
        self._to_disk = AsyncSaver(num_written=lambda: self._written_bytes, bubbles=self._bubbles)
        self._by_default = job.memory_interval is None
        # A copy that nobody asked for waits for no other one.
        self._to_memory = AsyncSaver(stall_s=0.0 if self._by_default else STALL_S, bubbles=self._bubbles)
        self._slots, self._has_room = slots, dict[int, bool]()  # by bytes of a copy
        self._under_way: dict[int, _Save] = {}  # saves to disk without an answer yet, by their number
        self._saves = itertools.count()

    # -------------------------------------------------------------- out

    def save(self, task: SaveCheckpoint, parts: StateParts, groups: Groups) -> None:
        """This worker's parts of the checkpoint on disk, and the optimizer's groups."""
        ours = self._logical(parts)

        def write(step: int, copies: dict[str, Tensor]) -> None:
            for number, slices in _with(ours, copies).items():
                self._write_part(task, save, (number, parts.count), slices, groups)
            self._under_way.pop(save, None)

        step, attempt, save = task.state_step, task.attempt, next(self._saves)
        self._under_way[save] = _Save(step, attempt)
        saved = self._to_disk.save(step, _values(ours), hold=False, write=write, last=task.last)
        if saved is None:
            del self._under_way[save]
            oldest = min(known.step for known in self._under_way.values())
            because = f"{STORAGE_IS_SILENT}; step {oldest} is still being written"
            self._not_saved(step, attempt, because, reason=Unsaved.STORAGE_IS_SILENT)
        elif task.last:
            watch = threading.Thread(
                target=self._watch_last, args=(save, saved), name="last-state", daemon=True
            )
            watch.start()

    def _watch_last(self, save: int, saved: Future[Any]) -> None:
        """Whoever waits for the last state is told if the storage hangs over it."""
        seen, since = self._written_bytes, time.monotonic()
        while time.monotonic() - since <= LAST_STALL_S:
            with contextlib.suppress(TimeoutError):
                saved.exception(LOOK_S)
                return
            if self._written_bytes != seen:
                seen, since = self._written_bytes, time.monotonic()
        self._give_up(save)

    def _give_up(self, save: int) -> None:
        """Nobody waits for this write any longer. Its reason is the storage's last answer, if there is one:
        the limit may end between two tries.
        """
        known = self._under_way.pop(save, None)
        if known is None:
            return
        if known.refused:
            self._not_saved(known.step, known.attempt, known.refused, reason=known.reason)
            return
        because = f"{STORAGE_IS_SILENT} for {LAST_STALL_S:.0f} s"
        self._not_saved(known.step, known.attempt, because, reason=Unsaved.STORAGE_IS_SILENT)

    def takes(self, task: StoreCopy, directions: StateDirections) -> bool:
        """Is there a copy to make? When a shape ends and where the job asks for it; by default where another
        node keeps it.
        """
        to = directions.copy_to
        return task.leaving or not self._by_default or (to is not None and to.node != self._node)

    def copy(self, task: StoreCopy, parts: StateParts, directions: StateDirections) -> None:
        """Copies in memory: on this node, and on another unless this worker ends anyway."""
        ours = self._logical(parts)
        num_bytes = sum(one.values.nbytes for slices in ours.values() for one in slices)
        if self._by_default and not task.leaving and not self._fits(num_bytes):
            return
        if not task.leaving and (because := memory.too_much(self._memory_root, num_bytes, self._at_once)):
            because = f"{because}; free some, or set memory_interval = 0"
            if self._by_default:
                say(f"no copy of step {task.state_step} in memory: {because}")
            else:
                short = Unsaved.NO_MEMORY
                self._not_saved(task.state_step, task.attempt, because, memory_of=self._node, reason=short)
            return

        def write(step: int, copies: dict[str, Tensor]) -> None:
            for number, slices in _with(ours, copies).items():
                self._put_copies(task, (number, parts.count), slices, directions)

        wait_s = LAST_STALL_S if task.leaving else None  # all wait for the last state of a shape
        saved = self._to_memory.save(task.state_step, _values(ours), hold=False, write=write, wait_s=wait_s)
        if saved is None:
            if self._by_default and not task.leaving:
                say(f"no copy of step {task.state_step} in memory: two older ones are still on their way")
                return
            because = "the memory of nodes takes no more bytes"
            self._not_saved(task.state_step, task.attempt, because, memory_of=self._node)

    def _fits(self, num_bytes: int) -> bool:
        """May copies of this size be made that nobody asked for? Looked at once: memory that is free later is
        less by the copies themselves.
        """
        if num_bytes not in self._has_room:
            most = MOST_STATES * self._at_once * num_bytes
            free = memory.room_bytes(self._memory_root) + memory.held_bytes(self._memory_root)
            self._has_room[num_bytes] = found = most <= MOST_OF_FREE * free
            every = f"every {self._job.copy_interval} steps, which takes at most {most / 1e9:.2f} GB"
            told = (
                f"states are kept in the memory of nodes {every}"
                if found
                else (f"no states are kept in the memory of nodes: {every}, is too much")
            )
            say(f"{told} of the {free / 1e9:.2f} GB that are free on node {self._node}")
        return self._has_room[num_bytes]

    @property
    def _at_once(self) -> int:
        """Of its node's workers one per stage copies; where states are sharded, all do."""
        if self._job.optimizer.shard:
            return self._slots
        return min(self._slots, self._job.stages * self._job.shards)

    def settle(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Before the state changes: what is left of it is copied. `waiting` is called if it takes a while."""
        self._to_disk.before_update(waiting)
        self._to_memory.before_update(waiting)

    def bubble(self, *, begins: bool) -> None:
        """The worker waits for others, or does no longer."""
        (self._bubbles.begin if begins else self._bubbles.end)()

    def finish(self, alive: Callable[[], None] = lambda: None) -> None:
        """Until everything is written. `alive` is called as long as bytes are: a slow disk is no hang. States
        that a silent storage does not take are reported as not saved.
        """
        self._bubbles.begin()
        seen, since = self._written_bytes, time.monotonic()
        while not (self._to_disk.finish(LOOK_S) and self._to_memory.finish(LOOK_S)):
            if self._written_bytes != seen:
                seen, since = self._written_bytes, time.monotonic()
                alive()
            elif time.monotonic() - since > LAST_STALL_S:
                break
        for save in list(self._under_way):
            self._give_up(save)

    def _write_part(
        self,
        task: SaveCheckpoint,
        save: int,
        share: tuple[int, int],
        slices: Sequence[StateSlice],
        groups: Groups,
    ) -> None:
        step, attempt = task.state_step, task.attempt
        share = share[0] * self._cut.count + self._cut.index, share[1] * self._cut.count
        # By its incarnation: a process that was given up may still write, and not over another's file.
        name = f"stage-{self._me.stage}-{share[0] + 1}-of-{share[1]}-i{self._incarnation}"
        began = time.monotonic()
        while True:
            try:
                part = folder.write_slices(self._root, step, name, slices, progress=self._progressed)
                part |= self._told_once(step, share, groups)
                label = folder.write_description(
                    self._root, step, name, part, self._saved(step, attempt, share)
                )
                break
            except Exception as error:  # whatever a disk or a store can say: training goes on
                tried_s, because = time.monotonic() - began, f"{type(error).__name__}: {error}"
                reason = Unsaved.UNKNOWN
                if isinstance(error, FileNotFoundError) and tried_s > STALL_S:
                    # Given up meanwhile, and its folder with it.
                    because = f"{STORAGE_IS_SILENT}: nothing was written for {tried_s:.0f} s"
                    reason = Unsaved.STORAGE_IS_SILENT
                known = self._under_way.get(save)
                if known is None:  # given up, and said so
                    return
                if not task.last or tried_s > LAST_STALL_S:
                    if self._under_way.pop(save, None) is not None:  # who takes it away says so, once
                        self._not_saved(step, attempt, because, reason=reason)
                    return
                if because != known.refused:
                    warn(f"the state of step {step} is not saved yet: {because}; it is tried again")
                known.refused, known.reason = because, reason
                time.sleep(LOOK_S)
        self._say(self._written(step, attempt, label, share=share))

    def _saved(self, step: int, attempt: int, share: tuple[int, int]) -> folder.SavedPart:
        """What the finder of the part must know to commit it, should the coordinator be away."""
        votes = self._job.vote_period
        return folder.SavedPart(
            run=self._run,
            attempt=attempt,
            stage=self._me.stage,
            stages=self._job.stages,
            share=share,
            settled=not votes or step >= self._job.steps,
        )

    def _told_once(self, step: int, share: tuple[int, int], groups: Groups) -> dict[str, Any]:
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

    def _put_copies(
        self,
        task: StoreCopy,
        share: tuple[int, int],
        slices: Sequence[StateSlice],
        directions: StateDirections,
    ) -> None:
        step, attempt = task.state_step, task.attempt
        of_shard = f"-shard-{self._cut.index}" if self._cut.count > 1 else ""
        name = f"stage-{self._me.stage}-{share[0]}-{self._me.replica}{of_shard}"
        node: str | None = None
        try:
            pace = self._bubbles.pace()
            label = memory.put(self._memory_root, self._task, step, name, slices, pace)
            self._say(self._written(step, attempt, label, memory_of=self._node, share=share))
            stays = task.leaving and not directions.copy_away
            if stays or directions.copy_to is None or directions.copy_to.node == self._node:
                return
            node, host, port = directions.copy_to
            memory.send(self._memory_root, label, self._remote(host, port), self._task, step, pace)
            self._say(self._written(step, attempt, label, memory_of=node, share=share))
        except OSError as error:
            if node is None:
                self._not_saved(step, attempt, f"{type(error).__name__}: {error}", memory_of=self._node)
            else:  # that node may be dying: an incident of its own, if it is
                warn(f"no copy of step {step} on node {node}: {error}")

    def _not_saved(
        self,
        step: int,
        attempt: int,
        because: str,
        *,
        memory_of: str | None = None,
        reason: Unsaved = Unsaved.UNKNOWN,
    ) -> None:
        failed = SaveFailed(
            task=self._task,
            step=step,
            attempt=attempt,
            because=clipped(because),
            memory_of=memory_of,
            reason=reason,
        )
        with contextlib.suppress(OSError):  # the agent is gone too
            self._say(failed)
        warn(f"the state of step {step} is not saved: {because}")

    def _progressed(self, num_bytes: int) -> None:
        self._written_bytes += num_bytes

    # -------------------------------------------------------------- in

    def load(
        self,
        step: int,
        names: Sequence[str],
        directions: StateDirections,
        take: Callable[[State], None],
    ) -> bool:
        """Give `take` the tensors of these parameters, which are read as it asks for them. False: they cannot
        be read; what it has taken then is of no use.
        """
        if not directions.copies:
            return self._load_from_disk(step, set(names), take)
        began = time.monotonic()
        holders = CopyHolders(directions)
        copied = _CopiedState(self._task, step, holders, self._source)
        try:
            take(self._stored(copied.tensors(), set(names), copied.read_box))
            is_whole = True
        except _StateGone:
            is_whole = False
        finally:
            copied.close()
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
        return is_whole

    def _load_from_disk(self, step: int, wanted: set[str], take: Callable[[State], None]) -> bool:
        try:
            checkpoint = folder.open_step(self._root, f"step-{step:08d}")
            try:
                take(self._stored(checkpoint.tensors, wanted, checkpoint.read_box))
            finally:
                checkpoint.close()
        except UnusableCheckpointError as error:
            warn(str(error))
            return False  # the coordinator has it verified, and chooses
        return True

    # -------------------------------------------------------------- shards

    def _logical(self, parts: StateParts) -> dict[int, list[StateSlice]]:
        """What this shard writes: its slices as boxes of the logical tensors. What all shards have whole is
        written by the first one.
        """
        return {number: self._of_logical(slices) for number, slices in parts.slices.items()}

    def _of_logical(self, slices: Sequence[StateSlice]) -> list[StateSlice]:
        found = []
        for one in slices:
            split = None
            if _per_element(one.tensor, one.shape):
                split = self._cut.split_of_part(parameter_of(one.tensor), one.shape)
            if split is not None:
                start = tuple(a + b for a, b in zip(split.box.start, one.box.start, strict=True))
                found.append(one._replace(shape=split.whole, box=Box(start, one.box.size)))
            elif self._cut.index == 0:
                found.append(one)
        return found

    def _stored(
        self,
        tensors: Mapping[str, TensorEntry],
        wanted: set[str],
        read: Callable[[str, Box | None], Tensor],
    ) -> StoredState:
        """Of a checkpoint's tensors those of these parameters; of a split one the part that is this shard's,
        whose boxes are counted from its own corner.
        """
        names = [name for name in tensors if parameter_of(name) in wanted]
        shapes = {name: tensors[name].shape for name in names}
        boxes = {
            name: split.box
            for name, shape in shapes.items()
            if _per_element(name, shape) and (split := self._cut.split(parameter_of(name), shape)) is not None
        }

        def read_part(name: str, box: Box | None) -> Tensor:
            part = boxes.get(name)
            if part is None or box is None:
                return read(name, part if box is None else box)
            start = tuple(a + b for a, b in zip(part.start, box.start, strict=True))
            return read(name, Box(start, box.size))

        return StoredState(shapes | {name: box.size for name, box in boxes.items()}, read_part)

    def _source(self, address: MemoryAddress) -> Path | memory.Remote:
        if address.node == self._node:
            return self._memory_root
        return self._remote(address.host, address.port)

    def _remote(self, host: str, port: int) -> memory.Remote:
        return memory.Remote(host, port, self._memory_key, memory.suite_for(self._job.net, host))

    @property
    def _root(self) -> str | Path:
        if self._job.checkpoint is None:
            raise UserError("the job names no checkpoint folder, and no state is in memory.")
        return folder.root_of(self._job.base, self._job.checkpoint.folder)


def _values(parts: Mapping[int, Sequence[StateSlice]]) -> dict[str, Tensor]:
    """What is copied before training goes on."""
    return {f"{number}/{i}": one.values for number, slices in parts.items() for i, one in enumerate(slices)}


def _with(
    parts: Mapping[int, Sequence[StateSlice]], copies: Mapping[str, Tensor]
) -> dict[int, list[StateSlice]]:
    return {
        number: [one._replace(values=copies[f"{number}/{i}"]) for i, one in enumerate(slices)]
        for number, slices in parts.items()
    }


def _per_element(name: str, shape: Sequence[int]) -> bool:
    """Not an optimizer's counters, nor what it keeps besides, nor the limits of sums."""
    return len(shape) > 0 and not name.startswith(BESIDE)


# ------------------------------------------------------------------ a copy in memory, read


class _StateGone(Exception):
    """A part of the state has no holder left."""


class _CopiedState:
    """A state in the memory of nodes, open between its making and `close`: read from the next holder of a
    part where a read fails. Who is asked next is decided in `core.worker.copy_holders`.
    """

    def __init__(
        self,
        task: str,
        step: int,
        holders: CopyHolders,
        source: Callable[[MemoryAddress], Path | memory.Remote],
    ) -> None:
        """`source`: how a node's memory is read from here."""
        self._task, self._step, self._holders, self._source = task, step, holders, source
        self.bytes_here = self.bytes_elsewhere = 0
        self._files: dict[str, int] = {}  # which part each file is of
        self._opened: Checkpoint | None = None

    def tensors(self) -> Mapping[str, TensorEntry]:
        return self._tried(lambda checkpoint: checkpoint.tensors)

    def read_box(self, name: str, box: Box | None) -> Tensor:
        return self._tried(lambda checkpoint: checkpoint.read_box(name, box))

    def close(self) -> None:
        if self._opened is not None:
            here, elsewhere = memory.bytes_read(self._opened)
            self.bytes_here += here
            self.bytes_elsewhere += elsewhere
            self._opened.close()
            self._opened = None

    def _tried(self, read: Callable[[Checkpoint], T]) -> T:
        while True:
            try:
                if self._opened is None:
                    self._opened = self._open()
                return read(self._opened)
            except (UserError, OSError) as error:
                warn(f"the state of step {self._step} in memory: {error}")
                self.close()
                if not self._ask_another(error):
                    raise _StateGone from error

    def _open(self) -> Checkpoint:
        self._files.clear()
        sources = []
        for number, (address, part) in enumerate(self._holders.chosen()):
            for label in part.get("shards", [part]):  # of a worker with shards: one each
                self._files[f"{label['name']}.safetensors"] = number
                sources.append((self._source(address), label))
        return memory.open_copies(self._task, self._step, sources)

    def _ask_another(self, error: UserError | OSError) -> bool:
        """False: it is not known whose part is to blame, or no other node has it."""
        if not isinstance(error, UnusableCheckpointError) or error.file not in self._files:
            return False
        reached = error.kind != "unreadable"
        return self._holders.read_failed(self._files[error.file], str(error), reached=reached)
