"""How fast a model trains in a shape: the time of one step, part by part.

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

from dataclasses import dataclass

import numpy as np

from everstep.plan.hardware import Gpu, Stack
from everstep.plan.memory import Floats
from everstep.plan.models import ModelFigures
from everstep.plan.pipeline_orders import ORDERS
from everstep.plan.shape import ParallelShape
from everstep.schedule.footprint import REDUCED

WHOLE_TRAFFIC, SPLIT_TRAFFIC, SCORE_TRAFFIC = 11.0, 16.0, 6.0  # bf16 elements moved, forward, a token
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
