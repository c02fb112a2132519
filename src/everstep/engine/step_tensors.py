"""The tensors a worker keeps of its open steps, and the rules of who may write to them.

The worker state decides in names; here the names have tensors:

    boundaries   activations and gradients, received or made here    until the worker state says Forget
    payloads     parts, chunks and sums that were received           until the worker state says Forget
    gradients    the sums of this worker's own microbatches          until the stage has sealed the step
    sums         the reduced mean gradient                           until sealed, valid and fed

Ownership. A send does not copy: the links *borrow* a tensor until the kernel has its last byte, which can be
many steps later when a large state is queued before it.

1. A tensor that is borrowed is never written to.
2. A buffer that is wanted for writing while it is borrowed is left to its borrower, and a new one is used.
3. Boundaries and payloads are never written to, by anyone.
4. A sum does not change between its assembly and the seal: until then any part of it may be sent again. What
   an update needs beyond it (a tied pair inside the stage) is computed by the update, not stored in the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from everstep.core.words.ops import Worker
from everstep.core.words.worker_messages import AssembleSum, CombineTied, Parcel, ParcelKind, SumChunk
from everstep.engine import device as devices
from everstep.engine.boundary import Boundary, Gradients
from everstep.engine.optimizer import Updater
from everstep.engine.stage import Stage

Borrowed = Callable[[Tensor], bool]  # is any of this tensor's memory queued for sending?


class SharedTensors(Protocol):
    """Where tensors live that peers read (`courier`)."""

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor: ...

    def kept(self, tensor: Tensor) -> Tensor: ...


class StepTensors:
    """Of one worker, by step and by parcel."""

    def __init__(
        self, me: Worker, stage: Stage, updater: Updater, *, borrowed: Borrowed, shared: SharedTensors
    ) -> None:
        self.me, self.stage, self.updater, self._shared = me, stage, updater, shared
        self.boundaries: dict[Parcel, Boundary | Gradients] = {}  # activations and gradients, in and out
        self.payloads: dict[Parcel, Tensor] = {}  # everything else that was received, and tied halves
        self._borrowed = borrowed
        self._gradients: dict[int, Tensor] = {}  # of steps that are updated and not sealed
        self._released: set[int] = set()
        self._sums: dict[int, Tensor] = {}
        self._spare_sums: list[Tensor] = []
        self._taken = 0  # the last step whose gradients left the stage's buffer

    def rebuilt(self, stage: Stage, updater: Updater) -> None:
        """The initial state is back, in new buffers."""
        self.stage, self.updater = stage, updater
        self._spare_sums.clear()

    # -------------------------------------------------------------- payloads

    def forget(self, parcels: Iterable[Parcel]) -> None:
        for parcel in parcels:
            self.payloads.pop(parcel, None)
            self.boundaries.pop(parcel, None)

    def outgoing(self, parcel: Parcel, members: tuple[int, ...]) -> Tensor | None:
        """What is sent under this name. Who carries it borrows it."""
        match parcel.what:
            case ParcelKind.PART:
                flat = self._gradients.get(parcel.step, self.stage.gradients)
                return flat[self._chunk(members, parcel.owner)]
            case ParcelKind.SUM:
                return self._sums[parcel.step][self._chunk(members, self.me.replica)]
            case ParcelKind.COPY | ParcelKind.FEED:
                return self._sums[parcel.step]
            case ParcelKind.TIED:
                if parcel not in self.payloads:  # before combining changes it
                    half = self.stage.tied_part(self._sums[parcel.step])
                    self.payloads[parcel] = self._shared.kept(half)
                return self.payloads[parcel]
            case _:
                return None

    # -------------------------------------------------------------- the reduce

    def sum_chunk(self, task: SumChunk) -> float:
        """Replica by replica in their order, so that the sum does not depend on who was first."""
        mine = self._chunk(task.members, self.me.replica)
        parts = {part.sender: self.payloads[part] for part in task.parts}
        total: Tensor | None = None
        for replica in task.members:
            part = self.stage.gradients[mine] if replica == self.me.replica else parts[replica]
            part = devices.to_device(part, self.stage.device)
            total = part if total is None else total + part
        assert total is not None
        mean = self._sum(task.step)[mine]
        torch.div(total, task.weight, out=mean)
        return float(torch.linalg.vector_norm(mean, dtype=torch.float64).square())

    def assemble(self, task: AssembleSum) -> float | None:
        """The whole sum, from the owners' chunks or from a peer's copy."""
        mean = self._sum(task.step)
        for chunk in task.chunks:
            is_copy = chunk.what is ParcelKind.COPY
            where = slice(None) if is_copy else self._chunk(task.members, chunk.sender)
            mean[where].copy_(self.payloads[chunk], non_blocking=True)
        return self.updater.sum_of_squares(mean) if self.stage.has_tied_pair else None

    def combine(self, task: CombineTied) -> float:
        """Add the other stage's half of a tied tensor. The sum is sealed, but may still be queued."""
        other = devices.to_device(self.payloads[task.other], self.stage.device)
        mean = self._sums[task.step]
        if self._borrowed(mean):
            mean = self._sums[task.step] = mean.clone()
        own = self.stage.tied_part(mean)
        lower_first = (own, other) if self.me.stage < task.other.stage else (other, own)
        self.stage.set_tied_part(mean, lower_first[0] + lower_first[1])
        return self.updater.sum_of_squares(mean)

    # -------------------------------------------------------------- lifetimes

    def sum_of(self, step: int) -> Tensor:
        return self._sums[step]

    def updated(self, step: int) -> None:
        """The step's update is made: the stage gets an empty buffer for the next step's gradients."""
        if step <= self._taken:  # an update made again after an undo
            return
        self._taken = step
        self._gradients[step] = self.stage.take_gradients()
        if step in self._released:
            self._recycle(step)

    def release_gradients(self, step: int) -> None:
        self._released.add(step)
        if step in self._gradients:
            self._recycle(step)

    def release_sum(self, step: int) -> None:
        released = self._sums.pop(step)
        if not self._borrowed(released):
            self._spare_sums.append(released)
        self.payloads = {
            p: t for p, t in self.payloads.items() if p.what is not ParcelKind.TIED or p.step > step
        }

    def discard(self, from_step: int | None, keep: Iterable[Parcel]) -> None:
        """Of this step and later ones; None: of all steps, and every payload that is not in `keep`."""
        if self._borrowed(self.stage.gradients):
            self.stage.take_gradients()
        self.stage.discard(from_step)
        for table in (self._gradients, self._sums):
            for step in [s for s in table if from_step is None or s >= from_step]:
                del table[step]
        self._released = {s for s in self._released if from_step is not None and s < from_step}
        self._taken = 0 if from_step is None else min(self._taken, from_step - 1)
        if from_step is None:
            kept = set(keep)
            self.payloads = {p: t for p, t in self.payloads.items() if p in kept}
            self.boundaries = {p: b for p, b in self.boundaries.items() if p in kept}

    # -------------------------------------------------------------- how

    def _recycle(self, step: int) -> None:
        buffer = self._gradients.pop(step)
        self._released.discard(step)
        if not self._borrowed(buffer):
            self.stage.recycle(buffer)

    def _sum(self, step: int) -> Tensor:
        if step not in self._sums:
            self._sums[step] = (
                self._spare_sums.pop()
                if self._spare_sums
                else self._shared.empty((self.stage.size,), dtype=torch.float32)
            )
        return self._sums[step]

    def _chunk(self, members: tuple[int, ...], owner: int) -> slice:
        size, at = self.stage.size, members.index(owner)
        return slice(size * at // len(members), size * (at + 1) // len(members))
