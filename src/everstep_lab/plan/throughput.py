"""How fast a model trains in a shape: the time of one step, part by part; and the best shape for each count.

    matrix products   FLOPs / (peak x efficiency); wider matrices per shard are more efficient
    pointwise         bytes moved / memory bandwidth: norms, residuals, activations, unfused scores
    shards            two all-reduces a layer and direction, within the node
    pipeline          the slowest stage, once per microbatch, and the bubble of the schedule
    hops              boundary tensors between stages
    reduce, update    gradients over the replicas, optimizer over its state

Each part is written once, for a vector of numbers of replicas: a curve over thousands of worker counts is a
few hundred numpy calls. What a number cannot show (congestion, stragglers, a bad kernel) is in the fitted
constants of `hardware.Stack`; docs/planner.md lists the error on every published row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from everstep.schedule.footprint import REDUCED
from everstep_lab.plan import memory
from everstep_lab.plan.curve import Curve, SameCut
from everstep_lab.plan.hardware import Gpu, Stack
from everstep_lab.plan.models import ModelFigures
from everstep_lab.plan.pipeline_orders import ORDERS
from everstep_lab.plan.task_shape import RECOMPUTE, Floats, ParallelShape

WHOLE_TRAFFIC, SPLIT_TRAFFIC, SCORE_TRAFFIC = 11.0, 16.0, 6.0  # bf16 elements moved, forward, a token
MICROBATCHES = (1, 2, 4, 8)
UPDATE_BYTES = 30.0  # read and written per parameter by the optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCut:
    """How the model and the batch are cut, all but the number of replicas."""

    stages: int
    shards: int
    microbatch: int
    recompute: str
    chunks: int = 1
    context: int = 1  # workers that share a sequence

    def shape(self, replicas: int) -> ParallelShape:
        return ParallelShape(replicas, self.stages, self.shards, self.microbatch, self.recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step, by part; each a vector over the numbers of replicas."""

    compute: Floats
    bubble: Floats
    shards: Floats
    hops: Floats
    reduce: Floats
    update: Floats

    @property
    def total(self) -> Floats:
        return self.compute + self.bubble + self.shards + self.hops + self.reduce + self.update


def matmul_rate(model: ModelFigures, gpu: Gpu, stack: Stack, shards: int) -> float:
    """FLOP/s of one shard's matrix products. A faster chip needs a wider matrix to be kept busy."""
    width = model.hidden / shards
    half = stack.matmul_half * gpu.peak_flops / 312e12
    return gpu.peak_flops * gpu.efficiency * stack.matmul_efficiency * width / (width + half)


def layer_forward(model: ModelFigures, gpu: Gpu, stack: Stack, cut: PlannedCut) -> tuple[float, float]:
    """Seconds of one layer's forward, one microbatch: all of it, and its attention alone."""
    tokens = cut.microbatch * model.sequence / cut.context
    rate = matmul_rate(model, gpu, stack, cut.shards)
    products = 2 * model.layer_parameters * tokens / cut.shards / rate
    scores = model.attention_flops_per_token * tokens / cut.shards / (rate * ATTENTION)
    if not stack.fused_attention:
        moved = 2 * SCORE_TRAFFIC * tokens * model.heads * model.sequence / cut.shards
        scores += stack.traffic * moved / gpu.memory_bandwidth
    whole = WHOLE_TRAFFIC / (cut.shards if stack.sequence_parallel else 1)
    moved = 2 * tokens * model.hidden * (whole + SPLIT_TRAFFIC / cut.shards)
    return products + scores + stack.traffic * moved / gpu.memory_bandwidth, scores


ATTENTION = 0.7  # efficiency of attention's products relative to a layer's


