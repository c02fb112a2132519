"""The tensors a worker keeps of its open steps, and the rules of who may write to them.

The worker state decides in names; here the names have tensors:

    boundaries   activations and gradients, received or made here    until the worker state says Forget
    payloads     parts, chunks and sums that were received           until the worker state says Forget
    gathered     parts of this node, for owners on other nodes       until it holds the stage's sum
    gradients    the sums of this worker's own microbatches          until it holds the stage's sum
    sums         the reduced mean gradient                           until sealed, valid and fed

Ownership. A send does not copy: the links *borrow* a tensor until the kernel has its last byte, which can be
many steps later when a large state is queued before it. Which buffers may be written to again is decided in
`core.worker.buffers`. Besides:

- Boundaries and payloads are never written to, by anyone.
- A sum does not change between its assembly and the seal: until then any part of it may be sent again. What
  an update needs beyond it (a tied pair inside the stage) is computed by the update, not stored in the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from everstep.core.worker.buffers import Buffers
from everstep.engine.layers.boundary import Boundary, Gradients
from everstep.engine.stage.stage import Stage
from everstep.engine.state.chunk_sums import ChunkSums
from everstep.engine.state.optimizer import Updater
from everstep.engine.state.sharded import ShardedUpdater
from everstep.engine.sums.sum_parts import PartsOfOne, owned, peaks_of, virtual_chunks
from everstep.net import host_memory
from everstep.net.envelope import Envelope
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.routes import Routes
from everstep.protocol.work import AssembleSum, CombineTied, GatherParts, Send, SumChunk

Message = tuple[Envelope, tuple[Tensor, ...]]
Borrowed = Callable[[Tensor], bool]  # is any of this tensor's memory queued for sending?


class SharedTensors(Protocol):
    """Where tensors live that peers read (`net.plane`)."""

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor: ...

    def kept(self, tensor: Tensor) -> Tensor: ...


HoldersAt = Callable[[int], tuple[tuple[int, ...], ...]]


class Payload(NamedTuple):
    """What travels under a parcel's name, besides the facts that the worker state knows of."""

    tensors: tuple[Tensor, ...]
    facts: Any = None  # in JSON's terms


