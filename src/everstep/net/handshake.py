"""Two workers prove to each other that they know the task's secret, without sending it.

    opener ──► hello    magic, its nonce
           ◄── answer   the acceptor's nonce, HMAC(secret, "acceptor" + both nonces + identity), identity
           ──► proof    HMAC(secret, "opener" + both nonces), then messages

The identity is what the acceptor says of itself: which memory it can share (`plane`). A process that listens
at a worker's old address learns nothing it could use: neither the secret nor a proof that holds for another
connection.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from everstep.errors import PeerError

MAGIC = b"EVH1"
NONCE = 16
PROOF = hashlib.sha256().digest_size
HELLO, ANSWER = len(MAGIC) + NONCE, NONCE + PROOF + 2  # the last two: the length of the identity
MAX_IDENTITY = 1024


class Opener:
    """The side that connects."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._nonce = secret, secrets.token_bytes(NONCE)
        self._heard = bytearray()
        self.identity = b""  # the acceptor's, once it is known

    def hello(self) -> bytes:
        return MAGIC + self._nonce

    @property
    def wants(self) -> int:
        length = (
            int.from_bytes(self._heard[ANSWER - 2 : ANSWER], "little") if len(self._heard) >= ANSWER else 0
        )
        return ANSWER + length - len(self._heard)

    def feed(self, data: bytes) -> bytes | None:
        """The proof to send, once the whole answer is here."""
        self._heard += data
        if self.wants > MAX_IDENTITY:
            raise PeerError("who listens here is not a worker")
        if self.wants:
            return None
        theirs, proof = bytes(self._heard[:NONCE]), bytes(self._heard[NONCE : NONCE + PROOF])
        identity = bytes(self._heard[ANSWER:])
        if not hmac.compare_digest(proof, _proof(self._secret, b"acceptor", self._nonce, theirs, identity)):
            raise PeerError("who listens here does not know the task's secret")
        self.identity = identity
        return _proof(self._secret, b"opener", self._nonce, theirs)


class Acceptor:
    """The side that listens."""

    def __init__(self, secret: bytes, identity: bytes = b"") -> None:
        assert len(identity) <= MAX_IDENTITY
        self._secret, self._nonce, self._identity = secret, secrets.token_bytes(NONCE), identity
        self._heard = bytearray()
        self._expected: bytes | None = None  # the opener's proof, once its hello is here

    @property
    def wants(self) -> int:
        """How many bytes are to come; 0: the opener is known."""
        return HELLO + (0 if self._expected is None else PROOF) - len(self._heard)

    def feed(self, data: bytes) -> bytes:
        """What to answer; empty: nothing now."""
        self._heard += data
        if not MAGIC.startswith(self._heard[: len(MAGIC)]):
            raise PeerError("a connection that is not a worker's")
        if self._expected is None and len(self._heard) == HELLO:
            theirs = bytes(self._heard[len(MAGIC) :])
            self._expected = _proof(self._secret, b"opener", theirs, self._nonce)
            proof = _proof(self._secret, b"acceptor", theirs, self._nonce, self._identity)
            return self._nonce + proof + len(self._identity).to_bytes(2, "little") + self._identity
        if self._expected is None or self.wants:
            return b""
        if not hmac.compare_digest(bytes(self._heard[HELLO:]), self._expected):
            raise PeerError("a connection that does not know the task's secret")
        return b""


def _proof(secret: bytes, side: bytes, opener: bytes, acceptor: bytes, identity: bytes = b"") -> bytes:
    return hmac.digest(secret, side + opener + acceptor + identity, "sha256")
