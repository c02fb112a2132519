"""The tensors a worker keeps of its open steps, and the rules of who may write to them.

The worker state decides in names; here the names have tensors:

    boundaries   activations and gradients, received or made here    until the worker state says Forget
    payloads     parts, chunks and sums that were received           until the worker state says Forget
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

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from everstep.core.worker.buffers import Buffers
from everstep.engine.layers.boundary import Boundary, Gradients
from everstep.engine.stage.stage import Stage
from everstep.engine.state.chunk_sums import ChunkSums
from everstep.engine.state.optimizer import Updater
from everstep.engine.state.sharded import ShardedUpdater
from everstep.engine.sums.sum_parts import owned, peaks_of, virtual_chunks
from everstep.engine.worker.parts_ahead import ArrivingParts, Message, PartsAhead
from everstep.net import host_memory
from everstep.net.envelope import Envelope
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.work import AssembleSum, CombineTied, Send, SumChunk

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
            self.by_chunk = ChunkSums(me.replica, updater.ranges, new)
        self._peaks: dict[int, list[int]] = {}  # of the same steps: the next step's limits follow from them
        self.ahead, self.arriving = PartsAhead(), ArrivingParts()

    def let_go(self) -> None:
        """Of the stage, its buffers and its optimizer; `rebuilt` follows."""
        self.ahead.clear()
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

    def outgoing(self, parcel: Parcel, members: tuple[int, ...]) -> Payload:
        """What is sent under this name. Who carries it borrows it."""
        if self.by_chunk is not None:
            return self._outgoing_chunks(parcel, self.by_chunk)
        match parcel.what:
            case ParcelKind.PART:
                sums = self.stage.sums
                where = self._stretch(members, parcel.owner)
                part = sums.part(where)
                tensors, told = sums.sent(where, part)
                return Payload(tensors, [list(part.peaks), *told])
            case ParcelKind.SUM:
                return Payload((self._sums[parcel.step][self._stretch(members, self.me.replica)],))
            case ParcelKind.COPY | ParcelKind.FEED:
                return Payload((self._sums[parcel.step],), self._peaks[parcel.step])
            case ParcelKind.TIED:
                if parcel not in self.payloads:  # before combining changes it
                    half = self.stage.tied.part(self._sums[parcel.step])
                    self.payloads[parcel] = Payload((self._shared.kept(half),))
                return self.payloads[parcel]
            case _:
                return Payload(())

    def _outgoing_chunks(self, parcel: Parcel, sums: ChunkSums) -> Payload:
        assert isinstance(self.updater, ShardedUpdater)
        assert self._holders is not None
        match parcel.what:
            case ParcelKind.PART:
                return Payload(*sums.part(self.stage, self._chunks_of(parcel)))
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

    def contents(self, command: Send, members: tuple[int, ...]) -> Message:
        """What goes with a parcel."""
        if command.parcel.what in (ParcelKind.ACTIVATION, ParcelKind.GRADIENT):
            boundary = self.boundaries[command.parcel]
            return Envelope(beside=boundary.facts), boundary.tensors
        if command.parcel.what is ParcelKind.REPLAY:
            return self._inputs(command.parcel)
        payload = self.outgoing(command.parcel, members)
        envelope = Envelope(command.value, payload.facts)
        if command.parcel.what is not ParcelKind.PART:
            return envelope, payload.tensors
        return self.ahead.rest(command.parcel, envelope, payload.tensors, self._places(payload))

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

    def stretches(self, parcel: Parcel, members: tuple[int, ...]) -> list[slice]:
        """Of the stage's sums, what a PART is of."""
        if self.by_chunk is None:
            return [self._stretch(members, parcel.owner)]
        assert isinstance(self.updater, ShardedUpdater)
        return [self.updater.ranges[chunk] for chunk in self._chunks_of(parcel)]

    def _chunks_of(self, parcel: Parcel) -> list[int]:
        """Sharded: the chunks of the owner that a PART goes to."""
        assert self._holders is not None
        return [c for c, row in enumerate(self._holders(parcel.step)) if row[0] == parcel.owner]

    def _places(self, part: Payload) -> list[int]:
        """Of the stretches among the tensors of a PART: each comes before what else there is of it."""
        if self.by_chunk is None:
            return [0]
        counts = [count for count, *_ in part.facts[1]]
        return [sum(counts[:at]) for at in range(len(counts))]

    def received(self, parcel: Parcel, tensors: tuple[Tensor, ...], beside: Any) -> None:
        """A parcel that is wanted. `beside`: facts that the worker state does not know of."""
        if parcel.what is ParcelKind.ACTIVATION:
            self.boundaries[parcel] = Boundary.arrived(tensors, beside)
        elif parcel.what is ParcelKind.GRADIENT:
            self.boundaries[parcel] = Gradients.arrived(tensors, beside)
        elif tensors or beside is not None:
            self.payloads[parcel] = Payload(tensors, beside)

    # -------------------------------------------------------------- the reduce

    def sum_chunk(self, task: SumChunk) -> tuple[float, ...]:
        """The chunks that are this worker's. Plain sums are added in the order of the replicas."""
        if self.by_chunk is not None:
            squares, self._peaks[task.step] = self.by_chunk.add_up(self.stage, task, self.payloads)
            return squares
        assert isinstance(self.updater, Updater)
        mine = self._stretch(task.members, self.me.replica)
        chunks = owned(self._chunks, task.members, self.me.replica)
        if self.stage.sums.are_means:  # a new epoch asks once more
            return self.updater.squares(self._sums[task.step], chunks)
        parts = {self.me.replica: self.stage.sums.part(mine)}
        for parcel in task.parts:
            tensors, (peaks, *told) = self.payloads[parcel]
            came = self.stage.sums.arrived(mine, self._on_device(tensors), peaks, told)
            parts[parcel.sender] = came
        ordered = [parts[replica] for replica in task.members]
        mean = self._sum(task.step)
        self.stage.sums.means(mine, chunks, ordered, task.weight * self.stage.scale_at(task.step), mean)
        self._peaks[task.step] = peaks_of(ordered)
        return self.updater.squares(mean, chunks)

    def assemble(self, task: AssembleSum) -> float | None:
        """The whole sum, from the owners' chunks or from a peer's copy."""
        if self.by_chunk is not None:
            self.by_chunk.assemble(self.stage, task, self.payloads)
            return None
        mean = self._sum(task.step)
        for chunk in task.chunks:
            (total,), peaks = self.payloads[chunk]
            if chunk.what is ParcelKind.COPY:
                self._peaks[task.step] = peaks
            is_copy = chunk.what is ParcelKind.COPY
            where = slice(None) if is_copy else self._stretch(task.members, chunk.sender)
            mean[where].copy_(total, non_blocking=True)
        if self.stage.tied.has_pair:
            return self._squares(mean)
        if self.stage.shards is not None:  # no shard reads from a peer any more when the leader says HELD
            self.stage.shards.gather(mean[:1])
        return None

    def combine(self, task: CombineTied) -> float:
        """Add the other stage's half of a tied tensor. The sum is sealed, but may still be queued.

        This stage's own half is kept: a worker of the other stage may ask for it when the sum is gone.
        """
        self.outgoing(task.other._replace(stage=self.me.stage), ())
        (other,) = self._on_device(self.payloads[task.other].tensors)
        mean = self._sums[task.step] = self._buffers.writable(self._sums[task.step])
        own = self.stage.tied.part(mean)
        lower_first = (own, other) if self.me.stage < task.other.stage else (other, own)
        self.stage.tied.set_part(mean, lower_first[0] + lower_first[1])
        return self._squares(mean)

    # -------------------------------------------------------------- lifetimes

    def sum_of(self, step: int) -> Tensor:
        return self._sums[step]

    def updated(self, step: int, *, skipped: bool) -> None:
        """The step's update is made: the sums of the next step begin, within limits that follow from it."""
        self.stage.updated(step, self._of_all_shards(self._peaks[step]), skipped=skipped)
        self._begin(step + 1)
        self.arriving.forget_until(step)
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
        self.ahead.clear()
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
        self.ahead.clear()
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

    def _stretch(self, members: tuple[int, ...], owner: int) -> slice:
        """All chunks of one owner: they lie side by side."""
        chunks = owned(self._chunks, members, owner)
        return slice(chunks[0].start, chunks[-1].stop)

    def _on_device(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(host_memory.to_device(tensor, self.stage.device) for tensor in tensors)
