"""The reduce begins before the backward ends: pieces of the parts are sent while the last W of a step runs.

W goes through its tensors one by one, and what the last W of a step has added to is final. A part is what one
worker adds to the stretch of another (`sum_parts`); it is cut into pieces at the borders of tensors.

    last W   ── layer 7 ── layer 6 ── layer 5 ── … ── layer 0 ──┐
    sent        │  piece 7,6      │  piece 5,4                   └─ PART: the rest, and which pieces count
                └──────────────── under the name of the PART ─────► put together by its receiver

Names and decisions do not change: a worker has a part once it is whole, and sums what it has in the order of
replicas, as before. So the bits stay, and a death leaves pieces behind that no message speaks of.

What a piece was made of may change after it was sent. On a GPU a strict contribution can turn out not to fit
(`sums`): then the PART brings that piece again; what 32 bits of its sums lack it always brings. More W of the
step, after a death: then all that was sent ahead counts for nothing, and the PART is sent whole; likewise if
the connection broke, or if the reduce began a new round. Pieces carry a number, so that those of two attempts
are never mixed. A send reads from the buffer of the sums while W writes to it, but never what is to count.

Not sent ahead: what lies in shared memory, for it is read in place; small pieces; what the last tensor ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from everstep.engine.sums.sums import GradientSums
from everstep.errors import PeerError
from everstep.net.envelope import MAX_BYTES, Envelope, PartAhead, PartRest, Stretch
from everstep.protocol.parcels import Parcel

PIECE = {"cpu": 1 << 20, "cuda": 16 << 20}  # bytes, at least
MOST_SENDERS = 4096

Post = Callable[[Parcel, Envelope, Tensor], None]
Message = tuple[Envelope, tuple[Tensor, ...]]


@dataclass(slots=True)
class _Part:
    stretches: Sequence[slice]
    waiting: dict[Stretch, set[int]]  # the tensors that are not final
    made_of: dict[Stretch, frozenset[int]]
    sent: list[Stretch] = field(default_factory=list)


class PartsAhead:
    """Of the step whose last W runs. `number` tells this attempt from all others of the process."""

    def __init__(self) -> None:
        self.number = 0
        self._parts: dict[Parcel, _Part] = {}
        self._sums: GradientSums | None = None

    def begin(
        self, sums: GradientSums, parts: Iterable[tuple[Parcel, Sequence[slice]]], slots: set[int], post: Post
    ) -> Callable[[int], None]:
        """`slots`: that the W adds to. To be called with each of them, once it is done: what is returned."""
        self.clear()
        self.number += 1
        self._sums = sums
        sums.changed.clear()
        left = set(slots)
        for parcel, stretches in parts:
            made_of = _cut(sums, stretches)
            waiting = {piece: set(of) for piece, of in made_of.items() if of <= slots}
            self._parts[parcel] = _Part(stretches, waiting, made_of)

        def finished(slot: int) -> None:
            left.discard(slot)
            for parcel, part in self._parts.items() if left else ():
                for piece in [piece for piece, of in part.waiting.items() if of == {slot}]:
                    sums.flush()
                    self._send(parcel, part, piece, post)
                for of in part.waiting.values():
                    of.discard(slot)

        return finished

    def _send(self, parcel: Parcel, part: _Part, piece: Stretch, post: Post) -> None:
        assert self._sums is not None
        del part.waiting[piece]
        part.sent.append(piece)
        where = part.stretches[piece.stretch]
        told = Envelope(piece=PartAhead(self.number, piece, where.stop - where.start))
        post(parcel, told, self._sums.flat[_within(where, piece)])

    def clear(self) -> None:
        """What was sent counts for nothing."""
        self._parts.clear()
        self._sums = None

    def lost(self, gone: Callable[[Parcel], bool]) -> None:
        """What was sent to these owners may not have come."""
        for parcel in [parcel for parcel in self._parts if gone(parcel)]:
            del self._parts[parcel]

    def rest(
        self, parcel: Parcel, envelope: Envelope, tensors: tuple[Tensor, ...], places: Sequence[int]
    ) -> Message:
        """A PART, less the pieces that were sent. `places`: of its stretches among the tensors."""
        part = self._parts.get(parcel)
        if part is None or self._sums is None or not part.sent:
            return envelope, tensors
        changed = self._sums.changed
        pieces = tuple(piece for piece in part.sent if not part.made_of[piece] & changed)
        sizes = tuple(tensors[place].numel() for place in places)
        missing = tuple(gap for k, size in enumerate(sizes) for gap in _gaps(k, size, pieces))
        told = PartRest(self.number, pieces, missing, tuple(places), sizes)
        others = [tensor for at, tensor in enumerate(tensors) if at not in set(places)]
        own = [self._sums.flat[_within(part.stretches[gap.stretch], gap)] for gap in missing]
        return envelope._replace(piece=told), (*own, *others)


def _cut(sums: GradientSums, stretches: Sequence[slice]) -> dict[Stretch, frozenset[int]]:
    """The pieces of a part, each with the slots it is made of. The last slots of a stretch end first."""
    least = PIECE[sums.device.type] // sums.flat.element_size()
    found: dict[Stretch, frozenset[int]] = {}
    for k, where in enumerate(stretches):
        stop, of = where.stop, set[int]()
        for slot, piece in reversed(sums.pieces(where)):
            of.add(slot)
            if stop - piece.start >= least:
                found[Stretch(k, piece.start - where.start, stop - where.start)] = frozenset(of)
                stop, of = piece.start, set()
    return found


def _within(where: slice, piece: Stretch) -> slice:
    return slice(where.start + piece.start, where.start + piece.stop)


def _gaps(stretch: int, size: int, pieces: Iterable[Stretch]) -> list[Stretch]:
    found, at = [], 0
    for _, start, stop in sorted(piece for piece in pieces if piece.stretch == stretch):
        if at < start:
            found.append(Stretch(stretch, at, start))
        at = stop
    return [*found, Stretch(stretch, at, size)] if at < size or not size else found


@dataclass(slots=True)
class _Arriving:
    age: tuple[float, ...]  # attempt, step, round of its parcel, and its number
    wholes: dict[int, Tensor] = field(default_factory=dict)
    here: set[Stretch] = field(default_factory=set)
    closing: tuple[PartRest, Message] | None = None  # the PART itself, which lacks pieces


class ArrivingParts:
    """At the receiver: of each sender the newest part that is not whole."""

    def __init__(self) -> None:
        self._of: dict[int, _Arriving] = {}

    def take(self, parcel: Parcel, envelope: Envelope, tensors: tuple[Tensor, ...]) -> Message | None:
        """A message of a PART: the whole of it, if it is here."""
        told = envelope.piece
        if not isinstance(told, PartAhead | PartRest):
            arriving = self._of.get(parcel.sender)
            if arriving is not None and arriving.age <= (parcel.attempt, parcel.step, parcel.round, math.inf):
                del self._of[parcel.sender]
            return envelope, tensors
        age = parcel.attempt, parcel.step, parcel.round, told.of
        arriving = self._of.get(parcel.sender)
        if arriving is None or arriving.age < age:
            if len(self._of) >= MOST_SENDERS:
                raise PeerError("more workers send parts than a task can have")
            arriving = self._of[parcel.sender] = _Arriving(age)
        elif arriving.age > age:
            return None
        try:
            if isinstance(told, PartAhead):
                self._put(arriving, told.piece, told.size, tensors[0])
                arriving.here.add(told.piece)
            else:
                arriving.closing = told, (envelope._replace(piece=None), tensors)
            return self._whole(parcel.sender, arriving)
        except (KeyError, IndexError, RuntimeError):  # numbers that do not belong together
            raise PeerError("a peer sent a piece of a part that cannot be read") from None

    def forget_until(self, step: int) -> None:
        """Of steps that are over: their senders have died."""
        self._of = {sender: one for sender, one in self._of.items() if one.age[1] > step}

    def _whole(self, sender: int, arriving: _Arriving) -> Message | None:
        if arriving.closing is None:
            return None
        told, (envelope, tensors) = arriving.closing
        if not set(told.ahead) <= arriving.here:
            return None
        for piece, tensor in zip(told.rest, tensors, strict=False):
            self._put(arriving, piece, told.sizes[piece.stretch], tensor)
        del self._of[sender]
        found = list(tensors[len(told.rest) :])
        for stretch, place in enumerate(told.places):
            found.insert(place, arriving.wholes[stretch])
        return envelope, tuple(found)

    def _put(self, arriving: _Arriving, piece: Stretch, size: int, tensor: Tensor) -> None:
        """At its place in the whole stretch. Alone in it, it is the stretch."""
        if not 0 <= piece.start <= piece.stop <= size or tensor.numel() != piece.stop - piece.start:
            raise PeerError("a peer sent a piece of a part that is outside of it")
        if size * tensor.itemsize > MAX_BYTES:
            raise PeerError("a peer sent a piece of a part that is too large")
        whole = arriving.wholes.get(piece.stretch)
        if tensor.numel() == size:
            whole = tensor
        elif whole is None:
            whole = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
        elif whole.dtype != tensor.dtype:
            raise PeerError("a peer sent pieces of a part that are of several types")
        if whole is not tensor:
            whole[piece.start : piece.stop].copy_(tensor, non_blocking=True)
        arriving.wholes[piece.stretch] = whole
