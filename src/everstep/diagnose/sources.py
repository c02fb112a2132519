"""A file's bytes to what they say, by what is in them, not by what they are called.

80 02 …           pickle: Flight Recorder
{ "version" …     JSON: Flight Recorder
{ "communicators" JSON: NCCL RAS
{ "header" …      JSON lines: NCCL Inspector
everring          our own ring
PAR1              parquet: a table of operations (read by the caller, who has the library for it)
"""

from __future__ import annotations

from everstep.diagnose import flight, inspector, pulled, raised, ras, ring
from everstep.diagnose.comm_record import Dump
from everstep.diagnose.flight import UnusableFileError
from everstep.diagnose.ras_json import read_json

PARQUET = b"PAR1"


def read(name: str, content: bytes, *, modified_ns: int | None = None, before: bytes | None = None) -> Dump:
    """One file; raises `UnusableFileError` with the reason. `before`: of RAS, the status taken before it."""
    if not content:
        raise UnusableFileError("it is empty")
    if content.startswith(ring.MAGIC):
        part = ring.read_ring(name, content)
    elif content[:1] == b"\x80":
        part = flight.read_pickle(name, content)
    else:
        part = _read_text(name, content, None if before is None else before.decode())
    if modified_ns is not None and (not len(part.log) or modified_ns >= int(part.log.enqueued_ns.max())):
        for rank in part.ranks:  # a dump is written when it is taken
            part.taken_ns.setdefault(rank, modified_ns)
    return part


def _read_text(name: str, content: bytes, before: str | None) -> Dump:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise UnusableFileError("not a format known here: pickle, JSON, a ring or parquet") from None
    stripped = text.lstrip()
    if inspector.is_inspector(stripped[: 1 << 16].split("\n", 1)[0]):
        return inspector.read_inspector(name, text)
    if not stripped.startswith(("{", "[")):
        raise UnusableFileError("not a format known here: pickle, JSON, a ring or parquet")
    try:
        value = read_json(text)
    except ValueError as error:
        raise UnusableFileError(f"truncated or not JSON ({error})") from None
    if pulled.is_pull(value):
        return pulled.read_pull(name, text)
    if raised.is_error(value):
        return raised.read_error(name, value)
    if ras.is_ras(value):
        return ras.read_ras(name, text, before)
    return flight.part_of(name, value)
