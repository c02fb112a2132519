"""What the shards of one worker say to each other. Shard 0 leads: it alone hears the agent and decides.

    leader ──► follower     what has happened, in the leader's order, and when to look for the next work item
    follower ──► leader     what is here for it: its slices of parcels and of states, its reports

Every shard has the same worker state and is given the same events in the same order, so every one finds the
same work item. A parcel counts only once each shard has its own slice of it: then no shard waits for bytes
while the others wait for it in a collective.
"""

from __future__ import annotations

from everstep.protocol.events import RaisedFor
from everstep.protocol.messages import (
    PartWritten,
    SaveFailed,
    StateFetched,
    TimePassed,
    WorkerOrder,
)
from everstep.protocol.parcels import Parcel, StateTransfer
from everstep.protocol.table import WORKER, message
from everstep.protocol.work import Facts, LinkBroke, LinkOpened


class ToShard:
    """From the leader to the other shards."""

    __slots__ = ()


class FromShard:
    """From another shard to the leader."""

    __slots__ = ()


@message(by=WORKER, says="the leader has taken {event}")
class ShardTakes(ToShard):
    """What the leader has taken from its inbox."""

    event: WorkerOrder | LinkBroke | LinkOpened | TimePassed
    now: float


@message(by=WORKER, says="{parcel} counts from now on")
class ShardReceives(ToShard):
    """The parcel counts from now on."""

    parcel: Parcel
    value: Facts = None  # of a parcel without tensors


@message(by=WORKER, says="{parcel} is of no use")
class ShardDrops(ToShard):
    """The parcel is of no use."""

    parcel: Parcel


@message(by=WORKER, says="the state of {transfer} is loaded")
class ShardLoads(ToShard):
    """The state of this transfer is whole on every shard: it is loaded."""

    transfer: StateTransfer


@message(by=WORKER, says="run the next work item")
class ShardLooks(ToShard):
    """Find the next work item, and run it."""


@message(by=WORKER, says="{parcel} is here")
class ParcelIsHere(FromShard):
    """This shard has its slice of the parcel."""

    parcel: Parcel


@message(by=WORKER, says="the state of {transfer} is here")
class StateIsHere(FromShard):
    """This shard has its slice of the state."""

    transfer: StateTransfer


@message(by=WORKER, says="a link of this shard: {event}")
class ShardLink(FromShard):
    """A connection of this shard broke, or is open. The peer is known by the address of its own leader."""

    event: LinkBroke | LinkOpened


@message(by=WORKER, says="a report of this shard")
class ShardReports(FromShard):
    """A report of this shard, for the agent."""

    report: PartWritten | SaveFailed | StateFetched


@message(by=WORKER, says="this shard raised {error}")
class ShardRaised(FromShard):
    """This shard has raised an exception."""

    error: str
    traceback: str
    raised_for: RaisedFor = RaisedFor.UNKNOWN
