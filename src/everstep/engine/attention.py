"""Attention of a built-in model, with the same bits every time where the process computes exactly.

On a Hopper GPU torch takes cuDNN's kernels, and under `use_deterministic_algorithms` flash attention 2, which
needs twice as long. The reason is the backward pass alone: cuDNN's adds up the gradients of queries in the
order in which blocks finish. Its forward pass has one order. So here an exact process runs cuDNN's forward
and flash attention's exact backward, which asks for no more than the output and the logarithms of the sums.

Rejected: cuDNN's backward with room for the whole gradient of the scores, which would be exact. cuDNN 9.19 as
torch 2.11 calls it does not take that way, whatever `CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT` says (measured:
`bench/gpu/attention.py`).

Which way is taken depends on shapes, GPU and software only, never on what a worker has met.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_HOPPER = 9
_aten = torch.ops.aten


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each rows x heads x length x size; keys and values may have fewer heads."""
    exact = q.is_cuda and torch.are_deterministic_algorithms_enabled()
    if exact and _may_mix(q, k, v) and mixes(q.shape, q.dtype, q.device):
        mixed: Tensor = _Mixed.apply(q, k, v)  # type: ignore[no-untyped-call]
        return mixed
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
        out, logsumexp, cum_q, cum_k, ctx.max_q, ctx.max_k, seed, offset, _ = made
        ctx.save_for_backward(q, k, v, out, logsumexp.reshape(logsumexp.shape[:3]), seed, offset)
        ctx.cum = cum_q, cum_k
        output: Tensor = out
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, logsumexp, seed, offset = ctx.saved_tensors
        found: tuple[Tensor, ...] = _aten._scaled_dot_product_flash_attention_backward(
            *(grads[0], q, k, v, out, logsumexp, *ctx.cum, ctx.max_q, ctx.max_k, 0.0, True, seed, offset)
        )
        return found


def _may_mix(q: Tensor, k: Tensor, v: Tensor) -> bool:
    small = q.shape[-1] % 8 == 0 and q.shape[-1] <= 128 and q.dtype in (torch.bfloat16, torch.float16)
    return small and q.shape == k.shape == v.shape and all(one.stride(-1) == 1 for one in (q, k, v))


@cache
def mixes(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """Do both passes run for this shape here?"""
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return False
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"attention of shape {tuple(shape)} was not tried before it is recorded.")
    rows, heads, length, size = shape
    with torch.enable_grad():
        made = [torch.zeros(rows, length, heads, size, dtype=dtype, device=device) for _ in range(3)]
        q, k, v = (tensor.transpose(1, 2).requires_grad_() for tensor in made)
        try:
            out = _Mixed.apply(q, k, v)  # type: ignore[no-untyped-call]
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError):  # there is no such kernel, or it is called otherwise
            return False
    return True
