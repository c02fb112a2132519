"""A stage's halves of tied pairs whose other halves are on another stage: in and out of a flat buffer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from everstep.engine.layers.model import Model, Slot


class TiedHalves:
    def __init__(self, model: Model, slots: Mapping[str, Slot]) -> None:
        both = [pair for pair in model.tied if all(half in slots for half in pair)]
        self.has_pair = bool(both)  # are both halves of a pair here?
        self._elsewhere = [
            slots[name] for pair in model.tied if pair not in both for name in pair if name in slots
        ]

    def part(self, flat: Tensor) -> Tensor:
        """The halves that are here, one after the other."""
        return torch.cat([slot.of(flat).reshape(-1) for slot in self._elsewhere])

    def set_part(self, flat: Tensor, part: Tensor) -> None:
        """The inverse of `part`."""
        for slot in self._elsewhere:
            here = slot.of(flat)
            here.copy_(part[: here.numel()].view(here.shape))
            part = part[here.numel() :]
