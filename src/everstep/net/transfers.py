"""A state on its way from a member to a joiner, in pieces, and a last frame that counts them. The state of a
chunk on its way to a new holder travels in the same way (`fills` collects it).

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
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everstep.core.worker.joining import FrameUse
from everstep.errors import PeerError
from everstep.net import frames, host_memory
from everstep.net.links import Address, Links
from everstep.protocol.parcels import Parcel, StateTransfer
from everstep.schedule.footprint import SNAPSHOT_PIECE, SNAPSHOT_REST, SNAPSHOT_WINDOW

STUCK_S = 5.0
_LOOK_S = 0.002


def cut_up(state: Mapping[str, Tensor], piece_bytes: int) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """A state's tensors in pieces: what each is, and the live elements."""
    for name, tensor in state.items():
        flat = tensor.detach().reshape(-1)
        count = max(1, piece_bytes // flat.element_size())
        for at in range(0, max(1, flat.numel()), count):
            yield {"name": name, "shape": list(tensor.shape), "at": at}, flat[at : at + count]


class _Outgoing:
    """One transfer. Its thread reads live tensors until `copied` is set. `head`: what every frame says of it,
    `tail`: what the last one says besides.
    """

    def __init__(
        self,
        to: Address,
        kind: str,
        parcel: Parcel | None,
        state: Mapping[str, Tensor],
        head: Mapping[str, Any],
        tail: Mapping[str, Any],
    ) -> None:
        self.to = to
        self.kind = kind
        self.parcel = parcel
        self.state = state
        self.head = head
        self.tail = tail
        self.left = sum(tensor.nbytes for tensor in state.values())
        self.hurry = threading.Event()
        self.cancelled = threading.Event()
        self.copied = threading.Event()
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
        self._begin((to, None), _Outgoing(to, frames.STATE, None, state, {"transfer": list(transfer)}, {}))

    def begin_fill(self, to: Address, parcel: Parcel, facts: Any, tensors: Sequence[Tensor]) -> None:
        """The same for the state of chunk `parcel.owner`."""
        state = {str(index): tensor for index, tensor in enumerate(tensors)}
        going = _Outgoing(to, parcel.what, parcel, state, {}, {"facts": facts})
        self._begin((to, parcel.owner), going)

    def _begin(self, key: tuple[Address, int | None], going: _Outgoing) -> None:
        for tensor in going.state.values():
            frames.type_number(tensor.dtype)  # refused here: a thread could tell no one
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
            if not self._drained(going, waiting):
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
            for facts, piece in cut_up(going.state, self._piece):
                self._wait_for_room(going)
                if going.cancelled.is_set():
                    return
                copy = host.copy(piece)
                self._links.send(going.to, going.kind, going.parcel, {**going.head, **facts}, copy)
                going.left -= piece.nbytes
                self.peak_bytes = max(self.peak_bytes, self._links.queued(going.to))
                count += 1
            whole = {**going.head, "pieces": count, **going.tail}
            self._links.send(going.to, going.kind, going.parcel, whole)
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


class ArrivingState:
    """The pieces of the transfer that counts, until they are complete. `place`: where a tensor belongs, if
    its pieces may be put there before all are here.
    """

    def __init__(
        self, use: Callable[[StateTransfer], FrameUse], place: Place = lambda name, shape, dtype: None
    ) -> None:
        self._use, self._place = use, place
        self._tensors: dict[str, Tensor] = {}
        self._pieces: set[tuple[str, int]] = set()

    def take(self, frame: frames.Incoming) -> tuple[StateTransfer, dict[str, Tensor]] | None:
        """A frame is here. Returns the whole state with its last one."""
        transfer = StateTransfer(*map(int, frame.facts["transfer"]))
        use = self._use(transfer)
        if use is FrameUse.DROP:
            return None
        if use is FrameUse.BEGIN:
            self._tensors, self._pieces = {}, set()
        if frame.tensor is not None:
            self._add(frame.facts, frame.tensor)
            return None
        if len(self._pieces) != frame.facts["pieces"]:
            return None  # a connection broke in between; the source sends all of it again
        whole, self._tensors, self._pieces = self._tensors, {}, set()
        return transfer, whole

    def _add(self, facts: Mapping[str, Any], piece: Tensor) -> None:
        name, shape, at = str(facts["name"]), tuple(map(int, facts["shape"])), int(facts["at"])
        size = torch.Size(shape).numel()
        if not 0 <= at <= size - piece.numel() or min(shape, default=0) < 0:
            raise PeerError("a peer sent a piece of a state that is outside of its tensor")
        if name not in self._tensors and piece.numel() == size:
            place = self._place(name, shape, piece.dtype)
            self._tensors[name] = piece.view(shape) if place is None else place.copy_(piece.view(shape))
        else:
            if name not in self._tensors:
                place = self._place(name, shape, piece.dtype)
                self._tensors[name] = torch.empty(shape, dtype=piece.dtype) if place is None else place
            self._tensors[name].view(-1)[at : at + piece.numel()].copy_(piece, non_blocking=True)
        self._pieces.add((name, at))
