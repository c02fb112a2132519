"""The global norm over shards: what every shard has whole counts on the first one, once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from everstep.engine.shards.collectives import summed
from everstep.engine.stage.stage import Stage
from everstep.engine.sums.sum_units import CHUNK, CPU_BLOCK


def counts(stage: Stage, name: str) -> bool:
    """Does this shard count this parameter?"""
    return stage.cut.index == 0 or stage.cut.is_split(name)


def counted(stage: Stage, part: slice) -> list[slice]:
    """Of a stretch of the stage's flat buffers, what this shard counts."""
    if stage.cut.index == 0:
        return [part]
    spans = [
        (slot.offset, slot.offset + slot.size) for name, slot in stage.slots.items() if counts(stage, name)
    ]
    met = [slice(max(part.start, a), min(part.stop, b)) for a, b in spans]
    return [one for one in met if one.start < one.stop]


def squares_of(stage: Stage, parts: Sequence[Sequence[Tensor]]) -> tuple[float, ...]:
    """The sum of squares of each part, in fp64, over all shards. In pieces: each is converted as a whole."""
    pieces = [[piece for one in some for piece in _pieces(one.reshape(-1))] for some in parts]
    every = [piece for some in pieces for piece in some]
    norms = torch._foreach_norm(every, 2, torch.float64) if every else ()  # some launches, not one per piece
    squares = iter(torch.stack(norms).square().tolist() if norms else ())
    found = tuple(math.fsum(next(squares) for _ in some) for some in pieces)  # `sum` is another one in 3.12
    return found if stage.shards is None else summed(stage.shards, found, stage.device)


def _pieces(flat: Tensor) -> list[Tensor]:
    size = CPU_BLOCK if flat.device.type == "cpu" else CHUNK
    return [flat[at : at + size] for at in range(0, flat.numel(), size)]
