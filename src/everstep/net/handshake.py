"""Two workers prove to each other that they know the task's secret, without sending it.

    opener ──► hello    magic, its nonce
           ◄── answer   the acceptor's nonce, HMAC(secret, "acceptor" + both nonces + the rest), the suites it
                        accepts, identity
           ──► proof    the suite, HMAC(secret, "opener" + both nonces + the suite), then messages

The identity is what the acceptor says of itself: which memory it can share (`plane`). A process that listens
at a worker's old address learns nothing it could use: neither the secret nor a proof that holds for another
connection. The suite (`seal`) protects all that follows; both proofs cover it, so no one on the way can talk
the two into a weaker one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

from everstep.errors import PeerError
from everstep.net.seal import Sealer, Suite, Unsealer, derived_key

MAGIC = b"EVH2"
NONCE = 16
PROOF = hashlib.sha256().digest_size
HELLO, ANSWER = (
    len(MAGIC) + NONCE,
    NONCE + PROOF + 3,
)  # the last three: suites, and the length of the identity
ANSWERED = 1 + PROOF  # the opener's last word: the suite, and its proof
MAX_IDENTITY = 1024
PLAIN = (Suite.PLAIN,)


class Opener:
    """The side that connects."""

    def __init__(self, secret: bytes, accepts: Sequence[Suite] = PLAIN) -> None:
        self._secret, self._nonce, self._accepts = secret, secrets.token_bytes(NONCE), accepts
        self._heard = bytearray()
        self.identity = b""  # the acceptor's, once it is known
        self.sealer: Sealer | None = None  # for what follows the proof

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
        said = bytes(self._heard[NONCE + PROOF :])
        if not hmac.compare_digest(proof, _proof(self._secret, b"acceptor", self._nonce + theirs, said)):
            raise PeerError("who listens here does not know the task's secret")
        both = [suite for suite in self._accepts if said[0] & 1 << suite]
        if not both:
            raise PeerError("the two ends of a connection do not agree on how it is protected")
        self.identity, suite = said[ANSWER - NONCE - PROOF :], both[0]
        self.sealer = Sealer(suite, _key(self._secret, self._nonce + theirs))
        chosen = bytes([suite])
        return chosen + _proof(self._secret, b"opener", self._nonce + theirs, chosen)


class Acceptor:
    """The side that listens."""

    def __init__(self, secret: bytes, identity: bytes = b"", accepts: Sequence[Suite] = PLAIN) -> None:
        assert len(identity) <= MAX_IDENTITY
        self._secret, self._nonce, self._accepts = secret, secrets.token_bytes(NONCE), accepts
        suites = sum(1 << suite for suite in accepts)
        self._says = bytes([suites]) + len(identity).to_bytes(2, "little") + identity
        self._heard = bytearray()
        self._nonces = b""  # of both, once the hello is here
        self.unsealer: Unsealer | None = None  # of what follows, once the opener is known

    @property
    def wants(self) -> int:
        """How many bytes are to come; 0: the opener is known."""
        return HELLO + (ANSWERED if self._nonces else 0) - len(self._heard)

    def feed(self, data: bytes) -> bytes:
        """What to answer; empty: nothing now."""
        self._heard += data
        if not MAGIC.startswith(self._heard[: len(MAGIC)]):
            raise PeerError("a connection that is not a worker's")
        if not self._nonces and len(self._heard) == HELLO:
            self._nonces = bytes(self._heard[len(MAGIC) :]) + self._nonce
            return self._nonce + _proof(self._secret, b"acceptor", self._nonces, self._says) + self._says
        if not self._nonces or self.wants:
            return b""
        chosen, proof = bytes(self._heard[HELLO : HELLO + 1]), bytes(self._heard[HELLO + 1 :])
        if not hmac.compare_digest(proof, _proof(self._secret, b"opener", self._nonces, chosen)):
            raise PeerError("a connection that does not know the task's secret")
        if chosen[0] not in list(self._accepts):
            raise PeerError("a connection that is protected in a way that was not offered")
        self.unsealer = Unsealer(Suite(chosen[0]), _key(self._secret, self._nonces))
        return b""


def _proof(secret: bytes, side: bytes, nonces: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, side + nonces + said, "sha256")


def _key(secret: bytes, nonces: bytes) -> bytes:
    return derived_key(secret, nonces, b"everstep link")
