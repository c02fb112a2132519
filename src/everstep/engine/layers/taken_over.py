"""Which modules of a layer queue their weight gradients, so that I and W are two ops (`linear`, `experts`).

A plain `nn.Linear` in any user's module is taken over by giving the instance a forward of ours, and a plain
`nn.Embedding` with it; of transformers also GPT-2's `Conv1D`, a Linear whose weight lies the other way,
Falcon's Linear, and experts whose matrices are stacked. Every other parameter gets its gradient from autograd
during I: for those, I and W are one op. `share_in_two` tells how many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine.layers.experts import QueuedExperts, fused_experts
from everstep.engine.layers.linear import (
    LinearInOne,
    Queue,
    QueuedLinear,
    fused_linear,
    queued_conv1d,
    queued_embedding,
)

_LINEAR_TOO = {"transformers.models.falcon.modeling_falcon.FalconLinear"}  # a forward of their own, as good
_ACROSS = {"transformers.pytorch_utils.Conv1D"}


@dataclass(frozen=True, slots=True, eq=False)
class QueuedConv1D:
    """The same for transformers' Conv1D, which is not imported for this."""

    module: Any
    queue: Queue

    def __call__(self, x: Tensor) -> Tensor:
        return queued_conv1d(x, self.module.weight, self.module.bias, self.queue)


@dataclass(frozen=True, slots=True, eq=False)
class QueuedEmbedding:
    """The same for an nn.Embedding."""

    module: Any
    queue: Queue

    def __call__(self, input: Tensor) -> Tensor:
        return queued_embedding(input, self.module.weight, self.module.padding_idx, self.queue)


_FUSED: dict[Any, Callable[..., Tensor]] = {QueuedLinear: fused_linear, QueuedExperts: fused_experts}


def take_over(module: nn.Module, queue: Queue, *, fused: bool = False, in_one: bool = False) -> int:
    """Every plain Linear and Embedding in `module` queues its weight gradient from now on; how many. `fused`:
    in a module that will be compiled. `in_one`: nobody waits for I, and numbers are fp32: autograd has the
    whole backward of plain ones.
    """
    taken = 0
    for part in module.modules():
        queued = queued_forward(part)
        if in_one:
            queued = _in_one(part, queued)
        if queued is not None:
            forward: Any = queued(part, queue)
            if fused and part is not module:  # else nothing around it is compiled
                method = _FUSED.get(queued)
                forward = _uncompiled(forward) if method is None else MethodType(method, part)
            part.forward = forward
            taken += 1
    return taken


def _in_one(part: Any, queued: Any) -> Any:
    if queued is QueuedEmbedding:
        return None  # its backward is one operation, the one that W would run
    is_plain = queued is QueuedLinear and type(part).forward is nn.Linear.forward
    return LinearInOne if is_plain and part.weight.requires_grad else queued


def _uncompiled(forward: Any) -> Any:
    """As it is, also inside what is compiled. Not a decorator: that loads the compiler into every process."""
    return torch.compiler.disable(forward.__call__)  # type: ignore[no-untyped-call]


def share_in_two(modules: Iterable[nn.Module]) -> float:
    """Of the trained numbers in these modules, the part whose I and W are two ops."""
    taken, total = 0, 0
    for part in (part for module in modules for part in module.modules()):
        own = [p for p in part.parameters(recurse=False) if p.requires_grad]
        total += sum(p.numel() for p in own)
        if queued_forward(part) is not None:
            taken += sum(p.numel() for p in own)
    return taken / total if total else 1.0


def largest_in_one(layers: Mapping[str, nn.Module]) -> str | None:
    """The name of the largest trained parameter whose I and W are one op."""
    sizes = {
        f"{layer}.{path}.{name}".replace("..", "."): p.numel()
        for layer, module in layers.items()
        for path, part in module.named_modules()
        for name, p in part.named_parameters(recurse=False)
        if p.requires_grad and queued_forward(part) is None
    }
    return max(sizes, key=sizes.__getitem__, default=None)


def _has_form_of_experts(part: Any) -> bool:
    known = all(hasattr(part, key) for key in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))
    if not known or "forward" in vars(part):
        return False
    matrices = [
        part._parameters.get(key) for key in ("gate_up_proj" if part.has_gate else "up_proj", "down_proj")
    ]
    # Another implementation that a user has chosen stays.
    usual = getattr(getattr(part, "config", None), "_experts_implementation", "grouped_mm") == "grouped_mm"
    return usual and all(isinstance(one, nn.Parameter) and one.ndim == 3 for one in matrices)


def queued_forward(part: nn.Module) -> Callable[[Any, Queue], Callable[..., Tensor]] | None:
    if _has_form_of_experts(part):
        return QueuedExperts
    # A parametrized weight is no parameter of the module but computed from one: autograd must see it.
    if not isinstance(part._parameters.get("weight"), nn.Parameter) or "forward" in vars(part):
        return None
    name = f"{type(part).__module__}.{type(part).__qualname__}"
    if isinstance(part, nn.Linear) and (type(part).forward is nn.Linear.forward or name in _LINEAR_TOO):
        return QueuedLinear
    if name in _ACROSS and part._parameters.get("bias") is not None:
        return QueuedConv1D
    if isinstance(part, nn.Embedding) and type(part).forward is nn.Embedding.forward:
        plain = part.max_norm is None and not part.sparse and not part.scale_grad_by_freq
        return QueuedEmbedding if plain else None
    return None