class StepTensors:
    """Of one worker, by step and by parcel. `replicas` is how many the task has when none has failed."""

    def __init__(
        self,
        me: Worker,
        stage: Stage,
        updater: Updater | ShardedUpdater,
        *,
        replicas: int,
        borrowed: Borrowed,
        shared: SharedTensors,
        holders: HoldersAt | None = None,
        is_alone: bool = False,
    ) -> None:
        """`holders`: sharded, who holds which chunk in a step. `is_alone`: the task has one worker when none
        has failed. Its sums can become its means: nobody asks for them again.
        """
        self.me, self.stage, self.updater, self._shared = me, stage, updater, shared
        self.boundaries: dict[Parcel, Boundary | Gradients] = {}  # activations and gradients, in and out
        self.payloads: dict[Parcel, Payload] = {}  # everything else that was received, and tied halves
        self._gathered: dict[Parcel, Payload] = {}
        self._placed: set[Parcel] = set()  # sums that are in the whole already
        self._chunks = virtual_chunks(stage.size, replicas)
        self._buffers = Buffers(
            borrowed=borrowed,
            new=lambda: shared.empty((self.stage.size,), dtype=torch.float32),
            copy=torch.clone,
        )
        self._sums: dict[int, Tensor] = {}
        self._is_alone = is_alone
        self._holders = holders
        self.by_chunk: ChunkSums | None = None
        if isinstance(updater, ShardedUpdater):
            new = lambda count: shared.empty((count,), dtype=torch.float32)  # noqa: E731
            self.by_chunk = ChunkSums(updater.ranges, new)
        self._peaks: dict[int, list[int]] = {}  # of the same steps: the next step's limits follow from them

    def let_go(self) -> None:
        """Of the stage, its buffers and its optimizer; `rebuilt` follows."""
        self._buffers.clear()
        del self.stage, self.updater

    def rebuilt(self, stage: Stage, updater: Updater | ShardedUpdater) -> None:
        """The initial state is back, in new buffers."""
        self.stage, self.updater = stage, updater

    # -------------------------------------------------------------- payloads

    def forget(self, parcels: Iterable[Parcel]) -> None:
        for parcel in parcels:
            self.payloads.pop(parcel, None)
            self.boundaries.pop(parcel, None)

    def outgoing(self, parcel: Parcel, routes: Routes) -> Payload:
        """What is sent under this name. Who carries it borrows it."""
        if parcel.what is ParcelKind.PART:
            return self._outgoing_part(parcel, routes)
        if self.by_chunk is not None:
            return self._outgoing_chunks(parcel, self.by_chunk)
        match parcel.what:
            case ParcelKind.SUM:
                owners = routes.of_sum(parcel.sender, parcel.owner)
                self._place([parcel._replace(sender=k, owner=-1) for k in owners], routes)
                mean = self._sums[parcel.step]
                return Payload(tuple(mean[self._stretch(routes, owner)] for owner in owners))
            case ParcelKind.COPY | ParcelKind.FEED:
                return Payload((self._sums[parcel.step],), self._peaks[parcel.step])
            case ParcelKind.TIED:
                return self._own_half(parcel)
            case _:
                return Payload(())

    def _own_half(self, tied: Parcel) -> Payload:
        if tied not in self.payloads:  # before combining changes it
            half = self.stage.tied.part(self._sums[tied.step])
            self.payloads[tied] = Payload((self._shared.kept(half),))
        return self.payloads[tied]

    def _outgoing_chunks(self, parcel: Parcel, sums: ChunkSums) -> Payload:
        assert isinstance(self.updater, ShardedUpdater)
        assert self._holders is not None
        match parcel.what:
            case ParcelKind.SUM:
                rows = enumerate(self._holders(parcel.step))
                both = [c for c, row in rows if row[0] == self.me.replica and parcel.owner in row]
                return Payload(*sums.for_holder(parcel.step, both))
            case ParcelKind.WEIGHTS:
                if parcel not in self.payloads:  # a copy: the next update must not wait for its last reader
                    self.payloads[parcel] = Payload((self._copied(self.updater.weights_of(parcel.owner)),))
                return self.payloads[parcel]
            case ParcelKind.FILL:
                return Payload(*self.updater.fill_of(parcel.owner))
            case ParcelKind.FEED:
                return Payload((host_memory.for_queue(self.stage.working),), self._peaks[parcel.step])
            case _:
                return Payload(())

    def _outgoing_part(self, parcel: Parcel, routes: Routes) -> Payload:
        if parcel in self._gathered:
            return self._gathered[parcel]
        stretches = [where for _, where in self._stretches(parcel, routes)]
        return self._as_sent(stretches, self._own(stretches))

    def _own(self, stretches: list[slice]) -> PartsOfOne:
        sums = self.stage.sums
        return PartsOfOne([sums.part(where) for where in stretches], sums.part(slice(0, 0)).peaks)

    def _as_sent(self, stretches: list[slice], given: PartsOfOne) -> Payload:
        """`_arrived` is the inverse."""
        sums = self.stage.sums
        if self._is_one(stretches):
            tensors, told = sums.sent(stretches[0], given.parts[0])
            return Payload(tensors, [list(given.peaks), *told])
        return Payload(*sums.sent_all(stretches, given.parts, given.peaks))

    def _arrived(self, parcel: Parcel, routes: Routes, owner: int) -> PartsOfOne:
        """What a PART that is here brings of the chunks of one owner."""
        (tensors, facts), sums = self.payloads[parcel], self.stage.sums
        stretches = self._stretches(parcel, routes)
        if self._is_one([where for _, where in stretches]):
            peaks, *told = facts
            return PartsOfOne(
                [sums.arrived(stretches[0][1], self._on_device(tensors), peaks, told)], list(peaks)
            )
        wanted = {place: where for place, (of, where) in enumerate(stretches) if of == owner}
        to_device = partial(host_memory.to_device, device=self.stage.device)
        return PartsOfOne(sums.arrived_all(wanted, tensors, facts, to_device), list(facts[0]))

    def _is_one(self, stretches: list[slice]) -> bool:
        """Not for sharded states: a worker may own one chunk, or none."""
        return self.by_chunk is None and len(stretches) == 1

    def contents(self, command: Send, routes: Routes) -> Message:
        """What goes with a parcel."""
        if command.parcel.what in (ParcelKind.ACTIVATION, ParcelKind.GRADIENT):
            boundary = self.boundaries[command.parcel]
            return Envelope(beside=boundary.facts), boundary.tensors
        if command.parcel.what is ParcelKind.REPLAY:
            return self._inputs(command.parcel)
        payload = self.outgoing(command.parcel, routes)
        return Envelope(command.value, payload.facts), payload.tensors

    def _inputs(self, replay: Parcel) -> Message:
        """What this worker has computed a microbatch from, for one who is to compute it again."""
        facts: dict[str, Any] = {}
        tensors: list[Tensor] = []
        for kind in (ParcelKind.ACTIVATION, ParcelKind.GRADIENT):
            found = self.boundaries.get(replay._replace(what=kind, sender=-1, owner=-1))
            if found is not None:
                facts[kind.value] = [len(found.tensors), found.facts]
                tensors += found.tensors
        return Envelope(beside=facts), tuple(tensors)

    def replayed(self, replay: Parcel) -> tuple[Boundary | None, Gradients | None]:
        tensors, facts = self.payloads[replay]
        count, said = facts.get(ParcelKind.ACTIVATION.value, (0, None))
        given = None if said is None else Boundary.arrived(tensors[:count], said | {"hash": ""})
        _, said = facts.get(ParcelKind.GRADIENT.value, (0, None))
        gradient = None if said is None else Gradients.arrived(tensors[count:], said | {"hash": ""})
        return given, gradient

    def _stretches(self, parcel: Parcel, routes: Routes) -> list[tuple[int, slice]]:
        """Of the stage's sums, what a PART is of, with its owners."""
        return self._of_owners(parcel.step, routes, routes.of_part(parcel.sender, parcel.owner))

    def _of_owners(self, step: int, routes: Routes, owners: tuple[int, ...]) -> list[tuple[int, slice]]:
        """The chunks of these owners, in their order."""
        if self.by_chunk is None:
            return [(owner, self._stretch(routes, owner)) for owner in owners]
        assert isinstance(self.updater, ShardedUpdater)
        assert self._holders is not None
        chunks: dict[int, list[int]] = {owner: [] for owner in owners}
        for chunk, row in enumerate(self._holders(step)):
            if row[0] in chunks:
                chunks[row[0]].append(chunk)
        return [(owner, self.updater.ranges[chunk]) for owner, own in chunks.items() for chunk in own]

    def received(self, parcel: Parcel, tensors: tuple[Tensor, ...], beside: Any) -> None:
        """A parcel that is wanted. `beside`: facts that the worker state does not know of."""
        if parcel.what is ParcelKind.ACTIVATION:
            self.boundaries[parcel] = Boundary.arrived(tensors, beside)
        elif parcel.what is ParcelKind.GRADIENT:
            self.boundaries[parcel] = Gradients.arrived(tensors, beside)
        elif tensors or beside is not None:
            self.payloads[parcel] = Payload(tensors, beside)

    # -------------------------------------------------------------- the reduce

    def gather(self, task: GatherParts) -> None:
        """What the workers of this node have of the chunks of an owner, as one part."""
        into = task.into
        self._gathered = {
            p: held for p, held in self._gathered.items() if p._replace(owner=into.owner) == into
        }
        stretches, ordered = self._ordered(into, task.routes, task.parts)
        sums = self.stage.sums
        whole = [
            sums.together(where, [one.parts[at] for one in ordered]) for at, where in enumerate(stretches)
        ]
        self._gathered[into] = self._as_sent(stretches, PartsOfOne(whole, peaks_of(ordered)))

    def _ordered(
        self, into: Parcel, routes: Routes, parts: tuple[Parcel, ...]
    ) -> tuple[list[slice], list[PartsOfOne]]:
        """The chunks of an owner, and of this worker and of each sender what it adds to them."""
        stretches = [where for _, where in self._of_owners(into.step, routes, (into.owner,))]
        found = {self.me.replica: self._own(stretches)}
        for parcel in parts:
            found[parcel.sender] = self._arrived(parcel, routes, into.owner)
        return stretches, [found[replica] for replica in sorted(found)]

    def sum_chunk(self, task: SumChunk) -> tuple[float, ...]:
        """The chunks that are this worker's. Plain sums are added in the order of the replicas."""
        if self.stage.sums.are_means:  # a new epoch asks once more
            assert isinstance(self.updater, Updater)
            return self.updater.squares(self._sums[task.step], self._owned(task.routes))
        name = Parcel(ParcelKind.PART, 0, task.step, self.me.stage, owner=self.me.replica)
        stretches, ordered = self._ordered(name, task.routes, task.parts)
        self._peaks[task.step] = peaks_of(ordered)
        if self.by_chunk is not None:
            return self.by_chunk.add_up(self.stage, task, [one.parts for one in ordered])
        assert isinstance(self.updater, Updater)
        ((mine,), mean, chunks) = stretches, self._sum(task.step), self._owned(task.routes)
        self.stage.sums.means(mine, chunks, [one.parts[0] for one in ordered], task.weight, mean)
        return self.updater.squares(mean, chunks)

    def _owned(self, routes: Routes) -> Sequence[slice]:
        return owned(self._chunks, routes.members, self.me.replica)

    def assemble(self, task: AssembleSum) -> float | None:
        """The whole sum, from the owners' chunks or from a peer's copy."""
        self._gathered.clear()
        if self.by_chunk is not None:
            self.by_chunk.assemble(self.stage, task, self.payloads)
            return None
        mean = self._sum(task.step)
        if task.chunks and task.chunks[0].what is ParcelKind.COPY:
            (total,), self._peaks[task.step] = self.payloads[task.chunks[0]]
            mean.copy_(total, non_blocking=True)
        else:
            self._place(task.chunks, task.routes)
        self._placed.clear()
        if self.stage.tied.has_pair:
            return self._squares(mean)
        if self.stage.shards is not None:  # no shard reads from a peer any more when the leader says HELD
            self.stage.shards.gather(mean[:1])
        return None

    def _place(self, chunks: Iterable[Parcel], routes: Routes) -> None:
        """Sums that are here, where they belong in the whole. Those that are passed on are read there."""
        for chunk in chunks:
            if chunk in self.payloads and chunk not in self._placed:
                mean, owners = self._sum(chunk.step), routes.of_sum(chunk.sender, chunk.owner)
                for owner, total in zip(owners, self.payloads[chunk].tensors, strict=True):
                    mean[self._stretch(routes, owner)].copy_(total, non_blocking=True)
                self._placed.add(chunk)

    def combine(self, task: CombineTied) -> float:
        """Add the other stage's half of a tied tensor. The sum is sealed, but may still be queued.

        This stage's own half is kept: a worker of the other stage may ask for it when the sum is gone.
        """
        self._own_half(task.other._replace(stage=self.me.stage))
        (other,) = self._on_device(self.payloads[task.other].tensors)
        mean = self._sums[task.step] = self._buffers.writable(self._sums[task.step])
        own = self.stage.tied.part(mean)
        lower_first = (own, other) if self.me.stage < task.other.stage else (other, own)
        self.stage.tied.set_part(mean, lower_first[0] + lower_first[1])
        return self._squares(mean)

    # -------------------------------------------------------------- lifetimes

    def sum_of(self, step: int) -> Tensor:
        return self._sums[step]

    def updated(self, step: int) -> None:
        """The step's update is made: the sums of the next step begin, within limits that follow from it."""
        self.stage.updated(step, self._of_all_shards(self._peaks[step]))
        self._begin(step + 1)
        over = (ParcelKind.TIED, ParcelKind.WEIGHTS)
        self.forget([p for p in self.payloads if p.what in over and p.step < step])

    def loaded(self, state_step: int) -> None:
        """A state is in place: training goes on with the step after it."""
        self._begin(state_step + 1)

    def fed(self, step: int, feed: Parcel) -> Tensor:
        """A joining worker's next gradient, to which it adds nothing; `updated` follows."""
        tensors, self._peaks[step] = self.payloads[feed]
        return self._on_device(tensors)[0]

    def release_sum(self, step: int) -> None:
        if self.by_chunk is not None:
            self.by_chunk.means.pop(step, None)
        elif (mean := self._sums.pop(step)).data_ptr() != self.stage.sums.flat.data_ptr():
            self._buffers.give_back(mean)
        self._peaks.pop(step, None)

    def discard(self, from_step: int | None, keep: Iterable[Parcel]) -> None:
        """Of this step and later ones; None: of all steps, and every payload that is not in `keep`."""
        if self._buffers.is_borrowed(self.stage.sums.flat):
            self.stage.sums.restart(leave_buffer=True)
        self.stage.discard(from_step)
        of_chunks = {} if self.by_chunk is None else self.by_chunk.means
        for table in (self._sums, self._peaks, of_chunks):
            for step in [s for s in table if from_step is None or s >= from_step]:
                del table[step]
        if from_step is not None:
            self._begin(from_step)
        if from_step is None:
            kept = set(keep)
            self.payloads = {p: t for p, t in self.payloads.items() if p in kept}
            self.boundaries = {p: b for p, b in self.boundaries.items() if p in kept}

    # -------------------------------------------------------------- how

    def _copied(self, tensor: Tensor) -> Tensor:
        return self._shared.empty(tuple(tensor.shape), dtype=tensor.dtype).copy_(tensor)

    def _squares(self, mean: Tensor) -> float:
        assert isinstance(self.updater, Updater)
        return self.updater.sum_of_squares(mean)

    def _begin(self, step: int) -> None:
        self._gathered.clear()
        self._placed.clear()
        sums, limits = self.stage.sums, self.stage.limits.at(step)
        sums.begin(step, limits, leave_buffer=self._buffers.is_borrowed(sums.flat))

    def _sum(self, step: int) -> Tensor:
        if step not in self._sums:
            own = self.stage.sums.own_means if self._is_alone else None
            self._sums[step] = self._buffers.take() if own is None else own
        return self._sums[step]

    def _of_all_shards(self, peaks: list[int]) -> list[int]:
        """A parameter has one limit, whatever part of it a shard has: states are then one state."""
        shards = self.stage.shards
        if shards is None or not peaks:
            return peaks
        found: list[int] = shards.max(
            torch.tensor(peaks, dtype=torch.int64, device=self.stage.device)
        ).tolist()
        return found

    def _stretch(self, routes: Routes, owner: int) -> slice:
        """All chunks of one owner: they lie side by side."""
        chunks = owned(self._chunks, routes.members, owner)
        return slice(chunks[0].start, chunks[-1].stop)

    def _on_device(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(host_memory.to_device(tensor, self.stage.device) for tensor in tensors)
