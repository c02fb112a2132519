"""A file's bytes to what they say, by what is in them, not by what they are called.

80 02 …           pickle: Flight Recorder
{ "version" …     JSON: Flight Recorder
{ "communicators" JSON: NCCL RAS
{ "header" …      JSON lines: NCCL Inspector
everring          our own ring
"""

from __future__ import annotations

from everstep.ras_json import read_json
from everstep.ring import MAGIC
from everstep_diagnose import flight, inspector, raised, ras, ring
from everstep_diagnose.comm_record import Dump
from everstep_diagnose.flight import UnusableFileError

MOST_RANKS = 1 << 20


def read(name: str, content: bytes, *, modified_ns: int | None = None, before: bytes | None = None) -> Dump:
    """One file; raises `UnusableFileError` with the reason. `before`: of RAS, the status taken before it."""
    if not content:
        raise UnusableFileError("it is empty")
    try:
        part = _read(name, content, before)
    except UnusableFileError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {str(error)[:80]}"
        raise UnusableFileError(f"what it holds is not what belongs there ({said})") from None
    _refuse_odd_ranks(part)
    if modified_ns is not None and (not len(part.log) or modified_ns >= int(part.log.enqueued_ns.max())):
        for rank in part.ranks:  # a dump is written when it is taken
            part.taken_ns.setdefault(rank, modified_ns)
    return part


def _refuse_odd_ranks(part: Dump) -> None:
    """What is looked at has a place for each rank."""
    if part.world_size > MOST_RANKS:
        raise UnusableFileError(
            f"it says that its job has {part.world_size} ranks; at most {MOST_RANKS} are read"
        )
    ranks = [*part.ranks, *part.silent]
    for group in part.groups:
        ranks += [min(group.members, default=0), max(group.members, default=0)]
    if len(part.log):
        ranks += [int(part.log.rank.min()), int(part.log.rank.max())]
    odd = next((rank for rank in ranks if not 0 <= rank < MOST_RANKS), None)
    if odd is not None:
        raise UnusableFileError(f"it speaks of rank {odd}; ranks are 0 to {MOST_RANKS - 1}")


def _read(name: str, content: bytes, before: bytes | None) -> Dump:
    if content.startswith(MAGIC):
        return ring.read_ring(name, content)
    if content[:1] == b"\x80":
        return flight.read_pickle(name, content)
    return _read_text(name, content, None if before is None else before.decode())


def _read_text(name: str, content: bytes, before: str | None) -> Dump:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise UnusableFileError("not a format known here: pickle, JSON or a ring") from None
    stripped = text.lstrip()
    if inspector.is_inspector(stripped[: 1 << 16].split("\n", 1)[0]):
        return inspector.read_inspector(name, text)
    if not stripped.startswith(("{", "[")):
        raise UnusableFileError("not a format known here: pickle, JSON or a ring")
    try:
        value = read_json(text)
    except ValueError as error:
        raise UnusableFileError(f"truncated or not JSON ({error})") from None
    if raised.is_error(value):
        return raised.read_error(name, value)
    if ras.is_ras(value):
        return ras.read_ras(name, text, before)
    return flight.part_of(name, value)
