"""The bytes of a message between two workers: a fixed header, shapes, small facts as JSON, the raw tensors.

    magic 4 | kind 1 | - | tensors 2 | shapes length 4 | facts length 4 | parcel: 8 x int32
    | per tensor: dtype 1, dims 1, dims x int64 | facts | the tensors, one after the other

No pickle. Every length is bounded before memory is taken for it.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import torch
from torch import Tensor

from everstep.errors import PeerError, UserError
from everstep.net.transport import MAX_BYTES, MAX_DIMS, MAX_TENSORS
from everstep.protocol.ops import Microbatch
from everstep.protocol.parcels import Parcel, ParcelKind, Part

MAGIC = b"EVS2"
HEAD = struct.Struct("<4s c x H I I 8i")
MAX_FACTS = 16 << 20
STATE = "X"  # not a parcel: one tensor of a state that a joining worker copies
LANE = "L"  # not a parcel: opens a lane between two workers, or says that one is broken
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


def encode(kind: str, parcel: Parcel | None, facts: Any, *tensors: Tensor) -> bytes:
    """Everything before the tensors' own bytes."""
    body = b"" if facts is None else json.dumps(facts, separators=(",", ":")).encode()
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


class Incoming:
    """A frame while it arrives: says how many bytes it wants next and where they go."""

    def __init__(self, empty: Any) -> None:
        self._empty = empty  # (shape, dtype) -> a tensor in host memory
        self._head = bytearray(HEAD.size)
        self._tail = bytearray()
        self.tensors: tuple[Tensor, ...] = ()
        self.kind = ""
        self.parcel: Parcel | None = None
        self.facts: Any = None
        self._want = memoryview(self._head)
        self._part = 0  # 0 head, 1 shapes and facts, 2 and on: the tensors

    @staticmethod
    def whole(parcel: Parcel, facts: Any, tensors: tuple[Tensor, ...]) -> Incoming:
        """A message that came in pieces, as if it had come as one."""
        made = Incoming(None)
        made.kind, made.parcel, made.facts, made.tensors = parcel.what, parcel, facts, tensors
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
        magic, kind, tensors, shapes, facts, *numbers = HEAD.unpack(self._head)
        if (
            magic != MAGIC
            or tensors > MAX_TENSORS
            or shapes > tensors * (2 + 8 * MAX_DIMS)
            or facts > MAX_FACTS
        ):
            raise PeerError("a peer sent something that is not a message of Everstep")
        self.kind, self._count, self._shapes = kind.decode("ascii", "replace"), tensors, shapes
        if self.kind not in (STATE, LANE):
            try:
                what = ParcelKind(self.kind)
            except ValueError:
                raise PeerError(f"a peer sent a message of the unknown kind {self.kind!r}") from None
            attempt, step, stage, home, number, round_, sender, owner = numbers
            microbatch = None if home < 0 else Microbatch(home, number)
            self.parcel = Parcel(what, attempt, step, stage, microbatch, round_, sender, owner)
        self._tail = bytearray(shapes + facts)
        self._want = memoryview(self._tail)

    def _read_tail(self) -> None:
        forms = self._forms(bytes(self._tail[: self._shapes]))
        body = bytes(self._tail[self._shapes :])
        try:
            self.facts = json.loads(body) if body else None
        except (ValueError, RecursionError):
            raise PeerError("a peer sent facts that are not JSON") from None
        self.tensors = tuple(self._empty(shape, dtype) for shape, dtype in forms)

    def _forms(self, shapes: bytes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """What the tensors will be, all of it checked before memory is taken for the first."""
        forms, at, total = [], 0, 0
        try:
            for _ in range(self._count):
                dtype, dims = DTYPES[shapes[at]], shapes[at + 1]
                shape = struct.unpack_from(f"<{dims}q", shapes, at + 2)
                at += 2 + 8 * dims
                forms.append((shape, dtype))
                total += math.prod(shape) * dtype.itemsize
                if any(n < 0 for n in shape) or total > MAX_BYTES:
                    raise PeerError(
                        f"a peer announced a tensor of shape {shape}, more than any message may hold"
                    )
        except (IndexError, struct.error):
            raise PeerError("a peer sent something that is not a message of Everstep") from None
        if at != len(shapes):
            raise PeerError("a peer sent something that is not a message of Everstep")
        return forms


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
            value.weights,
            [[*m, *scores] for m, scores in value.scores],
        ]
    if isinstance(value, tuple) and len(value) == 2 and not isinstance(value[1], float):  # of a COPY
        return [value[0], None if value[1] is None else facts_of(value[1])]
    return value


def value_of(what: ParcelKind, facts: Any) -> Any:
    """The inverse of `facts_of`."""
    match what:
        case ParcelKind.PART:
            return _part(facts)
        case ParcelKind.COPY:
            return facts[0], None if facts[1] is None else _part(facts[1])
        case ParcelKind.SUM:
            return tuple(map(float, facts))
        case _:
            return facts


def checked_value(what: ParcelKind, facts: Any) -> Any:
    """The same of a frame that has just come; PeerError if they are not the facts of such a parcel."""
    try:
        return value_of(what, facts)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise PeerError(f"these are not the facts of a {what.name.lower()}: {error}") from None


def _part(facts: Any) -> Part:
    microbatches, losses, executed, weights, scores = facts
    return Part(
        tuple(Microbatch(*m) for m in microbatches),
        tuple((Microbatch(home, number), loss) for home, number, loss in losses),
        executed,
        tuple(weights),
        tuple((Microbatch(home, number), tuple(found)) for home, number, *found in scores),
    )
