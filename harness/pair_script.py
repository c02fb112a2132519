"""A script that trains a small GPT with the features named on its command line (`bench/pairs.py`,
`bench/long.py`).

everstep run harness/pair_script.py bf16 evaluation [steps=8] [shape=2x2] [folder=DIR] [device=cuda]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import everstep
from everstep.engine.layers.gpt import gpt

VOCAB, ROWS, LENGTH, BATCH = 96, 2, 16, 8  # BATCH: microbatches of a step, in any shape
STOPS_AT = 7


def batch(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + microbatch)
    tokens = torch.randint(4, VOCAB, (ROWS, LENGTH + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def masked(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """The number of tokens that count differs from microbatch to microbatch."""
    x, y = batch(step, microbatch)
    return x, y.masked_fill(torch.arange(LENGTH) >= 3 + (step + 5 * microbatch) % (LENGTH - 3), -100)


def endless(
    made: Callable[[int, int], tuple[Tensor, Tensor]],
) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    def source() -> Iterator[tuple[Tensor, Tensor]]:
        number = 0
        while True:
            yield made(1 + number // BATCH, number % BATCH)
            number += 1

    return source


class Lora(nn.Module):
    """A frozen Linear, and what two thin ones add to it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, 2, bias=False)
        self.up = nn.Linear(2, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def with_lora(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        module = build()
        for part in list(module.modules()):
            for name, child in list(part.named_children()):
                if type(child) is nn.Linear and not isinstance(part, Lora):
                    setattr(part, name, Lora(child))
        return module

    return made


def frozen(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().requires_grad_(False)


def stop(step: Any) -> str | None:
    return "a callback has stopped it" if step.step == STOPS_AT else None


def main(words: list[str]) -> None:
    features = {word for word in words if "=" not in word}
    options = dict(word.split("=", 1) for word in words if "=" in word)
    replicas, stages = map(int, options.get("shape", "2x2").split("x"))
    width = 64 if "fp8" in features else 32  # smaller Linears stay in bf16
    sizes = {"vocab": VOCAB, "width": width, "heads": 2, "hidden": 64, "depth": 2, "context": LENGTH}
    model = gpt(**sizes, tied="tied" in features, experts=4 if "experts" in features else 0)
    layers = dict(model.layers)
    names = list(layers)
    if "lora" in features:
        layers |= {name: with_lora(layers[name]) for name in names[1:-1]}
    if "frozen" in features:
        layers[names[1]] = frozen(layers[names[1]])
    made = masked if "weighted" in features else batch
    settings: dict[str, Any] = {"lr": 1e-2, "seed": 3}
    settings |= {"device": options["device"]} if "device" in options else {}
    for precision in features & {"bf16", "fp16", "fp8"}:
        settings["precision"] = precision
    if "fp16" in features:  # every other step overflows; sums over tokens sooner than means
        settings |= {"loss_scale_interval": 1, "loss_scale": 2.0 ** (10 if "weighted" in features else 16)}
    settings |= {"recompute": True} if "recompute" in features else {}
    settings |= {"compile": True} if "compile" in features else {}
    settings |= {"ema": 0.9} if "ema" in features else {}
    settings |= {"shards": 2} if "shards" in features else {}
    settings |= {"shard": True} if "sharded" in features else {}
    settings |= {"loss": everstep.token_loss} if "weighted" in features else {}
    settings |= {"callbacks": [stop]} if "early-stop" in features else {}
    if "evaluation" in features:
        settings |= {"eval_data": lambda step, number: batch(9000 + step, number), "eval_every": 2}
        settings |= {"eval_batches": 2}
    if "folder" in options:
        settings |= {"checkpoint": {"folder": options["folder"], "interval": 2}}
    everstep.train(
        model=replace(model, layers=layers),
        data=everstep.stream(endless(made)) if "stream" in features else made,
        replicas=replicas,
        stages=stages,
        microbatches=BATCH // replicas,
        steps=int(options.get("steps", "8")),
        page=False,
        **settings,
    )


main(sys.argv[1:])
