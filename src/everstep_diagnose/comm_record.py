"""One communication, as one rank saw it; and the columns that hold millions of them.

Every reader ends here, whatever it read: a Flight Recorder dump, NCCL's own files, our engine's ring. A
record says which operation it was (group, sequence), who took part (rank, peer), and when it was enqueued,
started and ended. Each time may be unknown, and unknown is not a late time: sources differ in what they can
see, so no analysis may read an absence as evidence.

    enqueued   the host asked for it
    started    the device (or the kernel's socket) began
    ended      this rank was done with it
    took       how long it ran, where a source knows the length and not the moment

A `Dump` is what one file says; `case.py` makes one `Case` of many parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNKNOWN = -1
SEND, RECV, COMPUTE = "send", "recv", "compute"
FLIGHT_RECORDER = "flight recorder"  # a form of files
SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
EQUAL_SIZES = frozenset({"all_reduce", "broadcast", "reduce", "reduce_scatter"})
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row. Times are nanoseconds of whatever clock the rank's host has."""

    rank: int
    group: int  # an index into the groups of its part or case
    seq: int
    kind: str
    bytes: int = UNKNOWN
    peer: int = UNKNOWN
    enqueued_ns: int = UNKNOWN
    started_ns: int = UNKNOWN
    ended_ns: int = UNKNOWN
    took_ns: int = UNKNOWN
    done: bool | None = None
    order: int = UNKNOWN  # the rank's own program order

    @property
    def is_message(self) -> bool:
        return self.kind in (SEND, RECV)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate together. No members: the source does not say; see `case`."""

    name: str
    members: tuple[int, ...] = ()
    about: str = ""
    pairwise: bool = False  # messages carry a number of their own per sender and receiver

    @property
    def is_first(self) -> bool:
        """Of all ranks: PyTorch calls it the default group."""
        return "default" in self.about

    def __str__(self) -> str:
        return f"{self.name} ({self.about})" if self.about not in ("", "undefined", self.name) else self.name


_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("rank", np.int32),
    ("group", np.int32),
    ("seq", np.int64),
    ("kind", np.int16),
    ("bytes", np.int64),
    ("peer", np.int32),
    ("enqueued_ns", np.int64),
    ("started_ns", np.int64),
    ("ended_ns", np.int64),
    ("took_ns", np.int64),
    ("done", np.int8),  # 1, 0, or -1: unknown
    ("order", np.int64),
)


@dataclass(slots=True)
class Log:
    """Records as columns, each rank's in its own order."""

    kinds: list[str]
    rank: NDArray[np.int32]
    group: NDArray[np.int32]
    seq: Ints
    kind: NDArray[np.int16]
    bytes: Ints
    peer: NDArray[np.int32]
    enqueued_ns: Ints
    started_ns: Ints
    ended_ns: Ints
    took_ns: Ints
    done: NDArray[np.int8]
    order: Ints

    def __len__(self) -> int:
        return len(self.rank)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Log:
        rows = list(records)
        kinds: dict[str, int] = {}
        columns: dict[str, Any] = {}
        for name, dtype in _COLUMNS:
            if name == "kind":
                values = [kinds.setdefault(r.kind, len(kinds)) for r in rows]
            elif name == "done":
                values = [UNKNOWN if r.done is None else int(r.done) for r in rows]
            else:
                values = [getattr(r, name) for r in rows]
            columns[name] = np.array(values, dtype=dtype)
        return cls(kinds=list(kinds), **columns)

    def take(self, rows: NDArray[Any]) -> Log:
        return Log(kinds=self.kinds, **{name: getattr(self, name)[rows] for name, _ in _COLUMNS})

    def row(self, at: int) -> Record:
        done = int(self.done[at])
        plain = {name: int(getattr(self, name)[at]) for name, _ in _COLUMNS if name not in ("kind", "done")}
        return Record(kind=self.kinds[self.kind[at]], done=None if done < 0 else bool(done), **plain)

    def records(self) -> list[Record]:
        return [self.row(at) for at in range(len(self))]

    def is_kind(self, *kinds: str) -> NDArray[np.bool_]:
        wanted = np.array([kind in kinds for kind in self.kinds] or [False])
        if wanted.all() or not wanted.any():
            return np.full(len(self), bool(wanted.all()))
        return np.asarray(wanted[self.kind]) if len(self) else np.zeros(0, dtype=bool)


def most_by(key: Ints, values: Ints) -> tuple[Ints, Ints]:
    """The keys there are, and the largest value of each. A table over all possible keys where it is not much
    larger than what goes in (it seldom is), else a sort."""
    if not len(key):
        return key, values
    low, size = int(key.min()), int(key.max() - key.min()) + 1
    if size <= 4 * len(key) + 1024:
        table = np.full(size, np.iinfo(np.int64).min, dtype=np.int64)
        np.maximum.at(table, key - low, values)
        found = np.flatnonzero(table != np.iinfo(np.int64).min)
        return found + low, table[found]
    keys, inverse = np.unique(key, return_inverse=True)
    most = np.full(len(keys), np.iinfo(np.int64).min, dtype=np.int64)
    np.maximum.at(most, inverse, values)
    return keys, most


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """How far a rank got in a group, by the library's own counters."""

    enqueued: int = UNKNOWN
    completed: int = UNKNOWN


@dataclass(slots=True, kw_only=True)
class Dump:
    """What one source says, mostly about one rank: a Flight Recorder dump, a ring, an error file."""

    source: str
    form: str = ""  # of the file: two of one form and one rank are two takes of the same thing
    log: Log
    groups: list[Group]
    ranks: tuple[int, ...] = ()  # who speaks here, also with no record at all
    progress: dict[tuple[int, int], GroupProgress] = field(default_factory=dict)  # (rank, group)
    taken_ns: dict[int, int] = field(default_factory=dict)  # when a rank's records were taken, by their clock
    hosts: dict[int, str] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)  # NCCL's RAS asked it, no answer: how it failed to
    errors: dict[int, tuple[int, str]] = field(default_factory=dict)  # raised: when (ns), what
    world_size: int = 0
    has_device: bool = True  # gloo has none: what failed there looks completed
    misses_messages: bool = False  # it left out some that its rank issued


def concatenate(parts: list[tuple[Log, list[int]]]) -> Log:
    """Logs as one, by rank and order; with each log, where its groups have moved to."""
    kinds: dict[str, int] = {}
    pieces: dict[str, list[NDArray[Any]]] = {name: [] for name, _ in _COLUMNS}
    for log, groups in parts:
        kind_of = np.array([kinds.setdefault(kind, len(kinds)) for kind in log.kinds] or [0], dtype=np.int16)
        group_of = np.array(groups or [0], dtype=np.int32)
        for name, _ in _COLUMNS:
            column = getattr(log, name)
            if name == "kind" and len(log):
                column = kind_of[column]
            elif name == "group" and len(log):
                column = group_of[column]
            pieces[name].append(column)
    columns = {
        name: np.concatenate(pieces[name]) if pieces[name] else np.zeros(0, dtype=dtype)
        for name, dtype in _COLUMNS
    }
    log = Log(kinds=list(kinds), **columns)
    steps = np.diff(log.rank)
    if np.any(steps < 0) or np.any((steps == 0) & (np.diff(log.order) < 0)):
        log = log.take(np.lexsort((log.order, log.rank)))
    return log
