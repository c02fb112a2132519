"""Bytes a GPU must hold: weights, gradients, optimizer, and the activations of the microbatches in flight.

Per parameter: 2 (bf16 weight) + 4 (gradient summed in fp32; our engine: `schedule.footprint`) + 12 (fp32
master and Adam's two moments); with ZeRO-1 the 12 are split over the replicas. Per token and layer, in units
of hidden bytes, activations take

    34 + 5 a s / h     everything kept          (a heads, s tokens; the second term is the score matrix,
    34                 scores not kept           recomputed, or never written by a fused kernel)
    2                  only the layer's input    (full recomputation; one layer at a time is whole)

of which tensor parallelism splits 24 + 5 a s / h, or everything when the rest is split along the sequence:
the counts of Korthikanti et al. 2022 (arXiv 2205.05198), section 4.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from everstep.schedule.footprint import ADAM, MASTERS, USABLE, WEIGHTS
from everstep_lab.plan.hardware import Gpu, Stack
from everstep_lab.plan.models import ModelFigures
from everstep_lab.plan.pipeline_orders import ORDERS
from everstep_lab.plan.task_shape import Floats

WEIGHT, OPTIMIZER = WEIGHTS["bf16"], MASTERS + ADAM  # bytes per parameter
STATE = WEIGHT + OPTIMIZER  # what a worker needs to continue: gradients are computed again


def activation_per_token(model: ModelFigures, stack: Stack, *, shards: int, recompute: str) -> float:
    """Bytes one layer keeps of one token, on each of its shards."""
    hidden = model.hidden
    if recompute == "full":
        return 2.0 * hidden / (shards if stack.sequence_parallel else 1)
    scores = 5.0 * model.heads * model.sequence / hidden
    if recompute == "selective" or stack.fused_attention:
        scores = 0.0
    whole = 10.0 / (shards if stack.sequence_parallel else 1)
    return hidden * (whole + (24.0 + scores) / shards)


def in_flight(stack: Stack, *, stages: int, chunks: int) -> float:
    """Microbatches whose activations the first stage holds at once, in whole stages' worth."""
    if stages == 1:
        return 1.0
    return ORDERS[stack.schedule].in_flight(stages, chunks)


def needed(
    model: ModelFigures,
    stack: Stack,
    *,
    stages: int,
    shards: int,
    replicas: Floats,
    microbatch: int,
    recompute: str,
    chunks: int,
    context: int = 1,
) -> Floats:
    """Bytes on the fullest GPU, for each number of replicas."""
    layers = -(-model.layers // stages)
    embedding = model.vocab * model.hidden * (2 if stages == 1 and not model.tied else 1)
    parameters = (layers * model.layer_parameters + embedding) / shards
    copies = replicas * context if stack.zero_1 else np.ones_like(replicas)
    held = parameters * (WEIGHT + stack.gradient + OPTIMIZER / copies)
    tokens = microbatch * model.sequence / context
    per_layer = tokens * activation_per_token(model, stack, shards=shards, recompute=recompute)
    flying = layers * per_layer * in_flight(stack, stages=stages, chunks=chunks)
    if recompute == "full":
        flying += tokens * activation_per_token(model, stack, shards=shards, recompute="none")
    if stages == 1:  # the scores over the vocabulary, in fp32, only where the last stage is the fullest too
        flying += tokens * model.vocab * 4.0 / shards
    return held + flying


def fits(gpu: Gpu, bytes_needed: Floats) -> npt.NDArray[np.bool_]:
    return bytes_needed <= USABLE * gpu.memory
