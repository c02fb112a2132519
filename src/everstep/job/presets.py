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
    experts: int = 0  # in place of each SwiGLU, each as wide as it; 0: none
    experts_per_token: int = 2
    router_loss: float = 0.01  # what the loss of an uneven use of experts is multiplied with
    router_z_loss: float = 0.0  # what the mean square of the routers' log-sum-exp is multiplied with
    capacity_factor: float = 0.0  # an expert takes so many times an even share of tokens; 0: all it is sent

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
        if self.experts < 0 or self.experts == 1:
            raise UserError(f"model.experts is {self.experts}; give 2 or more, or 0 for none.")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise UserError(
                f"model.experts_per_token is {self.experts_per_token}; give 1 to {self.experts}, the number "
                "of experts."
            )
        for name in ("router_loss", "router_z_loss", "capacity_factor"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be at least 0, and finite.")
        for name in ("router_z_loss", "capacity_factor"):
            if getattr(self, name) and not self.experts:
                raise UserError(
                    f"model.{name} is {getattr(self, name)} and model.experts is 0; give experts, or leave "
                    f"{name} out."
                )
        if not 0 < self.rope_base < math.inf:
            raise UserError(f"model.rope_base is {self.rope_base}; it must be more than 0, and finite.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout is {self.dropout}; it must be at least 0 and below 1.")

    @property
    def routes_rows_together(self) -> bool:
        """Does what a token adds depend on the other tokens of its microbatch, besides by attention?"""
        return bool(self.experts and (self.router_loss or self.router_z_loss or self.capacity_factor))

    def shared_out(self) -> dict[str, int | None]:
        """What is shared out among shards, which must divide it."""
        kv_heads = self.kv_heads or self.heads
        inside = {"model.experts": self.experts} if self.experts else {"model.hidden": self.hidden}
        return {"model.heads": self.heads, "model.kv_heads": kv_heads, **inside, "model.vocab": self.vocab}


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
    "moe-tiny": BuiltIn(shape=GptShape(hidden=96, experts=8)),  # 0.7 M parameters, 0.23 M per token
    "moe-3b": BuiltIn(  # 0.6 B per token
        shape=GptShape(vocab=32000, width=1536, depth=20, heads=12, hidden=2048, context=2048, experts=16)
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
    """How a message about an unknown word ends."""
    near = get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(sorted(known))}."


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


def refuse_parts(shards: int, lengths: Mapping[str, int]) -> None:
    """`lengths`: of rows, of which each shard gets a piece from either end."""
    pieces = 2 * shards
    for name, length in lengths.items():
        if shards > 1 and length % pieces:
            raise UserError(
                f"context_parallel = true splits every row into {pieces} pieces, two for each of {shards} "
                f"shards, and {name} is {length}; give a multiple of {pieces}."
            )


def matmul_parameters(shape: GptShape) -> int:
    """The parameters a token is multiplied with: all Linear weights, the head's too, the embedding's not, of
    experts those that it goes to.
    """
    return shape.depth * block_parameters(shape) + shape.vocab * shape.width


def block_parameters(shape: GptShape) -> int:
    """The same of one block."""
    kv_width = shape.width // shape.heads * (shape.kv_heads or shape.heads)
    attention = 2 * shape.width**2 + 2 * shape.width * kv_width
    expert = 3 * shape.width * shape.hidden
    return attention + (
        expert * shape.experts_per_token + shape.width * shape.experts if shape.experts else expert
    )


def flops_per_token(shape: GptShape, sequence: int | None = None) -> int:
    """Forward and backward of one token: 6 per matmul parameter, and causal attention over half the sequence.

    Recomputed activations are not counted: this is model FLOPs, what MFU figures are made of.
    """
    return 6 * matmul_parameters(shape) + 6 * shape.depth * shape.width * (sequence or shape.context)
