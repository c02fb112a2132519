"""The words of a step: worker, microbatch, op; and their text form, with an exact inverse.

    worker      1:2      replica 1, stage 2
    microbatch  1.0      microbatch 0 of replica 1, its home
    op          2F1.0    stage 2, forward of microbatch 1.0
                2R, 2U   stage 2, gradient reduce and optimizer update

Every package speaks of ops in these words; `schedule` re-exports them. Named tuples, because planners hash
and compare millions of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from everstep.errors import UserError, clipped


class Kind(StrEnum):
    """What an op does. `R` and `U` belong to a stage, not to a microbatch."""

    F = "F"
    I = "I"
    W = "W"
    R = "R"
    U = "U"


class Worker(NamedTuple):
    """A place in a task's shape; the process that fills it may change."""

    replica: int
    stage: int

    def __str__(self) -> str:
        return f"{self.replica}:{self.stage}"


class Microbatch(NamedTuple):
    """`home` is the replica that runs it when nothing has failed."""

    home: int
    number: int

    def __str__(self) -> str:
        return f"{self.home}.{self.number}"


class Op(NamedTuple):
    """A unit of work at a stage: of one microbatch (F, I, W), or of a whole step (R, U); 2F1.0, 2R."""

    kind: Kind
    microbatch: Microbatch | None
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


# At most nine digits: Python does not convert more than 4,300.
_OP = re.compile(r"(\d{1,9})([FIWRU])(?:(\d{1,9})\.(\d{1,9}))?", re.ASCII)
_WORKER = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)
_MICROBATCH = re.compile(r"(\d{1,9})\.(\d{1,9})", re.ASCII)


def parse_op(text: str) -> Op:
    """The inverse of `str(op)`."""
    found = _OP.fullmatch(text)
    if found is None:
        raise UserError(
            f"op {clipped(text, 60)!r} is not of the form 2F1.0 (stage, kind, home.number) or 2R."
        )
    stage, kind, home, index = found.groups()
    if (kind in "RU") != (home is None):
        raise UserError(f"op {text!r}: F, I and W name a microbatch (2F1.0), R and U do not (2R).")
    return Op(Kind(kind), None if home is None else Microbatch(int(home), int(index)), int(stage))


def parse_worker(text: str) -> Worker:
    """The inverse of `str(worker)`."""
    found = _WORKER.fullmatch(text)
    if found is None:
        raise UserError(f"worker {clipped(text, 60)!r} is not of the form replica:stage, for example 1:2.")
    return Worker(int(found[1]), int(found[2]))


def parse_microbatch(text: str) -> Microbatch:
    """The inverse of `str(microbatch)`."""
    found = _MICROBATCH.fullmatch(text)
    if found is None:
        raise UserError(f"microbatch {clipped(text, 60)!r} is not of the form home.number, for example 1.0.")
    return Microbatch(int(found[1]), int(found[2]))


_cached_op = lru_cache(maxsize=1 << 16)(parse_op)
op_text = lru_cache(maxsize=1 << 16)(str)  # of ops alone: a worker and a microbatch can be equal tuples


def parse_ops(text: str) -> tuple[Op, ...]:
    """Several ops, with a blank between two."""
    return tuple(map(_cached_op, text.split()))


class Replicas(tuple[int, ...]):
    """Replicas of a stage, ascending. As text `0-510,512-1023`: of thousands few are missing."""

    __slots__ = ()

    def __str__(self) -> str:
        parts: list[str] = []
        first = last = -2
        for replica in (*self, -2):
            if replica == last + 1:
                last = replica
                continue
            if last >= 0:
                parts.append(str(first) if first == last else f"{first}-{last}")
            first = last = replica
        return ",".join(parts)


MOST_REPLICAS = 1 << 16
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


@lru_cache(maxsize=1 << 10)
def parse_replicas(text: str) -> Replicas:
    """The inverse of `str(replicas)`."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        match = _RANGE.fullmatch(part)
        if match is None:
            raise UserError(f"replicas {clipped(text, 60)!r} are not of the form 0-3,5.")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(found) > MOST_REPLICAS:
            raise UserError(f"replicas {clipped(text, 60)!r} are more than {MOST_REPLICAS}.")
    return Replicas(found)


OWN = "~"  # in a pattern: the replica that runs it


@dataclass(frozen=True, slots=True, eq=False)
class OpLists(Mapping[Worker, tuple[Op, ...]]):
    """The ops of every worker. Of thousands of replicas most do the same, each with microbatches of its own:
    that is one pattern, `2F~.0 2F~.1`, and a number per worker.
    """

    patterns: tuple[str, ...]
    numbers: tuple[tuple[int, ...], ...]  # by stage and replica; -1: no such worker

    def __post_init__(self) -> None:
        if len({len(row) for row in self.numbers}) > 1:
            raise UserError("the lists of ops have not as many replicas at every stage.")
        if not all(-1 <= number < len(self.patterns) for row in self.numbers for number in row):
            raise UserError(f"a list of ops has a number that is none of its {len(self.patterns)} patterns.")

    @classmethod
    def of(cls, lists: Mapping[Worker, Sequence[Op]]) -> OpLists:
        return cls.of_texts({worker: " ".join(map(op_text, ops)) for worker, ops in lists.items()})

    @classmethod
    def of_texts(cls, lists: Mapping[Worker, str]) -> OpLists:
        """From ops in their notation; the replica itself may be written as `OWN`."""
        replicas = max((w.replica for w in lists), default=-1) + 1
        stages = max((w.stage for w in lists), default=-1) + 1
        numbers = [[-1] * replicas for _ in range(stages)]
        patterns: dict[str, int] = {}
        for (replica, stage), text in lists.items():
            pattern = text if OWN in text else _with_own(text, replica)
            numbers[stage][replica] = patterns.setdefault(pattern, len(patterns))
        return cls(tuple(patterns), tuple(map(tuple, numbers)))

    def text(self, worker: Worker) -> str:
        """In their notation."""
        return self.pattern(worker).replace(OWN, str(worker.replica))

    def pattern(self, worker: Worker) -> str:
        return self.patterns[self.numbers[worker.stage][worker.replica]]

    def find(self, worker: Worker) -> str | None:
        """Its pattern, if it has one."""
        replica, stage = worker
        if not 0 <= stage < len(self.numbers):
            return None
        row = self.numbers[stage]
        return self.patterns[row[replica]] if 0 <= replica < len(row) and row[replica] >= 0 else None

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, Worker) and self.find(worker) is not None

    def __getitem__(self, worker: Worker) -> tuple[Op, ...]:
        if worker not in self:
            raise KeyError(worker)
        return parse_ops(self.text(worker))

    def __iter__(self) -> Iterator[Worker]:
        replicas = len(self.numbers[0]) if self.numbers else 0
        places = (Worker(k, s) for k in range(replicas) for s in range(len(self.numbers)))
        return (worker for worker in places if worker in self)

    def __len__(self) -> int:
        return sum(number >= 0 for row in self.numbers for number in row)


def _with_own(text: str, replica: int) -> str:
    """Where a replica's number is the home of a microbatch: behind the kind of an op."""
    for kind in "FIW":
        text = text.replace(f"{kind}{replica}.", f"{kind}{OWN}.")
    return text
