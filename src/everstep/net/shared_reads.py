"""Storage that the workers of a stage read together: every byte by one of them, who gives it to the others.

All replicas of a stage load the same checkpoint at the same time, in the same order. What they read is cut
into units; a unit is dealt to one reader by its place in its file, and the others ask that reader for it:

    worker's thread   read(file, at, out): asks for the units of others, reads its own, waits for the rest
    links' thread     takes units that come, and puts asks aside
    giver's thread    reads what it is asked for, or has it still, and sends it

A reader keeps its units for a while: whoever runs ahead of a peer by more than WINDOW waits for it, so what
a peer has not asked for yet is still there. The slowest never waits. A unit that is gone is read again.

No one depends on a peer: one that dies, refuses, or says nothing for PATIENCE_S is passed over, and its units
are dealt to those that are left, the reader itself last of all. The caller checks the bytes by their hashes.
Small reads are not worth a message: everybody makes them for itself.

Rejected: one replica that loads while the others join it. Training would begin with one replica, and the
state would cross the links after it was read, not while it is.
"""

from __future__ import annotations

import mmap
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from everstep.log import warn
from everstep.net import frames
from everstep.net.envelope import AskUnit, Envelope, FrameKind, GiveUnit
from everstep.net.links import Address

UNIT = 4 << 20
SMALLEST = 16 << 10  # less is read by everybody
WINDOW = 32 << 20  # the most that a reader is ahead of another
KEPT = 2 * WINDOW  # of units that peers may still ask for
PATIENCE_S = 10.0
LINGER_S = 10.0  # after the last ask, once its own load is over
MOST_EARLY = 1024  # asks that came before the load began here


class Unit(NamedTuple):
    file: str
    at: int
    size: int


class Storage(Protocol):
    def read(self, file: str, at: int, out: memoryview) -> None:
        """Fill `out`, or raise OSError or KeyError."""
        ...

    def close(self) -> None: ...


