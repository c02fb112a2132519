"""What the shards of one worker say to each other. Shard 0 leads: it alone hears the agent and decides.

    leader ──► follower     what has happened, in the leader's order, and when to look for the next work item
    follower ──► leader     what is here for it: its slices of parcels and of states, its reports

Every shard has the same worker state and is given the same events in the same order, so every one finds the
same work item. A parcel counts only once each shard has its own slice of it: then no shard waits for bytes
while the others wait for it in a collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from everstep.protocol.agent_messages import EndWorker, PlantFaults
from everstep.protocol.cluster_messages import NotifyWorker, PartWritten, SaveFailed, StateFetched, TimePassed
from everstep.protocol.links import LinkBroke, LinkOpened
from everstep.protocol.worker_messages import Parcel, StateTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTakes:
    """What the leader has taken from its inbox."""

    event: NotifyWorker | EndWorker | PlantFaults | LinkBroke | LinkOpened | TimePassed
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReceives:
    """The parcel counts from now on."""

    parcel: Parcel
    value: Any = None  # of a parcel without tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDrops:
    """The parcel is of no use."""

    parcel: Parcel


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLoads:
    """The state of this transfer is whole on every shard: it is loaded."""

    transfer: StateTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLooks:
    """Find the next work item, and run it."""


ToShard = ShardTakes | ShardReceives | ShardDrops | ShardLoads | ShardLooks


@dataclass(frozen=True, slots=True, kw_only=True)
class ParcelIsHere:
    parcel: Parcel


@dataclass(frozen=True, slots=True, kw_only=True)
class StateIsHere:
    transfer: StateTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLink:
    """A connection of this shard broke, or is open. The peer is known by the address of its own leader."""

    event: LinkBroke | LinkOpened


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReports:
    report: PartWritten | SaveFailed | StateFetched


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRaised:
    error: str
    traceback: str


FromShard = ParcelIsHere | StateIsHere | ShardLink | ShardReports | ShardRaised
