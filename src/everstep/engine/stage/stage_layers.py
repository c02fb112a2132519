"""A stage's layers and no others: drawn on the CPU from (seed, layer), so equal everywhere."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from everstep.engine.layers import regions
from everstep.engine.layers.linear import Queue
from everstep.engine.layers.model import (
    Model,
    Slot,
    drawn,
    every_parameter,
    in_precision,
    in_training,
    trained,
)
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.layers.taken_over import take_over
from everstep.engine.shards.collectives import Collectives
from everstep.engine.shards.layers import cut, join


class StageLayers(NamedTuple):
    modules: list[nn.Module]
    parameters: dict[str, nn.Parameter]  # what the layers compute with, by logical name
    summed: list[nn.Parameter]  # whole, with a gradient from every shard


def build_layers(
    model: Model,
    layers: range,
    *,
    seed: int,
    slots: dict[str, Slot],
    masters: Tensor,
    working: Tensor,
    queue: Queue,
    plan: Cut,
    shards: Collectives | None,
) -> StageLayers:
    """`masters` and `working` get the first values; weight gradients will go to `queue`."""
    made = StageLayers([], {}, [])
    index_of = {name: index for index, name in enumerate(model.layers)}
    for index in layers:
        layer = model.names[index]
        module = drawn(model, index, seed)
        here = every_parameter(layer, module)
        for first, second in model.tied:  # the second of a pair starts with the values of the first
            if second in here:
                owner = max((name for name in index_of if first.startswith(name + ".")), key=len)
                others = owner != layer
                source = every_parameter(owner, drawn(model, index_of[owner], seed)) if others else here
                here[second].data.copy_(source[first].data)
        cut(layer, module, plan)
        parameters = trained(layer, module)
        for name, parameter in parameters.items():
            master, copy = slots[name].of(masters), slots[name].of(working)
            copy.copy_(master.copy_(parameter.data))
            parameter.data = copy
        made.parameters.update(parameters)
        in_precision(module.to(working.device), working.dtype, layer, model.assembly.in_fp32)
        fused = regions.are_enabled() and shards is None and not model.assembly.has_regions
        take_over(module, queue, fused=fused)
        if shards is not None:
            made.summed.extend(join(layer, module, plan, shards))
        made.modules.append(in_training(module))
        if fused and "forward" not in vars(module):  # not a Linear or an Embedding by itself
            module.forward = regions.compiled(f"layer {layer!r}", module.forward)
    return made
