"""The gradient of causal attention's queries, in one order: a kernel of our own, in Triton.

Each block of queries goes through the keys before it, and adds up its gradient in registers. No other
block adds to it, so the bits are the same every time. Scores and the gradients of their softmax are
computed anew from what the forward pass has left, as flash attention does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

ROWS, COLUMNS = 128, 64  # of queries and keys in a block


@cache
def _compiled() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def query_grads(  # type: ignore[no-untyped-def]
        q_at, k_at, v_at, out_at, grad_at, logsumexp_at, found_at,
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
        logsumexp = tl.load(logsumexp_at + tl.program_id(1).to(tl.int64) * length + row) * base_2
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

    return query_grads


def query_grads(q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, logsumexp: Tensor) -> Tensor:
    """Each rows x heads x length x size, the last one with stride 1; a multiple of ROWS long."""
    rows, heads, length, size = q.shape
    found = torch.empty((rows, length, heads, size), dtype=q.dtype, device=q.device).transpose(1, 2)
    strides = [stride for one in (q, k, v, out, grad, found) for stride in one.stride()[:3]]
    _compiled()[(length // ROWS, rows * heads)](
        *(q, k, v, out, grad, logsumexp, found, *strides, heads, length, size**-0.5),
        SIZE=size, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8, num_stages=3,
    )  # fmt: skip
    return found
