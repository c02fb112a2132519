"""Which transport carries tensors between two workers, and the words in which transfers are announced.

Each worker says of itself which memory it can share and which lanes it can open; both ends of a pair compute
the same answer from the two statements:

    ipc, shm   both see the same memory: the bytes stay where they are (`arena`)
    nccl       both are on GPUs that do not share memory: a communicator of two ranks (`lanes`, `nccl`)
    pipe       the same protocol between CPU workers of one machine: what tests use
    tcp        all others, and until a lane is open: through the host and a socket

A *lane* leads from one worker to one other. Each transfer on it is announced by a message on the link, with a
number; the receiver takes the transfers in the order of their numbers, and a gap breaks the lane.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from everstep.errors import PeerError

Carrier = Literal["ipc", "shm", "nccl", "pipe", "tcp"]

ANNOUNCED = "on a lane"  # the fact that says on which lane tensors come
MAX_NAME = 128
MAX_COMPUTES = 300
# Of one message, whatever carries it.
MAX_TENSORS = 4096
MAX_BYTES = 64 << 30
MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says of itself to peers that connect."""

    kind: str  # of the memory it can share: ipc or shm; tcp: none
    memory: str  # the same text: the same memory
    lanes: str = ""  # the kind of lane it can open, with the version both ends must have: "nccl 22809"
    computes: str = (
        ""  # device and software that its bits depend on; empty: sums depend on their order anyway
    )

    def encode(self) -> bytes:
        return json.dumps([self.kind, self.memory, self.lanes, self.computes]).encode()

    @staticmethod
    def decode(data: bytes) -> Identity:
        try:
            kind, memory, lanes, computes = json.loads(data)
        except (TypeError, ValueError):
            raise PeerError("a peer did not say who it is") from None
        return Identity(str(kind), str(memory), str(lanes), str(computes)[:MAX_COMPUTES])


def chosen(mine: Identity, theirs: Identity) -> Carrier:
    """What carries tensors between these two."""
    if mine.memory and (mine.kind, mine.memory) == (theirs.kind, theirs.memory):
        return "ipc" if mine.kind == "ipc" else "shm"
    if mine.lanes and mine.lanes == theirs.lanes:
        return "nccl" if mine.lanes.startswith("nccl") else "pipe"
    return "tcp"


def bits_differ(mine: Identity, theirs: Identity) -> str | None:
    """One sentence, if the same microbatch may give other bits there."""
    if not mine.computes or not theirs.computes or mine.computes == theirs.computes:
        return None
    return (
        f"it computes with {theirs.computes}, this worker with {mine.computes}: the losses of a healed run "
        "are those of a clean one to the bit only if all workers compute with the same"
    )


@dataclass(frozen=True, slots=True)
class Announcement:
    """One transfer: its place in the order of its lane, and the form of each tensor (shape, type number)."""

    lane: str
    number: int
    forms: tuple[tuple[tuple[int, ...], int], ...]

    def encode(self) -> list[Any]:
        return [self.lane, self.number, [[list(shape), dtype] for shape, dtype in self.forms]]

    @staticmethod
    def decode(fact: Any, item_sizes: list[int]) -> Announcement:
        """`item_sizes`: bytes per element, by type number. Everything is checked before memory is taken."""
        try:
            lane, number, forms = fact
            read = tuple((tuple(map(_whole, shape)), _whole(dtype)) for shape, dtype in forms)
            total = sum(math.prod(shape) * item_sizes[dtype] for shape, dtype in read)
            name, place = lane_name(lane), _whole(number)
        except (TypeError, ValueError, IndexError):
            raise PeerError("a peer announced a transfer in a way that cannot be read") from None
        if len(read) > MAX_TENSORS or total > MAX_BYTES or any(len(shape) > MAX_DIMS for shape, _ in read):
            raise PeerError("a peer announced a transfer that is larger than any message may be")
        return Announcement(name, place, read)


@dataclass(frozen=True, slots=True)
class LaneOpening:
    """The sender's request to open a lane: where the sender listens, and the name both ends meet by."""

    lane: str
    host: str
    port: int
    meet: bytes

    def encode(self) -> dict[str, Any]:
        return {"open": [self.lane, self.host, self.port, self.meet.hex()]}

    @staticmethod
    def decode(fact: Any) -> LaneOpening:
        try:
            lane, host, port, meet = fact
            return LaneOpening(lane_name(lane), str(host), _whole(port), bytes.fromhex(meet))
        except (TypeError, ValueError):
            raise PeerError("a peer opened a lane in a way that cannot be read") from None


def lane_name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise PeerError("a peer named a lane in a way that cannot be read")
    return name


def _whole(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 48:
        raise ValueError(number)
    return number


class LaneOrder:
    """The numbers of a lane's transfers, at either end: each is one more than the one before."""

    def __init__(self) -> None:
        self._next = 1

    def take(self) -> int:
        """The number of the next transfer to be sent."""
        number, self._next = self._next, self._next + 1
        return number

    def expect(self, number: int) -> None:
        """The next announced transfer has this number."""
        if number != self._next:
            raise PeerError(f"transfer {number} was announced where {self._next} was due")
        self._next += 1
