"""A model with dropout, its data and a metric, for real workers."""

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


def error(output: Tensor, targets: Tensor) -> Any:
    return (output - targets).abs().sum(), len(targets)
