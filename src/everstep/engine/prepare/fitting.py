"""Does a job fit into the memory of its workers?

Before the start weights, optimizer states, gradient sums and logits are counted: a job that has no room for
these is refused. What microbatches hold besides is measured in the first step, and the scheduler lets a
worker hold as many of them as there is room for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from torch import nn

from everstep.engine.layers.boundary import Value, tensors_in
from everstep.engine.layers.model import Model, every_parameter, partition, skeleton
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.stage.stage import Stage
from everstep.engine.sums.grids import MOST_SHORT
from everstep.errors import UserError
from everstep.job.job import Job
from everstep.schedule import footprint
from everstep.schedule.footprint import Settings

GIB = 2.0**30
LOGITS = 3  # tensors of their size: they, what the loss keeps of them, and their gradient
PRODUCT = 4.0  # bytes of a parameter's gradient before it is added


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that there are. None: not known, or no limit of this kind."""

    worker: float | None = None  # for each worker
    machine: float | None = None  # for all of them together


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFit:
    """One worker of a stage, or one of its shards."""

    stage: int
    parameters: int  # that are trained
    items: dict[str, float]  # bytes, by name

    @property
    def total(self) -> float:
        return sum(self.items.values())


def memory_here(job: Job) -> Memory:
    """If all workers run on this machine: what the job allows, else what its devices have."""
    workers = job.replicas * job.stages * job.shards
    if job.memory_gib is not None:
        return Memory(worker=job.memory_gib * GIB)
    if job.device == "cpu":
        return Memory(machine=footprint.USABLE * psutil.virtual_memory().total)
    if torch.cuda.device_count() == 0:
        return Memory()
    total = torch.cuda.get_device_properties(0).total_memory
    return Memory(worker=footprint.USABLE * total / math.ceil(workers / torch.cuda.device_count()))


def take_share(job: Job, device: torch.device, sharers: int) -> Job:
    """The job of a worker that is one of `sharers` on its device. Memory is divided among them unless the job
    says how much each may use, and one that needs more runs out by itself: the others lose nothing.
    """
    if device.type != "cuda":
        return job
    total = torch.cuda.get_device_properties(device).total_memory
    if job.memory_gib is None and sharers > 1:
        job = replace(job, memory_gib=footprint.USABLE * total / sharers / GIB)
    if job.memory_gib is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.memory_gib * GIB / total), device)
    return job


def allocated(stage: Stage) -> tuple[int, int]:
    """Bytes on a worker's GPU, now and at most since the peak was last reset. What CUDA graphs use between
    replays is not part of torch's count.
    """
    idle = 0 if stage.recordings is None else stage.recordings.idle_bytes
    now = torch.cuda.memory_allocated(stage.device)
    return now + idle, torch.cuda.max_memory_allocated(stage.device) + idle


def room(job: Job, stage: Stage, shared: int = 0) -> float | None:
    """Bytes that a running worker has for stashes; None: it is not known, or does not matter. `shared`: what
    it has on the device besides torch's own.
    """
    if stage.device.type == "cuda":
        total = torch.cuda.get_device_properties(stage.device).total_memory
        limit = footprint.USABLE * total if job.memory_gib is None else job.memory_gib * GIB
        used = allocated(stage)[0] - stage.stash_bytes() + shared
        used += stage.held_bytes[1] if stage.sums.is_strict else 0  # of contributions that are being checked
        return max(0.0, limit - used)
    if job.memory_gib is None:
        return None
    largest = max((slot.size for slot in stage.slots.values()), default=0)
    always = sum(footprint.per_parameter(settings_of(job)).values()) * stage.size
    return max(0.0, job.memory_gib * GIB - always - PRODUCT * largest)


def settings_of(job: Job) -> Settings:
    hosted = job.microbatches * min(2, job.replicas)  # in a step, also after a death
    return Settings(
        precision=job.precision,
        accumulate=job.sums,
        eager=job.stages > 1 and job.optimizer.stagger != "never" and not job.optimizer.shard,
        average=job.optimizer.ema is not None,
        replicas=job.replicas,
        sharded=job.optimizer.shard,
        parted=job.sums == "strict40" and job.device.startswith("cuda") and hosted <= MOST_SHORT,
        alone=job.replicas * job.stages == 1 and not job.optimizer.shard,
    )


def fit(job: Job, model: Model, batch: tuple[Value, Value]) -> list[StageFit]:
    """What a worker of each stage needs at least."""
    cut = Cut(model.shard_plan, 0, job.shards)
    each, weight = footprint.per_parameter(settings_of(job)), footprint.WEIGHTS[job.precision]
    found = []
    for stage, part in enumerate(partition(model, job.stages)):
        trained = frozen = 0
        for name in (model.names[index] for index in part):
            for key, parameter in every_parameter(name, skeleton(model, name)).items():
                size = math.prod(cut.local_shape(key, tuple(parameter.shape)))
                trained, frozen = trained + size * parameter.requires_grad, frozen + size
        frozen -= trained
        items = {name: bytes_each * trained for name, bytes_each in each.items()}
        items["frozen weights"] = weight * frozen
        is_last = part.stop == len(model.layers)
        items["logits"] = LOGITS * weight * _logits(model, batch, cut) if is_last else 0.0
        found.append(StageFit(stage=stage, parameters=trained, items=items))
    return found


def _logits(model: Model, batch: tuple[Value, Value], cut: Cut) -> float:
    """Of a microbatch: numbers that the last matrix gives, where targets are classes."""
    last = skeleton(model, model.names[-1])
    widths = [part.out_features for part in last.modules() if isinstance(part, nn.Linear)]
    targets = tensors_in(batch[1])[:1]
    if not widths or not targets or targets[0].is_floating_point():
        return 0.0
    return targets[0].numel() * widths[-1] / (cut.count if "logits" in model.shard_plan.values() else 1)


def fits(job: Job, found: Sequence[StageFit], memory: Memory) -> bool:
    if memory.worker is not None and any(one.total > memory.worker for one in found):
        return False
    return memory.machine is None or _all_workers(job, found) <= memory.machine


def _all_workers(job: Job, found: Sequence[StageFit]) -> float:
    return job.replicas * job.shards * sum(one.total for one in found)


def refuse_what_does_not_fit(job: Job, model: Model, batch: tuple[Value, Value], memory: Memory) -> None:
    """One sentence: which stage, how much, and what to change."""
    if memory.worker is None and memory.machine is None:
        return
    found = fit(job, model, batch)
    if fits(job, found, memory):
        return
    worst = max(found, key=lambda one: one.total)
    needs = f"a worker of stage {worst.stage} needs {_gib(worst.total)}"
    if memory.worker is not None:
        needs += f" and has {_gib(memory.worker)}"
    else:
        assert memory.machine is not None
        needs += f", all workers {_gib(_all_workers(job, found))}, and this machine has"
        needs += f" {_gib(memory.machine)}"
    raise UserError(
        f"the job does not fit: for weights, optimizer states, sums and logits alone {needs}; use more "
        "stages, optimizer.shard = true with more replicas, devices with more memory, or a smaller model."
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"
