"""Boundary tensors between workers with shards: each shard sends its slice, and gets its peer's.

Every shard has the whole of a boundary tensor, so sending it once per shard would move it `count` times. Each
sends an equal slice to the same shard of the next worker; there the slices are gathered,
inside the group. A tensor that cannot be cut evenly is sent whole by every shard.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from everstep.engine.layers.boundary import Boundary, Gradients
from everstep.engine.shards.collectives import Collectives
from everstep.net import host_memory


def sliced(value: Boundary | Gradients, shards: Collectives | None) -> Boundary | Gradients:
    """What this shard sends of it."""
    if shards is None:
        return value
    cut = [tensor.numel() > 0 and tensor.numel() % shards.count == 0 for tensor in value.tensors]
    tensors = tuple(
        tensor.reshape(-1).chunk(shards.count)[shards.index].clone() if even else tensor
        for tensor, even in zip(value.tensors, cut, strict=True)
    )
    shapes = tuple(
        tuple(tensor.shape) if even else None for tensor, even in zip(value.tensors, cut, strict=True)
    )
    return replace(value, tensors=tensors, shapes=shapes)


def together(
    value: Boundary | Gradients, shards: Collectives | None, device: torch.device
) -> Boundary | Gradients:
    """The whole of it, from the slices of all shards."""
    if shards is None or not any(value.shapes):
        return value
    made: list[Tensor] = []
    for tensor, shape in zip(value.tensors, value.shapes, strict=True):
        if shape is not None:
            tensor = torch.cat(shards.gather(host_memory.to_device(tensor, device))).view(shape)
        made.append(tensor)
    return replace(value, tensors=tuple(made), shapes=())
