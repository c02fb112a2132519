"""Disks that forget: a write counts once it is synced; a crash before that loses it, or leaves it torn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tests.storms.truth import VirtualState

T = TypeVar("T")


class JournalDisk(Generic[T]):
    """An append-only file. Entries after `synced` do not survive a crash."""

    def __init__(self) -> None:
        self.entries: list[T] = []
        self.synced = 0

    def append(self, entry: T) -> None:
        self.entries.append(entry)

    def sync(self) -> Sequence[T]:
        """Make all durable; the entries that became so."""
        fresh = self.entries[self.synced :]
        self.synced = len(self.entries)
        return fresh

    def crash(self) -> list[T]:
        """The entries that are lost. The last may be torn, which a reader sees and drops: lost too."""
        lost = self.entries[self.synced :]
        del self.entries[self.synced :]
        return lost


@dataclass(slots=True)
class CheckpointDisk:
    """Storage all nodes share. A part is whole once its writer has lived to sync it."""

    stages: int
    parts: dict[int, dict[int, VirtualState]] = field(default_factory=dict)  # step -> stage -> durable part
    shares: dict[tuple[int, int, int], set[int]] = field(default_factory=dict)
    torn: dict[tuple[int, int], int] = field(default_factory=dict)  # begun and never synced
    committed: int = 0

    def begin(self, step: int, stage: int) -> None:
        self.torn[step, stage] = self.torn.get((step, stage), 0) + 1

    def sync(
        self, step: int, stage: int, state: VirtualState, share: tuple[int, int], chunks: tuple[int, ...] = ()
    ) -> None:
        """One peer's share of a stage's part; the part is whole when all of them are there. Sharded: the
        chunks are the shares.
        """
        index, count = share
        written = self.shares.setdefault((step, stage, count), set())
        written |= set(chunks) or {index}
        if len(written) == count:
            self.parts.setdefault(step, {})[stage] = state

    def whole_up_to(self, recorded: int) -> int | None:
        """The newest checkpoint that can be committed: all parts durable, its step on record."""
        whole = [s for s, p in self.parts.items() if len(p) == self.stages and self.committed < s <= recorded]
        if not whole:
            return None
        self.committed = max(whole)
        return self.committed

    def read(self, step: int, stage: int) -> VirtualState | None:
        return VirtualState(0, 0) if step == 0 else self.parts.get(step, {}).get(stage)
