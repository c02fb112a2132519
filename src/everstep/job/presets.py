"""The models we know by name, and what a token costs on them.

Torch-free: a job file is checked before torch is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from everstep.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class GptShape:
    """A GPT in numbers. `hidden` is the width inside SwiGLU; `context` the sequence length of training."""

    vocab: int = 256
    width: int = 64
    depth: int = 4
    heads: int = 4
    kv_heads: int | None = None  # fewer than heads: grouped-query attention
    hidden: int = 192
    context: int = 64
    dropout: float = 0.0
    tied: bool = False  # embedding and output head are one tensor
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "depth", "heads", "hidden", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.width % self.heads or self.width // self.heads % 2:
            raise UserError(
                f"model.width {self.width} over {self.heads} heads is not an even head size; "
                "make width a multiple of 2 x heads."
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise UserError(f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}.")
        if not 0 < self.rope_base < math.inf:
            raise UserError(f"model.rope_base is {self.rope_base}; it must be more than 0, and finite.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout is {self.dropout}; it must be at least 0 and below 1.")

    def shared_out(self) -> dict[str, int | None]:
        """What is shared out among shards, which must divide it."""
        kv_heads = self.kv_heads or self.heads
        split = {"model.heads": self.heads, "model.kv_heads": kv_heads}
        return {**split, "model.hidden": self.hidden, "model.vocab": self.vocab}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """A model that a job can ask for by name: its numbers, and the function that builds it from them."""

    shape: GptShape
    build: str = "everstep.engine.layers.gpt:gpt"  # module:function


# One row is one model: nothing else knows their names.
MODELS = {
    "gpt-tiny": BuiltIn(shape=GptShape()),  # 0.25 M parameters: for tests and demos
    "gpt-1m": BuiltIn(shape=GptShape(width=128, heads=4, hidden=384, context=128)),
    "gpt-10m": BuiltIn(shape=GptShape(width=320, depth=8, heads=5, hidden=896, context=256)),
    "gpt-125m": BuiltIn(
        shape=GptShape(vocab=50304, width=768, depth=12, heads=12, hidden=2048, context=1024, tied=True)
    ),
    "gpt-350m": BuiltIn(
        shape=GptShape(vocab=50304, width=1024, depth=24, heads=16, hidden=2816, context=1024, tied=True)
    ),
    "gpt-1b": BuiltIn(shape=GptShape(vocab=32000, width=2048, depth=18, heads=16, hidden=5632, context=2048)),
    "gpt-3b": BuiltIn(shape=GptShape(vocab=32000, width=3072, depth=24, heads=24, hidden=8192, context=2048)),
    "gpt-7b": BuiltIn(
        shape=GptShape(vocab=32000, width=4096, depth=32, heads=32, hidden=11008, context=2048)
    ),
}
SMALLEST = "gpt-tiny"


def shape(preset: str | None = None, **changes: Any) -> GptShape:
    """The numbers of a model, or of our smallest, with some of them changed."""
    if preset is not None and preset not in MODELS:
        raise UserError(f"model preset {preset!r} is not known; {closest(preset, MODELS)}")
    known = {field.name for field in fields(GptShape)}
    for name in changes:
        if name not in known:
            raise UserError(f"model.{name} is not a key of {preset or SMALLEST}; {closest_key(name, known)}")
    return replace(MODELS[preset or SMALLEST].shape, **changes)


def closest(word: str, known: Any) -> str:
    """How a message about an unknown word ends. Case aside, a word may be the very one."""
    by_lower = {str(one).lower(): str(one) for one in known}
    near = get_close_matches(word.lower(), list(by_lower), n=1)
    return f"did you mean {by_lower[near[0]]!r}?" if near else f"use one of {', '.join(sorted(known))}."


def closest_key(word: str, known: Any) -> str:
    """How a message about an unknown key ends: what it may have been, and all there are."""
    near = get_close_matches(word, list(known), n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}{'Its' if near else 'its'} keys: {', '.join(sorted(known))}."


def refuse_shards(shards: int, numbers: Mapping[str, int | None]) -> None:
    """`numbers`: of the model, by the names a user knows; each shard gets an equal part of every one."""
    for name, number in numbers.items():
        if number is not None and number % shards:
            raise UserError(
                f"shards is {shards}, which does not divide {name} {number}; give a divisor of it."
            )


def matmul_parameters(shape: GptShape) -> int:
    """The parameters a token is multiplied with: all Linear weights, the head's too, the embedding's not."""
    return shape.depth * block_parameters(shape) + shape.vocab * shape.width


def block_parameters(shape: GptShape) -> int:
    """The same of one block."""
    kv_width = shape.width // shape.heads * (shape.kv_heads or shape.heads)
    return 2 * shape.width**2 + 2 * shape.width * kv_width + 3 * shape.width * shape.hidden


def flops_per_token(shape: GptShape, sequence: int | None = None) -> int:
    """Forward and backward of one token: 6 per matmul parameter, and causal attention over half the sequence.

    Recomputed activations are not counted: this is model FLOPs, what MFU figures are made of.
    """
    return 6 * matmul_parameters(shape) + 6 * shape.depth * shape.width * (sequence or shape.context)
