"""Our GPT: RMSNorm, rotary positions, SwiGLU, causal attention, grouped heads if asked.

It is a user's model like any other: a table of layers, each built by its own factory on the worker that runs
it. Query, key and value are separate matrices, so that a checkpoint's names are the plain ones and a later
split of heads over shards is a slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everstep.engine.layers import regions
from everstep.engine.layers.attention import causal
from everstep.engine.layers.boundary import Value, described
from everstep.engine.layers.linear import of_one_input
from everstep.engine.layers.model import Model, ModelAssembly
from everstep.engine.layers.regions import region
from everstep.engine.layers.residual import branched
from everstep.errors import UserError
from everstep.job.presets import GptShape
from everstep.job.presets import shape as named_shape

SHARD_PLAN = {
    "embed.tokens": "vocab",
    "blocks.*.attention.q": "column",
    "blocks.*.attention.k": "column",
    "blocks.*.attention.v": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "head.logits": "logits",
}


def gpt(preset: str | GptShape | None = None, **changes: Any) -> Model:
    """`gpt("gpt-1m")`, `gpt("gpt-1m", dropout=0.1)`, `gpt(width=96, heads=6)`, or a whole `Shape`."""
    form = preset if isinstance(preset, GptShape) else named_shape(preset, **changes)
    blocks = {f"blocks.{i}": partial(Block, form) for i in range(form.depth)}
    tied = (("embed.tokens.weight", "head.logits.weight"),) if form.tied else ()
    return Model(
        layers={"embed": partial(Embed, form), **blocks, "head": partial(Head, form)},
        tied=tied,
        assembly=ModelAssembly(
            check=partial(check_tokens, form.vocab),
            shared_out=form.shared_out(),
            has_regions=True,
            recordable=True,
        ),
        shard_plan=SHARD_PLAN,
    )


IGNORED = -100  # torch's `ignore_index`: a target that no loss counts


def check_tokens(vocab: int, inputs: Value, targets: Value) -> None:
    """The first batch: rows of tokens that the model knows? Targets of -100 do not count in a loss."""
    if isinstance(inputs, Mapping):
        if inputs.keys() != {"input_ids", "position_ids"}:
            raise UserError(
                f"data gives {described(inputs)}; a GPT takes tokens, or, where rows hold several documents, "
                "a dict with input_ids and position_ids."
            )
        positions, inputs = inputs["position_ids"], inputs["input_ids"]
        if not isinstance(positions, Tensor) or positions.shape != getattr(inputs, "shape", None):
            raise UserError(f"data gives position_ids as {described(positions)}; one for each token.")
    for tokens, what in ((inputs, "inputs"), (targets, "targets")):
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.ndim != 2:
            kind = f" and {tokens.dtype}" if isinstance(tokens, Tensor) else ""
            raise UserError(
                f"data gives as {what} {described(tokens)}{kind}; a GPT takes token numbers in rows x length."
            )
        known = tokens[tokens != IGNORED] if what == "targets" else tokens
        if known.numel() and not 0 <= int(known.min()) <= int(known.max()) < vocab:
            raise UserError(
                f"data gives tokens {int(known.min())} to {int(known.max())} and the model "
                f"knows 0 to {vocab - 1}; raise model.vocab."
            )


class Embed(nn.Module):
    def __init__(self, form: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(form.vocab, form.width)
        self.dropout = nn.Dropout(form.dropout)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, value: Value) -> Value:
        tokens, positions = _parted(value)
        return _joined(self.dropout(self.tokens(tokens)), positions)


class Block(nn.Module):
    def __init__(self, form: GptShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(form.width, eps=1e-6)
        self.attention = Attention(form)
        self.mlp_norm = nn.RMSNorm(form.width, eps=1e-6)
        self.mlp = SwiGLU(form)
        self.dropout = nn.Dropout(form.dropout)

    def forward(self, value: Value) -> Value:
        eps = 1e-6
        x, positions = _parted(value)
        if regions.are_enabled():
            x, normed = branched(x, self.attention_norm.weight, eps)
        else:
            normed = _normed(x, self.attention_norm.weight, eps)
        attended = self.dropout(self.attention(normed, positions))
        x, normed = _added_and_normed(x, attended, self.mlp_norm.weight, eps)
        return _joined(x + self.dropout(self.mlp(normed)), positions)


class Attention(nn.Module):
    def __init__(self, form: GptShape) -> None:
        super().__init__()
        self.heads, self.kv_heads = form.heads, form.kv_heads or form.heads
        self.size = size = form.width // form.heads
        self.q = _linear(form.width, form.width)
        self.k = _linear(form.width, size * self.kv_heads)
        self.v = _linear(form.width, size * self.kv_heads)
        self.out = _linear(form.width, form.width, into_residual=form.depth)
        self.rotary = Rotary(size, form.rope_base)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        q, k, v = _all_of(x, self.q, self.k, self.v)
        rows, length, _ = q.shape
        q = self.rotary(q.view(rows, length, -1, self.size), positions)  # a shard has some of the heads
        k = self.rotary(k.view(rows, length, -1, self.size), positions)
        v = v.view(rows, length, -1, self.size)
        y = causal(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), positions)
        out: Tensor = self.out(y.transpose(1, 2).reshape(rows, length, -1))
        return out


class Rotary(nn.Module):
    """Positions as rotations. The tables stay fp32 in any precision, so they are no buffer of the module."""

    def __init__(self, size: int, base: float) -> None:
        super().__init__()
        self.size, self.base = size, base
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """`positions`: of the tokens, where they are not one after the other."""
        cos, sin = self._of(x.shape[1], x.device)
        return _rotated(x, cos, sin) if positions is None else _rotated(x, cos[positions], sin[positions])

    def _of(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        tables = self._tables
        if tables is None or tables[0].shape[0] < length or tables[0].device != device:
            rates = self.base ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
            angles = torch.outer(torch.arange(length, dtype=torch.float64), rates)[:, None, :]
            tables = (angles.cos().float().to(device), angles.sin().float().to(device))
            self._tables = tables
        return tables[0][:length], tables[1][:length]


class SwiGLU(nn.Module):
    def __init__(self, form: GptShape) -> None:
        super().__init__()
        self.gate = _linear(form.width, form.hidden)
        self.up = _linear(form.width, form.hidden)
        self.down = _linear(form.hidden, form.width, into_residual=form.depth)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(_gated(*_all_of(x, self.gate, self.up)))
        return y


class Head(nn.Module):
    def __init__(self, form: GptShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(form.width, eps=1e-6)
        self.logits = nn.Linear(form.width, form.vocab, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, value: Value) -> Tensor:
        x, _ = _parted(value)
        logits: Tensor = self.logits(_normed(x, self.norm.weight, 1e-6))
        return logits


def _parted(value: Value) -> tuple[Tensor, Tensor | None]:
    """What a layer is given: one tensor; in rows of several documents their positions beside it."""
    if isinstance(value, Tensor):
        return value, None
    return (value["input_ids"], value["position_ids"]) if isinstance(value, Mapping) else value


def _joined(x: Tensor, positions: Tensor | None) -> Value:
    return x if positions is None else (x, positions)


def _all_of(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Of Linears with one input. Only where regions are compiled other roundings may come with speed."""
    return of_one_input(x, *layers) if regions.are_enabled() else [layer(x) for layer in layers]


@region
def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


@region
def _added_and_normed(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x + more
    return x, F.rms_norm(x, weight.shape, weight, eps)


@region
def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


@region
def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _linear(inputs: int, outputs: int, *, into_residual: int = 0) -> nn.Linear:
    """Unit variance through a matrix; what is added to the residual stream shrinks as the adders grow."""
    layer = nn.Linear(inputs, outputs, bias=False)
    scale = (2 * into_residual) ** -0.5 if into_residual else 1.0
    nn.init.normal_(layer.weight, std=scale * inputs**-0.5)
    return layer
