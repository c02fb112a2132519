"""Your own model, on workers that heal:  everstep run examples/own_model.py  (plain python runs it, too)."""

import argparse

import torch
from torch import nn

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
options = parser.parse_args()

# The layers in order, each a function that builds it: a worker builds its own stage's, and no others.
layers = [
    lambda: nn.Linear(16, 128),
    *[lambda: nn.Sequential(nn.GELU(), nn.Linear(128, 128))] * 4,
    lambda: nn.Sequential(nn.GELU(), nn.Linear(128, 1)),
]


def batch(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points and their values. The same arguments give the same tensors: whoever asks, however often."""
    draw = torch.Generator().manual_seed(1000 * step + microbatch)
    x = torch.randn(32, 16, generator=draw)
    return x, torch.sin(x).sum(1, keepdim=True)


result = everstep.train(
    model=layers,
    data=batch,
    loss=nn.functional.mse_loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    replicas=2,
    stages=2,
    microbatches=4,
    steps=options.steps,
)
print(
    f"loss {result.losses[1]:.3f} -> {result.losses[options.steps]:.3f}; "
    f"{len(result.incidents)} incidents healed"
)
