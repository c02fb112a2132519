"""Attention of a built-in model, with the same bits every time where the process computes exactly.

On a Hopper GPU torch takes cuDNN's kernels, and under `use_deterministic_algorithms` flash attention 2, which
needs twice as long. The reason is one of the gradients: cuDNN's backward pass, as torch calls it, adds up
that of the queries in the order in which blocks finish. Its forward pass and the other gradients have one
order. An exact process therefore runs cuDNN's forward pass, and

    library   cuDNN's own exact backward pass, where its front end is installed (`attention_library`)
    own       cuDNN's gradients of keys and values, and a kernel of ours for the queries (`attention_kernels`)
    torch     what torch chooses: other GPUs, other shapes, or where neither passes a trial

The trial is one pass on a sample, compared with torch's exact one. Its answer depends on shapes, GPU and
software, never on what a worker has met; so workers with the same software take the same way.

Rejected: `CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT`, which is said to make the pass that torch calls exact. It
changes nothing in cuDNN 9.19 (tried; LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from everstep.engine.layers import attention_library
from everstep.engine.layers.attention_kernels import ROWS, query_grads
from everstep.log import warn

Way = Literal["library", "own", "torch"]
_HOPPER = 9
_CLOSE = 0.02  # of the largest gradient: both are computed in 16 bits
_aten = torch.ops.aten


def causal(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None) -> Tensor:
    """Each rows x heads x length x size; keys and values may have fewer heads. `positions`: rows x length, in
    rows of several documents: where they begin anew, so does a document, and none sees another.
    """
    if positions is not None:
        return _within_documents(q, k, v, positions)
    if q.is_cuda and torch.are_deterministic_algorithms_enabled() and _fits(q, k, v):
        return _WAYS[exact_way(q.shape, q.dtype, q.device)](q, k, v)
    return _torch(q, k, v)


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] not in (64, 128) or q.shape[-2] % ROWS:
        return False  # as `attention_library.workspace` has it
    return q.shape == k.shape == v.shape and all(map(attention_library.has_layout, (q, k, v)))


def _torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _within_documents(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """On a GPU by plain products: those of torch's kernels that take a mask add up in no fixed order."""
    document = (positions == 0).cumsum(1)
    length = positions.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    seen = (document[:, None, :, None] == document[:, None, None, :]) & earlier
    ways = [SDPBackend.MATH] if q.is_cuda else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(ways):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])


def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the logarithms of the sums of the scores' exponentials."""
    made = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
    return made[0], made[1]


class _Library(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, logsumexp = _forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        run = attention_library.backward(q.shape, q.dtype, q.device)
        assert run is not None
        return run(q, k, v, out, grads[0], logsumexp)


class _WithQueryGrads(torch.autograd.Function):
    """Attention's output as it is, and the gradient of its queries."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor, k: Tensor, v: Tensor, logsumexp: Tensor) -> Tensor:
        ctx.save_for_backward(out, q, k, v, logsumexp)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, q, k, v, logsumexp = ctx.saved_tensors
        grad = attention_library.in_layout(grads[0])
        return grad, query_grads(q, k, v, out, grad, logsumexp), None, None, None


def _library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    made: Tensor = _Library.apply(q, k, v)  # type: ignore[no-untyped-call]
    return made


def _own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, logsumexp = _forward(q.detach(), k, v)
    made: Tensor = _WithQueryGrads.apply(out, q, k.detach(), v.detach(), logsumexp)  # type: ignore[no-untyped-call]
    return made


_WAYS: dict[Way, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "library": _library,
    "own": _own,
    "torch": _torch,
}


@cache
def exact_way(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Way:
    """The first that passes its trial."""
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return "torch"
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"attention of shape {tuple(shape)} was not tried before it is recorded.")
    if attention_library.backward(shape, dtype, device) is not None and _passes(
        _library, shape, dtype, device
    ):
        return "library"
    return "own" if _passes(_own, shape, dtype, device) else "torch"


def _passes(
    way: Callable[[Tensor, Tensor, Tensor], Tensor],
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    rows, heads, length, size = shape
    draw = torch.Generator(device).manual_seed(1)
    inner = (rows, length, heads, size)
    made = [torch.randn(inner, generator=draw, dtype=dtype, device=device).transpose(1, 2) for _ in range(4)]
    q, k, v = (tensor.requires_grad_() for tensor in made[:3])
    # Under hooks of its own: the first forward of a recomputed layer would count the trial's saved tensors
    # among the layer's, and its recompute, which tries nothing, would come out short of them.
    alone = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    try:
        with torch.enable_grad(), alone:
            of_both = [
                (out, *torch.autograd.grad(out, (q, k, v), made[3]))
                for out in (way(q, k, v), _torch(q, k, v))
            ]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # there is no such kernel, or it is called otherwise
        warn(f"exact attention as torch has it: {error}")
        return False
    with torch.no_grad():
        return all(bool((a - b).abs().max() <= _CLOSE * b.abs().max()) for a, b in zip(*of_both, strict=True))
