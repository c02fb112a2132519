"""The work of a worker: what it reports of it, what it is ordered, and what its state asks of the loop that
runs it. Parcels, which workers send each other, are in `parcels`.

A new epoch is told in two parts, because a task may have thousands of workers and a death changes little:

    EpochFacts   what all workers have in common: one copy per node, and of it only the changes
    OwnOrders    what one worker alone does

    coordinator ──► ResumeTask(facts, own orders of every worker of the node) ──► agent ──► ResumeWorker
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from everstep.errors import PeerError
from everstep.protocol.ops import Kind, Microbatch, Op, Replicas, Worker, parse_ops
from everstep.protocol.parcels import Parcel, StateTransfer
from everstep.protocol.routes import Routes
from everstep.protocol.table import Json

Place = tuple[Microbatch, int]  # (microbatch, part of the model): with one part per worker, its stage
# Opaque to decisions; which type each one has follows from what it goes with.
Facts = Any  # with a parcel, by its kind
Answer = Any  # of the shell to a work item, by the item
Payload = Any  # of a parcel or a state: tensors, which the shell keeps


@dataclass(frozen=True, slots=True)
class Members:
    """Who makes up the stages, from a step on."""

    from_step: int
    live: tuple[Replicas, ...]  # per stage
    rounds: tuple[int, ...]  # per stage, the epoch in which this group was formed
    holders: tuple[tuple[tuple[int, ...], ...], ...] = ()  # sharded: per stage and chunk, the owner first


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a worker has done, reported when it is asked to pause."""

    step: int  # the step it is in; all earlier ones are updated
    done: tuple[Op, ...] = ()  # its ops of that step; R once it holds the sum
    done_before: tuple[Op, ...] = ()  # its ops of the step before, while that one is open somewhere
    holding: tuple[Parcel, ...] = ()  # activations and gradients it has received and not used
    joining: bool = False  # not yet a member: its state is that after `step - 1`
    chunks: tuple[int, ...] = ()  # sharded: those whose optimizer state it has
    shares: tuple[tuple[int, int, float], ...] = ()  # step, stage, its part of the norm, of other stages
    norms: tuple[tuple[int, bool], ...] = ()  # step, did its norm allow an eager update; where it is known
    # The same, as a recovery needs it: found when a ledger arrives, not for thousands of them when all have.
    kinds: Mapping[Place, str] = field(init=False, compare=False, repr=False)  # of `done`, in the order FIW
    kinds_before: Mapping[Place, str] = field(init=False, compare=False, repr=False)  # of `done_before`
    has_sum: bool = field(init=False, compare=False, repr=False)  # of the step it is in

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", _kinds(self.done))
        object.__setattr__(self, "kinds_before", _kinds(self.done_before))
        object.__setattr__(self, "has_sum", any(op.kind is Kind.R for op in self.done))


def _kinds(ops: tuple[Op, ...]) -> dict[Place, str]:
    found: dict[Place, str] = {}
    for op in ops:
        if op.microbatch is not None:
            place = (op.microbatch, op.stage)
            found[place] = found.get(place, "") + op.kind
    return {place: "".join(kind for kind in "FIW" if kind in done) for place, done in found.items()}


# ------------------------------------------------------------------ what a worker is told of an epoch


QUIET_STEPS = 20  # after one that came from data or model no step is held back


def is_quiet(step: int, odd: int | None) -> bool:
    """Is this step not looked into, as this odd one came from data or model? Earlier ones are: a task may go
    back.
    """
    return odd is not None and odd <= step <= odd + QUIET_STEPS


