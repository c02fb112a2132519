"""Attention that is run again in I holds less, with the same bits."""

from typing import Any

import pytest
import torch
from pipeline import by_name, run_step, stages
from torch import Tensor, nn

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.layers.model import Model
from everstep.engine.prepare.preflight import preflight
from everstep.engine.stage.attention_again import attention_in
from everstep.errors import UserError
from everstep.job.job import Job

DATA = Synthetic(vocab=64, sequence=32, rows=4, seed=3)


def small(**changes: Any) -> Model:
    return gpt(**{"vocab": 64, "width": 32, "heads": 4, "hidden": 48, "depth": 3, "dropout": 0.1, **changes})


def llama() -> Model:
    transformers = pytest.importorskip("transformers")
    from everstep.engine.hf.model import hf

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
    return hf(transformers.LlamaConfig(**sizes, num_hidden_layers=3, attention_dropout=0.1))


def trained(model: Model, count: int = 2, **more: Any) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Losses, gradients, and what each stage holds from F to I."""
    pipeline = stages(model, count, DATA, seed=3, contributions=8, **more)
    losses = run_step(pipeline, 1, 2)
    sums = by_name(pipeline, [stage.take_gradients() for stage in pipeline])
    return losses.tolist(), sums, [stage.held_bytes[0] for stage in pipeline]


WAYS: dict[str, dict[str, Any]] = {
    "attention": {"recompute": 1, "attention_alone": True},
    "attention of every other layer": {"recompute": 2, "attention_alone": True},
}


@pytest.mark.parametrize("build", [small, llama])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_bits_are_those_of_a_run_that_keeps_everything(build: Any, way: str, precision: str) -> None:
    losses, sums, held = trained(build(), precision=precision)
    again = trained(build(), precision=precision, **WAYS[way])
    assert again[0] == losses
    assert all(torch.equal(again[1][name], gradient) for name, gradient in sums.items())
    assert sum(again[2]) < sum(held)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({"cross_attn": nn.Linear(4, 4)})
        self.attention_norm, self.attn_scale = nn.LayerNorm(4), nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"attention": nn.Linear(4, 4)})


def test_attention_is_found_by_its_name_and_once() -> None:
    layer = Named()
    assert attention_in(layer) == [layer.self_attn, layer.inner["attention"]]


WORDS = {"model": {"preset": "gpt-tiny"}, "data": {"kind": "synthetic"}}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"recompute_part": "attention"}, "recompute is false; set it to true"),
        ({"recompute_part": "attention", "recompute": True, "shards": 2}, "shards that split the layers"),
        ({"recompute_part": "attention", "recompute": True, "compile": True}, "with compile = true"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_a_sentence(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        preflight(Job.from_dict(WORDS | words))


def test_a_model_without_attention_is_told_so() -> None:
    own = Model(layers={"a": lambda: nn.Embedding(64, 8), "b": lambda: nn.Linear(8, 64)})
    with pytest.raises(UserError, match="no layer has a module of the name attention"):
        preflight(Job.from_dict(WORDS | {"recompute": True, "recompute_part": "attention"}), model=own)
