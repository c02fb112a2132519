"""The bytes of a message between two workers: a fixed header, shapes, its envelope as JSON, the raw tensors.

    magic 4 | kind 1 | - | tensors 2 | shapes length 4 | envelope length 4 | parcel: 8 x int32
    | per tensor: dtype 1, dims 1, dims x int64 | envelope | the tensors, one after the other

No pickle. Every length is bounded before memory is taken for it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from everstep.errors import PeerError
from everstep.net.envelope import (
    DTYPES,
    MAX_DIMS,
    MAX_TENSORS,
    Envelope,
    Form,
    FrameKind,
    check_forms,
    name_of,
    type_number,
)
from everstep.protocol.ops import Microbatch
from everstep.protocol.parcels import Parcel, ParcelKind

MAGIC = b"EVS3"
HEAD = struct.Struct("<4s c x H I I 8i")
MAX_ENVELOPE = 16 << 20
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]  # a tensor in host memory


def encode(what: Parcel | FrameKind, envelope: Envelope, *tensors: Tensor) -> bytes:
    """Everything before the tensors' own bytes."""
    kind, parcel = name_of(what)
    body = envelope.encode()
    shapes = b"".join(struct.pack(f"<BB{t.ndim}q", type_number(t.dtype), t.ndim, *t.shape) for t in tensors)
    numbers = (
        (0,) * 8
        if parcel is None
        else (
            parcel.attempt,
            parcel.step,
            parcel.stage,
            *(parcel.microbatch or (-1, -1)),
            parcel.round,
            parcel.sender,
            parcel.owner,
        )
    )
    head = HEAD.pack(MAGIC, kind.encode(), len(tensors), len(shapes), len(body), *numbers)
    return head + shapes + body


def parts(head: bytes) -> list[memoryview]:
    """What `encode` gives, cut where `Incoming` wants the next bytes."""
    view = memoryview(head)
    return [part for part in (view[: HEAD.size], view[HEAD.size :]) if part]


class Incoming:
    """A frame while it arrives: says how many bytes it wants next and where they go."""

    def __init__(self, empty: Empty) -> None:
        self._empty = empty
        self._head = bytearray(HEAD.size)
        self._tail = bytearray()
        self.tensors: tuple[Tensor, ...] = ()
        self.kind: ParcelKind | FrameKind = FrameKind.STATE
        self.parcel: Parcel | None = None
        self.envelope = Envelope()
        self._want = memoryview(self._head)
        self._part = 0  # 0 head, 1 shapes and envelope, 2 and on: the tensors

    @staticmethod
    def whole(what: Parcel | FrameKind, envelope: Envelope, tensors: tuple[Tensor, ...]) -> Incoming:
        """A message that came in pieces, as if it had come as one."""
        made = Incoming(lambda shape, dtype: torch.empty(shape, dtype=dtype))
        made.kind, made.parcel = name_of(what)
        made.envelope, made.tensors = envelope, tensors
        return made

    @property
    def want(self) -> memoryview:
        """Where the next bytes go. Empty: the frame is whole."""
        return self._want

    @property
    def tensor(self) -> Tensor | None:
        """Of a message that has at most one."""
        return self.tensors[0] if self.tensors else None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def took(self, count: int) -> bool:
        """Bytes have been put into `want`. True: the frame is whole."""
        self._want = self._want[count:]
        while not self._want and self._part < 2 + len(self.tensors):
            self._part += 1
            if self._part == 1:
                self._read_head()
            elif self._part == 2:
                self._read_tail()
            if 2 <= self._part < 2 + len(self.tensors):
                self._want = raw(self.tensors[self._part - 2])
        return self._part >= 2 + len(self.tensors)

    def _read_head(self) -> None:
        magic, kind, tensors, shapes, envelope, *numbers = HEAD.unpack(self._head)
        if (
            magic != MAGIC
            or tensors > MAX_TENSORS
            or shapes > tensors * (2 + 8 * MAX_DIMS)
            or envelope > MAX_ENVELOPE
        ):
            raise PeerError("a peer sent something that is not a message of this version of Everstep")
        self._count, self._shapes = tensors, shapes
        self._read_kind(kind.decode("ascii", "replace"), numbers)
        self._tail = bytearray(shapes + envelope)
        self._want = memoryview(self._tail)

    def _read_kind(self, letter: str, numbers: list[int]) -> None:
        if letter in list(FrameKind):
            self.kind = FrameKind(letter)
            return
        try:
            self.kind = what = ParcelKind(letter)
        except ValueError:
            raise PeerError(f"a peer sent a message of the unknown kind {letter!r}") from None
        attempt, step, stage, home, number, round_, sender, owner = numbers
        microbatch = None if home < 0 else Microbatch(home, number)
        self.parcel = Parcel(what, attempt, step, stage, microbatch, round_, sender, owner)

    def _read_tail(self) -> None:
        forms = self._forms(bytes(self._tail[: self._shapes]))
        self.envelope = Envelope.decode(self.kind, bytes(self._tail[self._shapes :]))
        self.tensors = tuple(self._empty(shape, DTYPES[dtype]) for shape, dtype in forms)

    def _forms(self, shapes: bytes) -> list[Form]:
        """What the tensors will be."""
        forms, at = [], 0
        try:
            for _ in range(self._count):
                dtype, dims = shapes[at], shapes[at + 1]
                forms.append(Form(struct.unpack_from(f"<{dims}q", shapes, at + 2), dtype))
                at += 2 + 8 * dims
        except (IndexError, struct.error):
            raise PeerError("a peer sent shapes that cannot be read") from None
        if at != len(shapes):
            raise PeerError("a peer sent shapes that cannot be read")
        check_forms(forms)
        return forms


def raw(tensor: Tensor) -> memoryview:
    """A contiguous host tensor's bytes, not copied."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.view(-1).view(torch.uint8).numpy().data
