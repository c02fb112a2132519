"""The loss of each microbatch and what it counts, of this step and the one before."""

from __future__ import annotations

import math

from torch import Tensor

from everstep.errors import UserError


class MicrobatchNumbers:
    def __init__(self) -> None:
        self.losses: dict[tuple[int, int], Tensor] = {}  # by step and microbatch
        self.weights: dict[tuple[int, int], float] = {}

    def keep_loss(self, step: int, microbatch: int, loss: Tensor) -> None:
        self.losses = {key: known for key, known in self.losses.items() if key[0] >= step - 1}
        self.losses[step, microbatch] = loss

    def keep_weight(self, step: int, microbatch: int, weight: float) -> None:
        if not 0 <= weight < math.inf:
            raise UserError(
                f"the loss of step {step}, microbatch {microbatch} has the weight {weight}; it must be 0 or "
                "more, such as the number of tokens that count."
            )
        self.weights = {key: known for key, known in self.weights.items() if key[0] >= step - 1}
        self.weights[step, microbatch] = weight

    def discard(self, from_step: int | None) -> None:
        for key in [key for key in self.losses if from_step is None or key[0] >= from_step]:
            del self.losses[key]
        for key in [key for key in self.weights if from_step is None or key[0] >= from_step]:
            del self.weights[key]
