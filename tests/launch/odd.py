"""A model of odd sizes, for real workers: single numbers, fewer elements than chunks, frozen parts."""

import torch
from torch import Tensor, nn

from everstep import Model


class Odd(nn.Module):
    def __init__(self, width: int, *, frozen: bool = False) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor([0.1]))
        self.mix.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.mix(x) * self.scale + self.shift).tanh()


class Single(nn.Module):
    """All that its stage trains are two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor([0.2]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a + self.b


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def model() -> Model:
    return Model(
        layers=[lambda: Odd(5), lambda: Odd(5, frozen=True), lambda: Odd(5), lambda: Odd(5)], loss=_loss
    )


def tiny() -> Model:
    """Fewer elements than chunks, in both stages."""
    return Model(layers=[Single, Single], loss=_loss)


class Data:
    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1000 * step + microbatch)
        x = torch.randn(3, 5, generator=draw)
        return x, x.flip(-1).sin()
