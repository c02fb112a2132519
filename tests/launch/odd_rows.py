"""Data with one bad batch, in step 15: `bad` says how."""

import os
from typing import Any

import torch

import everstep

STEP = 15


def model() -> Any:
    layers = [lambda: torch.nn.Linear(4, 8), torch.nn.Tanh, lambda: torch.nn.Linear(8, 1)]
    return everstep.Model(layers=layers, loss=torch.nn.functional.mse_loss)


class Data:
    def __init__(self, bad: str = "") -> None:
        self.factor = {"": 1.0, "nan": float("nan"), "spike": 1000.0}[bad]

    def batch(self, step: int, microbatch: int) -> Any:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(microbatch))
        y = torch.sin(x).sum(1, keepdim=True)
        return x, y * self.factor if step == STEP and microbatch == 1 else y


class Chance(torch.nn.Module):
    """Another result each time: what atomics and generators of one's own do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + int.from_bytes(os.urandom(2)) * 1e-6)


def model_of_chance() -> Any:
    layers = [lambda: torch.nn.Linear(4, 8), Chance, lambda: torch.nn.Linear(8, 1)]
    return everstep.Model(layers=layers, loss=torch.nn.functional.mse_loss)
