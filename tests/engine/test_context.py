"""Shards that split the rows, as real processes: the losses of one process, whatever the model does."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from test_experts import BASE, LATENT, each
from test_shards import CPU, DATA, in_shards, scored, sent_on, small_gpt, trained
from torch import Tensor, nn

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.attention import causal_from
from everstep.engine.layers.boundary import Value
from everstep.engine.layers.model import Model, token_loss
from everstep.engine.prepare.figures import layer_figures, stage_figures
from everstep.engine.prepare.preflight import preflight
from everstep.engine.shards.collectives import GroupCollectives
from everstep.engine.shards.context import ContextPart
from everstep.engine.stage.stage import Stage
from everstep.errors import UserError
from everstep.job.job import Job


def alike(one: dict[str, Any], found: list[dict[str, Any]]) -> None:
    assert all(shard == found[0] for shard in found), "losses, norms and all weights, to the bit"
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=2e-6)
    assert found[0]["norms"] == pytest.approx(one["norms"], rel=2e-5)
    assert found[0]["whole"].keys() >= one["whole"].keys()


class Documents:
    """Rows of several documents, of which one goes on over the edge of a piece."""

    def batch(self, step: int, microbatch: int) -> tuple[Value, Tensor]:
        tokens, targets = DATA.batch(step, microbatch)
        starts = torch.zeros_like(tokens)
        starts[0, [0, 3, 9]], starts[1, [0, 14]] = 1, 1
        positions = torch.stack([_positions(row) for row in starts])
        return {"input_ids": tokens, "position_ids": positions}, targets.masked_fill(positions == 2, -100)


def _positions(starts: Tensor) -> Tensor:
    numbers = torch.arange(len(starts))
    return numbers - torch.cummax(numbers * starts, 0).values


def by_tokens(**changes: Any) -> Model:
    return replace(small_gpt(**changes), loss=token_loss)


OURS: dict[str, Callable[..., Any]] = {
    "plain": partial(trained, small_gpt),
    "tied, run again": partial(trained, partial(small_gpt, tied=True), recompute=True),
    "dropout, grouped heads": partial(trained, partial(small_gpt, dropout=0.1, kv_heads=2)),
    "experts": partial(trained, partial(small_gpt, experts=4, router_loss=0.0)),
    "documents, a sum over tokens": partial(trained, partial(by_tokens, kv_heads=2), data=Documents()),
    "strict sums": partial(trained, small_gpt, accumulate="strict"),
}


@pytest.mark.parametrize(
    ("count", "names"), [(2, list(OURS)), (4, ["documents, a sum over tokens", "strict sums"])]
)
def test_losses_and_norms_are_those_of_one_process(count: int, names: list[str]) -> None:
    work = partial(each, {name: OURS[name] for name in names})
    one, found = work(), in_shards(count, work, splits_context=True)
    for name in names:
        alike(one[name], [shard[name] for shard in found])


def test_in_bf16_every_shard_has_the_same_bits() -> None:
    work = partial(trained, small_gpt, precision="bf16", accumulate="strict40", steps=2)
    one, found = work(), in_shards(2, work, splits_context=True)
    assert found[0] == found[1]
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=1e-2)


THEIRS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 5},  # windows smaller than a piece and larger, norms of heads
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "sliding_window": 8},  # which its mask does not have
    "deepseek_v3": {"n_routed_experts": 4, **LATENT, "n_group": 2, "topk_group": 2},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "attn_pdrop": 0.0},
}


def theirs(kind: str) -> Model:
    import transformers

    from everstep.engine.hf.model import hf

    return hf(transformers.AutoConfig.for_model(kind, **{**BASE, **THEIRS[kind]}))


@pytest.mark.slow
def test_hugging_face_models_have_the_losses_of_one_process() -> None:
    pytest.importorskip("transformers")
    work = partial(each, {kind: partial(trained, partial(theirs, kind)) for kind in THEIRS})
    one, found = work(), in_shards(2, work, splits_context=True)
    for kind in THEIRS:
        alike(one[kind], [shard[kind] for shard in found])


def test_evaluation_sees_whole_rows() -> None:
    one, found = scored(), in_shards(2, scored, splits_context=True)
    assert found[0] == found[1] == pytest.approx(one, rel=2e-6)


def test_each_shard_sends_its_part_to_the_next_stage() -> None:
    assert in_shards(2, sent_on, splits_context=True) == [[[2, 8, 32], True, True]] * 2


class Alone:
    """One of several shards, without the others."""

    splits_sequence, splits_context = False, True

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_token_is_on_one_shard_and_all_shards_see_as_many_pairs(count: int) -> None:
    row = torch.arange(24 * count).unsqueeze(0)
    parts = [ContextPart(Alone(index, count)).of(row)[0] for index in range(count)]  # type: ignore[arg-type]
    assert sorted(torch.cat(parts).tolist()) == row[0].tolist()
    seen = [int((part + 1).sum()) for part in parts]  # a token at `place` sees `place + 1`
    assert len(set(seen)) == 1


def test_a_piece_attends_as_it_does_inside_the_row() -> None:
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 12, 8, generator=draw) for heads in (4, 2, 2))
    for options in ({}, {"scale": 0.2}, {"window": 5}):
        whole = causal_from(0, q, k, v, **options)
        for start in (0, 4, 8):
            piece = causal_from(start, q[..., start : start + 4, :], k, v, **options)
            assert torch.allclose(piece, whole[..., start : start + 4, :], atol=1e-6)
    narrow = causal_from(0, q, k, v, window=5)
    k[..., :3, :] += 1.0
    assert torch.equal(causal_from(0, q, k, v, window=5)[..., 8:, :], narrow[..., 8:, :])


LONG = Synthetic(vocab=128, sequence=128, rows=4, seed=1)


def held(shards: GroupCollectives | None = None) -> tuple[int, int]:
    model = small_gpt(kv_heads=1)
    stage = Stage(model, range(4), data=LONG, device=CPU, shards=shards)
    stage.forward(1, 0)
    stage.input_grad(1, 0)
    return stage.held_bytes


def test_memory_falls_with_the_shards_and_the_model_of_it_knows() -> None:
    model = small_gpt(kv_heads=1)
    figures = stage_figures(layer_figures(model, LONG.batch(1, 0), "fp32"), range(4), recompute=0)
    one = held()
    for count in (2, 4):
        told = figures.of_a_part(count)
        for forward, weight in in_shards(count, held, splits_context=True):
            assert told.held_forward == pytest.approx(forward, rel=0.05)
            assert told.held_weight == pytest.approx(weight, rel=0.02)
            assert forward < one[0] / count * 1.2
            assert weight == pytest.approx(figures.held_weight / count, rel=0.02)


WORDS = {
    "model": {"preset": "gpt-tiny"},
    "shards": 2,
    "context_parallel": True,
    "data": {"kind": "synthetic"},
}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"shards": 1}, "context_parallel = true splits the sequence .* shards is 1"),
        ({"sequence_parallel": True}, "sequence_parallel and context_parallel are both true"),
        ({"data": {"kind": "synthetic", "sequence": 66}}, r"4 pieces.*data\.sequence is 66.* multiple of 4"),
        ({"model": {"preset": "moe-tiny"}}, "GPT presets without router_loss"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_a_sentence(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        preflight(Job.from_dict(WORDS | words))


def test_a_model_of_ones_own_and_a_loss_of_ones_own_are_refused() -> None:
    own = Model(layers={"a": lambda: nn.Embedding(64, 8), "b": lambda: nn.Linear(8, 64)})
    with pytest.raises(UserError, match="for models that say where their tokens meet"):
        preflight(Job.from_dict(WORDS), model=own)
    paired = replace(small_gpt(), loss=lambda output, targets: output.float().square().mean())
    with pytest.raises(UserError, match="the loss is your own"):
        preflight(Job.from_dict(WORDS), model=paired)


def test_heads_need_not_be_divided() -> None:
    model = {"preset": "gpt-tiny", "width": 48, "heads": 3}
    assert preflight(Job.from_dict(WORDS | {"model": model})).parameters
    with pytest.raises(UserError, match=r"shards is 2, which does not divide .*heads 3"):
        Job.from_dict(WORDS | {"model": model, "context_parallel": False})


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("opt", {}),  # drops by functions, not by modules
        ("llama", {"attention_dropout": 0.1}),
        ("mixtral", {"output_router_logits": True}),
        ("gpt_oss", {}),  # sinks
        ("phimoe", {}),  # noise in its routers
    ],
)
def test_models_whose_rows_cannot_be_split_are_refused(kind: str, changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from everstep.engine.hf.model import hf

    sizes = {
        key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    }
    model = hf(transformers.AutoConfig.for_model(kind, **sizes, **changes))
    with pytest.raises(UserError, match="for models that say where their tokens meet"):
        preflight(Job.from_dict(WORDS), model=model)


def test_an_attention_with_a_mask_of_its_own_is_refused_before_the_start() -> None:
    """Doge masks by values: it was refused by its workers, in step 1."""
    transformers = pytest.importorskip("transformers")
    from everstep.engine.hf.model import hf

    sizes = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    model = hf(transformers.AutoConfig.for_model("doge", **sizes, num_attention_heads=4))
    with pytest.raises(UserError, match="DogeAttention attends with attention_mask, which shards"):
        preflight(Job.from_dict(WORDS), model=model)


def test_padded_rows_of_a_hugging_face_model_are_refused() -> None:
    pytest.importorskip("transformers")

    class Padded:
        def batch(self, step: int, microbatch: int) -> dict[str, Tensor]:
            tokens, _ = DATA.batch(step, microbatch)
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    with pytest.raises(UserError, match="data gives 'attention_mask'"):
        preflight(Job.from_dict(WORDS), model=theirs("llama"), data=Padded())
