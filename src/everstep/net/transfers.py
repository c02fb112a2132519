"""A state on its way from a member to a joiner, in pieces, and a last frame that counts them. The state of a
chunk on its way to a new holder travels in the same way.

Training goes on meanwhile, and host memory stays bounded. A state changes only in an update. Until then a
thread copies piece after piece to the host and queues it, never more than WINDOW bytes at a time:

    update of 7 │ F B W … of step 8: pieces of the state after 7, as fast as the link takes them │ update of 8
                                                             settle(): what is left is copied now ┘

If more than REST bytes are left before the update, the update waits until it is that little. So transfers
have at most WINDOW + PIECE bytes per receiver and REST together in host memory, whatever the size of a state.
A receiver that takes nothing for STUCK_S is cut off: to the rest of the worker its link broke, and it is sent
a newer state.

Every frame names its transfer. Which transfer counts is decided in `core.worker.joining`; here its frames are
collected, and those of no other one. A piece goes straight to its place, where the joiner can name one.

Pieces of chunks are put to their place by the links' own thread, which reads nothing else meanwhile: a worker
that is busy with an op for seconds does not let them pile up in host memory, the sender's kernel does not
take more than is read, and the sender waits. So one piece at a time is in host memory here. Pieces of one
name have the same bits from every sender, each time they are sent: a chunk's state after a step.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everstep.core.worker.joining import FrameUse
from everstep.errors import PeerError
from everstep.net import frames, host_memory
from everstep.net.envelope import MAX_BYTES, Envelope, FrameKind, StateEnd, StatePiece, type_number
from everstep.net.links import Address, Links
from everstep.protocol.parcels import Parcel, ParcelKind, StateTransfer

STUCK_S = 5.0
# Bytes in host memory: queued for each receiver while a step is computed; left for the moment before an
# update; copied at once.
SNAPSHOT_WINDOW, SNAPSHOT_REST, SNAPSHOT_PIECE = 256 << 20, 1 << 30, 8 << 20
_LOOK_S = 0.002


def cut_up(state: Mapping[str, Tensor], piece_bytes: int) -> Iterator[tuple[StatePiece, Tensor]]:
    """A state's tensors in pieces: what each is, and the live elements."""
    for name, tensor in state.items():
        flat = tensor.detach().reshape(-1)
        count = max(1, piece_bytes // flat.element_size())
        for at in range(0, max(1, flat.numel()), count):
            yield StatePiece(name, tuple(tensor.shape), at), flat[at : at + count]


class _Outgoing:
    """One transfer. Its thread reads live tensors until `copied` is set. `envelope`: of its last frame; the
    others have its value.
    """

    def __init__(
        self, to: Address, what: Parcel | FrameKind, envelope: Envelope, state: Mapping[str, Tensor]
    ) -> None:
        self.to, self.what, self.envelope, self.state = to, what, envelope, state
        self.left = sum(tensor.nbytes for tensor in state.values())
        self.hurry = threading.Event()
        self.cancelled = threading.Event()
        self.copied = threading.Event()
        self.error: Exception | None = None  # why it will not end
        self.device = next((t.device for t in state.values() if t.is_cuda), torch.device("cpu"))
        self.ready: Any = None
        if self.device.type == "cuda":
            self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.ready.record(torch.cuda.current_stream(self.device))


class StateSender:
    """A member's states on their way to joiners, and those of chunks on their way to new holders."""

    def __init__(
        self,
        links: Links,
        *,
        window: int = SNAPSHOT_WINDOW,
        rest: int = SNAPSHOT_REST,
        piece: int = SNAPSHOT_PIECE,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._links, self._window, self._rest, self._piece = links, window, rest, piece
        self._stuck_s = stuck_s
        self._going: dict[tuple[Address, int | None], _Outgoing] = {}  # by receiver and chunk
        self.peak_bytes = 0  # the most that was queued for one receiver

    def begin(self, to: Address, transfer: StateTransfer, state: Mapping[str, Tensor]) -> None:
        """`state`: live tensors. They must not change before `settle` has returned."""
        self._begin((to, None), _Outgoing(to, FrameKind.STATE, Envelope(transfer), state))

    def begin_fill(self, to: Address, parcel: Parcel, envelope: Envelope, tensors: Sequence[Tensor]) -> None:
        """The same for the state of chunk `parcel.owner`."""
        state = {str(index): tensor for index, tensor in enumerate(tensors)}
        self._begin((to, parcel.owner), _Outgoing(to, parcel, envelope, state))

    def _begin(self, key: tuple[Address, int | None], going: _Outgoing) -> None:
        for tensor in going.state.values():
            type_number(tensor.dtype)  # refused here: a thread could tell no one
        self._cancel(key)
        self._going[key] = going
        threading.Thread(target=self._run, args=(going,), name="state", daemon=True).start()

    def settle(self, fed: Iterable[Address] = (), waiting: Callable[[], None] = lambda: None) -> None:
        """Until every live tensor is copied, and the queue of no receiver is longer than it may be. `fed`:
        who gets every step besides. `waiting` is called if it takes a while.
        """
        still = set(fed)
        for going in self._going.values():
            going.hurry.set()
        for key, going in list(self._going.items()):
            to, chunk = key
            drained = self._drained(going, waiting)
            if going.error is not None:
                raise going.error
            if not drained:
                self._cancel(key)
                self._links.move(to)
            elif chunk is not None or to not in still:
                del self._going[key]

    def _drained(self, going: _Outgoing, waiting: Callable[[], None]) -> bool:
        """False: the receiver took nothing for too long."""
        if going.copied.wait(_LOOK_S) and self._links.queued(going.to) <= self._window + self._rest:
            return True
        waiting()
        most, seen, since = self._window + self._rest, -1, time.monotonic()
        while not going.copied.wait(_LOOK_S) or self._links.queued(going.to) > most:
            if not going.copied.is_set():
                now = self._links.queued(going.to) + going.left
            else:
                now = self._links.queued(going.to)
                time.sleep(_LOOK_S)
            if now != seen:
                seen, since = now, time.monotonic()
                waiting()
            elif time.monotonic() - since > self._stuck_s:
                return False
        return True

    def _cancel(self, key: tuple[Address, int | None]) -> None:
        going = self._going.pop(key, None)
        if going is not None:
            going.cancelled.set()
            going.copied.wait()

    # -------------------------------------------------------------- the thread

    def _run(self, going: _Outgoing) -> None:
        try:
            host = _Host(going)
            count = 0
            for piece, elements in cut_up(going.state, self._piece):
                self._wait_for_room(going)
                if going.cancelled.is_set():
                    return
                copy = host.copy(elements)
                self._links.send(going.to, going.what, Envelope(going.envelope.value, piece=piece), copy)
                going.left -= elements.nbytes
                self.peak_bytes = max(self.peak_bytes, self._links.queued(going.to))
                count += 1
            self._links.send(going.to, going.what, going.envelope._replace(piece=StateEnd(count)))
        except (
            Exception
        ) as error:  # raised by the next `settle`: the receiver would wait for the end for ever
            going.error = error
        finally:
            going.state = {}
            going.copied.set()

    def _wait_for_room(self, going: _Outgoing) -> None:
        while not going.cancelled.is_set():
            if self._links.queued(going.to) <= self._window:
                return
            if going.hurry.is_set() and sum(one.left for one in list(self._going.values())) <= self._rest:
                return
            time.sleep(_LOOK_S)


class _Host:
    """Copies pieces to the host, on a GPU's own stream for it."""

    def __init__(self, going: _Outgoing) -> None:
        self._stream: Any = None
        if going.device.type == "cuda":
            self._stream = torch.cuda.Stream(going.device)  # type: ignore[no-untyped-call]
            self._stream.wait_event(going.ready)

    def copy(self, piece: Tensor) -> Tensor:
        if not piece.is_cuda:
            return piece.clone()
        with torch.cuda.stream(self._stream):
            return host_memory.to_host(piece)


# ------------------------------------------------------------------ arriving

Place = Callable[[str, tuple[int, ...], torch.dtype], Tensor | None]


class _Pieces:
    """Tensors that come piece by piece. `new` makes one, given its first piece."""

    def __init__(self, new: Callable[[StatePiece, Tensor], Tensor]) -> None:
        self._new = new
        self.tensors: dict[str, Tensor] = {}
        self._here: set[tuple[str, int]] = set()

    def add(self, piece: StatePiece, elements: Tensor) -> None:
        size, stop = math.prod(piece.shape), piece.at + elements.numel()
        too_large = size * elements.element_size() > MAX_BYTES
        if too_large or min(piece.shape, default=0) < 0 or not 0 <= piece.at <= stop <= size:
            raise PeerError("a peer sent a piece of a tensor that is outside of it")
        if piece.name not in self.tensors:
            self.tensors[piece.name] = self._new(piece, elements)
        tensor = self.tensors[piece.name]
        if tensor.dtype != elements.dtype or tensor.numel() != size:
            raise PeerError("a peer sent pieces of a tensor that do not belong together")
        if elements.numel() < size:
            tensor.view(-1)[piece.at : stop].copy_(elements, non_blocking=True)
        elif tensor.data_ptr() != elements.data_ptr():
            tensor.copy_(elements.view(tensor.shape), non_blocking=True)
        self._here.add((piece.name, piece.at))

    def are_all(self, end: StateEnd) -> bool:
        """If not, a connection broke in between, and all of it is sent again."""
        return len(self._here) == end.pieces


class ArrivingState:
    """The pieces of the transfer that counts, until they are complete. `place`: where a tensor belongs, if
    its pieces may be put there before all are here.
    """

    def __init__(
        self, use: Callable[[StateTransfer], FrameUse], place: Place = lambda name, shape, dtype: None
    ) -> None:
        self._use, self._place = use, place
        self._pieces = _Pieces(self._new)

    def take(self, frame: frames.Incoming) -> tuple[StateTransfer, dict[str, Tensor]] | None:
        """A frame is here. Returns the whole state with its last one."""
        transfer, piece = frame.envelope.value, frame.envelope.piece
        use = self._use(transfer)
        if use is FrameUse.DROP:
            return None
        if use is FrameUse.BEGIN:
            self._pieces = _Pieces(self._new)
        if isinstance(piece, StatePiece) and frame.tensor is not None:
            self._pieces.add(piece, frame.tensor)
            return None
        if not isinstance(piece, StateEnd):
            raise PeerError("a peer sent a frame of a state without saying what it is")
        if not self._pieces.are_all(piece):
            return None
        whole, self._pieces = self._pieces.tensors, _Pieces(self._new)
        return transfer, whole

    def _new(self, piece: StatePiece, elements: Tensor) -> Tensor:
        place = self._place(piece.name, piece.shape, elements.dtype)
        if place is not None:
            return place
        if elements.numel() == math.prod(piece.shape):
            return elements.view(piece.shape)
        return torch.empty(piece.shape, dtype=elements.dtype)


@dataclass(slots=True)
class _Filling:
    parcel: Parcel
    pieces: _Pieces


class ArrivingFills:
    """States of chunks for a new holder, one per chunk at most: the newest. `deliver`: gets the whole message
    as if it had come as one.
    """

    def __init__(self, device: torch.device, deliver: Callable[[frames.Incoming], None]) -> None:
        self._device, self._deliver = device, deliver
        self._filling: dict[int, _Filling] = {}
        self._stream: Any = None

    def take(self, frame: frames.Incoming) -> bool:
        """True: it is a piece of a chunk's state, or the frame that counts them."""
        parcel, piece = frame.parcel, frame.envelope.piece
        if parcel is None or parcel.what is not ParcelKind.FILL:
            return False
        filling = self._filling.get(parcel.owner)
        if filling is None or filling.parcel != parcel:
            if filling is not None and filling.parcel.step > parcel.step:
                return True  # of a state that has been replaced
            filling = self._filling[parcel.owner] = _Filling(parcel, _Pieces(self._new))
        if isinstance(piece, StatePiece) and frame.tensor is not None:
            self._add(filling.pieces, piece, frame.tensor)
        elif not isinstance(piece, StateEnd):
            raise PeerError("a peer sent a frame of a chunk without saying what it is")
        elif filling.pieces.are_all(piece):
            del self._filling[parcel.owner]
            self._deliver(self._whole(frame, filling.pieces.tensors))
        return True

    @staticmethod
    def _whole(end: frames.Incoming, tensors: dict[str, Tensor]) -> frames.Incoming:
        names = [str(index) for index in range(len(tensors))]
        if end.parcel is None or tensors.keys() != set(names):
            raise PeerError("a peer sent the state of a chunk by other names than its own")
        envelope = end.envelope._replace(piece=None)
        return frames.Incoming.whole(end.parcel, envelope, tuple(tensors[name] for name in names))

    def _new(self, piece: StatePiece, elements: Tensor) -> Tensor:
        device = self._device if piece.shape else torch.device("cpu")  # a single number is a counter
        return torch.empty(piece.shape, dtype=elements.dtype, device=device)

    def _add(self, pieces: _Pieces, piece: StatePiece, elements: Tensor) -> None:
        if self._device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            pieces.add(piece, elements)
        if self._stream is not None:
            self._stream.synchronize()  # then its host memory is free again
