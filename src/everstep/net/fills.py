"""States of chunks that arrive for a new holder, piece by piece (`transfers` sends them).

Pieces are put to their place by the links' own thread, which reads nothing else meanwhile: a worker that is
busy with an op for seconds does not let them pile up in host memory, the sender's kernel does not take more
than is read, and the sender waits. So one piece at a time is in host memory here. Once all are there, the
message is delivered as if it had come as one.

Pieces of one name have the same bits whoever sends them, and however often: a chunk's state after a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everstep.errors import PeerError
from everstep.net import frames, transport
from everstep.protocol.parcels import Parcel, ParcelKind


@dataclass(slots=True)
class _Filling:
    parcel: Parcel
    tensors: dict[str, Tensor] = field(default_factory=dict)
    pieces: set[tuple[str, int]] = field(default_factory=set)


class ArrivingFills:
    """One per chunk at most: the newest. `deliver`: gets the whole message."""

    def __init__(self, device: torch.device, deliver: Callable[[frames.Incoming], None]) -> None:
        self._device, self._deliver = device, deliver
        self._filling: dict[int, _Filling] = {}
        self._stream: Any = None

    def take(self, frame: frames.Incoming) -> bool:
        """True: it is a piece of a chunk's state, or the frame that counts them."""
        parcel = frame.parcel
        if parcel is None or parcel.what is not ParcelKind.FILL:
            return False
        filling = self._filling.get(parcel.owner)
        if filling is None or filling.parcel != parcel:
            if filling is not None and filling.parcel.step > parcel.step:
                return True  # of a state that has been replaced
            filling = self._filling[parcel.owner] = _Filling(parcel)
        try:
            if frame.tensor is not None:
                self._add(filling, frame.facts, frame.tensor)
            elif len(filling.pieces) == int(frame.facts["pieces"]):
                del self._filling[parcel.owner]
                ordered = [filling.tensors[str(index)] for index in range(len(filling.tensors))]
                self._deliver(frames.Incoming.whole(parcel, frame.facts["facts"], tuple(ordered)))
        except (KeyError, TypeError, ValueError):
            raise PeerError("a peer sent a piece of a chunk that cannot be read") from None
        return True  # one that lacks pieces is sent again: a connection broke in between

    def _add(self, filling: _Filling, facts: Mapping[str, Any], piece: Tensor) -> None:
        name, shape, at = str(facts["name"]), tuple(map(int, facts["shape"])), int(facts["at"])
        size = math.prod(shape)
        too_large = size * piece.element_size() > transport.MAX_BYTES
        if too_large or min(shape, default=0) < 0 or not 0 <= at <= size - piece.numel():
            raise PeerError("a peer sent a piece of a chunk that is outside of its tensor")
        if self._device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if name not in filling.tensors:
                device = self._device if shape else torch.device("cpu")  # a single number is a counter
                filling.tensors[name] = torch.empty(shape, dtype=piece.dtype, device=device)
            whole = filling.tensors[name].view(-1)
            if whole.dtype != piece.dtype or at + piece.numel() > whole.numel():
                raise PeerError("a peer sent pieces of a chunk that do not belong together")
            whole[at : at + piece.numel()].copy_(piece, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()  # then its host memory is free again
        filling.pieces.add((name, at))
