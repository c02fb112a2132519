"""Where a worker's states go and come from: the checkpoint folder on disk, and the shelves in memory.

Training stands still for one copy of the state, nothing else: hashing, writing and sending happen behind its
back, one state after the other, and two at most wait (see `checkpoint.saver`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from everstep.checkpoint import folder, memory
from everstep.checkpoint.saver import AsyncSaver, share_of
from everstep.core.words.ops import Worker
from everstep.engine.job import Job
from everstep.errors import UserError
from everstep.node.memory_store import token_of

Tell = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Directions:
    """What the order to go on says about states: where copies go, and where the one to load is."""

    shelf: tuple[str, str, int] | None = None  # node, host, port
    leaves: bool = True
    kept: Sequence[tuple[tuple[str, str, int], Any]] = ()  # shelf, part


class States:
    def __init__(
        self,
        me: Worker,
        job: Job,
        *,
        task: str,
        incarnation: int,
        node: str,
        shelf: Path,
        secret: str,
        tell: Tell,
    ) -> None:
        self._incarnation = incarnation
        self.directions = Directions()
        self._me, self._job, self._task, self._node, self._shelf = me, job, task, node, shelf
        self._token = token_of(secret)
        self._tell = tell
        self._saver = AsyncSaver()

    def obey(self, told: Mapping[str, Any]) -> None:
        """What the order to go on says about states."""
        self.directions = Directions(
            shelf=None if told["shelf"] is None else tuple(told["shelf"]),
            leaves=told["leaves"],
            kept=[((node, host, port), part) for (node, host, port), part in told["kept"]],
        )

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
        self._saver.save(
            step,
            share_of(state, *share),
            write=lambda step, tensors: self._write_to_disk(step, attempt, share, tensors, groups),
        )

    def shelve(self, step: int, attempt: int, leaving: bool, state: Mapping[str, Tensor]) -> None:
        """A copy in memory: on this node's shelf, and on another's unless this worker leaves anyway."""
        directions = self.directions
        if leaving and not directions.leaves:
            return
        self._saver.save(
            step,
            state,
            write=lambda step, tensors: self._write_to_shelves(step, attempt, tensors, directions, leaving),
        )

    def finish(self) -> None:
        self._saver.finish()

    def _write_to_disk(
        self,
        step: int,
        attempt: int,
        share: tuple[int, int],
        tensors: dict[str, Tensor],
        groups: list[dict[str, Any]],
    ) -> None:
        # By its incarnation: a process that was given up may still write, and not over another's file.
        name = f"stage-{self._me.stage}-{share[0] + 1}-of-{share[1]}-i{self._incarnation}"
        try:
            part = folder.write_part(self._root, step, name, tensors)
        except OSError as error:
            print(f"checkpoint of step {step} not written: {error}", file=sys.stderr)
            return
        told = part if share[0] else part | {"groups": groups}  # peers have the same: one tells
        self._tell("saved", {"step": step, "attempt": attempt, "part": told, "share": share})

    def _write_to_shelves(
        self, step: int, attempt: int, tensors: dict[str, Tensor], directions: Directions, leaving: bool
    ) -> None:
        name = f"stage-{self._me.stage}-{self._me.replica}"
        try:
            label = memory.put(self._shelf, self._task, step, name, tensors)
            told = {"step": step, "attempt": attempt, "part": label}
            self._tell("shelved", told | {"node": self._node})
            if leaving or directions.shelf is None or directions.shelf[0] == self._node:
                return
            node, host, port = directions.shelf
            memory.send(self._shelf, label, memory.Remote(host, port, self._token), self._task, step)
            self._tell("shelved", told | {"node": node})
        except OSError as error:
            print(f"the copy of step {step} in memory is not whole: {error}", file=sys.stderr)

    # -------------------------------------------------------------- in

    def load(self, step: int, names: Sequence[str]) -> Mapping[str, Tensor] | None:
        """The tensors of these parameters; None: the state was in memory and is gone."""
        wanted = set(names)
        kept = self.directions.kept
        if not kept:
            checkpoint = folder.open_step(self._root, f"step-{step:08d}")
            return checkpoint.read([name for name in checkpoint.tensors if _parameter(name) in wanted])
        began = time.monotonic()
        try:
            sources = [(self._source(*shelf), part) for shelf, part in kept]
            checkpoint = memory.open_kept(self._task, step, sources)
            found = checkpoint.read([name for name in checkpoint.tensors if _parameter(name) in wanted])
        except (UserError, OSError) as error:
            print(f"the state of step {step} in memory cannot be read: {error}", file=sys.stderr)
            return None
        here, elsewhere = memory.bytes_read(checkpoint)
        seconds = time.monotonic() - began
        self._tell("fetched", {"step": step, "here": here, "elsewhere": elsewhere, "seconds": seconds})
        checkpoint.close()
        return found

    def _source(self, node: str, host: str, port: int) -> Path | memory.Remote:
        return self._shelf if node == self._node else memory.Remote(host, port, self._token)

    @property
    def _root(self) -> str | Path:
        if self._job.checkpoint is None:
            raise UserError("the job names no checkpoint folder, and no state is in memory.")
        return folder.root_of(self._job.base, self._job.checkpoint.folder)


def _parameter(name: str) -> str:
    """`model/embed.weight` and `optimizer/embed.weight/exp_avg` are both of embed.weight."""
    return name.split("/")[1]
