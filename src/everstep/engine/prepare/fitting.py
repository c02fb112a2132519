"""Does a job fit into the memory of its workers, and if not, what is the smallest change that makes it fit?

The count is `plan.footprint`'s; what a layer holds is found on the meta device (`figures`). After a death a
worker runs more microbatches, but never holds more of them at once: stash caps hold for re-routed schedules
too. So a job that fits also fits then, except for outboxes, which are counted for twice the microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from everstep.engine.layers.boundary import Value
from everstep.engine.layers.model import Model, slots, stage_parts
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.prepare.figures import (
    LayerFigures,
    layer_figures,
    makes_in_input_grad,
    recompute_of,
    settings_of,
    stage_figures,
)
from everstep.engine.stage.stage import Stage
from everstep.errors import UserError
from everstep.job.job import Job
from everstep.schedule import footprint
from everstep.schedule.footprint import Item, StageFigures

GIB = 2.0**30
AFTER_A_DEATH = 2  # times the microbatches that a worker runs in a step
WHOLE_ON_EVERY_SHARD = 10 / 34  # of what a block keeps for its backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that there are. None: not known, or no limit of this kind."""

    worker: float | None = None  # for each worker
    machine: float | None = None  # for all of them together


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFit:
    """One worker of a stage, or one of its shards, in bytes."""

    stage: int
    figures: StageFigures
    items: list[Item]
    stash: int  # microbatches it may hold at once

    @property
    def total(self) -> float:
        return footprint.total(self.items)

    @property
    def with_recordings(self) -> float:
        """Where there is room for CUDA graphs; a job needs none of them."""
        return footprint.with_recordings(self.items)


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
    settings = settings_of(job)
    largest = max((slot.size for slot in stage.slots.values()), default=0)
    figures = StageFigures(parameters=stage.size, largest=largest)
    always = sum(footprint.per_parameter(settings).values()) * figures.parameters
    return max(0.0, job.memory_gib * GIB - always - footprint.PRODUCT * figures.largest)


def fits(job: Job, found: Sequence[StageFit], memory: Memory) -> bool:
    if memory.worker is not None and any(one.total > memory.worker for one in found):
        return False
    return memory.machine is None or _all_workers(job, found) <= memory.machine


def _all_workers(job: Job, found: Sequence[StageFit]) -> float:
    return job.replicas * job.shards * sum(one.total for one in found)


def fit(
    job: Job, model: Model, layers: list[LayerFigures], memory: Memory, *, scale: float = 1.0
) -> list[StageFit]:
    """What a worker of each stage needs. `scale`: of what microbatches hold, as against `layers`."""
    found = []
    settings = settings_of(job)
    hosted = job.microbatches * (AFTER_A_DEATH if job.replicas > 1 else 1)
    fold = job.task_shape().fold
    hosted *= fold.virtual
    for stage, parts in enumerate(stage_parts(model, fold)):
        kept = {"attention_alone": job.recompute_part == "attention", "offload": job.offload}
        kept["makes"] = makes_in_input_grad(job)
        each = [stage_figures(layers, part, recompute=recompute_of(job), **kept) for part in parts]
        whole = _scaled(footprint.together(each), scale)
        if job.context_parallel:
            figures = whole.of_a_part(job.shards)
        else:
            figures = _of_one_shard(whole, model, parts[0], job.shards)
        cap = footprint.stash_cap(fold.parts)
        if memory.worker is not None:
            cap = max(1, min(cap, footprint.room_for(figures, settings, memory.worker, hosted=hosted)))
        items = footprint.items(figures, settings, stash=cap, hosted=hosted)
        found.append(StageFit(stage=stage, figures=figures, items=items, stash=cap))
    return found


def refuse_what_does_not_fit(job: Job, model: Model, batch: tuple[Value, Value], memory: Memory) -> None:
    """One sentence: which stage, how much, and what to change."""
    if memory.worker is None and memory.machine is None:
        return
    layers = layer_figures(model, batch, job.precision, job.device, compiled=job.compiles)
    found = fit(job, model, layers, memory)
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
    raise UserError(f"the job does not fit: {needs}; {_advice(job, model, layers, memory)}.")


