"""The bytes of a message between two workers: a fixed header, small facts as JSON, then the raw tensor.

    magic 4 | kind 1 | dtype 1 | dims 1 | - | facts length 4 | parcel: 8 x int32 | shape: dims x int64 | facts
    | tensor

No pickle. Every length is bounded before memory is taken for it.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import torch
from torch import Tensor

from everstep.core.words.ops import Microbatch
from everstep.core.words.worker_messages import Parcel, ParcelKind, Part
from everstep.errors import PeerError

MAGIC = b"EVS1"
HEAD = struct.Struct("<4s c B B x I 8i")
MAX_FACTS = 16 << 20
MAX_TENSOR = 64 << 30
MAX_DIMS = 8
STATE = "X"  # not a parcel: one tensor of a state that a joining worker copies
DTYPES = [
    None,
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def encode(kind: str, parcel: Parcel | None, facts: Any, tensor: Tensor | None) -> bytes:
    """Everything before the tensor's own bytes."""
    body = b"" if facts is None else json.dumps(facts, separators=(",", ":")).encode()
    shape = () if tensor is None else tuple(tensor.shape)
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
    dtype = 0 if tensor is None else DTYPES.index(tensor.dtype)
    head = HEAD.pack(MAGIC, kind.encode(), dtype, len(shape), len(body), *numbers)
    return head + struct.pack(f"<{len(shape)}q", *shape) + body


class Incoming:
    """A frame while it arrives: says how many bytes it wants next and where they go."""

    def __init__(self, empty: Any) -> None:
        self._empty = empty  # (shape, dtype) -> a tensor in host memory
        self._head = bytearray(HEAD.size)
        self._tail = bytearray()
        self.tensor: Tensor | None = None
        self.kind = ""
        self.parcel: Parcel | None = None
        self.facts: Any = None
        self._want = memoryview(self._head)
        self._part = 0  # 0 head, 1 shape and facts, 2 tensor, 3 whole

    @property
    def want(self) -> memoryview:
        """Where the next bytes go. Empty: the frame is whole."""
        return self._want

    def took(self, count: int) -> bool:
        """Bytes have been put into `want`. True: the frame is whole."""
        self._want = self._want[count:]
        while not self._want and self._part < 3:
            self._part += 1
            if self._part == 1:
                self._read_head()
            elif self._part == 2:
                self._read_tail()
        return self._part == 3

    def _read_head(self) -> None:
        magic, kind, dtype, dims, facts, *numbers = HEAD.unpack(self._head)
        if magic != MAGIC or dims > MAX_DIMS or facts > MAX_FACTS or dtype >= len(DTYPES):
            raise PeerError("a peer sent something that is not a message of Everstep")
        self.kind, self._dtype, self._dims = kind.decode("ascii", "replace"), DTYPES[dtype], dims
        if self.kind != STATE:
            try:
                what = ParcelKind(self.kind)
            except ValueError:
                raise PeerError(f"a peer sent a message of the unknown kind {self.kind!r}") from None
            attempt, step, stage, home, number, round_, sender, owner = numbers
            microbatch = None if home < 0 else Microbatch(home, number)
            self.parcel = Parcel(what, attempt, step, stage, microbatch, round_, sender, owner)
        self._tail = bytearray(8 * dims + facts)
        self._want = memoryview(self._tail)

    def _read_tail(self) -> None:
        shape = struct.unpack_from(f"<{self._dims}q", self._tail)
        body = bytes(self._tail[8 * self._dims :])
        try:
            self.facts = json.loads(body) if body else None
        except ValueError:
            raise PeerError("a peer sent facts that are not JSON") from None
        if self._dtype is None:
            self._want = memoryview(b"")
            return
        if any(n < 0 for n in shape) or math.prod(shape) * self._dtype.itemsize > MAX_TENSOR:
            raise PeerError(f"a peer announced a tensor of shape {shape}, more than any message may hold")
        self.tensor = self._empty(shape, self._dtype)
        self._want = raw(self.tensor)


def raw(tensor: Tensor) -> memoryview:
    """A contiguous host tensor's bytes, not copied."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.view(-1).view(torch.uint8).numpy().data


def facts_of(value: Any) -> Any:
    """A parcel's small facts in JSON's terms."""
    if isinstance(value, Part):
        return [
            [list(m) for m in value.microbatches],
            [[*m, loss] for m, loss in value.losses],
            value.executed,
        ]
    if isinstance(value, tuple) and len(value) == 2:  # of a COPY
        return [value[0], None if value[1] is None else facts_of(value[1])]
    return value


def value_of(what: ParcelKind, facts: Any) -> Any:
    """The inverse of `facts_of`."""
    match what:
        case ParcelKind.PART:
            return _part(facts)
        case ParcelKind.COPY:
            return facts[0], None if facts[1] is None else _part(facts[1])
        case _:
            return facts


def _part(facts: Any) -> Part:
    microbatches, losses, executed = facts
    return Part(
        tuple(Microbatch(*m) for m in microbatches),
        tuple((Microbatch(home, number), loss) for home, number, loss in losses),
        executed,
    )
