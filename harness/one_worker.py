"""One worker of a job alone in a process: its ops in the order of its real schedule.

What neighbours send is random, of the right shape; peers contribute what this worker does. So its time and
its memory are those of a worker in a run, and nothing but torch and everstep is needed to measure them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from everstep.engine.layers.boundary import Boundary, Gradients
from everstep.engine.prepare.program import Program
from everstep.engine.worker.step_tensors import Payload, StepTensors
from everstep.job.job import Job
from everstep.protocol.ops import Kind, Op, Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.routes import Routes
from everstep.protocol.work import AssembleSum, SumChunk
from everstep.schedule import Instance, plan, uniform
from everstep.schedule.footprint import stash_cap


class OnTheDevice:
    """Buffers that no other process reads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def kept(self, tensor: Tensor) -> Tensor:
        return tensor


class OneWorker:
    """Worker (0, stage) of a job. `cap`: microbatches it may hold; 0: as many as the schedule likes."""

    def __init__(self, job: Job, stage: int, *, cap: int | None = None) -> None:
        program = Program.of(job)
        self.job, self.index = job, stage
        self.stage, self.updater = program.build(stage)
        self.tensors = StepTensors(
            Worker(0, stage),
            self.stage,
            self.updater,
            replicas=job.replicas,
            borrowed=lambda tensor: False,
            shared=OnTheDevice(self.stage.device),
            is_alone=job.replicas * job.stages == 1,
        )
        self.ops = _ops(job, stage, stash_cap(job.stages) if cap is None else cap)
        self.peak_stash = _peak(self.ops)
        self._given = self._boundary(program, stage)
        self._kept: dict[tuple[int, int], Boundary | Gradients | None] = {}
        self._grad: Gradients | None = None

    @staticmethod
    def _boundary(program: Program, stage: int) -> Boundary | None:
        """What the stage before sends, from a smaller worker that is built and dropped."""
        given = None
        for earlier in range(stage):
            made, _ = program.build(earlier)
            given = made.forward(0, 0, given)
            made.discard()
        return given

    def step(self, step: int, *, eager: bool = False) -> float:
        """One whole step. The sum of squares of the mean gradient."""
        self._kept.clear()
        for op in self.ops:
            assert op.microbatch is not None
            self._run(op, step, op.microbatch.home * self.job.microbatches + op.microbatch.number)
        squares = self.reduce(step)
        mean = self.tensors.sum_of(step)
        if eager:
            self.updater.preview(step, mean)
            self.updater.commit(step, mean)
        else:
            clip = self.job.optimizer.clip
            scale = 1.0 if clip is None else min(1.0, clip / max(squares, 1e-30) ** 0.5)
            self.updater.apply(step, mean, scale)
        self.tensors.updated(step, skipped=False)
        self.tensors.release_sum(step)
        return squares

    def _run(self, op: Op, step: int, number: int) -> None:
        if op.kind is Kind.F:
            sent = self.stage.forward(step, number, self._given)
            self._kept[number, 0] = sent
            if sent is not None and self._grad is None:
                graded = [torch.randn_like(sent.tensors[i]) * 1e-3 for i in sent.graded]
                self._grad = Gradients(tuple(graded), tuple(range(len(graded))), 1.0)
        elif op.kind is Kind.W:
            self.stage.weight_grad(step, number)
        else:
            self._kept[number, 1] = self.stage.input_grad(step, number, self._grad)
            if op.kind is Kind.B:
                self.stage.weight_grad(step, number)

    def reduce(self, step: int) -> float:
        """With peers that contribute what this worker does."""
        members = range(self.job.replicas)
        routes = Routes.direct(0, members)
        mine = self.tensors.outgoing(Parcel(ParcelKind.PART, 0, step, self.index, None, 0, 1, 0), routes)
        parts = []
        for peer in members[1:]:
            parcel = Parcel(ParcelKind.PART, 0, step, self.index, None, 0, peer, 0)
            self.tensors.payloads[parcel] = Payload(tuple(t.clone() for t in mine.tensors), mine.facts)
            parts.append(parcel)
        weight = float(self.job.microbatches_in_step)
        squares = sum(self.tensors.sum_chunk(SumChunk(step, routes, tuple(parts), weight)))
        self.tensors.forget(parts)
        chunks = []
        for peer in members[1:]:
            parcel = Parcel(ParcelKind.SUM, 0, step, self.index, None, 0, peer)
            size = self.tensors._stretch(routes, peer)
            zeros = torch.zeros(size.stop - size.start, device=self.stage.device)
            self.tensors.payloads[parcel] = Payload((zeros,))
            chunks.append(parcel)
        self.tensors.assemble(AssembleSum(step, routes, tuple(chunks)))
        self.tensors.forget(chunks)
        return squares


def _ops(job: Job, stage: int, cap: int) -> list[Op]:
    one = uniform(replicas=job.replicas, stages=job.stages, value=1.0)
    instance = Instance(
        replicas=job.replicas,
        stages=job.stages,
        microbatches=job.microbatches,
        forward=one,
        input_grad=one,
        weight_grad=one,
    )
    if cap and cap < job.microbatches:
        caps = dict.fromkeys(instance.workers(), cap)
        instance = replace(instance, stash_cap=caps)
    planned = plan(instance, "staggered" if job.stages > 1 else "decoupled")
    ops = planned.schedule.ops[Worker(0, stage)]
    return [op for op in ops if op.microbatch is not None]


def _peak(ops: list[Op]) -> int:
    held = most = 0
    for op in ops:
        held += {"F": 1, "W": -1, "B": -1}.get(op.kind, 0)
        most = max(most, held)
    return most
