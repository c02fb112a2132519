"""Batches as language models get them: tokens, masks and labels, in rows of different lengths."""

from __future__ import annotations

import torch
from torch import Tensor

VOCAB, LENGTH = 96, 16


class MaskedTokens:
    """A made-up language that a model can learn; how many tokens count differs from microbatch to
    microbatch.
    """

    def batch(self, step: int, microbatch: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(1000 * step + microbatch)
        start = torch.randint(4, VOCAB, (2, 1), generator=draw)
        stride = torch.randint(1, 4, (2, 1), generator=draw)
        ids = 4 + (start + stride * torch.arange(LENGTH)) % (VOCAB - 4)
        lengths = torch.randint(4, LENGTH + 1, (2, 1), generator=draw)
        mask = (torch.arange(LENGTH) < lengths).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
