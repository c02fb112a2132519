"""Planted bit flips: what a broken machine does to numbers, in one worker and one op. For demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from everstep.engine.telemetry.faults import PlantedFault


def flip(tensor: Tensor, fault: PlantedFault) -> None:
    """One bit of one element, in place."""
    raw = tensor.detach().reshape(-1)
    assert raw.data_ptr() == tensor.data_ptr(), "a flip of a copy"
    size = raw.element_size()
    bits = raw.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    bit = fault.bit % (8 * size)
    mask = torch.tensor(1 << bit if bit < 8 * size - 1 or size == 1 else -(1 << bit), dtype=bits.dtype)
    bits[fault.element % bits.numel()] ^= mask.to(bits.device)


def before_forward(faults: Sequence[PlantedFault], stage: Any, updater: Any, given: Any) -> Any:
    """In the state, or in what the stage before has sent."""
    for fault in faults:
        if fault.what == "weights":
            flip(stage.masters if stage.masters.numel() else stage.working, fault)
        elif fault.what == "optimizer":
            state = updater.state()
            large = [t for name, t in state.items() if name.startswith("optimizer/") and t.numel() > 1]
            if large:
                flip(large[0], fault)
        elif fault.what == "boundary" and given is not None:
            floats = [i for i, tensor in enumerate(given.tensors) if tensor.is_floating_point()]
            tensors = list(given.tensors)
            tensors[floats[0]] = tensors[floats[0]].clone()
            flip(tensors[floats[0]], fault)
            given = replace(given, tensors=tuple(tensors))
    return given


def before_weight_grad(faults: Sequence[PlantedFault], stage: Any, step: int, microbatch: int) -> None:
    """In what is held of a microbatch for its weight gradients."""
    activation, gradient = stage.held_for_weights(step, microbatch)
    for fault in faults:
        if fault.what in ("activation", "gradient"):
            flip(activation if fault.what == "activation" else gradient, fault)