def mean_loss(losses: Iterable[tuple[Microbatch, float]]) -> float | None:
    """Of a step; None: no loss is known. All who judge a step must get the same bits, in any order of the
    losses and on any Python (`sum` is another one from 3.12 on), so the sum is exact.
    """
    found = [loss for _, loss in losses]
    if not found:
        return None
    try:
        return math.fsum(found) / len(found) if all(map(math.isfinite, found)) else math.nan
    except OverflowError:
        return math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectedStep:
    """A step with a NaN, or with a loss far above those before it. It is computed again from its beginning;
    where there are votes, a second worker computes every microbatch of it, too.
    """

    step: int
    loss: float  # the mean, the first time; NaN: it is not finite
    stage: int = -1  # whose gradient was not finite, though the loss was; -1: the loss is meant
    losses: tuple[tuple[Microbatch, float], ...] = ()  # the largest of them
    skips: bool = False  # if its loss has the same bits again, it changes no weight

    @property
    def is_nan(self) -> bool:
        return self.stage >= 0 or math.isnan(self.loss)

    def is_again(self, loss: float) -> bool:
        """The same loss as the first time."""
        return loss == self.loss or (not math.isfinite(loss) and math.isnan(self.loss))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFacts:
    """What all workers of a task are told of an epoch; `Resume` says what each is."""

    epoch: int
    attempts: tuple[tuple[int, int], ...]
    members: tuple[Members, ...]
    hosts: Mapping[int, Mapping[Place, int]] = field(default_factory=dict)
    steady_hosts: Mapping[Place, int] = field(default_factory=dict)
    shares: tuple[tuple[int, int, float], ...] = ()
    rewind: int | None = None
    restore: int | None = None
    until: int | None = None
    saves: bool = False
    recorded: int = 0
    votes_from: int | None = 0
    suspect: SuspectedStep | None = None
    book: Mapping[Worker, tuple[str, int]] = field(default_factory=dict)  # where each worker is reached


@dataclass(frozen=True, slots=True, kw_only=True)
class FactChanges:
    """The facts of an epoch for one who knows those of epoch `since`: addresses, and holders of chunks, are
    thousands, and few of them change.
    """

    since: int
    facts: EpochFacts  # without addresses and holders
    book: Mapping[Worker, tuple[str, int]]  # new or changed
    gone: tuple[Worker, ...]  # who is in the book no more
    holders: tuple[tuple[tuple[int, int, tuple[int, ...]], ...], ...]  # by row of members: stage, chunk, who


def changes(before: EpochFacts, after: EpochFacts) -> FactChanges | None:
    """`applied` is the inverse. None: they have too little in common."""
    old = before.members[-1].holders if before.members else ()
    rows = [_changed_holders(old, members.holders) for members in after.members]
    if any(row is None for row in rows):
        return None
    bare = tuple(replace(members, holders=()) for members in after.members)
    return FactChanges(
        since=before.epoch,
        facts=replace(after, members=bare, book={}),
        book={w: address for w, address in after.book.items() if before.book.get(w) != address},
        gone=tuple(worker for worker in before.book if worker not in after.book),
        holders=tuple(row for row in rows if row is not None),
    )


def applied(before: EpochFacts | None, news: EpochFacts | FactChanges | None) -> EpochFacts:
    """The whole facts, for one who knows those of an earlier epoch."""
    if isinstance(news, EpochFacts):
        return news
    known = None if before is None else before.epoch
    if news is None or before is None or known != news.since:
        since = None if news is None else news.since
        raise PeerError(f"facts since epoch {since} do not help one who knows those of epoch {known}")
    old = before.members[-1].holders if before.members else ()
    members = tuple(
        replace(row, holders=_with_changes(old, changed))
        for row, changed in zip(news.facts.members, news.holders, strict=True)
    )
    gone = frozenset(news.gone)
    book = {worker: address for worker, address in before.book.items() if worker not in gone}
    return replace(news.facts, members=members, book=book | dict(news.book))


Holders = tuple[tuple[tuple[int, ...], ...], ...]  # per stage and chunk


def _changed_holders(before: Holders, after: Holders) -> tuple[tuple[int, int, tuple[int, ...]], ...] | None:
    if [len(chunks) for chunks in before] != [len(chunks) for chunks in after]:
        return None
    return tuple(
        (stage, chunk, new)
        for stage, (old_chunks, new_chunks) in enumerate(zip(before, after, strict=True))
        if old_chunks is not new_chunks
        for chunk, (old, new) in enumerate(zip(old_chunks, new_chunks, strict=True))
        if old != new
    )


