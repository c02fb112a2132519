"""Event files as TensorBoard reads them, written without TensorBoard.

A file is a run of records, a record is

    length  8 bytes, little-endian     its checksum  4 bytes
    event   `length` bytes             its checksum  4 bytes

with CRC-32C (Castagnoli), rotated and offset ("masked"). The event is a protocol-buffer message of which five
kinds are needed here; field numbers are those of TensorFlow's event.proto, summary.proto and tensor.proto.
Rejected: `torch.utils.tensorboard`, which needs the tensorboard package, some 30 MB, to write forty bytes.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import BinaryIO

_POLYNOMIAL = 0x82F63B78
_STRING = 7  # DT_STRING


class EventFile:
    """One run's events. The file appears with the first of them; `flush` hands them to readers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: BinaryIO | None = None

    def scalars(self, step: int, at: float, values: Mapping[str, float]) -> None:
        summary = b"".join(_message(1, _text(1, tag) + _float(2, value)) for tag, value in values.items())
        self._write(at, step, _message(5, summary))

    def text(self, step: int, at: float, tag: str, markdown: str) -> None:
        plugin = _message(9, _message(1, _text(1, "text")))
        tensor = _int(1, _STRING) + _message(2, _message(2, _int(1, 1))) + _text(8, markdown)
        self._write(at, step, _message(5, _message(1, _text(1, tag) + _message(8, tensor) + plugin)))

    def goes_back(self, step: int, at: float) -> None:
        """This step and all later ones will be written again; their earlier values no longer count."""
        self._write(at, step, _message(7, _int(1, 1)))

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, at: float, step: int, what: bytes) -> None:
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}.everstep"
            self._file = (self.folder / name).open("ab")
            self._file.write(_record(_double(1, at) + _text(3, "brain.Event:2")))
        self._file.write(_record(_double(1, at) + _int(2, step) + what))


def _record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _checksum(length) + event + _checksum(event)


def _checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return struct.pack("<I", masked)


def crc32c(data: bytes) -> int:
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return tuple(found)


# ------------------------------------------------------------------ protocol buffers


def _varint(value: int) -> bytes:
    found = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    largest = 3.4028234663852886e38
    return _varint(field << 3 | 5) + struct.pack("<f", max(-largest, min(largest, value)))


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())
