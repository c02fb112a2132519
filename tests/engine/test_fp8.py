"""fp8: rows with scales of their own, on a CPU with the arithmetic that a GPU has."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline import run_step, stages
from torch import nn

from everstep.engine.layers import fp8
from everstep.engine.layers.fp8 import ScaledLinear, ScaledRows, in_rows, linears_in_fp8, product
from everstep.engine.layers.linear import Queue, QueuedLinear, contributions_of
from everstep.engine.layers.model import built
from everstep.engine.layers.taken_over import take_over
from everstep.engine.prepare.preflight import preflight
from everstep.engine.prepare.resolve import data_of, model_of
from everstep.engine.stage.stage import Stage
from everstep.engine.state.optimizer import Updater
from everstep.errors import UserError
from everstep.job.job import DataSpec, Job, ModelSpec

JOB = Job(
    model=ModelSpec(preset="gpt-tiny", options={"depth": 2}),
    data=DataSpec(kind="synthetic", rows=1, sequence=16),
    precision="fp8",
)


def values(rows: ScaledRows) -> torch.Tensor:
    return rows.values.double() * rows.scales.double()


@given(st.integers(-60, 60), st.floats(1, 2, exclude_max=True))
def test_a_scale_is_the_largest_power_of_two_that_fits(exponent: int, part: float) -> None:
    x = torch.tensor([[part * 2.0**exponent, 0.3 * part * 2.0**exponent, 0.0]])
    rows = in_rows(x)
    largest = float(rows.values.float().max())
    assert 224 <= largest <= 448
    assert float(x.max() / rows.scales) <= 448 < float(2 * x.max() / rows.scales)
    assert torch.frexp(rows.scales)[0].item() == 0.5
    assert (values(rows) - x).abs().max() <= x.max() * 2**-4  # of a number that has three bits


def test_rows_that_are_zero_or_not_finite() -> None:
    rows = in_rows(torch.tensor([[0.0, 0.0], [1.0, torch.inf], [torch.nan, 2.0], [1e38, 1e-38]]))
    assert values(rows)[0].tolist() == [0, 0]
    assert rows.scales[1:3].isnan().all()
    assert values(rows)[3, 0] == pytest.approx(1e38, rel=0.07)


def test_a_linear_and_its_gradients_are_those_of_the_scaled_numbers() -> None:
    draw = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(3, 5, size, generator=draw).bfloat16() for size in (64, 96))
    layer, queue = nn.Linear(64, 96).bfloat16(), Queue()
    take_over(layer, queue, in_fp8=True)
    assert isinstance(layer.forward, ScaledLinear)
    given = x.clone().requires_grad_()
    made = layer(given)
    weight = layer.weight.detach()
    expected = values(in_rows(x.reshape(-1, 64))) @ values(in_rows(weight)).t()
    assert made.shape == (3, 5, 96)
    assert torch.allclose(made.double().view(-1, 96), expected + layer.bias.double(), rtol=2**-7, atol=0.02)
    made.backward(grad)
    back = values(in_rows(grad.reshape(-1, 96))) @ values(in_rows(weight.t())).t()
    assert torch.allclose(given.grad.double().view(-1, 64), back, rtol=2**-7, atol=0.02)
    assert layer.weight.grad is None  # W is an op of its own, of the bf16 numbers
    found = {parameter: product() for parameter, product in contributions_of(queue, [])}
    wanted = grad.reshape(-1, 96).t() @ x.reshape(-1, 64)
    assert found[layer.weight].equal(wanted)
    assert found[layer.bias].equal(grad.reshape(-1, 96).sum(0, dtype=torch.float32))


def test_several_linears_of_one_input_make_what_each_makes() -> None:
    layers = nn.ModuleList(nn.Linear(64, size, bias=False).bfloat16() for size in (64, 96))
    queue: Queue = []
    take_over(layers, queue, in_fp8=True)
    x = torch.randn(7, 64).bfloat16()
    together = layers[0].forward.together(x, *(layer.forward for layer in layers))
    assert all(one.equal(layer(x)) for one, layer in zip(together, layers, strict=True))


def test_a_frozen_weight_queues_nothing() -> None:
    layer, queue = nn.Linear(64, 64, bias=False).bfloat16().requires_grad_(False), Queue()
    take_over(layer, queue, in_fp8=True)
    x = torch.randn(4, 64).bfloat16().requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert not queue


def test_heads_routers_and_small_linears_stay_in_bf16() -> None:
    options = {"depth": 1, "experts": 64, "width": 64, "hidden": 64, "heads": 2}
    job = replace(JOB, model=ModelSpec(preset="gpt-tiny", options=options))
    (stage,) = stages(model_of(job), 1, data_of(job), precision="fp8")
    kinds = {
        name: type(part.forward)
        for layer in stage._modules
        for name, part in layer.named_modules()
        if "forward" in vars(part)
    }
    assert kinds["attention.q"] is kinds["attention.out"] is ScaledLinear
    assert kinds["mlp.router"] is kinds["logits"] is QueuedLinear
    block = built(model_of(JOB), "blocks.0")
    assert {tuple(part.weight.shape) for part in linears_in_fp8(block)} == {(64, 64), (192, 64), (64, 192)}
    assert not list(linears_in_fp8(nn.Sequential(nn.Linear(64, 8), nn.Linear(72, 64), nn.LayerNorm(64))))


def test_a_run_learns_as_in_bf16_and_any_order_of_microbatches_has_the_same_bits() -> None:
    found = {}
    for precision, order in (("bf16", (0, 1, 2)), ("fp8", (0, 1, 2)), ("fp8", (2, 0, 1))):
        pipeline = stages(model_of(JOB), 2, data_of(JOB), precision=precision, accumulate="strict40")
        losses = run_step(pipeline, 1, 3, order=order)
        found[precision, order] = losses, [stage.take_gradients() for stage in pipeline]
    (bf16, theirs), (loss, sums), (again, others) = found.values()
    assert loss.equal(again)
    assert all(a.equal(b) for a, b in zip(sums, others, strict=True))
    assert not loss.equal(bf16)
    assert torch.allclose(loss, bf16, rtol=0.02)
    for a, b in zip(sums, theirs, strict=True):
        assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.97


def test_eight_bit_weights_follow_every_update_and_every_undo() -> None:
    def losses(stage: Stage) -> list[float]:
        found = run_step([stage], 1, 1).tolist()
        stage.discard()
        return found

    made, fresh = (stages(model_of(JOB), 1, data_of(JOB), precision="fp8")[0] for _ in range(2))
    updater, mean = Updater(made), torch.randn(made.size, generator=torch.Generator().manual_seed(1))
    places = [one.rows.values.data_ptr() for one in made._scaled]
    before = losses(made)
    updater.preview(1, mean)
    ahead = losses(made)
    updater.undo()
    assert losses(made) == before != ahead
    updater.apply(1, mean)
    assert losses(made) == ahead
    Updater(fresh).load(updater.state(), 1)
    assert losses(fresh) == ahead
    assert places == [one.rows.values.data_ptr() for one in made._scaled]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model": ModelSpec(preset="gpt-tiny", options={"width": 40, "heads": 4, "hidden": 40})},
            "is for Linears with at least 64 inputs and outputs, multiples of 16",
        ),
        ({"shards": 2}, 'precision = "fp8" cannot be combined with shards that split the layers'),
    ],
)
def test_what_does_not_go_with_fp8_is_one_sentence(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        preflight(replace(JOB, **changes))


def test_shapes_without_memory() -> None:
    with torch.device("meta"):
        rows = in_rows(torch.empty(6, 64, dtype=torch.bfloat16))
        assert product(rows, rows).shape == (6, 6)
    assert fp8.LEAST % fp8.MULTIPLE == 0