def _with_changes(before: Holders, changed: tuple[tuple[int, int, tuple[int, ...]], ...]) -> Holders:
    stages = [list(chunks) for chunks in before]
    for stage, chunk, holders in changed:
        stages[stage][chunk] = holders
    return tuple(map(tuple, stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOrders:
    """What one worker alone is told of an epoch; `Resume` says what each is. Ops are in their notation."""

    step: int
    lists: Mapping[int, str] = field(default_factory=dict)  # where they are not the steady ones
    steady: str = ""
    ghosts: frozenset[tuple[int, Microbatch]] = frozenset()
    give: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    awaits: frozenset[int] = frozenset()
    feeds: Mapping[int, int | None] = field(default_factory=dict)
    fills: tuple[tuple[int, int, int], ...] = ()


class MemoryAddress(NamedTuple):
    """The memory of a node, as other nodes reach it."""

    node: str
    host: str
    port: int


PartHolder = tuple[MemoryAddress, Json]  # whose memory, and the part that it has


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDirections:
    """What orders say about states: where copies go, whether one is left behind, where to load from."""

    copy_to: MemoryAddress | None = None
    copy_at_end: bool = True  # on its own node, when its shape ends; a peer on its node may do so
    copy_away: bool = False  # that one goes to `copy_to` too, because its node is to be emptied
    copies: tuple[PartHolder, ...] = ()  # empty: the state is on disk
    other_holders: tuple[tuple[PartHolder, ...], ...] = ()  # of every part, in turn


def resume(facts: EpochFacts, own: OwnOrders) -> Resume:
    """Both parts put together."""
    return Resume(
        epoch=facts.epoch,
        attempts=facts.attempts,
        step=own.step,
        lists={step: parse_ops(ops) for step, ops in own.lists.items()},
        steady=parse_ops(own.steady),
        hosts=facts.hosts,
        steady_hosts=facts.steady_hosts,
        members=facts.members,
        ghosts=own.ghosts,
        give=own.give,
        awaits=own.awaits,
        feeds=own.feeds,
        rewind=facts.rewind,
        shares=facts.shares,
        fills=own.fills,
        restore=facts.restore,
        until=facts.until,
        saves=facts.saves,
        recorded=facts.recorded,
        votes_from=facts.votes_from,
        suspect=facts.suspect,
        book=facts.book,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """All a worker needs to resume: the rest of the broken steps, and the step that repeats after them."""

    epoch: int
    attempts: tuple[tuple[int, int], ...]  # (from this step on, attempt), ascending
    step: int  # the step the worker is in when it goes on
    lists: Mapping[int, tuple[Op, ...]] = field(default_factory=dict)  # for these steps
    steady: tuple[Op, ...] = ()  # for all later ones
    hosts: Mapping[int, Mapping[Place, int]] = field(default_factory=dict)  # where it is not the home
    steady_hosts: Mapping[Place, int] = field(default_factory=dict)
    members: tuple[Members, ...] = ()
    ghosts: frozenset[tuple[int, Microbatch]] = frozenset()  # (step, microbatch) to run for outputs only
    give: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # step -> peers that lack its sum
    awaits: frozenset[int] = frozenset()  # steps whose sum this worker is given: it adds up nothing itself
    feeds: Mapping[int, int | None] = field(default_factory=dict)  # joining replica -> last step to feed it
    rewind: int | None = None  # undo this step's eager update, and decide it again
    shares: tuple[tuple[int, int, float], ...] = ()  # step, stage, its part of the norm: who knew may be dead
    fills: tuple[tuple[int, int, int], ...] = ()  # sharded: chunk, replica to send its state to, from step
    restore: int | None = None  # load the state kept of this step (0: the initial state)
    # The last step of this shape: after it the state is copied to memory, and that is all.
    until: int | None = None
    saves: bool = False  # the state of the step `until` is saved as a checkpoint
    recorded: int = 0  # the coordinator knows that this step and all before it are sealed
    votes_from: int | None = 0  # from this step on peers check each other, in steps that the task's rules say
    suspect: SuspectedStep | None = None  # a step that is computed again; it is not held back twice
    book: Mapping[Worker, tuple[str, int]] = field(default_factory=dict)  # where each worker is reached

    def attempt(self, step: int) -> int:
        if len(self.attempts) == 1:
            return self.attempts[0][1]
        return [attempt for first, attempt in self.attempts if first <= step][-1]

    def ops(self, step: int) -> tuple[Op, ...]:
        return self.lists.get(step, self.steady)

    def host(self, step: int, microbatch: Microbatch, stage: int) -> int:
        return self.hosts.get(step, self.steady_hosts).get((microbatch, stage), microbatch.home)

    def members_at(self, step: int) -> Members:
        if len(self.members) == 1:
            return self.members[0]
        fitting = [m for m in self.members if m.from_step <= step]
        return fitting[-1] if fitting else self.members[0]


# ------------------------------------------------------------------ what a worker's state asks its loop to do


@dataclass(frozen=True, slots=True)
class Compute:
    """Run F, I, W or B of one microbatch. Its input is the parcel in hand, if any; its output is `output`.

    A ghost is run for its output alone, which died with its holder; its gradients are in the sum already. But
    its stash is kept until `DropStashes`: if the sum is lost too, its W is owed after all.
    """

    op: Op
    step: int
    input: Parcel | None
    output: Parcel | None
    ghost: bool = False
    hashed: bool = False  # a peer computes it again. Answer, of its last op: the hashes by name


@dataclass(frozen=True, slots=True)
class HashState:
    """Answer: the hashes of weights and optimizer state as they are before this step's update, by name."""

    step: int


@dataclass(frozen=True, slots=True)
class Recompute:
    """Compute F, I and W of a microbatch that another worker hosts, `runs` times, and add nothing to any sum.
    `replay`: the inputs are in this parcel. Answer: of each run the hashes of what was made, by name.
    """

    step: int
    microbatch: Microbatch
    activation: Parcel | None = None
    gradient: Parcel | None = None
    replay: Parcel | None = None
    runs: int = 1


@dataclass(frozen=True, slots=True)
class Contribute:
    """Close the step's gradients. Answer: the losses of the microbatches run here, at the last stage, the
    weight of each microbatch, and in a step that evaluates, the scores found here.
    """

    step: int


@dataclass(frozen=True, slots=True)
class GatherParts:
    """Add up the parts of this node for an owner on another one: `into` is what it will be sent."""

    step: int
    routes: Routes
    parts: tuple[Parcel, ...]
    into: Parcel


@dataclass(frozen=True, slots=True)
class SumChunk:
    """Add up the parts of the chunks that are ours, in the order of replicas, and divide by `weight`.

    Answer: the sum of squares of each chunk's quotient. Chunks are the same whichever workers live: only
    their owners change.
    """

    step: int
    routes: Routes
    parts: tuple[Parcel, ...]
    weight: float  # of all the step's microbatches
    chunks: tuple[int, ...] = ()  # sharded: those that this worker owns


@dataclass(frozen=True, slots=True)
class AssembleSum:
    """Put the chunks of all owners together, or take a peer's whole sum.

    Answer: the whole sum's sum of squares where it is not that of its chunks (a tied pair inside one stage),
    else None.
    """

    step: int
    routes: Routes
    chunks: tuple[Parcel, ...]  # sharded: of each owner, the chunks that this worker holds too


@dataclass(frozen=True, slots=True)
class CombineTied:
    """Add the tied tensor's other half, lower stage first. Answer: the stage's sum of squares."""

    step: int
    other: Parcel


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step. `scale` None: a skipped step.

    `keep`: it may have to be undone. Then only what the layers compute with changes; the optimizer's own
    state follows with `Commit`, or never.
    """

    step: int
    scale: float | None
    keep: bool
    chunks: tuple[int, ...] = ()  # sharded: those that this worker holds


@dataclass(frozen=True, slots=True)
class AdoptWeights:
    """Sharded: take over the working weights of the chunks that others have updated."""

    step: int
    weights: tuple[Parcel, ...]


@dataclass(frozen=True, slots=True)
class LoadFill:
    """Sharded: take over the optimizer state of a chunk."""

    fill: Parcel


@dataclass(frozen=True, slots=True)
class Commit:
    """The update that was made eagerly holds: make it again, in the optimizer's state."""

    step: int


@dataclass(frozen=True, slots=True)
class Undo:
    """Take the eager update back, exactly: compute with the weights that the optimizer's state has."""

    step: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy the state as it is now, and stream the copy to a joining peer."""

    joiner: int
    transfer: StateTransfer


@dataclass(frozen=True, slots=True)
class ApplyFeed:
    """A joining worker follows a step it took no part in."""

    step: int
    scale: float | None
    feed: Parcel


@dataclass(frozen=True, slots=True)
class Restore:
    """Load the state kept of this step, or build the initial state for 0. Answer: False if it is gone."""

    state_step: int


@dataclass(slots=True)
class WrittenParts:
    """The parts of a checkpoint in its folder: per stage, by how many workers share it, which part."""

    attempt: int = 0  # at that step: parts of two attempts are not one checkpoint
    stages: dict[int, dict[int, dict[int, Json]]] = field(default_factory=dict)

    def add(self, stage: int, share: tuple[int, int], part: Json) -> None:
        index, count = share
        self.stages.setdefault(stage, {}).setdefault(count, {})[index] = part

    def whole(self, stages: int) -> tuple[Json, ...] | None:
        """All parts, if no stage lacks one."""
        found: list[Json] = []
        for stage in range(stages):
            by_count = self.stages.get(stage, {})
            counts = [count for count, written in by_count.items() if len(written) == count]
            if not counts:
                return None
            written = by_count[min(counts)]
            found += [written[index] for index in sorted(written)]
        return tuple(found)


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Write a share of this stage's part of the checkpoint: the `index`-th of `count`, one a live peer."""

    state_step: int
    attempt: int  # at that step
    index: int = 0
    count: int = 1
    chunks: tuple[int, ...] = ()  # sharded: these of `count` chunks, one part each
    last: bool = False  # no later one will be written in its place


@dataclass(frozen=True, slots=True)
class StoreCopy:
    """Copy the state to memory that outlives this worker. `leaving`: it is this worker's last deed."""

    state_step: int
    attempt: int  # at that step
    leaving: bool = False
    chunks: tuple[int, ...] = ()  # sharded: these alone


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until something arrives."""

    missing: str


@dataclass(frozen=True, slots=True)
class Paused:
    """Between an interrupt and the order to resume."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last step is updated, sealed and valid."""


WorkItem = (
    Compute
    | HashState
    | Recompute
    | Contribute
    | GatherParts
    | SumChunk
    | AssembleSum
    | CombineTied
    | Update
    | AdoptWeights
    | LoadFill
    | Commit
    | Undo
    | Snapshot
    | ApplyFeed
    | Restore
    | SaveCheckpoint
    | StoreCopy
    | Wait
    | Paused
    | Finished
)


# ------------------------------------------------------------------ what it asks its shell to do meanwhile


@dataclass(frozen=True, slots=True)
class Send:
    """Send a parcel to the worker of this replica and stage. `value` are the small facts that go with it."""

    parcel: Parcel
    replica: int
    stage: int
    value: Facts = None


@dataclass(frozen=True, slots=True)
class Forget:
    """Free the payloads of these parcels."""

    parcels: tuple[Parcel, ...]


@dataclass(frozen=True, slots=True)
class ReleaseGradients:
    """This worker holds the sum of this step: its local gradients are not needed again."""

    step: int


@dataclass(frozen=True, slots=True)
class DropStashes:
    """Let go of what F and I of these microbatches left for a W: their gradients are in the sum, here."""

    step: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class ReleaseSum:
    """Sealed, valid and fed: the sum of this step is not needed again."""

    step: int


@dataclass(frozen=True, slots=True)
class DiscardWork:
    """Throw away the stashes and gradients of this step and later ones (None: everything of every step)."""

    from_step: int | None


@dataclass(frozen=True, slots=True)
class ReleaseChunks:
    """Sharded: other replicas hold these chunks now; their state here is not needed again."""

    chunks: tuple[int, ...]


Command = Send | Forget | ReleaseGradients | DropStashes | ReleaseSum | ReleaseChunks | DiscardWork


# ------------------------------------------------------------------ its connections, as it hears of them

PeerAddress = tuple[str, int]  # host, port


@dataclass(frozen=True, slots=True)
class LinkBroke:
    """A connection to or from this address broke, or could not be opened."""

    address: PeerAddress
    error: str = ""


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """The peer at this address has answered on a new connection."""

    address: PeerAddress
