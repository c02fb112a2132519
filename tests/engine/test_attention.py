"""Attention in exact jobs: the same numbers as torch's, and on a GPU the same bits every time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from everstep.engine import attention

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def drawn(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    rows, heads, length, size = shape
    generator = torch.Generator(device).manual_seed(sum(shape))
    made = torch.randn(rows, length, heads, size, generator=generator, device=device, dtype=dtype)
    return made.transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_on_a_cpu_attention_is_torchs_own(kv_heads: int) -> None:
    q, k, v = drawn(2, 4, 8, 16), drawn(2, kv_heads, 8, 16), drawn(2, kv_heads, 8, 16)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != 4)
    assert torch.equal(attention.causal(q, k, v), expected)


@needs_gpu
@pytest.mark.parametrize("shape", [(8, 16, 1024, 64), (8, 16, 2048, 128)])
def test_on_a_gpu_gradients_have_the_same_bits_every_time(shape: tuple[int, ...]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        given = [drawn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        q, k, v = (tensor.detach().requires_grad_() for tensor in given[:3])
        out = attention.causal(q, k, v)
        if torch.cuda.get_device_capability()[0] == 9:
            assert attention.mixes(q.shape, q.dtype, q.device), "cuDNN's forward is twice as fast"
        first = torch.autograd.grad(out, (q, k, v), given[3], retain_graph=True)
        for _ in range(20):
            again = torch.autograd.grad(out, (q, k, v), given[3], retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            assert torch.equal(attention.causal(q, k, v), out)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        theirs = torch.autograd.grad(expected, (q, k, v), given[3])
        for ours, other in zip((out, *first), (expected, *theirs), strict=True):
            assert (ours - other).abs().max() < 0.02 * other.abs().max()
    finally:
        torch.use_deterministic_algorithms(False)
