"""The loss of the last stage: on the device, in the right precision, and where the vocabulary is split; and
what it is multiplied with in fp16.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from everstep.engine.datasets.data import uneven
from everstep.engine.layers.boundary import Value, mapped, tensors_in
from everstep.engine.layers.model import Loss, Model, cross_entropy, token_loss
from everstep.engine.shards import loss as sharded
from everstep.engine.shards.collectives import Collectives
from everstep.engine.shards.context import ContextPart
from everstep.engine.shards.layers import gathered
from everstep.engine.shards.loss import IGNORED
from everstep.errors import UserError
from everstep.net import host_memory

_LEAST_SCALE, _MOST_SCALE = 2.0**-64, 2.0**64  # beyond these fp32 itself ends
_OF_PARTS = ((cross_entropy, sharded.cross_entropy), (token_loss, sharded.token_loss))


class StageLoss:
    def __init__(
        self,
        model: Model,
        device: torch.device,
        shards: Collectives | None,
        part: ContextPart | None = None,
    ) -> None:
        """`part`: of each row, what this shard has."""
        self._whole: Loss = model.loss  # of all logits
        self._device, self._part = device, part
        self._split_over = shards if part is None and "logits" in model.shard_plan.values() else None
        self._loss = self._whole
        of_parts = next((parts for whole, parts in _OF_PARTS if whole is self._whole), None)
        if self._split_over is not None:
            if of_parts is None:
                raise UserError(
                    'shard_plan splits "logits", and the loss is your own; use "column_gather" there.'
                )
            self._loss = partial(of_parts, collectives=self._split_over)
        if part is not None:
            self._loss = partial(loss_of_part, self._whole, part)
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

    def of_all_shards(self, loss: Tensor) -> Tensor:
        """The loss that is shown, of what this shard has made."""
        return loss if self._part is None else self._part.shards.sum(loss.clone())

    def weight_on_host(self, targets: Value) -> Tensor | float | None:
        """What a microbatch counts, if the loss can say so from its targets."""
        weigh = getattr(self._whole, "weigh", None)
        return None if weigh is None else weigh(targets)

    def to_be_scored(self, output: Value, targets: Value) -> tuple[Loss, Value, Value]:
        """For metrics, which are anybody's functions: the loss, the whole output, the targets."""
        if self._split_over is not None:
            output = mapped(partial(gathered, collectives=self._split_over), output)
        if self._part is not None:
            output = mapped(self._part.whole, output)
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


class LossScale:
    """What the loss is multiplied with before the backward, by step: without it, small gradients are 0 in
    fp16. A power of two, so that it rounds nothing, and is divided out of the sums exactly.

    It is halved by a step that was skipped, because some gradient was not finite, and doubled after so many
    steps in a row that were not, as torch's GradScaler does it. All stages skip the same steps, so each has
    the same scale without a word. It is part of the state, and of every step that is still open: a step whose
    update is undone is followed again.
    """

    def __init__(self, first: float, interval: int) -> None:
        self._first, self._interval = first, interval
        self._known: dict[int, tuple[float, int]] = {1: (first, 0)}  # with the good steps since it changed

    def at(self, step: int) -> float:
        return self._known[step][0]

    def follow(self, step: int, *, skipped: bool) -> None:
        """A step is updated or skipped: the scale of the next one is known. The last call counts."""
        scale, good = self._known[step]
        if skipped:
            scale, good = max(scale / 2, _LEAST_SCALE), 0
        elif good + 1 == self._interval:
            scale, good = min(scale * 2, _MOST_SCALE), 0
        else:
            good += 1
        self.stay(step, (scale, good))

    def stay(self, step: int, following: tuple[float, int] | None = None) -> None:
        """The step before is still open, for ghosts; those before it are not."""
        self._known[step + 1] = following or self._known[step]
        self._known = {known: scale for known, scale in self._known.items() if known >= step - 1}

    def state(self, step: int) -> tuple[float, int]:
        """What the state after a step holds."""
        return self._known[step + 1]

    def load(self, step: int, state: tuple[float, int] | None) -> None:
        """The inverse of `state`; None: the state is of a run without a scale."""
        self._known = {step + 1: state or (self._first, 0)}


def loss_of_part(whole: Loss, part: ContextPart, output: Value, targets: Value) -> Any:
    """This shard's summand of a loss of tokens; what it counts is that of the whole rows."""
    followed = getattr(whole, "following", _themselves)(targets)
    weight = (followed != IGNORED).sum()
    logits = output["logits"] if isinstance(output, Mapping) else output
    made, _ = token_loss(logits, part.of(followed))
    return made / weight if whole is cross_entropy else (made, weight)


def splits_rows(whole: Loss) -> bool:
    """Is a loss the sum of what each token adds to it?"""
    return whole in (cross_entropy, token_loss) or hasattr(whole, "following")


def _themselves(targets: Value) -> Value:
    return targets


def _in_fp32(output: Value) -> Value:
    return mapped(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, output)
