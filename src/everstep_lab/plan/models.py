"""The models we know by name, and what a token costs on them.

A model is a stack of equal transformer layers between an embedding and an output head. Everything the planner
asks of it is arithmetic on these numbers: parameters, FLOPs, bytes. The engine's own presets
(`everstep.job.presets`) are what we can build; these are what a cluster may be asked to plan for.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from everstep.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """A decoder in numbers, and how it is trained: `batch` sequences of `sequence` tokens a step."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    batch: int
    kv_heads: int | None = None  # fewer than heads: grouped-query attention
    feed_forward: int | None = None  # width inside the MLP; four times hidden if not given
    gated: bool = False  # SwiGLU: three matrices instead of two
    tied: bool = True  # embedding and output head are one tensor
    causal_kernel: bool = False  # FLOPs count attention over half the square, as fused kernels run it

    @property
    def inner(self) -> int:
        return self.feed_forward or 4 * self.hidden

    @property
    def layer_parameters(self) -> float:
        shared = (self.kv_heads or self.heads) / self.heads
        attention = 2 * self.hidden**2 * (1 + shared)
        return attention + (3 if self.gated else 2) * self.hidden * self.inner

    @property
    def parameters(self) -> float:
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def attention_flops_per_token(self) -> float:
        """Scores and their product with the values, forward, one layer."""
        return 4 * self.hidden * self.sequence * (0.5 if self.causal_kernel else 1.0)

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of a step: forward and twice that for backward; what is recomputed does not count."""
        forward = self.layers * (2 * self.layer_parameters + self.attention_flops_per_token)
        return 3 * (forward + 2 * self.vocab * self.hidden) * self.batch * self.sequence


def _gpt3(name: str, layers: int, hidden: int, heads: int, batch: int) -> ModelFigures:
    return ModelFigures(
        name=name, layers=layers, hidden=hidden, heads=heads, vocab=51200, sequence=2048, batch=batch
    )


def _llama3(name: str, layers: int, hidden: int, heads: int, inner: int, batch: int) -> ModelFigures:
    return ModelFigures(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=128256,
        sequence=8192,
        batch=batch,
        kv_heads=8,
        feed_forward=inner,
        gated=True,
        tied=False,
        causal_kernel=True,
    )


PRESETS = {
    model.name: model
    for model in (
        _gpt3("gpt3-1.3b", 24, 2048, 16, 512),
        _gpt3("gpt3-7b", 32, 4096, 32, 1024),
        _gpt3("gpt3-13b", 40, 5120, 40, 1024),
        _gpt3("gpt3-70b", 80, 8192, 64, 1536),
        _gpt3("gpt3-175b", 96, 12288, 96, 1536),
        _llama3("llama3-8b", 32, 4096, 32, 14336, 1024),
        _llama3("llama3-70b", 80, 8192, 64, 28672, 2048),
        _llama3("llama3-405b", 126, 16384, 128, 53248, 2048),
    )
}


def model(name: str) -> ModelFigures:
    if name not in PRESETS:
        near = get_close_matches(name, list(PRESETS), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(PRESETS)}."
        raise UserError(f"model {name!r} is not known; {hint}")
    return PRESETS[name]