def _gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"


def _advice(job: Job, model: Model, layers: list[LayerFigures], memory: Memory) -> str:
    for words, changed, scale in _changes(job, model):
        try:
            found = fit(changed, model, layers, memory, scale=scale)
        except UserError:  # layers that no cut may part
            break
        if fits(changed, found, memory):
            return f"set {words}"
    return "use devices with more memory, or a smaller model"


def _changes(job: Job, model: Model) -> Iterator[tuple[str, Job, float]]:
    """From what costs least: coarser sums, time, smaller microbatches, more workers. Then all of them."""
    words: list[str] = []
    changed = job

    def one(text: str, **changes: object) -> tuple[str, Job]:
        nonlocal changed
        words.append(text)
        changed = replace(changed, **changes)  # type: ignore[arg-type]
        return text, replace(job, **changes)  # type: ignore[arg-type]

    singles = []
    if footprint.SUMS[job.accumulate] > footprint.SUMS["strict32"]:
        singles.append((*one('accumulate = "strict32"', accumulate="strict32"), 1.0))
    if settings_of(job).eager and job.precision == "fp32":
        never = replace(job.optimizer, stagger="never")
        singles.append((*one('optimizer.stagger = "never"', optimizer=never), 1.0))
    if not job.recompute and not job.offload:
        if not job.compiles and (job.shards == 1 or job.context_parallel):
            text = 'recompute = true and recompute_part = "attention"'
            singles.append((text, replace(job, recompute=True, recompute_part="attention"), 1.0))
        if job.device == "cuda" and job.graphs != "always":
            singles.append(("offload = true", replace(job, offload=True), 1.0))
        half = replace(job, recompute=True, recompute_every=2)
        singles.append(("recompute = true and recompute_every = 2", half, 1.0))
    if not job.recompute or job.recompute_every > 1 or job.recompute_part == "attention":
        alone, away = job.recompute_part == "attention", job.offload
        text = 'recompute_part = "layer"' if alone else "recompute = true" + " without offload" * away
        whole = {"recompute": True, "recompute_every": 1, "recompute_part": "layer", "offload": False}
        singles.append((*one(text, **whole), 1.0))
    yield from singles
    together = " and ".join(words)
    if len(words) > 1:
        yield together, changed, 1.0
    rows, scale = job.data.rows, 1.0
    while rows % 2 == 0:
        rows, scale = rows // 2, scale / 2
        text = f"data.rows = {rows} with microbatches = {int(job.microbatches / scale)}"
        yield text, replace(job, microbatches=int(job.microbatches / scale)), scale
        yield f"{together} and {text}", replace(changed, microbatches=int(job.microbatches / scale)), scale
    for stages in range(job.stages + 1, len(model.layers) // job.virtual + 1):
        yield f"stages = {stages}", replace(job, stages=stages), 1.0
        yield f"{together} and stages = {stages}", replace(changed, stages=stages), 1.0


def _of_one_shard(figures: StageFigures, model: Model, part: range, shards: int) -> StageFigures:
    """Parameters are counted; of what a microbatch holds, norms and the residual stream are whole on every
    shard, as in `plan.memory`.
    """
    if shards == 1:
        return figures
    own = [slot.size for slot in slots(model, part, cut=Cut(model.shard_plan, 0, shards)).values()]
    held = WHOLE_ON_EVERY_SHARD + (1 - WHOLE_ON_EVERY_SHARD) / shards
    smaller = replace(
        _scaled(figures, held), sent=figures.sent / shards, workspace=figures.workspace / shards
    )
    return replace(smaller, parameters=sum(own), largest=max(own, default=0))


def _scaled(figures: StageFigures, scale: float) -> StageFigures:
    return replace(
        figures,
        held_forward=figures.held_forward * scale,
        held_weight=figures.held_weight * scale,
        host=figures.host * scale,
        inside=figures.inside * scale,
        sent=figures.sent * scale,
        keys_values=figures.keys_values * scale,
        keys_values_inside=figures.keys_values_inside * scale,
        queries=figures.queries * scale,
    )
