"""Attention of a built-in model: torch's own, which has the same bits every time where the process computes
exactly, and in rows of several documents within each document.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def causal(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None) -> Tensor:
    """Each rows x heads x length x size; keys and values may have fewer heads. `positions`: rows x length, in
    rows of several documents: where they start again, a document begins, and none sees another.
    """
    grouped = q.shape[1] != k.shape[1]
    if positions is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    documents = (positions == 0).cumsum(1)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    seen = same & torch.ones(2 * (q.shape[-2],), dtype=torch.bool, device=q.device).tril()
    # On a GPU by plain products: those of torch's kernels that take a mask add up in no fixed order.
    ways = [SDPBackend.MATH] if q.is_cuda else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(ways):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)
