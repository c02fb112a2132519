"""The loss of a causal language model: summed over the tokens that count, with their number as its weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from everstep.engine.layers.boundary import Value
from everstep.engine.layers.model import token_loss


@dataclass(frozen=True, slots=True)
class CausalLoss:
    """Of (the last stage's output, a batch or targets that are shifted already)."""

    router: float = 0.0  # what the loss of routers is multiplied with

    any_precision = True  # logits come as they are, not in fp32

    def __call__(self, output: Mapping[str, Tensor], targets: Value) -> tuple[Tensor, Tensor]:
        logits = output["logits"]
        total, weight = token_loss(logits[:, :-1] if isinstance(targets, Mapping) else logits, _next(targets))
        if "aux" in output:  # a mean over tokens: as a sum, in proportion
            total = total + self.router * output["aux"] * weight
        return total, weight

    def weigh(self, targets: Value) -> float:
        """The weight alone, from targets on the host: nothing waits for a GPU."""
        return float((_next(targets) != -100).sum())


def _next(targets: Value) -> Tensor:
    """For every position the token that follows it."""
    if not isinstance(targets, Mapping):
        return targets  # type: ignore[no-any-return]
    return labels_of(targets)[:, 1:]


def labels_of(batch: Mapping[str, Tensor]) -> Tensor:
    """A batch's labels; without them its tokens, padding left out."""
    if "labels" in batch:
        return batch["labels"]
    mask, tokens = batch.get("attention_mask"), batch["input_ids"]
    return tokens if mask is None else tokens.masked_fill(mask == 0, -100)
