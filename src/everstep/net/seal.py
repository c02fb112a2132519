"""Bytes between workers that cannot be changed on their way, and if the job asks for it, not be read.

A connection is a row of chunks: at most `CHUNK_BYTES` of a message, then a tag of 16 bytes. Lengths are not
sent: both ends know them from the message. A chunk's number is part of its tag, and the key is made of the
task's secret and of a nonce of each end, so it holds for one connection and one direction.

    a byte was changed, a chunk is missing, repeated or out of its turn     the tag is wrong
    a whole connection is played again                                      the nonces are others

A wrong tag closes the connection; to the worker that is a link that broke, and what was on it is sent again.

    plain      nothing: loopback, unless the job says otherwise
    blake2b    authenticated, by Python's own library
    gmac       the same, several times as fast; needs the package `cryptography` at both ends
    aes-gcm    encrypted and authenticated; needs it as well

Rejected: TLS. Its sockets copy and its handshake wants certificates or, for a shared secret, Python 3.13.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any

from everstep.errors import PeerError, UserError
from everstep.job.job import NetSpec

CHUNK_BYTES = 256 << 10
TAG_BYTES = 16


class TamperedError(PeerError):
    """A chunk's tag is wrong."""


class Suite(IntEnum):
    """How chunks are protected: by the first of the opener's that the acceptor has as well."""

    PLAIN = 0
    BLAKE2B = 1
    GMAC = 2
    AES_GCM = 3


@cache
def _aes_gcm() -> Any:
    """The class of `cryptography`, or None where it is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return None
    return AESGCM if hasattr(AESGCM, "decrypt_into") else None  # since 47


def is_available(suite: Suite) -> bool:
    return suite not in (Suite.GMAC, Suite.AES_GCM) or _aes_gcm() is not None


def accepted(net: NetSpec, peer: str) -> tuple[Suite, ...]:
    """What a job allows on a connection with this host, the best first. An end has `gmac` or has not; and
    through a tunnel or a proxy, one end may see loopback where the other does not: then it is authenticated.
    """
    if net.encrypt:
        return (Suite.AES_GCM,)
    if net.authenticate == "never":
        return (Suite.PLAIN,)
    authenticated = tuple(filter(is_available, (Suite.GMAC, Suite.BLAKE2B)))
    if net.authenticate == "auto" and is_loopback(peer):
        return (Suite.PLAIN, *authenticated)
    return authenticated


def require_encryption() -> None:
    if not is_available(Suite.AES_GCM):
        raise UserError(
            "net.encrypt = true needs the package cryptography, version 47 or later, on every node; install "
            "it there, or leave net.encrypt out."
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def derived_key(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    """32 bytes by HKDF (RFC 5869) with SHA-256."""
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, purpose + b"\x01", "sha256")


class _Tags:
    """The tags of one direction of a connection, chunk after chunk."""

    def __init__(self, suite: Suite, key: bytes) -> None:
        assert len(key) == 32
        assert is_available(suite)
        self.suite, self._key, self._number = suite, key, 0
        if suite in (Suite.GMAC, Suite.AES_GCM):
            self._cipher = _aes_gcm()(key)

    def next_nonce(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(12, "little")

    def tag(self, data: memoryview) -> bytes:
        """Of the next chunk, if it is not encrypted."""
        nonce = self.next_nonce()
        if self.suite is Suite.GMAC:
            made: bytes = self._cipher.encrypt(nonce, b"", data)
            return made
        found = hashlib.blake2b(nonce, key=self._key, digest_size=TAG_BYTES)
        found.update(data)
        return found.digest()


class Sealer(_Tags):
    """The sending end."""

    def seal(self, data: memoryview) -> tuple[memoryview, ...]:
        """What to send for the next chunk: `data` itself and its tag, or new memory with both."""
        assert data.nbytes <= CHUNK_BYTES or self.suite is Suite.PLAIN
        if self.suite is Suite.PLAIN:
            return (data,)
        if self.suite is Suite.AES_GCM:
            sealed = memoryview(bytearray(data.nbytes + TAG_BYTES))
            self._cipher.encrypt_into(self.next_nonce(), data, None, sealed)
            return (sealed,)
        return data, memoryview(self.tag(data))

    def next_chunk(self, data: memoryview) -> memoryview:
        return data if self.suite is Suite.PLAIN else data[:CHUNK_BYTES]

    def other_end(self) -> Unsealer:
        """For a connection on which only its acceptor sends: then this end receives."""
        return Unsealer(self.suite, self._key)


class Unsealer(_Tags):
    """The receiving end. `want` is where the next bytes of the message belong; it stays the same until a
    whole chunk is there and its tag is right.
    """

    def __init__(self, suite: Suite, key: bytes) -> None:
        super().__init__(suite, key)
        self._got = 0  # of the chunk and its tag
        self._tag = memoryview(bytearray(TAG_BYTES))
        self._sealed = memoryview(bytearray(CHUNK_BYTES + TAG_BYTES if suite is Suite.AES_GCM else 0))

    def other_end(self) -> Sealer:
        """For a connection on which only its acceptor sends."""
        return Sealer(self.suite, self._key)

    def room(self, want: memoryview) -> Sequence[memoryview]:
        """Where the next bytes from the wire go."""
        if self.suite is Suite.PLAIN:
            return (want,)
        size = min(len(want), CHUNK_BYTES)
        if self.suite is Suite.AES_GCM:
            return (self._sealed[self._got : size + TAG_BYTES],)
        if self._got < size:
            return want[self._got : size], self._tag
        return (self._tag[self._got - size :],)

    def took(self, want: memoryview, count: int) -> int:
        """So many bytes have come; how many of `want` are there and are right."""
        if self.suite is Suite.PLAIN:
            return count
        size = min(len(want), CHUNK_BYTES)
        self._got += count
        if self._got < size + TAG_BYTES:
            return 0
        self._got = 0
        if self.suite is Suite.AES_GCM:
            self._decrypt(want[:size])
        elif not hmac.compare_digest(self.tag(want[:size]), self._tag):
            raise TamperedError("bytes on the wire were changed: a chunk's tag is wrong")
        return size

    def _decrypt(self, into: memoryview) -> None:
        from cryptography.exceptions import InvalidTag

        sealed = self._sealed[: len(into) + TAG_BYTES]
        try:
            self._cipher.decrypt_into(self.next_nonce(), sealed, None, into)
        except InvalidTag:
            raise TamperedError("bytes on the wire were changed: a chunk's tag is wrong") from None


def sealed_bytes(suite: Suite, size: int) -> int:
    """How long `size` bytes are on the wire."""
    return size if suite is Suite.PLAIN else size + TAG_BYTES * -(-size // CHUNK_BYTES)
