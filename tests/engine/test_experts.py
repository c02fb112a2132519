"""Experts spread over the shards of a worker: the losses of the whole model, and no shard has them all."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_shards import CPU, DATA, in_shards, small_gpt, trained
from torch import Tensor, nn

from everstep.engine.layers.experts import (
    NO_EXPERT,
    DroppedShare,
    QueuedExperts,
    product_of_groups,
    within_capacity,
)
from everstep.engine.layers.gpt import Mixture
from everstep.engine.layers.linear import Queue
from everstep.engine.layers.model import BACKWARD, Model, slots, token_loss
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.prepare.preflight import preflight
from everstep.engine.shards.collectives import GroupCollectives
from everstep.engine.stage.stage import Stage
from everstep.engine.state.sharded import StateSlice
from everstep.engine.worker.ports import StateParts
from everstep.errors import UserError
from everstep.job.job import Job
from everstep.job.presets import GptShape
from everstep.layout.box import Box
from everstep.protocol.ops import Worker
from everstep.store.folder import parameter_of
from everstep.store.state_keeper import StateKeeper

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
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 64, "num_experts_per_tok": 1},
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


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Listed(nn.Module):
    """A mixture with its experts in a list, as in the first publications of Mixtral and DeepSeek."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(32, experts)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 32)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                out = out.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return x + out.view_as(x)


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


TIGHT = {"capacity_factor": 0.75, "router_loss": 0.1, "router_z_loss": 0.1}


def weighted(build: Callable[[], Model]) -> Model:
    return replace(build(), loss=token_loss)


def test_experts_of_ones_own_and_of_our_gpt() -> None:
    """In a list and stacked; also where a shard's experts get no token, and where nothing before them is
    trained.
    """
    ours = partial(small_gpt, hidden=24, experts=4)
    spread(
        {
            "our GPT": partial(trained, ours, steps=2),
            "our GPT, a sum over tokens": partial(trained, partial(weighted, ours), steps=2),
            "our GPT, one expert per token": partial(trained, partial(ours, experts_per_token=1), steps=2),
            "our GPT, a capacity": partial(trained, partial(ours, **TIGHT), steps=2),
            "our GPT, a capacity, recomputed": partial(
                trained, partial(ours, **TIGHT), recompute=True, steps=2
            ),
        }
        | {
            f"{mixture.__name__}, {frozen=}, {recompute=}": partial(
                trained, partial(own, mixture, frozen), recompute=recompute, steps=2
            )
            for mixture, frozen, recompute in itertools.product((Listed, Idle), (False, True), (0, 1))
            if (mixture is Idle) ^ frozen ^ recompute  # each with each other once
        }
    )


def held(shards: GroupCollectives) -> dict[str, list[int]]:
    stage = Stage(own(Listed), range(4), data=DATA, device=CPU, shards=shards)
    return {name: list(slot.shape) for name, slot in stage.slots.items() if stage.cut.is_split(name)}


