"""Experts spread over the shards of a worker: the losses of the whole model, and no shard has them all."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_shards import in_shards, trained
from torch import Tensor, nn

from everstep.engine.layers.experts import product_of_groups
from everstep.engine.layers.model import Model, slots
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.prepare.preflight import preflight
from everstep.engine.shards.collectives import GroupCollectives
from everstep.errors import UserError
from everstep.job.job import Job

BASE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
GROUPS = {"n_group": 2, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1}
THEIRS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "qwen3_moe": {"num_experts": 4, "output_router_logits": True},
    "deepseek_v3": {"n_routed_experts": 4, **LATENT, **GROUPS},
    "gpt_oss": {"num_local_experts": 4, "output_router_logits": True, "sliding_window": 8},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": 4},
    "glm4_moe": {"n_routed_experts": 4, **GROUPS},
    "granitemoe": {"num_local_experts": 4},
}


def theirs(kind: str, **changes: Any) -> Model:
    import transformers

    from everstep.engine.hf.model import hf

    return hf(transformers.AutoConfig.for_model(kind, **{**BASE, **THEIRS[kind], **changes}))


def each(runs: dict[str, Callable[..., Any]], shards: GroupCollectives | None = None) -> dict[str, Any]:
    return {name: run(shards) for name, run in runs.items()}


def alike(one: dict[str, Any], found: list[dict[str, Any]]) -> None:
    assert all(shard == found[0] for shard in found), "losses, norms and whole parameters, to the bit"
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=2e-6)
    assert found[0]["norms"] == pytest.approx(one["norms"], rel=2e-5)


def spread(runs: dict[str, Callable[..., Any]]) -> None:
    work = partial(each, runs)
    one, found = work(), in_shards(2, work)
    for name in runs:
        alike(one[name], [shard[name] for shard in found])


@pytest.mark.slow
def test_experts_of_hugging_face_models_are_spread_over_the_shards() -> None:
    """Router losses, shared experts, latent attention, biases: the losses of one process."""
    pytest.importorskip("transformers")
    spread({kind: partial(trained, partial(theirs, kind), steps=3) for kind in THEIRS})


@pytest.mark.parametrize("kind", list(THEIRS))
def test_half_of_the_experts_are_on_each_of_two_shards(kind: str) -> None:
    pytest.importorskip("transformers")
    model = theirs(kind)
    assert "experts" in model.shard_plan.values()
    whole = slots(model, range(len(model.layers)))
    experts = [name for name in whole if ".experts." in name]
    assert experts
    for index in (0, 1):
        part = slots(model, range(len(model.layers)), cut=Cut(model.shard_plan, index, 2))
        assert sum(part[n].size for n in experts) == sum(whole[n].size for n in experts) / 2


class Rows(nn.Module):
    """Stacked experts of one's own, arguments in another order, with a norm that they share. Every token is
    sent to the first two, so that the other shard's have nothing to do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(*shape) * 0.2) for shape in ((4, 32, 16), (4, 16, 32)))
        self.num_experts, self.norm = 4, nn.RMSNorm(32)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in range(self.num_experts):
            token, place = torch.where(chosen == number)
            if len(token):
                made = self.norm(torch.relu(x[token] @ self.up[number]) @ self.down[number])
                out = out.index_add(0, token, made * weights[token, place, None])
        return out


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(32, 2), Rows()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 32)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        return x + self.experts(flat, weights=weights, chosen=chosen).view_as(x)


def own(mixture: Callable[[], nn.Module], frozen: bool = False) -> Model:
    def embed() -> nn.Module:
        return nn.Embedding(128, 32).requires_grad_(not frozen)

    layers = {"embed": embed, "a": mixture, "b": mixture, "head": partial(nn.Linear, 32, 128)}
    return Model(layers=layers, shard_plan={"*.experts": "experts", "a.experts": "experts"})


def test_stacked_experts_of_ones_own() -> None:
    """Also where a shard's experts get no token, and where nothing before them is trained."""
    spread(
        {
            f"{frozen=}, {recompute=}": partial(
                trained, partial(own, Idle, frozen), recompute=recompute, steps=2
            )
            for frozen, recompute in itertools.product((False, True), (0, 1))
        }
    )


def test_experts_of_a_form_that_is_not_known_are_refused_in_a_sentence() -> None:
    listed = Model(
        layers={"a": lambda: nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(4))})},
        shard_plan={"a.experts": "experts"},
    )
    job = Job.from_dict({"model": {"preset": "gpt-tiny"}, "shards": 2, "data": {"kind": "synthetic"}})
    with pytest.raises(UserError, match=r"a\.experts as experts; it is a ModuleList, not a module whose own"):
        preflight(job, model=listed)


def test_heads_that_stay_whole_need_not_be_divided() -> None:
    """DeepSeek-V4 has one head of keys and values; its attention is whole on every shard."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("this transformers has no DeepSeek-V4")
    from everstep.engine.hf.model import hf

    small = {
        key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    }
    config = transformers.DeepseekV4Config(
        **small, num_key_value_heads=1, head_dim=16, o_groups=2, n_routed_experts=4, num_experts_per_tok=2
    )
    assert list(hf(config).assembly.shared_out.values()) == [4], "its experts"
    assert "num_key_value_heads" in theirs("mixtral").assembly.shared_out


def test_a_number_of_shards_that_does_not_divide_the_experts_is_refused() -> None:
    pytest.importorskip("transformers")
    job = Job.from_dict({"model": {"preset": "gpt-tiny"}, "shards": 4, "data": {"kind": "synthetic"}})
    with pytest.raises(UserError, match="shards is 4, which does not divide num_local_experts 6"):
        preflight(job, model=theirs("mixtral", num_local_experts=6, num_key_value_heads=4))


def test_products_by_expert_are_those_of_a_loop() -> None:
    for width in (32, 5):  # with torch's grouped product, and by a loop
        x, weights = torch.randn(7, 32), torch.randn(4, 32, width)
        wanted = torch.cat([x[:2] @ weights[0], x[2:6] @ weights[2], x[6:] @ weights[3]])
        assert torch.allclose(
            product_of_groups(x, weights, torch.tensor((2, 2, 6, 7), dtype=torch.int32)), wanted, atol=1e-5
        )