class SharedReads:
    """Of one worker: the load that it takes part in."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._load: SharedLoad | None = None
        self._early: deque[AskUnit] = deque(maxlen=MOST_EARLY)

    def begin(self, step: int, me: int, peers: Mapping[int, Address], storage: Storage) -> SharedLoad:
        """`peers`: the other replicas that load this step's state. The storage is closed when none of them
        can need it any more.
        """
        with self._lock:
            if self._load is not None:
                self._load.leave()
            self._load = load = SharedLoad(step, me, peers, storage, self._send)
            early = [ask for ask in self._early if ask.step == step]
            self._early.clear()
        for ask in early:
            load.asked(ask)
        load.start()
        return load

    def arrived(self, frame: frames.Incoming) -> bool:
        """True: the message belongs here."""
        if frame.kind is not FrameKind.READ:
            return False
        said = frame.envelope.value
        with self._lock:
            load = self._load if self._load is not None and self._load.step == said.step else None
            if load is None and isinstance(said, AskUnit):
                self._early.append(said)
        if load is not None and isinstance(said, AskUnit):
            load.asked(said)
        elif load is not None:
            load.given(said, frame.tensor)
        return True

    def link_broke(self, address: Address) -> None:
        with self._lock:
            load = self._load
        if load is not None:
            load.link_broke(address)


class SharedLoad:
    def __init__(
        self, step: int, me: int, peers: Mapping[int, Address], storage: Storage, send: Callable[..., None]
    ) -> None:
        assert me not in peers
        self.step, self._me, self._peers = step, me, dict(peers)
        self._readers = sorted([me, *peers])
        self._storage, self._send = storage, send
        self.from_peers = 0  # bytes
        self.counts = True  # is what is read now read by every peer? Only then does it tell how far this is
        self._changed = threading.Condition()  # guards all of the rest
        self._position = 0
        self._gone: set[int] = set()  # peers that are asked for nothing any more
        self._heard: dict[int, float] = {}
        self._wanted: set[Unit] = set()
        self._given: dict[Unit, Tensor] = {}
        self._reading: set[Unit] = set()
        self._kept: OrderedDict[Unit, Tensor] = OrderedDict()
        self._kept_bytes = 0
        self._asks: deque[AskUnit] = deque()
        self._over: bool | None = None  # has this worker's own load ended, and well?
        self._left = False
        self._thread = threading.Thread(target=self._give, name="shared reads", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -------------------------------------------------------------- the worker's thread

    def read(self, file: str, at: int, out: memoryview) -> None:
        with self._changed:
            self._position += len(out) if self.counts else 0
            self._changed.notify_all()
        if len(out) < SMALLEST:
            self._storage.read(file, at, out)
            return
        units = [Unit(file, at + i, min(UNIT, len(out) - i)) for i in range(0, len(out), UNIT)]
        asked = {unit: self._ask(unit) for unit in units}
        for unit in sorted(units, key=lambda unit: asked[unit] != self._me):  # meanwhile its own
            found = self._fetched(unit, asked[unit])
            out[unit.at - at :][: unit.size] = frames.raw(found)

    def end(self, *, whole: bool) -> None:
        """This worker has loaded all it needs, or has failed. Peers may still ask."""
        with self._changed:
            self._over = whole
            self._changed.notify_all()

    def leave(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def _dealt_to(self, unit: Unit) -> int:
        first = zlib.crc32(unit.file.encode()) + unit.at // UNIT
        count = len(self._readers)
        ring = (self._readers[(first + i) % count] for i in range(count))
        return next(reader for reader in ring if reader not in self._gone)

    def _ask(self, unit: Unit) -> int:
        """Whose it is; asked for, if it is another's."""
        with self._changed:
            owner = self._dealt_to(unit)
            if owner == self._me:
                return owner
            self._wanted.add(unit)
            self._heard[owner] = time.monotonic()  # from now on it has time to answer
            position = self._position
        ask = AskUnit(self.step, *unit, position, self._me)
        self._send(self._peers[owner], FrameKind.READ, Envelope(ask))
        return owner

    def _fetched(self, unit: Unit, owner: int) -> Tensor:
        while owner != self._me:
            with self._changed:
                while unit not in self._given and owner not in self._gone:
                    left = self._heard[owner] + PATIENCE_S - time.monotonic()
                    if left <= 0:
                        self._pass_over(owner, f"has not answered for {PATIENCE_S:.0f} s")
                    else:
                        self._changed.wait(left)
                found = self._given.pop(unit, None)
                self._wanted.discard(unit)
            if found is not None:
                self.from_peers += unit.size
                return found
            owner = self._ask(unit)
        return self._own(unit)

    def _pass_over(self, peer: int, why: str) -> None:
        """The caller holds the lock."""
        if peer not in self._gone and not self._over:
            warn(f"replica {peer} {why}: what it was to read of step {self.step} is read by others")
        self._gone.add(peer)
        self._changed.notify_all()

    # -------------------------------------------------------------- the links' thread

    def asked(self, ask: AskUnit) -> None:
        with self._changed:
            if ask.replica not in self._peers or not 0 < ask.size <= UNIT:
                return
            if not self._left:
                self._asks.append(ask)
                self._changed.notify_all()
                return
        self._say(ask)

    def given(self, said: GiveUnit, tensor: Tensor | None) -> None:
        unit = Unit(said.file, said.at, said.size)
        with self._changed:
            if said.replica not in self._peers or unit not in self._wanted:
                return
            self._heard[said.replica] = time.monotonic()
            if tensor is None or tensor.dtype is not torch.uint8 or tensor.numel() != unit.size:
                self._pass_over(said.replica, "cannot read its share")
            else:
                self._given[unit] = tensor
                self._changed.notify_all()

    def link_broke(self, address: Address) -> None:
        with self._changed:
            for peer in [peer for peer, at in self._peers.items() if at == address]:
                self._pass_over(peer, "is not connected any more")

    # -------------------------------------------------------------- the giver's thread

    def _give(self) -> None:
        while (ask := self._next_ask()) is not None:
            self._answer(ask)
        with self._changed:
            self._changed.wait_for(lambda: self._over is not None)  # its own load reads there
            self._left = True
            self._kept.clear()
            late = list(self._asks)
        self._storage.close()
        for ask in late:
            self._say(ask)

    def _next_ask(self) -> AskUnit | None:
        """None: it is time to leave."""
        with self._changed:
            while not self._left:
                for ask in self._asks:
                    if self._over is not None or ask.position <= self._position + WINDOW:
                        self._asks.remove(ask)
                        return ask
                timeout = LINGER_S if self._over is not None else None
                if not self._changed.wait(timeout) and self._over is not None:
                    break
        return None

    def _answer(self, ask: AskUnit) -> None:
        unit = Unit(ask.file, ask.at, ask.size)
        try:
            self._say(ask, *(() if self._over is False else (self._own(unit),)))
        except (OSError, KeyError) as error:
            warn(f"a peer asks for {unit.size} bytes of {unit.file}, which cannot be read: {error}")
            self._say(ask)

    def _say(self, ask: AskUnit, *found: Tensor) -> None:
        """Nothing found: it is refused."""
        said = GiveUnit(self.step, ask.file, ask.at, ask.size, self._me)
        self._send(self._peers[ask.replica], FrameKind.READ, Envelope(said), *found)

    # -------------------------------------------------------------- both

    def _own(self, unit: Unit) -> Tensor:
        """From storage, or what was read there before."""
        with self._changed:
            self._changed.wait_for(lambda: unit not in self._reading)
            if unit in self._kept:
                self._kept.move_to_end(unit)
                return self._kept[unit]
            self._reading.add(unit)
        try:
            # A mapping of its own: in the heap it would leave a hole between tensors that stay.
            found = torch.frombuffer(mmap.mmap(-1, unit.size), dtype=torch.uint8)
            self._storage.read(unit.file, unit.at, frames.raw(found))
            with self._changed:
                self._keep(unit, found)
        finally:
            with self._changed:
                self._reading.discard(unit)
                self._changed.notify_all()
        return found

    def _keep(self, unit: Unit, found: Tensor) -> None:
        self._kept[unit] = found
        self._kept_bytes += unit.size
        while self._kept_bytes > KEPT:
            _, old = self._kept.popitem(last=False)
            self._kept_bytes -= old.numel()