def op_seconds(model: ModelFigures, gpu: Gpu, stack: Stack, cut: PlannedCut) -> tuple[float, float]:
    """Forward and backward of one microbatch on the slowest stage, shard traffic apart."""
    forward, scores = layer_forward(model, gpu, stack, cut)
    again = {"none": 0.0, "selective": scores, "full": forward}[cut.recompute]
    tokens = cut.microbatch * model.sequence / cut.context
    rate = matmul_rate(model, gpu, stack, cut.shards)
    head = 2 * model.vocab * model.hidden * tokens / cut.shards / rate
    inner, last = layers_per_stage(model, cut.stages)
    forward_s = max(inner * forward, last * forward + head)
    return forward_s, forward_s * 2 + max(inner, last) * again


def layers_per_stage(model: ModelFigures, stages: int) -> tuple[int, int]:
    """Layers of an inner stage and of the last; embedding and head count as a layer where that divides."""
    if stages > 1 and model.layers % stages and (model.layers + 2) % stages == 0:
        inner = (model.layers + 2) // stages
        return inner, inner - 1
    return model.layers // stages, model.layers // stages


def divides(model: ModelFigures, stages: int) -> bool:
    return model.layers % stages == 0 or (stages > 1 and (model.layers + 2) % stages == 0)


def step_time(
    model: ModelFigures, gpu: Gpu, stack: Stack, cut: PlannedCut, replicas: Floats, *, slots_per_node: int = 8
) -> StepTime:
    """Seconds of one step, for each number of replicas."""
    count = model.batch / (replicas * cut.microbatch)  # microbatches of a replica
    forward, backward = op_seconds(model, gpu, stack, cut)
    once = forward + backward
    crosses = replicas * cut.stages * cut.shards * cut.context > slots_per_node
    wire = stack.wire_efficiency * np.where(crosses, gpu.network_bandwidth, gpu.node_bandwidth)
    shard_s = shard_traffic(model, gpu, stack, cut)
    hop_bytes = 2.0 * cut.microbatch * model.sequence / cut.context * model.hidden / cut.shards
    hop = np.where(cut.stages > 1, hop_bytes / wire, 0.0)
    per_gpu = (model.layers / cut.stages * model.layer_parameters + model.vocab * model.hidden) / cut.shards
    copies = replicas * cut.context
    reduce = 2 * (copies - 1) / copies * per_gpu * REDUCED / wire * stack.reduce_exposed
    shared = copies if stack.zero_1 else np.ones_like(copies)
    update = per_gpu * UPDATE_BYTES / gpu.memory_bandwidth / shared
    idle = ORDERS[stack.schedule].bubble(cut.stages, cut.chunks)
    return StepTime(
        compute=count * once,
        bubble=np.full_like(count, idle * (once + shard_s)),
        shards=count * shard_s,
        hops=(count * cut.chunks + cut.stages - 1) * 2 * hop,
        reduce=reduce,
        update=update,
    )


def shard_traffic(model: ModelFigures, gpu: Gpu, stack: Stack, cut: PlannedCut) -> float:
    """Seconds a microbatch spends on a stage in all-reduces between shards (and gathers between contexts)."""
    inner, _ = layers_per_stage(model, cut.stages)
    tokens = cut.microbatch * model.sequence / cut.context
    times = 6 if cut.recompute == "full" else 4
    ring = 2 * (cut.shards - 1) / cut.shards * 2.0 * tokens * model.hidden
    seconds = inner * times * ring / (gpu.node_bandwidth * stack.wire_efficiency) * stack.shards_exposed
    if cut.context > 1:  # keys and values of the whole sequence, forward and backward
        shared = (model.kv_heads or model.heads) / model.heads
        gathered = 2 * 2.0 * tokens * (cut.context - 1) * model.hidden * shared / cut.shards
        seconds += inner * 2 * gathered / (gpu.network_bandwidth * stack.wire_efficiency)
    return seconds


# ---------------------------------------------------------------- the curve of a model


