"""Layers with more than one tensor, and losses that count tokens: the gradient is that of the whole batch."""

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline import by_name, forward, input_grad, run_step, stages
from torch import Tensor, nn

from everstep.engine.layers.boundary import Boundary, put_together, take_apart, tensors_in
from everstep.engine.layers.model import Model, token_loss
from everstep.engine.stage.stage import Stage
from everstep.errors import UserError

TENSORS = st.integers(0, 5).map(lambda n: torch.full((n,), float(n)))
VALUES = st.recursive(
    TENSORS | st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b and type(a) is type(b)


@given(VALUES)
def test_a_value_comes_out_as_it_went_in_and_its_tree_is_json(value: Any) -> None:
    tensors, tree = take_apart(value)
    assert same(put_together(json.loads(json.dumps(tree)), tensors), value)


def test_a_tensor_that_is_in_a_value_twice_travels_once() -> None:
    x = torch.ones(3, requires_grad=True)
    boundary = Boundary.of({"a": x, "b": (x, x)})
    assert len(boundary.tensors) == 1
    assert boundary.graded == (0,)


@pytest.mark.parametrize(("value", "says"), [({1: None}, "the key 1"), ({2, 3}, "a set is between layers")])
def test_what_cannot_travel_is_named(value: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        take_apart(value)


# ------------------------------------------------------------------ masks, positions, side losses

WIDTH, VOCAB = 8, 13


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        mask = batch["attention_mask"]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return {"hidden": self.tokens(batch["input_ids"]), "mask": mask, "at": positions, "side": ()}


class Middle(nn.Module):
    """Mixes with the mask, adds a table of positions that has no gradient, and puts a side loss aside."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 2)
        self.dropout = nn.Dropout(0.2)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        h, mask = value["hidden"], value["mask"].unsqueeze(-1)
        h = h + self.dropout(self.mix(h)) * mask + value["at"].unsqueeze(-1) * 0.01
        side = self.gate(h).softmax(-1).square().mean()
        return value | {"hidden": h, "side": (*value["side"], side)}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        return {"logits": self.out(value["hidden"]), "side": sum(value["side"])}


def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    total, weight = token_loss(output["logits"], batch["labels"])
    return total + 0.1 * output["side"] * weight, weight


class Masked:
    """Rows of different lengths, padded; microbatches with more rows and fewer, one with no token at all."""

    def batch(self, step: int, microbatch: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(100 * step + microbatch)
        rows, length = 2 + microbatch % 2, 6
        ids = torch.randint(0, VOCAB, (rows, length), generator=draw)
        lengths = torch.randint(1, length + 1, (rows, 1), generator=draw)
        mask = (torch.arange(length) < lengths).long()
        counted = mask.bool() if microbatch != 1 else torch.zeros_like(mask).bool()
        labels = torch.where(counted, (3 * ids + 1) % VOCAB, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


MODEL = Model(layers=[First, Middle, Middle, Last], loss=loss)


def mean(pipeline: list[Stage], flats: list[Tensor], count: int) -> dict[str, Tensor]:
    """What the reduce makes of the sums."""
    for stage in pipeline:
        assert [stage.weight(1, m) for m in range(count)] == [pipeline[-1].weight(1, m) for m in range(count)]
    weight = sum(pipeline[0].weight(1, m) for m in range(count))
    return by_name(pipeline, [flat / weight for flat in flats])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_same_bits_under_every_cut_and_in_every_order(count: int, recompute: bool) -> None:
    whole = stages(MODEL, 1, Masked())
    run_step(whole, 1, 4)
    expected = mean(whole, [stage.take_gradients() for stage in whole], 4)
    pipeline = stages(MODEL, count, Masked(), recompute=recompute)
    losses = run_step(pipeline, 1, 4, (2, 0, 3, 1))
    assert losses[1] == 0.0
    found = mean(pipeline, [stage.take_gradients() for stage in pipeline], 4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].float(), expected[name].float()) for name in found)


def test_the_gradient_is_that_of_all_tokens_in_one_batch() -> None:
    """Without dropout and side losses, of which a batch in one piece has others."""

    class Plain(Middle):
        def forward(self, value: dict[str, Any]) -> dict[str, Any]:
            h = value["hidden"]
            return value | {"hidden": h + self.mix(h) * value["mask"].unsqueeze(-1), "side": (h.sum() * 0,)}

    class Joined:
        def batch(self, step: int, microbatch: int) -> dict[str, Tensor]:
            batches = [Masked().batch(step, m) for m in range(4)]
            return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}

    model = Model(layers=[First, Plain, Plain, Last], loss=loss)
    pipeline, joined = stages(model, 2, Masked()), stages(model, 1, Joined())
    run_step(pipeline, 1, 4)
    run_step(joined, 1, 1)
    found = mean(pipeline, [stage.take_gradients() for stage in pipeline], 4)
    expected = mean(joined, [stage.take_gradients() for stage in joined], 1)
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-7), name


def test_what_is_not_trained_asks_for_no_gradient() -> None:
    def frozen() -> nn.Module:
        return First().requires_grad_(False)

    pipeline = stages(Model(layers=[frozen, Middle, Last], loss=loss), 3, Masked())
    boundary = pipeline[0].forward(1, 0)
    assert boundary is not None
    assert boundary.graded == ()
    second = pipeline[1].forward(1, 0, boundary)
    assert second is not None
    assert len(second.graded) == 2  # hidden and the side loss, not the mask and the positions
    assert len(second.tensors) == 4
    pipeline[2].forward(1, 0, second)
    back = pipeline[2].input_grad(1, 0)
    assert back is not None
    assert len(back.tensors) == 2
    nothing = pipeline[1].input_grad(1, 0, back)
    assert nothing is not None
    assert nothing.tensors == ()
    assert pipeline[0].input_grad(1, 0, nothing) is None
    for stage in pipeline:
        stage.weight_grad(1, 0)
    assert pipeline[0].size == 0
    assert pipeline[1].take_gradients().any()


def test_a_tensor_that_the_next_stage_does_not_use_gets_no_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.b(x), self.a(x)

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Linear(3, 1)

        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return self.c(pair[1])

    class Data:
        def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
            return torch.ones(2, 3), torch.ones(2, 1)

    pipeline = stages(Model(layers=[Two, One], loss=nn.functional.mse_loss), 2, Data())
    run_step(pipeline, 1, 1)
    gradients = by_name(pipeline, [stage.take_gradients() for stage in pipeline])
    assert not gradients["0.b.weight"].any()
    assert gradients["0.a.weight"].any()


def test_a_mean_over_microbatches_of_different_sizes_is_refused() -> None:
    def average(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        total, weight = loss(output, batch)
        return total / weight

    pipeline = stages(Model(layers=MODEL.layers, loss=average), 1, Masked())
    forward(pipeline, 1, 0)
    forward(pipeline, 1, 2)
    with pytest.raises(UserError, match=r"would count a small microbatch as much .* everstep.token_loss"):
        forward(pipeline, 1, 3)


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_a_weight_is_a_count(weight: float) -> None:
    pipeline = stages(Model(layers=MODEL.layers, loss=lambda y, b: (y["logits"].sum(), weight)), 1, Masked())
    forward(pipeline, 1, 0)
    with pytest.raises(UserError, match="has the weight"):
        input_grad(pipeline, 1, 0)


def test_plain_values_pass_between_layers_too() -> None:
    assert [t.numel() for t in tensors_in({"x": torch.ones(2), "flag": True, "n": 3})] == [2]
    assert list(itertools.chain(tensors_in(None), tensors_in("a"))) == []
