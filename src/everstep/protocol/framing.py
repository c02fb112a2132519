"""Messages on a stream of bytes: JSON of the codec behind a length."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from everstep.errors import PeerError
from everstep.protocol.codec import decode, encode

MAX_MESSAGE = 64 << 20
_LENGTH = struct.Struct("<I")


def pack(message: Any) -> bytes:
    body = json.dumps(encode(message), separators=(",", ":")).encode()
    if len(body) > MAX_MESSAGE:
        raise PeerError(f"a {type(message).__name__} of {len(body)} bytes is more than {MAX_MESSAGE}")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Bytes in, messages of one type out; PeerError for what is none."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > MAX_MESSAGE:
                raise PeerError(f"a message of {length} bytes is more than the {MAX_MESSAGE} allowed")
            if len(self._bytes) < _LENGTH.size + length:
                return
            body = bytes(self._bytes[_LENGTH.size : _LENGTH.size + length])
            del self._bytes[: _LENGTH.size + length]
            yield decode(self._kind, _parsed(body))


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"a message is not JSON: {error}") from error