def test_an_expert_of_a_list_is_whole_on_one_shard_and_nowhere_else() -> None:
    first, second = in_shards(2, held)
    assert not first.keys() & second.keys()
    assert {name.split(".")[2] for name in first} == {"0", "2"}
    assert {name.split(".")[2] for name in second} == {"1", "3"}
    assert first["a.experts.0.up.weight"] == [16, 32]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (partial(own, partial(Listed, 3)), "a.experts has 3 experts of 1 forms"),
        (lambda: Model(layers={"a": Expert}, shard_plan={"a": "experts"}), "neither a ModuleList of experts"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused_in_a_sentence(
    model: Callable[[], Model], words: str
) -> None:
    job = Job.from_dict({"model": {"preset": "gpt-tiny"}, "shards": 2, "data": {"kind": "synthetic"}})
    with pytest.raises(UserError, match=words):
        preflight(job, model=model())


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
    split = Job.from_dict(
        {
            "model": {"preset": "moe-tiny"},
            "shards": 2,
            "sequence_parallel": True,
            "data": {"kind": "synthetic"},
        }
    )
    with pytest.raises(UserError, match="sequence_parallel = true cannot be combined with experts"):
        preflight(split)


def test_products_by_expert_are_those_of_a_loop() -> None:
    for width in (32, 5):  # with torch's grouped product, and by a loop
        x, weights = torch.randn(7, 32), torch.randn(4, 32, width)
        wanted = torch.cat([x[:2] @ weights[0], x[2:6] @ weights[2], x[6:] @ weights[3]])
        assert torch.allclose(
            product_of_groups(x, weights, torch.tensor((2, 2, 6, 7), dtype=torch.int32)), wanted, atol=1e-5
        )


@given(data=st.data(), tokens=st.integers(1, 12), number=st.integers(2, 5), capacity=st.integers(1, 6))
def test_an_expert_takes_first_choices_first_and_no_more_than_its_capacity(
    data: st.DataObject, tokens: int, number: int, capacity: int
) -> None:
    each = data.draw(st.integers(1, number))
    rows = [data.draw(st.permutations(range(number)))[:each] for _ in range(tokens)]
    wanted, taken = [list(row) for row in rows], [0] * number
    for choice in range(each):
        for token in range(tokens):
            expert = rows[token][choice]
            if taken[expert] == capacity:
                wanted[token][choice] = NO_EXPERT
            else:
                taken[expert] += 1
    assert within_capacity(torch.tensor(rows), capacity).tolist() == wanted


@pytest.mark.parametrize("hidden", [16, 5])  # with torch's grouped product, and by a loop
def test_what_is_beyond_an_experts_capacity_passes_by_the_residual(hidden: int) -> None:
    """Values and gradients are those of a mixture written out, in which such a token adds nothing."""
    torch.manual_seed(3)
    form = GptShape(width=32, hidden=hidden, experts=4, router_loss=0.0, capacity_factor=0.5)
    mixture, x = Mixture(form), torch.randn(2, 8, 32, requires_grad=True)
    queue: Queue = []
    for taken in (mixture.experts.forward, QueuedExperts(mixture.experts, queue)):
        mixture.zero_grad()
        mixture.experts.forward = taken  # type: ignore[method-assign]
        made = mixture(x)
        flat, experts = x.reshape(-1, 32), mixture.experts
        weights, chosen = mixture.router(flat).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        kept = within_capacity(chosen, 4)
        assert bool((kept == NO_EXPERT).any())
        outs = []
        for token in range(16):
            out = torch.zeros(32)
            for place, number in enumerate(kept[token].tolist()):
                if number != NO_EXPERT:
                    gate, up = (flat[token] @ experts.gate_up_proj[number]).chunk(2)
                    inside = nn.functional.silu(gate) * up
                    out = out + weights[token, place] * (inside @ experts.down_proj[number])
            outs.append(out)
        plain = torch.stack(outs).view_as(x)
        assert torch.allclose(made, plain, atol=1e-5)
        trained_ = [x, mixture.router.weight, experts.gate_up_proj, experts.down_proj]
        theirs_ = torch.autograd.grad(plain.square().sum(), trained_)
        made.square().sum().backward()
        for one in queue:
            one.weight.grad = torch.zeros_like(one.weight)
            one.run(lambda weight: weight.grad)  # type: ignore[arg-type, return-value]
        for one, wanted in zip(trained_, theirs_, strict=True):
            assert one.grad is not None
            assert torch.allclose(one.grad, wanted, atol=1e-4)
        x.grad = None


def test_a_capacity_that_is_never_reached_changes_no_bit() -> None:
    torch.manual_seed(3)
    form = GptShape(width=32, hidden=16, experts=4)
    plain, roomy = Mixture(form), Mixture(replace(form, capacity_factor=4.0))
    roomy.load_state_dict(plain.state_dict())
    x = torch.randn(2, 8, 32)
    assert torch.equal(plain(x), roomy(x))


def test_a_capacity_and_parts_of_rows_are_refused_in_a_sentence() -> None:
    model = {"preset": "gpt-tiny", "experts": 4, "router_loss": 0.0, "capacity_factor": 1.0}
    job = Job.from_dict(
        {"model": model, "shards": 2, "context_parallel": True, "data": {"kind": "synthetic"}}
    )
    with pytest.raises(UserError, match=r"without router_loss, router_z_loss and capacity_factor"):
        preflight(job)


@pytest.mark.parametrize("weight", [1.0, 16.0])
def test_the_routers_loss_is_in_proportion_to_the_models(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is that of the loss written out, once per mean, or as often as a sum counts."""
    torch.manual_seed(3)
    form = GptShape(width=32, hidden=16, experts=4, router_loss=0.5, router_z_loss=0.25)
    mixture, x = Mixture(form), torch.randn(2, 8, 32)
    monkeypatch.setattr(BACKWARD, "now", weight)
    mixture(x).sum().backward()
    plain = Mixture(replace(form, router_loss=0.0, router_z_loss=0.0))
    plain.load_state_dict(mixture.state_dict())
    logits = plain.router(x.reshape(-1, 32))
    chances, large = logits.softmax(-1), logits.exp().sum(-1).log().square().mean()
    used = nn.functional.one_hot(chances.topk(2).indices, 4).sum(1).float().mean(0) / 2
    (plain(x).sum() + weight * (0.5 * 4 * (used * chances.mean(0)).sum() + 0.25 * large)).backward()
    assert torch.allclose(mixture.router.weight.grad, plain.router.weight.grad, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": 1}, "model.experts is 1; give 2 or more, or 0 for none"),
        ({"experts": 4, "experts_per_token": 5}, "model.experts_per_token is 5"),
        ({"experts": 4, "router_loss": -1.0}, "model.router_loss is -1.0"),
        ({"experts": 4, "router_z_loss": float("nan")}, "model.router_z_loss is nan"),
        ({"experts": 4, "capacity_factor": float("inf")}, "model.capacity_factor is inf"),
        ({"capacity_factor": 1.25}, "model.capacity_factor is 1.25 and model.experts is 0"),
    ],
)
def test_numbers_of_experts_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        GptShape(**changes)


def test_what_one_shard_alone_has_is_written_by_that_shard() -> None:
    """An expert of a list, and the counter of its optimizer, which has no elements to be split by."""
    name, whole = "a.experts.1.up.weight", "a.router.weight"
    values = {
        f"model/{name}": torch.zeros(16, 32),
        f"optimizer/{name}/step": torch.zeros(()),
        f"model/{whole}": torch.zeros(4, 32),
        f"optimizer/{whole}/step": torch.zeros(()),
    }
    job = Job.from_dict({"model": {"preset": "gpt-tiny"}, "data": {"kind": "synthetic"}})
    written = []
    for index in (0, 1):
        cut = Cut({"*.experts": "experts"}, index, 2)
        slices = [
            StateSlice(tensor, tuple(one.shape), Box((0,) * one.ndim, tuple(one.shape)), one)
            for tensor, one in values.items()
            if cut.has(parameter_of(tensor))
        ]
        keeper = StateKeeper(
            ("t", Worker(0, 0), 0),
            job,
            node="n",
            memory_root=Path(),
            secret="",
            say=lambda word: None,
            cut=cut,
        )
        parts = keeper._logical(StateParts(count=1, slices={0: slices}))
        written.append([one.tensor for one in parts[0]])
    assert written == [list(values)[2:], list(values)[:2]]


def test_what_a_capacity_drops_is_counted_and_changes_no_bits() -> None:
    form = GptShape(width=16, hidden=16, experts=4, experts_per_token=2, capacity_factor=0.5, router_loss=0.0)
    torch.manual_seed(0)
    mixture = Mixture(form)
    x, share = torch.randn(2, 16, 16), DroppedShare([nn.Sequential(mixture)])
    assert share.since_last() is None
    made = mixture(x)
    taken = mixture.dropped.counts.tolist()
    assert taken[0] >= 32, "4 experts take at most 8 of 64 pairs each"
    assert taken[1] == 64
    assert share.since_last() is None, "up to the call before"
    assert share.since_last() == taken[0] / taken[1]
    assert share.since_last() is None, "nothing since"
    mixture.eval()
    assert torch.equal(mixture(x), made)
    assert mixture.dropped.counts.tolist() == taken, "evaluations do not count"
    assert not mixture.state_dict().keys() & {"dropped.counts"}
