"""The leader's side of a worker's shards: what is here on all of them, and what they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from everstep.core.words import shard_messages as sh
from everstep.core.words.agent_messages import WorkerReport
from everstep.core.words.cluster_messages import PartWritten
from everstep.core.words.worker_messages import Parcel, ParcelKind, StateTransfer

SMALL = frozenset({ParcelKind.HELD, ParcelKind.NEWS})  # without tensors: only leaders send them


@dataclass(frozen=True, slots=True)
class FollowerSays:
    shard: int
    message: sh.FromShard


@dataclass(frozen=True, slots=True)
class Contents:
    """Of a parcel: facts for the worker state, tensors, and facts beside them."""

    facts: Any
    tensors: tuple[Tensor, ...]
    beside: Any


class ShardLeader:
    """`tell` reaches every follower. `report` reaches the agent."""

    def __init__(
        self, count: int, tell: Callable[[sh.ToShard], None], report: Callable[[WorkerReport], None]
    ) -> None:
        self.count, self.tell, self._report = count, tell, report
        self._parcels: dict[Parcel, Contents] = {}  # this shard's own
        self._have: dict[Parcel, set[int]] = {}  # the followers that have theirs
        self._states: dict[StateTransfer, dict[str, Tensor]] = {}
        self._have_state: dict[StateTransfer, set[int]] = {}
        self._lock = threading.Lock()  # reports come from several threads
        self._copies: dict[tuple[int, int, str], dict[int, Any]] = {}  # step, attempt, node -> part per shard

    # -------------------------------------------------------------- parcels

    def own(self, parcel: Parcel, contents: Contents) -> bool:
        """This shard has its slice. True: so have all."""
        self._parcels[parcel] = contents
        return self._is_whole(parcel)

    def others(self, shard: int, parcel: Parcel) -> bool:
        self._have.setdefault(parcel, set()).add(shard)
        return self._is_whole(parcel)

    def take(self, parcel: Parcel) -> Contents:
        """Of a parcel that is whole."""
        del self._have[parcel]
        return self._parcels.pop(parcel)

    def forget_before(self, step: int) -> None:
        """What never became whole (its sender died) and is of no use any more."""
        for table in (self._parcels, self._have):
            for parcel in [p for p in table if p.step < step and p.what is not ParcelKind.FEED]:
                del table[parcel]

    def _is_whole(self, parcel: Parcel) -> bool:
        return parcel in self._parcels and len(self._have.get(parcel, ())) == self.count - 1

    # -------------------------------------------------------------- states

    def own_state(self, transfer: StateTransfer, state: dict[str, Tensor]) -> bool:
        self._states[transfer] = state
        return self._has_state(transfer)

    def others_state(self, shard: int, transfer: StateTransfer) -> bool:
        self._have_state.setdefault(transfer, set()).add(shard)
        return self._has_state(transfer)

    def take_state(self, transfer: StateTransfer) -> dict[str, Tensor]:
        found = self._states[transfer]
        self._states.clear()
        self._have_state.clear()
        return found

    def _has_state(self, transfer: StateTransfer) -> bool:
        return transfer in self._states and len(self._have_state.get(transfer, ())) == self.count - 1

    # -------------------------------------------------------------- reports

    def report(self, shard: int, report: WorkerReport) -> None:
        """Copies in memory are one copy of the worker once every shard has its own."""
        if not isinstance(report, PartWritten) or report.memory_of is None:
            self._report(report)
            return
        with self._lock:
            parts = self._copies.setdefault((report.step, report.attempt, report.memory_of), {})
            parts[shard] = report.part
            if len(parts) < self.count:
                return
            for key in [key for key in self._copies if key[2] == report.memory_of and key[0] <= report.step]:
                del self._copies[key]
        self._report(replace(report, part={"shards": [parts[i] for i in range(self.count)]}))
