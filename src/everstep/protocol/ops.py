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
from enum import StrEnum
from typing import NamedTuple

from everstep.errors import UserError, clipped


class Kind(StrEnum):
    """What an op does. `B` is `I` and `W` at once; `R` and `U` belong to a stage, not to a microbatch."""

    F = "F"
    I = "I"
    W = "W"
    B = "B"
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
    """A unit of work at a stage: of one microbatch (F, I, W, B), or of a whole step (R, U); 2F1.0, 2R."""

    kind: Kind
    microbatch: Microbatch | None
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


# At most nine digits: Python does not convert more than 4,300.
_OP = re.compile(r"(\d{1,9})([FIWBRU])(?:(\d{1,9})\.(\d{1,9}))?", re.ASCII)
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
        raise UserError(f"op {text!r}: F, I, W and B name a microbatch (2F1.0), R and U do not (2R).")
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
