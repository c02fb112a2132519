"""The training that every system runs in the trial, in torch alone: a GPT of 0.87 M parameters and its data.

Two workers, each with 8 sequences of 64 tokens a step; AdamW; a checkpoint on disk every 10 steps. Data is a
function of (step, worker). Every worker writes a line a step into one diary, from which all times are read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, DEPTH, HEADS, LENGTH, ROWS = 256, 128, 4, 4, 64, 8
WORKERS, CHECKPOINT_EVERY, LEARNING_RATE = 2, 10, 3e-4


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def layers() -> list[Callable[[], nn.Module]]:
    return [Embed, *[Block] * DEPTH, Head]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=LEARNING_RATE)


class Data:
    def batch(self, step: int, worker: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1_000_003 * step + worker)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=draw)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Diary:
    """Lines of all processes in one file, each written at once. A (re)started worker begins a new life."""

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(
        self, *, rank: int, step: int, life: str, world: int, pid: int | None = None, at: float | None = None
    ) -> None:
        line: dict[str, Any] = {
            "rank": rank,
            "step": step,
            "life": life,
            "world": world,
            "pid": pid or os.getpid(),
            "at": time.monotonic() if at is None else at,
        }
        os.write(self._file, (json.dumps(line) + "\n").encode())
