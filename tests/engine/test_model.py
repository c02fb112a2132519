"""A model is a table of factories; nothing is built until a worker builds its own part."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import check_tokens, gpt
from everstep.engine.layers.model import Model, _balanced, check_tied, parameter_count, partition, slots
from everstep.engine.prepare.program import Program
from everstep.engine.state.optimizer import adamw
from everstep.errors import UserError
from everstep.job.job import Job, ModelSpec
from everstep.job.presets import MODELS, GptShape, flops_per_token, matmul_parameters, shape

SIZES = {
    "gpt-tiny": 0.25e6,
    "gpt-1m": 1e6,
    "gpt-10m": 10e6,
    "gpt-125m": 125e6,
    "gpt-350m": 350e6,
    "gpt-1b": 1e9,
    "gpt-3b": 3e9,
    "gpt-7b": 7e9,
}


def linear() -> nn.Module:
    return nn.Linear(2, 3)


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_is_the_size_its_name_says(name: str) -> None:
    assert parameter_count(gpt(name)) == pytest.approx(SIZES[name], rel=0.1)
    form = MODELS[name].shape
    table = slots(gpt(form), range(form.depth + 2))
    matrices = sum(slot.size for name, slot in table.items() if len(slot.shape) == 2 and "tokens" not in name)
    assert matmul_parameters(form) == matrices
    assert flops_per_token(form) > 6 * matmul_parameters(form)


def test_logical_names_know_nothing_of_stages() -> None:
    model = gpt("gpt-tiny")
    table = slots(model, range(6))
    assert {"embed.tokens.weight", "blocks.3.attention.q.weight", "head.logits.weight"} <= table.keys()
    parts = [slots(model, part) for part in partition(model, 3)]
    assert {name: slot.shape for part in parts for name, slot in part.items()} == {
        name: slot.shape for name, slot in table.items()
    }


def test_slots_are_aligned_and_disjoint() -> None:
    end = 0
    for slot in slots(gpt(width=12, heads=2, hidden=10, vocab=7), range(6)).values():
        assert slot.offset % 64 == 0
        assert slot.offset >= end
        end = slot.offset + slot.size


def test_a_partition_is_contiguous_and_even() -> None:
    assert [list(part) for part in partition(gpt("gpt-tiny"), 2)] == [[0, 1, 2], [3, 4, 5]]
    model = gpt("gpt-7b")
    parts = partition(model, 8)
    assert [layer for part in parts for layer in part] == list(range(len(model.layers)))
    assert {len(part) for part in parts} <= {4, 5}
    assert partition(model, 1) == [range(34)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 9))
def test_no_partition_has_a_cheaper_costliest_stage(costs: list[int], parts: int) -> None:
    parts = min(parts, len(costs))
    found = _balanced(costs, parts)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert len(found) == parts
    assert all(found)

    def best(start: int, left: int) -> int:
        if left == 1:
            return sum(costs[start:])
        return min(
            max(sum(costs[start:cut]), best(cut, left - 1)) for cut in range(start + 1, len(costs) - left + 2)
        )

    assert max(sum(costs[i] for i in part) for part in found) == best(0, parts)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: partition(gpt("gpt-tiny"), 7), "more stages than layers"),
        (lambda: Model(layers={"a": nn.Linear(2, 2)}), "give a factory"),
        (lambda: Model(layers=[3]), "layer '0' is a int"),
        (lambda: Model(layers=[]), "layers is empty"),
        (lambda: partition(Model(layers=[lambda: 3]), 1), "factory of layer '0' gave a int"),
        (lambda: gpt("gpt-1mm"), "did you mean 'gpt-1m'"),
        (lambda: gpt(widht=3), "did you mean 'width'"),
        (lambda: gpt(width=30, heads=4), "multiple of 2 x heads"),
        (lambda: gpt(kv_heads=3), "does not divide"),
        (lambda: gpt(dropout=1.5), "dropout is 1.5"),
        (lambda: check_tied(Model(layers=[linear], tied=(("0.weight", "1.weight"),))), "'1.weight'"),
        (lambda: check_tied(Model(layers=[linear], tied=(("0.weight", "0.bias"),))), "in shape"),
    ],
)
def test_a_mistake_is_one_sentence(make, says: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_list_of_factories_is_named_by_number() -> None:
    model = Model(layers=[lambda: nn.Linear(2, 2), nn.Tanh])
    assert model.names == ["0", "1"]
    assert list(slots(model, range(2))) == ["0.weight", "0.bias"]


def test_grouped_heads_share_keys_and_values() -> None:
    form = shape("gpt-tiny", kv_heads=2)
    table = slots(gpt(form), range(2))
    assert table["blocks.0.attention.k.weight"].shape == (32, 64)
    assert table["blocks.0.attention.q.weight"].shape == (64, 64)


def test_rotary_positions_are_relative() -> None:
    from everstep.engine.layers.gpt import Rotary

    rotary = Rotary(8, 10_000.0)
    q, k = torch.randn(2, 1, 1, 1, 8)
    turned = [rotary(t.expand(1, 6, 1, 8))[0, :, 0] for t in (q, k)]
    scores = turned[0] @ turned[1].t()
    assert torch.allclose(scores.diagonal(), scores[0, 0].expand(6), atol=1e-5)
    assert torch.allclose(scores.diagonal(1), scores[0, 1].expand(5), atol=1e-5)


def test_a_shape_is_a_preset_too() -> None:
    assert parameter_count(gpt(GptShape())) == parameter_count(gpt("gpt-tiny"))


def test_targets_that_no_loss_counts_are_no_unknown_tokens() -> None:
    """Masked targets (-100) were refused: "data gives tokens -100 to 87 … raise model.vocab"."""
    tokens = torch.tensor([[1, 2, 3]])
    check_tokens(8, tokens, torch.tensor([[2, -100, 7]]))
    for inputs, targets in ((torch.tensor([[1, -100, 3]]), tokens), (tokens, torch.tensor([[2, -100, 8]]))):
        with pytest.raises(UserError, match=r"the model knows 0 to 7; raise model\.vocab"):
            check_tokens(8, inputs, targets)


def test_a_worker_builds_a_layer_of_another_stage_once_and_without_values() -> None:
    made, drawn = Counter[str](), Counter[str]()

    def counted(name: str, build: Callable[[], nn.Module]) -> nn.Module:
        layer = build()
        (made if next(layer.parameters()).is_meta else drawn)[name] += 1
        return layer

    whole = gpt("gpt-tiny")
    layers = {name: partial(counted, name, build) for name, build in whole.layers.items()}
    model = replace(whole, layers=layers)
    others = [model.names[index] for index in partition(model, 2)[1]]
    made.clear()
    job = Job(model=ModelSpec(build="in-the:script"), stages=2)
    program = Program(job, model, Synthetic(vocab=256, sequence=8, rows=1), adamw(lr=1e-3))
    program.rules()
    program.build(0)
    assert [made[name] for name in others] == [1] * len(others)
    assert not drawn.keys() & set(others)
