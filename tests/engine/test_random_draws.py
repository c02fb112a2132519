"""Whatever a layer draws from, torch, Python or numpy, the draws are a function of keys: a microbatch has one
result, wherever and whenever it is computed, and a recomputed layer draws the same again.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import everstep
from everstep.engine import device as devices
from everstep.engine.datasets.loading import Loader
from everstep.engine.layers.model import Model, drawn
from everstep.engine.stage.stage import Stage, StageSettings
from everstep.job.job import Job, ModelSpec

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(1)),
}


class Pairs:
    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(step * 100 + microbatch)
        x = torch.randn(4, 8, generator=draw)
        return x, x.sum(1, keepdim=True)


class Noisy(torch.autograd.Function):
    """Draws in the backward, as stochastic rounding of gradients does."""

    @staticmethod
    def forward(ctx, x: Tensor, draw: Callable[[], float]) -> Tensor:
        ctx.draw = draw
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (1 + ctx.draw()), None


class Depth(nn.Module):
    """Stochastic depth, drawn as Python code often does."""

    def __init__(self, draw: Callable[[], float], backward: bool) -> None:
        super().__init__()
        self.a, self.b, self.draw, self.backward = nn.Linear(8, 8), nn.Linear(8, 8), draw, backward

    def forward(self, x: Tensor) -> Tensor:
        x = Noisy.apply(x, self.draw) if self.backward else x
        return x + self.b(self.a(x) * (0.1 + self.draw()))


def computed(
    name: str, noise: int, *, recompute: bool = False, backward: bool = False
) -> tuple[Tensor, Tensor]:
    """A microbatch's loss and gradients. `noise`: what was drawn in the process before."""
    layers = [lambda: Depth(DRAWS[name], backward)] * 2
    model = Model(layers=[*layers, lambda: nn.Linear(8, 1)], loss=nn.functional.mse_loss)
    stage = Stage(model, range(3), data=Pairs(), device=CPU, settings=StageSettings(recompute=recompute))
    devices.seed(CPU, noise)
    stage.forward(1, 0)
    loss = stage.loss(1, 0).clone()
    devices.seed(CPU, noise + 1)
    stage.input_grad(1, 0)
    stage.weight_grad(1, 0)
    return [loss, stage.take_gradients()]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_a_microbatch_has_one_result_whatever_was_drawn_before(name: str, backward: bool) -> None:
    loss, gradients = computed(name, 1, backward=backward)
    for noise in (2, 3):
        again = computed(name, noise, backward=backward)
        assert torch.equal(again[0], loss)
        assert torch.equal(again[1], gradients)


@pytest.mark.parametrize("name", DRAWS)
def test_a_recomputed_layer_draws_the_same_again(name: str) -> None:
    for noise in (1, 2):
        loss, gradients = computed(name, noise)
        again = computed(name, noise, recompute=True)
        assert torch.equal(again[0], loss)
        assert torch.equal(again[1], gradients)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_of_any_kind_is_noticed(name: str) -> None:
    """Recorded ops must not freeze it."""
    devices.seed(CPU, 7)
    assert not devices.has_drawn(CPU, 7)
    DRAWS[name]()
    assert devices.has_drawn(CPU, 7)


@pytest.mark.parametrize("name", DRAWS)
def test_first_values_do_not_depend_on_what_was_drawn_before(name: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(DRAWS[name]()))

    model = Model(layers=[Scaled])
    found = []
    for noise in (1, 2):
        devices.seed(CPU, noise)
        found.append(drawn(model, 0, 0).scale.item())
    assert found[0] == found[1]


class Augmented:
    """A source that draws from the generators of the process, as a DataLoader does for every epoch."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            x = torch.rand(8, 8) + random.random() + float(np.random.rand())
            yield x, x.sum(1, keepdim=True)


def read(folder: Path, *, before: bool) -> tuple[list[float], list[float]]:
    """Losses of layers with dropout, and the batches. `before`: all are stored before the first forward."""
    job = Job(model=ModelSpec(build="x:y"), steps=200)
    stream = everstep.stream(Augmented(), folder=folder).for_job(job)
    stream.prepare(fresh=True)
    data = Loader(stream, ahead=2)
    layers = [lambda: nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 1))]
    stage = Stage(Model(layers=layers, loss=nn.functional.mse_loss), range(1), data=data, device=CPU)
    for number in range(80) if before else ():
        stream.batch(1 + number // 4, number % 4)
    losses = []
    for step in range(1, 21):
        for microbatch in range(4):
            stage.forward(step, microbatch)
            losses.append(float(stage.loss(step, microbatch)))
            stage.drop(step, microbatch)
    batches = [float(stream.batch(step, 0)[0].sum()) for step in range(1, 21)]
    data.close()
    return losses, batches


def test_what_a_stream_draws_reaches_no_layer_and_is_the_same_in_every_run(tmp_path: Path) -> None:
    expected = read(tmp_path / "stored", before=True)
    for noise in (1, 2):
        devices.seed(CPU, noise)
        assert read(tmp_path / f"beside-{noise}", before=False) == expected
