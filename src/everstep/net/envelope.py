"""What a message between two workers says besides its name and its bytes. Every fact is declared here, and is
decoded once, when its frame arrives.

    value     what the worker state knows of a parcel (`VALUES`: its type, by the kind of message)
    beside    what goes with the tensors; JSON that only those who use them understand
    where     the tensors are, if not in the frame itself: in memory that both ends see, or on a lane
    piece     of what the tensors are a piece, or what ends the pieces

All of it comes from another process: what does not fit its type, or is larger than any message may be, is
refused before memory is taken for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everstep.errors import PeerError, UserError
from everstep.net.arena import Location
from everstep.protocol.codec import decode, encode
from everstep.protocol.parcels import Parcel, ParcelKind, Part, RunHashes, StateTransfer, StepHashes

# Of one message, whatever carries it.
MAX_TENSORS = 4096
MAX_BYTES = 64 << 30
MAX_DIMS = 8
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def type_number(dtype: torch.dtype) -> int:
    if dtype not in DTYPES:
        raise UserError(
            f"a tensor of {str(dtype).removeprefix('torch.')} cannot be sent to another worker; use a type "
            "of whole bytes, such as int8."
        )
    return DTYPES.index(dtype)


class Form(NamedTuple):
    """Of a tensor: its shape, and the number of its type."""

    shape: tuple[int, ...]
    dtype: int

    @staticmethod
    def of(tensor: Tensor) -> Form:
        return Form(tuple(tensor.shape), type_number(tensor.dtype))


def check_forms(forms: Sequence[Form]) -> None:
    """Of all tensors of a message, before memory is taken for the first."""
    total = 0
    for shape, dtype in forms:
        if not 0 <= dtype < len(DTYPES) or min(shape, default=0) < 0:
            raise PeerError(f"a peer announced a tensor of shape {shape} and type {dtype}, which cannot be")
        total += math.prod(shape) * DTYPES[dtype].itemsize
        if len(shape) > MAX_DIMS or total > MAX_BYTES:
            raise PeerError(f"a peer announced a tensor of shape {shape}, more than any message may hold")
    if len(forms) > MAX_TENSORS:
        raise PeerError(f"a peer announced {len(forms)} tensors, more than any message may hold")


# ------------------------------------------------------------------ where tensors are


class PlaceInMemory(NamedTuple):
    owner: str  # the address of the worker whose memory it is
    at: Location
    form: Form


@dataclass(frozen=True, slots=True)
class InMemory:
    """Both ends see it: the tensors stay where they are."""

    places: tuple[PlaceInMemory, ...]


@dataclass(frozen=True, slots=True)
class OnLane:
    """They come on a lane, as the transfer with this number."""

    lane: str
    number: int
    forms: tuple[Form, ...]


# ------------------------------------------------------------------ pieces


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Elements of one tensor of a state, or of a chunk's state, from `at` on."""

    name: str
    shape: tuple[int, ...]
    at: int


@dataclass(frozen=True, slots=True)
class StateEnd:
    """So many pieces are the whole of it."""

    pieces: int


# ------------------------------------------------------------------ lanes


@dataclass(frozen=True, slots=True)
class OpenLane:
    """The sender listens there; both ends meet by this name."""

    lane: str
    host: str
    port: int
    meet: str  # hexadecimal


@dataclass(frozen=True, slots=True)
class LaneBroke:
    lane: str


@dataclass(frozen=True, slots=True)
class Unmappable:
    """The sender, which listens there, cannot map the receiver's memory."""

    host: str
    port: int


# ------------------------------------------------------------------ the envelope


class FrameKind(StrEnum):
    """Messages that are not parcels."""

    STATE = "X"  # a piece of a state that a joining worker copies
    LANE = "L"  # opens a lane between two workers, or says that one is broken or no memory can be mapped


VALUES: dict[ParcelKind | FrameKind, Any] = {
    ParcelKind.PART: Part,
    ParcelKind.SUM: tuple[float, ...],  # squares, of the chunks
    ParcelKind.COPY: tuple[float | None, Part | None],  # sum of squares, and of whom
    ParcelKind.NEWS: float,  # sum of squares
    ParcelKind.FEED: float | None,  # scale; None: a skipped step
    ParcelKind.HASHES: StepHashes,
    ParcelKind.ANSWER: RunHashes,
    FrameKind.STATE: StateTransfer,
    FrameKind.LANE: OpenLane | LaneBroke | Unmappable,
}  # other messages have none
PIECES: dict[ParcelKind | FrameKind, Any] = {
    ParcelKind.FILL: StatePiece | StateEnd,
    FrameKind.STATE: StatePiece | StateEnd,
}  # other messages are whole
Where = InMemory | OnLane | None


class Envelope(NamedTuple):
    value: Any = None
    beside: Any = None
    where: Where = None
    piece: StatePiece | StateEnd | None = None

    def encode(self) -> bytes:
        if self == _EMPTY:
            return b""
        told = [encode(self.value), self.beside, encode(self.where), encode(self.piece)]
        return json.dumps(told, separators=(",", ":")).encode()

    @staticmethod
    def decode(kind: ParcelKind | FrameKind, data: bytes) -> Envelope:
        if not data:
            return _decoded(kind, _EMPTY)
        try:
            told = json.loads(data)
        except (ValueError, RecursionError):
            raise PeerError("a peer sent facts that are not JSON") from None
        if not isinstance(told, list) or len(told) != len(_EMPTY):
            raise PeerError("a peer sent facts that are not those of a message")
        return _decoded(kind, told)


_EMPTY = Envelope()


def _decoded(kind: ParcelKind | FrameKind, told: Sequence[Any]) -> Envelope:
    value, beside, where, piece = told
    value, piece = decode(VALUES.get(kind, NoneType), value), decode(PIECES.get(kind, NoneType), piece)
    made = Envelope(value, beside, decode(Where, where), piece)
    if isinstance(made.where, InMemory):
        check_forms([place.form for place in made.where.places])
    elif made.where is not None:
        check_forms(made.where.forms)
    return made


def name_of(what: Parcel | FrameKind) -> tuple[ParcelKind | FrameKind, Parcel | None]:
    """The kind of a message, and its name if it is a parcel."""
    return (what, None) if isinstance(what, FrameKind) else (what.what, what)
