"""What the shards of one worker have in hand, and when it counts: for all of them, or for none.

Every shard has the same worker state and is given the same events in the same order (`shard_messages`). What
arrives, arrives on each shard by itself, as its own slice. The leader counts: a parcel or a state is whole
once every shard has its slice, and then the leader says to all of them that it counts. What a slice is made
of only the shell knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from everstep.core.worker.joining import FrameUse
from everstep.protocol import shard_messages as sh
from everstep.protocol.parcels import Parcel, ParcelKind, StateTransfer
from everstep.protocol.work import Payload

SMALL = frozenset({ParcelKind.HELD, ParcelKind.NEWS})  # without tensors: only leaders send them


class SliceCount:
    """The leader's: its own slices, and which followers have theirs."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._parcels: dict[Parcel, Payload] = {}  # this shard's own
        self._have: dict[Parcel, Counter[int]] = {}  # how often each follower said that it has its own
        self._states: dict[StateTransfer, Payload] = {}
        self._have_state: dict[StateTransfer, set[int]] = {}

    def __len__(self) -> int:
        """Parcels that are not whole."""
        return len(self._parcels.keys() | self._have.keys())

    def own(self, parcel: Parcel, contents: Payload) -> bool:
        """This shard has its slice. True: so have all."""
        self._parcels[parcel] = contents
        return self._is_whole(parcel)

    def others(self, shard: int, parcel: Parcel) -> bool:
        self._have.setdefault(parcel, Counter())[shard] += 1
        return self._is_whole(parcel)

    def take(self, parcel: Parcel) -> Payload:
        """Of a parcel that is whole. A slice that came twice is still there, as it is on its shard."""
        left = self._have.pop(parcel) - Counter(range(1, self.count))
        if left:
            self._have[parcel] = left
        return self._parcels.pop(parcel)

    def forget_before(self, step: int, attempt: Callable[[int], int]) -> None:
        """What never became whole (its sender died) and is of no use any more. A parcel of a later attempt
        than the one in force is kept: its step is about to be done again, and the order comes after it.
        """
        for parcel in _useless(self._parcels.keys() | self._have.keys(), step, attempt):
            self._parcels.pop(parcel, None)
            self._have.pop(parcel, None)

    def own_state(self, transfer: StateTransfer, state: Payload) -> bool:
        self._states[transfer] = state
        return self._has_state(transfer)

    def others_state(self, shard: int, transfer: StateTransfer) -> bool:
        self._have_state.setdefault(transfer, set()).add(shard)
        return self._has_state(transfer)

    def take_state(self, transfer: StateTransfer) -> Payload:
        found = self._states[transfer]
        self._states.clear()
        self._have_state.clear()
        return found

    def _is_whole(self, parcel: Parcel) -> bool:
        return parcel in self._parcels and len(self._have.get(parcel, ())) == self.count - 1

    def _has_state(self, transfer: StateTransfer) -> bool:
        return transfer in self._states and len(self._have_state.get(transfer, ())) == self.count - 1


class SlicesInHand:
    """A follower's: what has arrived for it, until the leader says that it counts.

    What the leader believes to be here must be here: a slice that has come twice is taken twice.
    """

    def __init__(self) -> None:
        self._parcels: dict[Parcel, Payload] = {}
        self._copies: Counter[Parcel] = Counter()
        self._states: dict[StateTransfer, Payload] = {}
        self._newest: StateTransfer | None = None

    def __len__(self) -> int:
        return len(self._parcels)

    def arrived(self, parcel: Parcel, contents: Payload) -> sh.ParcelIsHere:
        self._parcels[parcel] = contents
        self._copies[parcel] += 1
        return sh.ParcelIsHere(parcel=parcel)

    def take(self, parcel: Parcel) -> Payload:
        """None: it has no slice of it."""
        self._copies[parcel] -= 1
        if self._copies[parcel] > 0:
            return self._parcels[parcel]
        del self._copies[parcel]
        return self._parcels.pop(parcel, None)

    def forget_before(self, step: int, attempt: Callable[[int], int]) -> None:
        for parcel in _useless(self._parcels, step, attempt):
            del self._parcels[parcel], self._copies[parcel]

    def use(self, transfer: StateTransfer) -> FrameUse:
        """A frame of a state is here: the newest transfer counts; whether it does is the leader's to say."""
        if transfer == self._newest:
            return FrameUse.DROP if transfer in self._states else FrameUse.ADD
        if self._newest is not None and transfer < self._newest:
            return FrameUse.DROP
        self._newest = transfer
        return FrameUse.BEGIN

    def state_arrived(self, transfer: StateTransfer, state: Payload) -> sh.StateIsHere:
        self._states[transfer] = state
        return sh.StateIsHere(transfer=transfer)

    def take_state(self, transfer: StateTransfer) -> Payload:
        found = self._states[transfer]
        self._states.clear()
        return found


def _useless(parcels: Iterable[Parcel], step: int, attempt: Callable[[int], int]) -> list[Parcel]:
    """Of an earlier step, and of no later attempt at it than this worker knows of."""
    earlier = [p for p in parcels if p.step < step and p.what is not ParcelKind.FEED]
    return [p for p in earlier if p.attempt <= attempt(p.step)]
