"""The reduce begins before the backward ends: pieces of the parts are sent while the last W of a step runs.

W goes through its tensors one by one, and what the last W of a step has added to is final. A part is what one
worker adds to the stretch of another (`sum_parts`); it is cut into pieces at the borders of tensors.

    last W   ── layer 7 ── layer 6 ── layer 5 ── … ── layer 0 ──┐
    sent        │  piece 7,6      │  piece 5,4                   └─ PART: the rest, and which pieces count
                └──────────────── under the name of the PART ─────► put together by its receiver

Names and decisions do not change: a worker has a part once it is whole, and sums what it has in the order of
replicas, as before. So the bits stay, and a death leaves pieces behind that no message speaks of.

What a piece was made of may change after it was sent. On a GPU a strict contribution can turn out not to fit
(`sums`): then the PART brings that piece again. More W of the step, after a death: then all that was sent
ahead counts for nothing, and the PART is sent whole; likewise if the connection broke, or if the reduce began
a new round. Pieces carry a number, so that those of two attempts are never mixed. A send reads from the
buffer of the sums while W writes to it, but never what is to count.

Not sent ahead: what lies in shared memory, for it is read in place; small pieces; what the last tensor ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everstep.engine.sums.sums import GradientSums
from everstep.errors import PeerError
from everstep.net import transport
from everstep.protocol.parcels import Parcel

PIECE = {"cpu": 1 << 20, "cuda": 16 << 20}  # bytes, at least
AHEAD = "ahead"  # among a message's facts
MOST_SENDERS = 4096

Post = Callable[[Parcel, Any, Tensor], None]


class PartPiece(NamedTuple):
    """Of one stretch of a part."""

    stretch: int
    start: int  # from its beginning
    stop: int


@dataclass(slots=True)
class _Part:
    stretches: Sequence[slice]
    waiting: dict[PartPiece, set[int]]  # the tensors that are not final
    made_of: dict[PartPiece, frozenset[int]]
    sent: list[PartPiece] = field(default_factory=list)


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

    def _send(self, parcel: Parcel, part: _Part, piece: PartPiece, post: Post) -> None:
        assert self._sums is not None
        del part.waiting[piece]
        part.sent.append(piece)
        where = part.stretches[piece.stretch]
        facts = {"of": self.number, "piece": list(piece), "size": where.stop - where.start}
        post(parcel, {AHEAD: facts}, self._sums.flat[where.start + piece.start : where.start + piece.stop])

    def clear(self) -> None:
        """What was sent counts for nothing."""
        self._parts.clear()
        self._sums = None

    def lost(self, gone: Callable[[Parcel], bool]) -> None:
        """What was sent to these owners may not have come."""
        for parcel in [parcel for parcel in self._parts if gone(parcel)]:
            del self._parts[parcel]

    def rest(
        self, parcel: Parcel, facts: Any, tensors: tuple[Tensor, ...], places: Sequence[int]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """A PART, less the pieces that were sent. `places`: of its stretches among the tensors."""
        part = self._parts.get(parcel)
        if part is None or self._sums is None or not part.sent:
            return facts, tensors
        changed = self._sums.changed
        pieces = [piece for piece in part.sent if not part.made_of[piece] & changed]
        sizes = [tensors[place].numel() for place in places]
        missing = [gap for k, size in enumerate(sizes) for gap in _gaps(k, size, pieces)]
        told = {"of": self.number, "pieces": pieces, "rest": missing, "places": places, "sizes": sizes}
        others = [tensor for at, tensor in enumerate(tensors) if at not in set(places)]
        own = [tensors[places[k]][start:stop] for k, start, stop in missing]
        return {AHEAD: told, "facts": facts}, (*own, *others)


def _cut(sums: GradientSums, stretches: Sequence[slice]) -> dict[PartPiece, frozenset[int]]:
    """The pieces of a part, each with the slots it is made of. The last slots of a stretch end first."""
    least = PIECE[sums.device.type] // sums.flat.element_size()
    found: dict[PartPiece, frozenset[int]] = {}
    for k, where in enumerate(stretches):
        stop, of = where.stop, set[int]()
        for slot, piece in reversed(sums.pieces(where)):
            of.add(slot)
            if stop - piece.start >= least:
                found[PartPiece(k, piece.start - where.start, stop - where.start)] = frozenset(of)
                stop, of = piece.start, set()
    return found


def _gaps(stretch: int, size: int, pieces: Iterable[PartPiece]) -> list[PartPiece]:
    found, at = [], 0
    for _, start, stop in sorted(piece for piece in pieces if piece.stretch == stretch):
        if at < start:
            found.append(PartPiece(stretch, at, start))
        at = stop
    return [*found, PartPiece(stretch, at, size)] if at < size or not size else found


@dataclass(slots=True)
class _Arriving:
    age: tuple[float, ...]  # attempt, step, round of its parcel, and its number
    wholes: dict[int, Tensor] = field(default_factory=dict)
    here: set[PartPiece] = field(default_factory=set)
    closing: tuple[Any, tuple[Tensor, ...]] | None = None  # the PART itself, which lacks pieces


class ArrivingParts:
    """At the receiver: of each sender the newest part that is not whole."""

    def __init__(self) -> None:
        self._of: dict[int, _Arriving] = {}

    def take(
        self, parcel: Parcel, facts: Any, tensors: tuple[Tensor, ...]
    ) -> tuple[Any, tuple[Tensor, ...]] | None:
        """A message of a PART: the whole of it, if it is here."""
        if not isinstance(facts, dict) or AHEAD not in facts:
            arriving = self._of.get(parcel.sender)
            if arriving is not None and arriving.age <= (parcel.attempt, parcel.step, parcel.round, math.inf):
                del self._of[parcel.sender]
            return facts, tensors
        try:
            return self._take(parcel, facts, tensors)
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError):
            raise PeerError("a peer sent a piece of a part that cannot be read") from None

    def forget_until(self, step: int) -> None:
        """Of steps that are over: their senders have died."""
        self._of = {sender: one for sender, one in self._of.items() if one.age[1] > step}

    def _take(
        self, parcel: Parcel, facts: dict[str, Any], tensors: tuple[Tensor, ...]
    ) -> tuple[Any, tuple[Tensor, ...]] | None:
        told = facts[AHEAD]
        age = parcel.attempt, parcel.step, parcel.round, int(told["of"])
        arriving = self._of.get(parcel.sender)
        if arriving is None or arriving.age < age:
            if len(self._of) >= MOST_SENDERS:
                raise PeerError("more workers send parts than a task can have")
            arriving = self._of[parcel.sender] = _Arriving(age)
        elif arriving.age > age:
            return None
        if "facts" not in facts:
            piece = PartPiece(*map(int, told["piece"]))
            self._put(arriving, piece, int(told["size"]), tensors[0])
            arriving.here.add(piece)
        else:
            arriving.closing = facts, tensors
        return self._whole(parcel.sender, arriving)

    def _whole(self, sender: int, arriving: _Arriving) -> tuple[Any, tuple[Tensor, ...]] | None:
        if arriving.closing is None:
            return None
        facts, tensors = arriving.closing
        told = facts[AHEAD]
        if not {PartPiece(*piece) for piece in told["pieces"]} <= arriving.here:
            return None
        rest, sizes = [PartPiece(*piece) for piece in told["rest"]], told["sizes"]
        for piece, tensor in zip(rest, tensors, strict=False):
            self._put(arriving, piece, int(sizes[piece.stretch]), tensor)
        del self._of[sender]
        found = list(tensors[len(rest) :])
        for stretch, place in enumerate(told["places"]):
            found.insert(int(place), arriving.wholes[stretch])
        return facts["facts"], tuple(found)

    @staticmethod
    def _put(arriving: _Arriving, piece: PartPiece, size: int, tensor: Tensor) -> None:
        """At its place in the whole stretch. Alone in it, it is the stretch."""
        if not 0 <= piece.start <= piece.stop <= size or tensor.numel() != piece.stop - piece.start:
            raise PeerError("a peer sent a piece of a part that is outside of it")
        if size * tensor.element_size() > transport.MAX_BYTES:
            raise PeerError("a peer sent a piece of a part that is too large")
        if tensor.numel() == size:
            arriving.wholes[piece.stretch] = tensor
            return
        if piece.stretch not in arriving.wholes:
            pinned = tensor.device.type == "cpu" and tensor.is_pinned()
            whole = torch.empty(size, dtype=tensor.dtype, device=tensor.device, pin_memory=pinned)
            arriving.wholes[piece.stretch] = whole
        arriving.wholes[piece.stretch][piece.start : piece.stop].copy_(tensor, non_blocking=True)
