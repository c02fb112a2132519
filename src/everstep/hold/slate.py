"""What a rank wrote down at its last two snapshots, in memory that outlives it: a file of its keeper.

Two slots, written in turn, each with its lengths and hash in front, so what is torn by a death is not read.
No message is sent for it: a step costs a copy of some kilobytes. The record in front is for decisions, and is
read by a keeper without torch; the rest is for the newcomer alone.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import xxhash

from everstep.errors import PeerError
from everstep.protocol.codec import decode, encode
from everstep.protocol.held import Record

SLOT = 4 << 20  # room is taken by what is written only
_FRONT = struct.Struct("<QQQ")  # lengths of the record and of the rest, hash of both


class Slate:
    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, 2 * SLOT)
            self._map = mmap.mmap(fd, 2 * SLOT)
        finally:
            os.close(fd)

    def write(self, record: Record, content: bytes) -> None:
        head = json.dumps(encode(record)).encode()
        data = head + content
        if len(data) > SLOT - _FRONT.size:
            raise ValueError(f"what is written down at a snapshot takes {len(data)} bytes, more than {SLOT}")
        at = (record.interval % 2) * SLOT
        self._map[at : at + _FRONT.size] = bytes(_FRONT.size)
        self._map[at + _FRONT.size : at + _FRONT.size + len(data)] = data
        front = _FRONT.pack(len(head), len(content), xxhash.xxh3_64_intdigest(data))
        self._map[at : at + _FRONT.size] = front

    def records(self) -> tuple[Record, ...]:
        """Of the slots that are whole, oldest first."""
        return tuple(sorted((record for record, _ in self._slots()), key=lambda record: record.interval))

    def content(self, interval: int) -> bytes:
        """What was written beside the record of this interval."""
        for record, content in self._slots():
            if record.interval == interval:
                return content
        raise PeerError(f"nothing was written down at the beginning of interval {interval}")

    def _slots(self) -> list[tuple[Record, bytes]]:
        found: list[tuple[Record, bytes]] = []
        for at in (0, SLOT):
            length, more, expected = _FRONT.unpack(self._map[at : at + _FRONT.size])
            if not 0 < length + more <= SLOT - _FRONT.size:
                continue
            data = self._map[at + _FRONT.size : at + _FRONT.size + length + more]
            if xxhash.xxh3_64_intdigest(data) == expected:
                record: Any = decode(Record, json.loads(data[:length]))
                found.append((record, data[length:]))
        return found

    def close(self) -> None:
        self._map.close()
