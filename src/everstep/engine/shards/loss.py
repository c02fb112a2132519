"""Cross entropy of logits whose vocabulary is split over the shards: no shard ever holds them all.

per row    m = max over shards,  z = Σ shards Σ exp(l - m),  l_t from the shard that has the target
loss       log z + m - l_t
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everstep.engine.shards.collectives import Collectives

IGNORED = -100


class _RowLosses(torch.autograd.Function):
    """The loss of every row; 0 for a row whose target is `IGNORED`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, collectives: Collectives) -> Tensor:
        width = logits.shape[-1]
        highest = collectives.max(logits.amax(-1))
        shifted = logits - highest.unsqueeze(-1)
        local = targets - collectives.index * width
        here = (local >= 0) & (local < width)
        picked = shifted.gather(-1, local.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
        picked = picked.masked_fill(~here, 0.0)
        powers = shifted.exp_()
        # Two sums in one: of the powers, and of the one shard's logit of the target.
        both = collectives.sum(torch.stack((powers.sum(-1), picked)))
        counts = targets != IGNORED
        ctx.save_for_backward(powers.div_(both[0].unsqueeze(-1)), local, here, counts)
        return (both[0].log() - both[1]).masked_fill(~counts, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        shares, local, here, counts = ctx.saved_tensors
        made = shares.clone()
        rows = here.nonzero().squeeze(-1)
        made[rows, local[rows]] -= 1.0
        return made.mul_((grads[0] * counts).unsqueeze(-1)), None, None


def row_losses(logits: Tensor, targets: Tensor, collectives: Collectives) -> Tensor:
    flat = logits.float().reshape(-1, logits.shape[-1])
    made: Tensor = _RowLosses.apply(flat, targets.reshape(-1), collectives)  # type: ignore[no-untyped-call]
    return made


def cross_entropy(logits: Tensor, targets: Tensor, collectives: Collectives) -> Tensor:
    """The mean over all positions, as `model.cross_entropy`."""
    counted = (targets != IGNORED).sum()
    return row_losses(logits, targets, collectives).sum() / counted


def token_loss(logits: Tensor, targets: Tensor, collectives: Collectives) -> tuple[Tensor, Tensor]:
    """The sum over the tokens that count, and how many they are, as `model.token_loss`."""
    return row_losses(logits, targets, collectives).sum(), (targets != IGNORED).sum()