def from_model(model: ModelFigures, gpu: Gpu, stack: Stack, *, most: int, slots_per_node: int = 8) -> Curve:
    """The best shape for each number of workers up to `most`. Cuts know larger shapes too: a task runs them
    with places empty (`everstep_lab.plan.holes`).
    """
    best = np.zeros(most + 1)
    cut_of = np.full(most + 1, -1, dtype=np.int64)
    cuts: list[SameCut] = []
    for stages, shards in _cuts(model, min(slots_per_node, stack.most_shards), most):
        cut = _same_cut(model, gpu, stack, stages, shards, slots_per_node)
        if not cut.throughput.any():
            continue
        replicas = np.flatnonzero(cut.throughput[: most // (stages * shards) + 1])
        workers = replicas * stages * shards
        better = cut.throughput[replicas] > best[workers] * (1 + 1e-9)
        best[workers[better]] = cut.throughput[replicas[better]]
        cut_of[workers[better]] = len(cuts)
        cuts.append(cut)
    return Curve(
        throughput=best,
        cut_of=cut_of,
        cuts=tuple(cuts),
        state_bytes=memory.STATE * model.parameters,
        work_per_step=model.flops_per_step,
        batch=model.batch,
        schedule=stack.schedule,
        replicated=not stack.zero_1,
        _index={(cut.stages, cut.shards): i for i, cut in enumerate(cuts)},
    )


def _cuts(model: ModelFigures, most_shards: int, most: int) -> Iterator[tuple[int, int]]:
    """Shards stay within a node and divide the heads; stages divide the layers."""
    for shards in (1, 2, 4, 8, 16):
        if shards > min(most_shards, most) or model.heads % shards:
            continue
        for stages in range(1, min(model.layers, most // shards) + 1):
            if divides(model, stages):
                yield stages, shards


def _same_cut(
    model: ModelFigures, gpu: Gpu, stack: Stack, stages: int, shards: int, slots_per_node: int
) -> SameCut:
    top = model.batch
    throughput, per_step, bubble = (np.zeros(top + 1) for _ in range(3))
    microbatches = np.zeros(top + 1, dtype=np.int64)
    recomputes = np.zeros(top + 1, dtype=np.int8)
    for microbatch in MICROBATCHES:
        share = model.batch // microbatch if model.batch % microbatch == 0 else 0
        replicas = np.array(_divisors(share), dtype=np.int64)
        if not len(replicas):
            continue
        for code, recompute in enumerate(RECOMPUTE):
            if recompute == "selective" and stack.fused_attention:
                continue
            for chunks in range(1, stack.most_chunks + 1):
                if chunks > 1 and (stages == 1 or model.layers % (stages * chunks)):
                    continue
                cut = PlannedCut(
                    stages=stages, shards=shards, microbatch=microbatch, recompute=recompute, chunks=chunks
                )
                rate, time = _rate(model, gpu, stack, cut, replicas.astype(np.float64), slots_per_node)
                better = rate > throughput[replicas]
                chosen = replicas[better]
                throughput[chosen] = rate[better]
                per_step[chosen] = ((time.reduce + time.update) / time.total)[better]
                bubble[chosen] = (time.bubble / time.total)[better]
                microbatches[chosen] = microbatch
                recomputes[chosen] = code
    return SameCut(stages, shards, throughput, microbatches, recomputes, per_step, bubble)


def _rate(
    model: ModelFigures, gpu: Gpu, stack: Stack, cut: PlannedCut, replicas: Floats, slots_per_node: int
) -> tuple[Floats, StepTime]:
    """FLOP/s of all workers, 0 where memory does not suffice; and the step's time."""
    need = memory.needed(
        model,
        stack,
        stages=cut.stages,
        shards=cut.shards,
        replicas=replicas,
        microbatch=cut.microbatch,
        recompute=cut.recompute,
        chunks=cut.chunks,
    )
    time = step_time(model, gpu, stack, cut, replicas, slots_per_node=slots_per_node)
    return np.where(memory.fits(gpu, need), model.flops_per_step / time.total, 0.0), time


def _divisors(number: int) -> list[int]:
    if number < 1:
        return []
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
