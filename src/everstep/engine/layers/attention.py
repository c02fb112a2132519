"""Attention of a built-in model, with the same bits every time where the process computes exactly.

On a Hopper GPU torch takes cuDNN's kernels, and under `use_deterministic_algorithms` flash attention 2, which
needs twice as long. The reason is one of the gradients: cuDNN's backward pass, as torch calls it, adds up
that of the queries in the order in which blocks finish. Its forward pass has one order. An exact process
therefore runs cuDNN's forward pass, and

    library   cuDNN's own exact backward pass, where its front end is installed (`attention_library`)
    own       kernels of ours for the backward pass (below)
    torch     what torch chooses: other GPUs, other shapes, or where neither passes a trial

The trial is one pass on a sample, compared with torch's exact one. Its answer depends on shapes, GPU and
software, never on what a worker has met; so workers with the same software take the same way.

Rejected: `CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT`, which is said to make the pass that torch calls exact. It
changes nothing in cuDNN 9.19 (tried; LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from everstep.engine.layers import attention_library
from everstep.log import warn

Way = Literal["library", "own", "torch"]
_HOPPER = 9
_CLOSE = 0.02  # of the largest gradient: both are computed in 16 bits
_aten = torch.ops.aten


class Attend(nn.Module):
    """Where the tokens of a row meet, and nowhere else: shards that have a part of each row change it."""

    parts = 1  # in which a row is on as many shards

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None) -> Tensor:
        return causal(q, k, v, positions)

    def places(self, length: int, device: torch.device) -> Tensor | None:
        """Where in their row the tokens are; None: one after the other."""
        return None


def causal(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None) -> Tensor:
    """Each rows x heads x length x size; keys and values may have fewer heads. `positions`: rows x length, in
    rows of several documents: where they start again, a document begins, and none sees another.
    """
    if positions is not None:
        return causal_from(0, q, k, v, document_numbers(positions))
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


def document_numbers(positions: Tensor) -> Tensor:
    """Of each token the document of its row that it belongs to."""
    return (positions == 0).cumsum(1)


def causal_from(
    start: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of a piece of each row, whose first token is the one at `start`, to all up to its own, or to
    the last `window` of them. `documents`: rows x length, if a row has several, of which none sees another.
    """
    end, grouped = start + q.shape[-2], q.shape[1] != k.shape[1]
    first = 0 if window is None else max(0, start - window + 1)
    k, v = k[..., first:end, :], v[..., first:end, :]
    size, plain = q.shape[-1], documents is None and window is None
    fits = size == v.shape[-1] and size <= 256 and not size % 8
    if plain and fits and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        if grouped:
            k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        # Of fewer queries than keys the last one sees the last key, other than with torch's own `is_causal`.
        made: Tensor = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[0]
        return made
    if documents is None:
        seen = _added(start - first, end - first, window, q.device, q.dtype)
    else:
        same = documents[:, None, start:end, None] == documents[:, None, None, first:end]
        seen = same & _seen(start - first, end - first, window, q.device)
    # On a GPU by plain products: those of torch's kernels that take a mask add up in no fixed order.
    ways = [SDPBackend.MATH] if q.is_cuda else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(ways):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped)


def _seen(start: int, end: int, window: int | None, device: torch.device) -> Tensor:
    earlier = torch.ones(end - start, end, dtype=torch.bool, device=device).tril(start)
    return earlier if window is None else earlier.triu(start - window + 1)


