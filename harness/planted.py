"""Faults of a machine that are planted in one worker, by the data that it is given: a bit of its numbers that
flips, a GPU that fails.

    activation, gradient    what is kept for the weight gradients         flipped before a W
    boundary                what the stage before has sent                flipped before an F
    weights, optimizer      the masters; the first tensor of the state    flipped before an F
    illegal, oom, spin      a kernel writes to memory that was freed; more memory than there is; a kernel
                            that does not end                             before an F

Each strikes once, also if the worker is replaced: a file in `folder` says that it has.
"""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.linear import LinearGrad, MadeGrad
from everstep.engine.stage.stage import Stage
from everstep.engine.worker.work_items import WorkItems
from everstep.job.job import DataSpec, Job
from everstep.net.arena import CudaMemory, cuda_runtime
from everstep.protocol.ops import Kind, Worker

IN_W = ("activation", "gradient")
OF_GPU = ("illegal", "oom", "spin")
_SPIN_CYCLES = 2_000_000_000 * 600  # about ten minutes
_BLOCK = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    what: str
    replica: int
    stage: int
    step: int
    microbatch: int  # of this replica
    bit: int = 0
    element: int = 0

    def is_at(self, me: Worker, task: Any) -> bool:
        at = task.op.microbatch
        kinds = (Kind.W,) if self.what in IN_W else (Kind.F,)
        here = (me.replica, me.stage, task.step) == (self.replica, self.stage, self.step)
        return here and task.op.kind in kinds and (at.home, at.number) == (self.replica, self.microbatch)


def planted_in(job: Job, folder: Path, fault: Planted | None) -> Job:
    """A job on synthetic data, with this fault."""
    language = job.language()
    assert language is not None
    vocab, context = language
    synthetic = {"vocab": vocab, "sequence": job.data.sequence or context, "rows": job.data.rows}
    options = {"folder": str(folder), "fault": None if fault is None else asdict(fault), **synthetic}
    return replace(
        job,
        data=DataSpec(
            build="harness.planted:Data", rows=job.data.rows, options={**options, "seed": job.seed}
        ),
    )


class Data:
    """Synthetic, in a worker that may be the one."""

    in_a_thread = True

    def __init__(self, folder: str, fault: dict[str, Any] | None, **synthetic: Any) -> None:
        self._data = Synthetic(**synthetic)
        if fault is not None:
            _plant(Planted(**fault), Path(folder) / "struck")

    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        return self._data.batch(step, microbatch)


def _plant(fault: Planted, mark: Path) -> None:
    compute = WorkItems._compute

    def computed(self: WorkItems, task: Any) -> Any:
        if not fault.is_at(self.me, task) or mark.exists():
            return compute(self, task)
        mark.touch()
        before = self.tensors.boundaries.get(task.input)
        _strike(fault, self, task)
        try:
            return compute(self, task)
        finally:
            if before is not None and task.input in self.tensors.boundaries:
                self.tensors.boundaries[task.input] = before  # as it came

    WorkItems._compute = computed  # type: ignore[method-assign]


def _strike(fault: Planted, items: WorkItems, task: Any) -> None:
    stage = items.stage
    if fault.what in OF_GPU:
        strike_gpu(fault.what, stage.device)
    elif fault.what == "weights":
        flip(stage.masters if stage.masters.numel() else stage.working, fault)
    elif fault.what == "optimizer":
        state = items.updater.state()
        flip(next(t for name, t in state.items() if name.startswith("optimizer/") and t.numel() > 1), fault)
    elif fault.what == "boundary":
        given = items.tensors.boundaries[task.input]
        tensors = list(given.tensors)
        place = next(i for i, tensor in enumerate(tensors) if tensor.is_floating_point())
        tensors[place] = tensors[place].clone()
        flip(tensors[place], fault)
        items.tensors.boundaries[task.input] = replace(given, tensors=tuple(tensors))
    else:
        _before_weight_grad(stage, fault)


def _before_weight_grad(stage: Stage, fault: Planted) -> None:
    def weight_grad(step: int, microbatch: int, seen: Any = None) -> None:
        del stage.weight_grad  # type: ignore[misc]
        activation, gradient = _held(stage, step, microbatch)
        flip(activation if fault.what == "activation" else gradient, fault)
        stage.weight_grad(step, microbatch, seen)

    stage.weight_grad = weight_grad  # type: ignore[method-assign]


def _held(stage: Stage, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """An activation and a gradient that W will use."""
    stash = stage._stashes[step, microbatch]
    linear = [entry for entry in stash.queue if isinstance(entry, LinearGrad) and entry.input is not None]
    if linear:
        return linear[0].input, linear[0].grad  # type: ignore[return-value]
    made = [entry.grad for entry in stash.queue if isinstance(entry, MadeGrad)]
    grads = made or [gradient for _, gradient in stash.others]
    return grads[0], grads[0]


def flip(tensor: Tensor, fault: Planted) -> None:
    """One bit of one element, in place."""
    raw = tensor.detach().reshape(-1)
    assert raw.data_ptr() == tensor.data_ptr(), "a flip of a copy"
    size = raw.element_size()
    bits = raw.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    bit = fault.bit % (8 * size)
    mask = torch.tensor(1 << bit if bit < 8 * size - 1 or size == 1 else -(1 << bit), dtype=bits.dtype)
    bits[fault.element % bits.numel()] ^= mask.to(bits.device)


def strike_gpu(kind: str, device: torch.device) -> None:
    if kind == "oom":
        torch.empty(1 << 48, dtype=torch.uint8, device=device)
    elif kind == "spin":
        torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
    else:
        memory = CudaMemory(device)
        address, _ = memory.allocate(_BLOCK)
        there = memory.view(address, _BLOCK, None)
        cuda_runtime().cudaFree(ctypes.c_void_p(address))
        there.fill_(1)
