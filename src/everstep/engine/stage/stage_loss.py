"""The loss of the last stage: on the device, in the right precision, and where the vocabulary is split."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from everstep.engine.datasets.data import uneven
from everstep.engine.layers.boundary import Value, mapped, tensors_in
from everstep.engine.layers.model import Loss, Model, cross_entropy, token_loss
from everstep.engine.shards import loss as sharded
from everstep.engine.shards.collectives import Collectives
from everstep.engine.shards.layers import gathered
from everstep.errors import UserError
from everstep.net import host_memory

_OF_PARTS = ((cross_entropy, sharded.cross_entropy), (token_loss, sharded.token_loss))


class StageLoss:
    def __init__(self, model: Model, device: torch.device, shards: Collectives | None) -> None:
        self._whole: Loss = model.loss  # of all logits
        self._device = device
        self._split_over = shards if "logits" in model.shard_plan.values() else None
        self._loss = self._whole
        of_parts = next((parts for whole, parts in _OF_PARTS if whole is self._whole), None)
        if self._split_over is not None:
            if of_parts is None:
                raise UserError(
                    'shard_plan splits "logits", and the loss is your own; use "column_gather" there.'
                )
            self._loss = partial(of_parts, collectives=self._split_over)
        self._any_precision = of_parts is not None or getattr(self._whole, "any_precision", False)
        self._target_shapes: list[tuple[int, ...]] | None = None  # of a loss without weights

    def __call__(self, output: Value, targets: Value) -> tuple[Tensor, Tensor | float]:
        """The loss to differentiate, and what it counts."""
        if not self._any_precision:
            output = _in_fp32(output)
        made = self._loss(output, self.there(targets))
        if isinstance(made, tuple | list):
            weight = self.weight_on_host(targets)  # if it can: a GPU is not waited for
            return made[0], made[1] if weight is None else weight
        shapes = [tuple(tensor.shape) for tensor in tensors_in(targets)]
        if self._target_shapes is None:
            self._target_shapes = shapes
        if shapes != self._target_shapes:
            raise UserError(uneven(self._target_shapes, shapes))
        return made, 1.0

    def weight_on_host(self, targets: Value) -> Tensor | float | None:
        """What a microbatch counts, if the loss can say so from its targets."""
        weigh = getattr(self._whole, "weigh", None)
        return None if weigh is None else weigh(targets)

    def to_be_scored(self, output: Value, targets: Value) -> tuple[Loss, Value, Value]:
        """For metrics, which are anybody's functions: the loss, the whole output, the targets."""
        if self._split_over is not None:
            output = mapped(partial(gathered, collectives=self._split_over), output)
        return self._whole, _in_fp32(output), self.there(targets)

    def there(self, targets: Value) -> Any:
        """On the device, and not the data's own tensors."""
        return mapped(
            lambda tensor: (
                tensor.clone()
                if tensor.device == self._device
                else host_memory.to_device(tensor, self._device)
            ),
            targets,
        )


def _in_fp32(output: Value) -> Value:
    return mapped(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, output)