@lru_cache(maxsize=8)
def _added(start: int, end: int, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """As kernels make it of a mask, for themselves and each layer; so it is there once for all."""
    seen = _seen(start, end, window, device)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


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


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, logsumexp = _forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        return gradients(q, k, v, out, attention_library.in_layout(grads[0]), logsumexp)


def _library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    made: Tensor = _Library.apply(q, k, v)  # type: ignore[no-untyped-call]
    return made


def _own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    made: Tensor = _Own.apply(q, k, v)  # type: ignore[no-untyped-call]
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


# ------------------------------------------------------------------
# The backward pass of causal attention, in one order: kernels of our own, in Triton.
#
# Each block of queries goes through the keys before it, and adds up its gradient in registers; each block of
# keys goes through the queries after it. No other block adds to it, so the bits are the same every time.
# Scores and the gradients of their softmax are computed again from what the forward pass has left, as flash
# attention does, once for the queries and once for the keys.

# A block of queries is a multiple of its blocks of keys, and a block of keys of its blocks of queries.
ROWS = 128  # of which a length is a multiple
_BLOCKS = ("ROWS", "COLUMNS", "num_warps", "num_stages")  # queries and keys in a block, and how it is run
_OF_QUERIES = {64: (64, 64, 4, 3), 128: (128, 32, 8, 3)}  # by the size of a head: measured on an H200
_OF_KEYS = {64: (64, 64, 4, 3), 128: (64, 64, 4, 2)}


@cache
def _compiled() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def query_grads(  # type: ignore[no-untyped-def]
        q_at, k_at, v_at, out_at, grad_at, logsumexp_at, delta_at, found_at,
        q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, g_b, g_h, g_s, f_b, f_h, f_s,
        heads, length, scale,
        SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
        b = (tl.program_id(1) // heads).to(tl.int64)
        h = (tl.program_id(1) % heads).to(tl.int64)
        row, d = block * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
        q = tl.load(q_at + b * q_b + h * q_h + row[:, None] * q_s + d[None, :])
        out = tl.load(out_at + b * o_b + h * o_h + row[:, None] * o_s + d[None, :])
        grad = tl.load(grad_at + b * g_b + h * g_h + row[:, None] * g_s + d[None, :])
        delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
        base_2 = 1.4426950408889634
        place = tl.program_id(1).to(tl.int64) * length + row
        tl.store(delta_at + place, delta)
        logsumexp = tl.load(logsumexp_at + place) * base_2
        keys, values = k_at + b * k_b + h * k_h, v_at + b * v_b + h * v_h
        total = tl.zeros((ROWS, SIZE), tl.float32)
        whole = block * ROWS // COLUMNS  # blocks of keys that every query of this block sees
        for n in range(0, whole):
            column = n * COLUMNS + tl.arange(0, COLUMNS)
            k = tl.load(keys + column[:, None] * k_s + d[None, :])
            v = tl.load(values + column[:, None] * v_s + d[None, :])
            p = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * base_2) - logsumexp[:, None])
            ds = p * (tl.dot(grad, tl.trans(v)) - delta[:, None])
            total = tl.dot(ds.to(q.dtype), k, total)
        for n in range(whole, (block + 1) * ROWS // COLUMNS):
            column = n * COLUMNS + tl.arange(0, COLUMNS)
            k = tl.load(keys + column[:, None] * k_s + d[None, :])
            v = tl.load(values + column[:, None] * v_s + d[None, :])
            p = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * base_2) - logsumexp[:, None])
            p = tl.where(row[:, None] >= column[None, :], p, 0.0)
            ds = p * (tl.dot(grad, tl.trans(v)) - delta[:, None])
            total = tl.dot(ds.to(q.dtype), k, total)
        found = found_at + b * f_b + h * f_h + row[:, None] * f_s + d[None, :]
        tl.store(found, (total * scale).to(q.dtype))

    @triton.jit  # type: ignore[untyped-decorator]
    def key_grads(  # type: ignore[no-untyped-def]
        q_at, k_at, v_at, grad_at, logsumexp_at, delta_at, of_k_at, of_v_at,
        q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_s, f_b, f_h, f_s,
        heads, length, scale,
        SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0)  # the longest first
        b = (tl.program_id(1) // heads).to(tl.int64)
        h = (tl.program_id(1) % heads).to(tl.int64)
        column, d = block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, SIZE)
        k = tl.load(k_at + b * k_b + h * k_h + column[:, None] * k_s + d[None, :])
        v = tl.load(v_at + b * v_b + h * v_h + column[:, None] * v_s + d[None, :])
        base_2 = 1.4426950408889634
        queries, grads = q_at + b * q_b + h * q_h, grad_at + b * g_b + h * g_h
        first = tl.program_id(1).to(tl.int64) * length
        of_k, of_v = tl.zeros((COLUMNS, SIZE), tl.float32), tl.zeros((COLUMNS, SIZE), tl.float32)
        whole = (block + 1) * COLUMNS // ROWS  # from here on every query sees all these keys
        for m in range(block * COLUMNS // ROWS, whole):
            row = m * ROWS + tl.arange(0, ROWS)
            q = tl.load(queries + row[:, None] * q_s + d[None, :])
            grad = tl.load(grads + row[:, None] * g_s + d[None, :])
            logsumexp = tl.load(logsumexp_at + first + row) * base_2
            p = tl.exp2(tl.dot(k, tl.trans(q)) * (scale * base_2) - logsumexp[None, :])
            p = tl.where(row[None, :] >= column[:, None], p, 0.0)
            of_v = tl.dot(p.to(q.dtype), grad, of_v)
            ds = p * (tl.dot(v, tl.trans(grad)) - tl.load(delta_at + first + row)[None, :])
            of_k = tl.dot(ds.to(q.dtype), q, of_k)
        for m in range(whole, length // ROWS):
            row = m * ROWS + tl.arange(0, ROWS)
            q = tl.load(queries + row[:, None] * q_s + d[None, :])
            grad = tl.load(grads + row[:, None] * g_s + d[None, :])
            logsumexp = tl.load(logsumexp_at + first + row) * base_2
            p = tl.exp2(tl.dot(k, tl.trans(q)) * (scale * base_2) - logsumexp[None, :])
            of_v = tl.dot(p.to(q.dtype), grad, of_v)
            ds = p * (tl.dot(v, tl.trans(grad)) - tl.load(delta_at + first + row)[None, :])
            of_k = tl.dot(ds.to(q.dtype), q, of_k)
        place = b * f_b + h * f_h + column[:, None] * f_s + d[None, :]
        tl.store(of_k_at + place, (of_k * scale).to(k.dtype))
        tl.store(of_v_at + place, of_v.to(v.dtype))

    return query_grads, key_grads


def gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k, v. Each rows x heads x length x size, the last one with stride 1; a multiple of ROWS long."""
    of_queries, of_keys = _compiled()
    rows, heads, length, size = q.shape
    inner = (rows, length, heads, size)
    of_q, of_k, of_v = (torch.empty(inner, dtype=q.dtype, device=q.device).transpose(1, 2) for _ in range(3))
    delta = torch.empty((rows, heads, length), dtype=torch.float32, device=q.device)

    def strides(*tensors: Tensor) -> list[int]:
        return [stride for one in tensors for stride in one.stride()[:3]]

    rest = (heads, length, size**-0.5)
    blocks = dict(zip(_BLOCKS, _OF_QUERIES[size], strict=True))
    of_queries[(length // blocks["ROWS"], rows * heads)](
        *(q, k, v, out, grad, logsumexp, delta, of_q, *strides(q, k, v, out, grad, of_q), *rest),
        SIZE=size, **blocks,
    )  # fmt: skip
    blocks = dict(zip(_BLOCKS, _OF_KEYS[size], strict=True))
    of_keys[(length // blocks["COLUMNS"], rows * heads)](
        *(q, k, v, grad, logsumexp, delta, of_k, of_v, *strides(q, k, v, grad, of_k), *rest),
        SIZE=size, **blocks,
    )  # fmt: skip
    return of_q, of_k, of_v
