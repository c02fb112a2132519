"""Context parallel: each shard of a worker has whole layers, and of each row a part of its sequence.

A row is cut into twice as many pieces as there are shards, and each shard has one from either end:

    pieces    0  1  2  3  4  5  6  7
    shard     0  1  2  3  3  2  1  0

With causal attention a piece sees itself and all pieces before it, so every shard has as much to compute.
Tokens meet in attention alone: keys and values of all shards are gathered ahead of it, and in the backward
their gradients are added up, each shard keeping those of its part. Gradients of weights are added up over the
shards in W, one microbatch after the other (`stage.weight_sums`), all in the order of the shards.

Rejected: keys and values that go round in a ring. It hides the exchange behind the products, but the parts of
a row's softmax are then put together in another order on each shard, and torch's kernels of attention would
have to be called once per pair of shards; gathered ones need a collective per layer and none of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everstep.engine.layers.attention import Attend, causal_from, document_numbers
from everstep.engine.shards.collectives import Collectives
from everstep.job.presets import refuse_parts


@dataclass(frozen=True, slots=True, eq=False)
class ContextPart:
    """Of every row the part that this shard has."""

    shards: Collectives

    @property
    def pieces(self) -> tuple[int, int]:
        return self.shards.index, 2 * self.shards.count - 1 - self.shards.index

    def of(self, whole: Tensor, dim: int = 1) -> Tensor:
        """This shard's part of a tensor that all shards have."""
        cut = self._pieces_of(whole, dim)
        return torch.cat([cut[piece] for piece in self.pieces], dim=dim)

    def whole(self, part: Tensor, dim: int = 1) -> Tensor:
        """The whole of a tensor of which each shard has its part; no gradient comes back."""
        return self._in_order(self.shards.gather(part), dim)

    def gathered(self, part: Tensor, dim: int) -> Tensor:
        """As `whole`, and the gradients of all shards come back to the parts."""
        made: Tensor = _Gathered.apply(part, self, dim)  # type: ignore[no-untyped-call]
        return made

    def places(self, length: int, device: torch.device) -> Tensor:
        """Where in their row the tokens of a part of this length are."""
        return self.of(torch.arange(length * self.shards.count, device=device), dim=0)

    def sum_of_part(self, whole: Tensor, dim: int) -> Tensor:
        """Of all shards' tensors the sum, of this shard's part."""
        cut, last = self._pieces_of(whole, dim), 2 * self.shards.count - 1
        parts = [torch.cat((cut[i], cut[last - i]), dim=dim) for i in range(self.shards.count)]
        return self.shards.sum_of_part(torch.stack(parts))

    def _in_order(self, parts: list[Tensor], dim: int) -> Tensor:
        halves = [part.chunk(2, dim=dim) for part in parts]
        return torch.cat([first for first, _ in halves] + [second for _, second in halves[::-1]], dim=dim)

    def _pieces_of(self, whole: Tensor, dim: int) -> tuple[Tensor, ...]:
        refuse_parts(self.shards.count, {"the length of a row": whole.shape[dim]})
        return whole.chunk(2 * self.shards.count, dim=dim)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: ContextPart, dim: int) -> Tensor:
        ctx.part, ctx.dim = part, dim
        return part.whole(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.part.sum_of_part(grads[0], ctx.dim), None, None


@dataclass(frozen=True, slots=True, eq=False)
class ContextAttention:
    """Attention of queries, keys and values of a part of each row; also the forward of an `Attend`."""

    part: ContextPart

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor | None = None,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Each rows x heads x length x size; `positions`: in rows of several documents."""
        keys, values = self.part.gathered(k, -2), self.part.gathered(v, -2)
        documents = None if positions is None else document_numbers(self.part.whole(positions))
        size = q.shape[-2] // 2
        made = [
            causal_from(piece * size, queries, keys, values, documents, scale=scale, window=window)
            for piece, queries in zip(self.part.pieces, q.chunk(2, dim=-2), strict=True)
        ]
        return torch.cat(made, dim=-2)


@dataclass(frozen=True, slots=True, eq=False)
class ContextDropout:
    """Drawn for whole rows, so that it does not depend on the shards."""

    module: nn.Dropout
    part: ContextPart

    def __call__(self, input: Tensor) -> Tensor:
        if not self.module.training or self.module.p == 0:
            return input
        whole = (*input.shape[:-2], input.shape[-2] * self.part.shards.count, input.shape[-1])
        return input * self.part.of(F.dropout(input.new_ones(whole), self.module.p), dim=-2)


def join_context(module: nn.Module, part: ContextPart) -> None:
    """Make a whole layer work on a part of each row."""
    for one in module.modules():
        if isinstance(one, Attend):
            one.forward = ContextAttention(part)  # type: ignore[method-assign]
            one.places = part.places  # type: ignore[method-assign]
            one.parts = part.shards.count
        elif isinstance(one, nn.Dropout):
            one.forward = ContextDropout(one, part)  # type: ignore[method-assign]
