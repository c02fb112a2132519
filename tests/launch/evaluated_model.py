"""A model with dropout, its data and a metric, for real workers."""

from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

import everstep


def model() -> everstep.Model:
    return everstep.Model(
        layers=[
            lambda: nn.Linear(8, 32),
            lambda: nn.Sequential(nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 32)),
            lambda: nn.Sequential(nn.GELU(), nn.Linear(32, 1)),
        ],
        loss=nn.functional.mse_loss,
    )


class Data:
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(10_000 * self.seed + 100 * step + microbatch)
        x = torch.randn(3 if self.seed == 0 else 2 + microbatch % 3, 8, generator=draw)
        return x, torch.sin(x).sum(1, keepdim=True)


def streamed(seed: int = 0) -> Any:
    """The same, of steps of six microbatches, or of an evaluation, as a stream."""
    each = 6 if seed == 0 else 1000
    return everstep.stream(lambda: (Data(seed).batch(1 + n // each, n % each) for n in count()))


def error(output: Tensor, targets: Tensor) -> Any:
    return (output - targets).abs().sum(), len(targets)
