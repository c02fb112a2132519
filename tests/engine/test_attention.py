"""Attention of built-in models is torch's own, within the documents of a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from everstep.engine.layers import attention


def drawn(*shape: int) -> Tensor:
    rows, heads, length, size = shape
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(rows, length, heads, size, generator=generator).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_is_torchs_own(kv_heads: int) -> None:
    q, k, v = drawn(2, 4, 8, 16), drawn(2, kv_heads, 8, 16), drawn(2, kv_heads, 8, 16)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != 4)
    assert torch.equal(attention.causal(q, k, v), expected)
