"""Layers of others under `compile = true`: fused around their Linears, whose weight gradients stay ops of
their own.

With a backend that makes no code, so that a test takes seconds; the code is torch's matter.
"""

from collections.abc import Iterator

import pytest
import torch
from pipeline import by_name, run_step, stages
from test_hf import CONFIGS, Masked, config_of, without_dropout
from torch import Tensor, nn

from everstep.engine.hf.model import hf
from everstep.engine.layers import regions
from everstep.engine.layers.linear import LinearGrad, MadeGrad
from everstep.engine.layers.model import Loss, Model
from everstep.engine.stage.stage import Stage
from everstep.errors import UserError


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dynamo = pytest.importorskip("torch._dynamo")
    kept = {key: getattr(dynamo.config, key) for key in LIMITS}
    dynamo.reset()
    monkeypatch.setattr(regions, "_backend", None)
    regions.enable("aot_eager")
    yield
    for key, value in kept.items():
        setattr(dynamo.config, key, value)
    dynamo.reset()


LIMITS = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")


class Rows:
    """Numbers, with a target for each."""

    def __init__(self, length: int = 6) -> None:
        self.length = length

    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(10 * step + microbatch)
        length = self.length + (microbatch if self.length < 0 else 0)
        return torch.randn(2, abs(length), 8, generator=draw), torch.zeros(2, abs(length), 8)


class Odd(nn.Module):
    """Linears: on what wants no gradient, used twice, frozen, and with a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(3, 8)
        self.twice = nn.Linear(8, 8, bias=False)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(8, 8)
        self.last.bias.requires_grad_(False)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        there = self.table(torch.arange(3.0).expand(*x.shape[:-1], 3))
        y = self.twice(torch.relu(self.twice(self.norm(x)))) + there
        y *= 2  # in place, after a Linear that has seen what y is made of
        return x + self.last(torch.tanh(self.frozen(self.dropout(y))))


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def summed_squares(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return (output - targets).square().sum(), torch.tensor(targets.numel())


def odd_model(loss: Loss = squares) -> Model:
    return Model(layers={"first": lambda: nn.Linear(8, 8), "odd": Odd, "odd2": Odd}, loss=loss)


def one_step(pipeline: list[Stage]) -> tuple[Tensor, dict[str, Tensor]]:
    losses = run_step(pipeline, 1, 2, (1, 0))
    return losses, by_name(pipeline, [stage.take_gradients() for stage in pipeline])


def close(first: tuple[Tensor, dict[str, Tensor]], second: tuple[Tensor, dict[str, Tensor]]) -> bool:
    assert first[1].keys() == second[1].keys()
    losses = torch.allclose(first[0], second[0], rtol=1e-5)
    return losses and all(
        torch.allclose(a, second[1][name], rtol=1e-4, atol=1e-5 * float(a.abs().max()))
        for name, a in first[1].items()
    )


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        pytest.param(name, 1 + at % 2, marks=[pytest.mark.slow] if name[:5] in ("gemma", "falco") else [])
        for at, name in enumerate(CONFIGS)
    ],
)
def test_models_of_transformers_have_the_losses_and_gradients_of_eager_layers(
    name: str, cut: int, request: pytest.FixtureRequest
) -> None:
    model = hf(without_dropout(config_of(name)))
    eager = one_step(stages(model, cut, Masked()))
    request.getfixturevalue("compiles")
    assert close(eager, one_step(stages(model, cut, Masked())))


def test_odd_layers_have_the_gradients_of_eager_ones(request: pytest.FixtureRequest) -> None:
    eager = one_step(stages(odd_model(), 1, Rows()))
    assert all(float(grad.abs().max()) > 0 for grad in eager[1].values())
    request.getfixturevalue("compiles")
    (stage,) = stages(odd_model(), 1, Rows())
    stage.forward(1, 0)
    stage.input_grad(1, 0)
    made = (LinearGrad, MadeGrad)
    queued = [
        one.weight for one in stage._stashes[1, 0].queue if isinstance(one, made) and one.weight.ndim == 2
    ]
    names = {id(parameter): name for name, parameter in stage.parameters.items()}
    assert sorted(names[id(weight)] for weight in queued) == sorted(
        ["first.weight", *(f"{layer}.{part}.weight" for layer in ("odd", "odd2") for part in PARTS)]
    )
    assert close(eager, one_step(stages(odd_model(), 1, Rows())))


PARTS = ("last", "twice", "twice")


def test_a_microbatch_gives_the_same_bits_after_others_and_with_dropout(compiles: None) -> None:
    first, again = (stages(odd_model(), 1, Rows())[0] for _ in range(2))
    for number in (3, 0, 2, 1):
        first.forward(5, number)
        first.input_grad(5, number)
        first.drop(5, number)
    found = []
    for stage in (first, again):
        stage.forward(6, 1)
        stage.input_grad(6, 1)
        stage.weight_grad(6, 1)
        found.append((stage.loss(6, 1), stage.take_gradients()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_equal_layers_are_compiled_once(compiles: None) -> None:
    counters = torch._dynamo.utils.counters
    counters.clear()
    layers = {f"odd{number}": Odd for number in range(4)}
    model = Model(layers={"first": lambda: nn.Linear(8, 8), **layers}, loss=squares)
    one_step(stages(model, 1, Rows()))
    assert counters["stats"]["unique_graphs"] == 1


def test_more_kinds_of_batches_than_are_compiled_are_refused(
    compiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that was run as it is after so many would have other bits than on a worker that met fewer."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    (stage,) = stages(odd_model(summed_squares), 1, Rows(-9))
    for number in range(2):
        stage.forward(1, number)
    with pytest.raises(UserError, match=r"layer 'odd' .* another one; pad rows to a few lengths"):
        stage.forward(1, 2)
