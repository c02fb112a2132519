"""Plans of shards, followed before the start: what would be summed wrongly, or not run at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.engine.layers.model import Model
from everstep.engine.prepare.preflight import preflight
from everstep.engine.prepare.shard_trial import refuse_mixed, with_summed
from everstep.errors import UserError
from everstep.job.job import Job, ModelSpec

JOB = Job(model=ModelSpec(build="module:function"), shards=2)
TOKENS = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}


def theirs(kind: str, **changes: Any) -> Model:
    transformers = pytest.importorskip("transformers")
    from everstep.engine.hf.model import hf

    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return hf(transformers.AutoConfig.for_model(kind, **sizes | heads | changes))


class Rows:
    def batch(self, step: int, microbatch: int) -> dict[str, Tensor]:
        return {"input_ids": torch.arange(16).view(2, 8) % 128}


def test_parameters_of_an_activation_inside_split_matrices_are_summed() -> None:
    """Apertus learns its activation, and its plan does not name it: the first step was refused."""
    model = theirs("apertus")
    with pytest.raises(
        UserError, match=r"mlp.act_fn.alpha_\w is whole on every shard, and its gradient differs"
    ):
        refuse_mixed(model, TOKENS, 2)
    found = with_summed(model, JOB)
    assert set(found.shard_plan) - set(model.shard_plan) == {"model.layers.*.mlp.act_fn"}
    refuse_mixed(found, TOKENS, 2)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "olmo3", "glm4", "granite_swa", "mixtral"])
def test_a_plan_that_names_all_stays_as_it_is(kind: str) -> None:
    model = theirs(kind)
    assert with_summed(model, JOB) is model
    refuse_mixed(model, TOKENS, 2)


@pytest.mark.parametrize(
    ("kind", "pattern", "style", "sentence"),
    [
        ("qwen3", "*.q_norm", "whole", "q_norm.weight is whole on every shard, and its gradient differs"),
        ("llama", "*.input_layernorm", "whole_summed", "sums the gradients of .*input_layernorm.weight"),
        ("llama", "*.o_proj", "column", "'column', and what it is given is split already"),
        ("llama", "*.o_proj", "whole", "model.layers.0' cannot run with its parts of the matrices"),
        ("llama", "*.v_proj", "column_gather", "is whole on every shard meets split ones"),
    ],
)
def test_a_wrong_style_is_refused_before_the_start(
    kind: str, pattern: str, style: str, sentence: str
) -> None:
    model = theirs(kind)
    with pytest.raises(UserError, match=sentence):
        refuse_mixed(replace(model, shard_plan={pattern: style, **model.shard_plan}), TOKENS, 2)


def test_a_model_whose_plan_cannot_run_is_refused_before_the_start() -> None:
    """Doge's heads get a mask that is made of all of them."""
    with pytest.raises(UserError, match="cannot run with its parts of the matrices"):
        preflight(JOB, model=theirs("doge"), data=Rows())


class Block(nn.Module):
    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(8, 16), nn.Parameter(torch.ones(1)), nn.Linear(16, 8)
        self.looks = looks

    def forward(self, x: Tensor) -> Tensor:
        if self.looks and x.sum().item() > 0:
            x = -x
        return self.down(self.up(x) * self.scale) + x  # type: ignore[no-any-return]


PLAN = {"*.up": "column", "*.down": "row"}


@pytest.mark.parametrize(
    ("build", "plan", "sentence"),
    [
        (Block, PLAN, "block.scale is whole on every shard"),
        (Block, {"*.up": "column"}, "cannot run with its parts"),
        (
            lambda: nn.Sequential(nn.Linear(8, 8)),
            {"*.0": "column"},
            "gives values that are split over shards",
        ),
        (Block, PLAN | {"block": "whole_summed"}, None),
        (lambda: Block(looks=True), PLAN, None),  # it cannot be followed: the first step compares
    ],
)
def test_plans_of_own_models_are_followed(
    build: Callable[[], nn.Module], plan: dict[str, str], sentence: str | None
) -> None:
    model = Model(layers={"block": build, "head": lambda: nn.Linear(8, 4)}, shard_plan=plan)
    given = torch.zeros(2, 4, 8)
    if sentence is None:
        return refuse_mixed(model, given, 2)
    with pytest.raises(UserError, match=sentence):
        refuse_mixed(model, given, 2)
