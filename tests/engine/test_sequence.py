"""Shards that have a part of each row around the blocks of a Hugging Face layer: the losses of one process,
less memory, and what cannot be split is refused.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pipeline import run_step
from test_experts import each, theirs
from test_shards import CPU, DATA, in_shards, trained

from everstep.engine.hf.anatomy import blocks_of
from everstep.engine.layers.model import Model
from everstep.engine.prepare.preflight import preflight
from everstep.engine.shards.collectives import GroupCollectives
from everstep.engine.stage.stage import Stage
from everstep.errors import UserError
from everstep.job.job import Job

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def built(kind: str, **changes: Any) -> Model:
    from everstep.engine.hf.model import hf

    return hf(transformers.AutoConfig.for_model(kind, **{**SMALL, **changes}))


def piped(build: Callable[[], Model], shards: GroupCollectives | None = None) -> dict[str, Any]:
    """One step of three stages, cut between decoder layers and behind the last of them."""
    model = build()
    last = len(model.layers) - 2  # norm and head
    ranges = (range(2), range(2, last), range(last, last + 2))
    pipeline = [Stage(model, layers, data=DATA, device=CPU, shards=shards) for layers in ranges]
    losses = run_step(pipeline, 1, 2, (0, 1))
    whole = {
        name: stage.slots[name].of(found).tolist()
        for stage, found in zip(pipeline, [stage.take_gradients() for stage in pipeline], strict=True)
        for name in stage.slots
        if not stage.cut.is_split(name)
    }
    return {"losses": losses.tolist(), "gradients": whole}


RUNS: dict[str, Callable[..., Any]] = {
    "llama": partial(trained, partial(built, "llama")),
    "gemma3, run again": partial(
        trained, partial(built, "gemma3_text", head_dim=8, sliding_window=8), recompute=1
    ),
    "experts, a router's loss": partial(trained, partial(theirs, "qwen3_moe"), steps=2),
    "experts that give one token after the other": partial(trained, partial(theirs, "llama4_text"), steps=1),
    "latent attention": partial(trained, partial(theirs, "deepseek_v3"), steps=2),
    "layers in parallel": partial(trained, partial(built, "cohere")),
}


def test_losses_and_norms_are_those_of_one_process() -> None:
    work = partial(each, RUNS)
    one, found = work(), in_shards(2, work, splits_sequence=True)
    for name in RUNS:
        assert found[0][name] == found[1][name], "losses, norms and whole parameters, to the bit"
        assert found[0][name]["losses"] == pytest.approx(one[name]["losses"], rel=2e-6)
        assert found[0][name]["norms"] == pytest.approx(one[name]["norms"], rel=2e-5)


def test_parts_of_rows_pass_from_stage_to_stage() -> None:
    work = partial(piped, partial(built, "llama"))
    one, found = work(), in_shards(2, work, splits_sequence=True)
    assert found[0] == found[1]
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=2e-6)
    for name, gradient in found[0]["gradients"].items():
        assert torch.allclose(torch.tensor(gradient), torch.tensor(one["gradients"][name]), atol=1e-6), name


def held(shards: GroupCollectives) -> int:
    model = built("llama", hidden_size=256, intermediate_size=512)
    stage = Stage(model, range(1, 5), data=DATA, device=CPU, shards=shards)
    first = Stage(model, range(1), data=DATA, device=CPU, shards=shards)
    stage.forward(1, 0, first.forward(1, 0))
    return stage.held_bytes[0]


def test_a_shard_holds_less_of_a_microbatch() -> None:
    """What norms keep is halved; what blocks are given stays whole, for their weight gradients."""
    with_parts, without = (in_shards(2, held, splits_sequence=split)[0] for split in (True, False))
    assert with_parts < 0.85 * without


def test_layers_that_mix_tokens_around_their_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    usual = LlamaDecoderLayer.forward

    def shifted(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return usual(self, hidden_states + hidden_states.roll(1, dims=1), *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", shifted)
    job = Job.from_dict(
        {
            "model": {"preset": "gpt-tiny"},
            "shards": 2,
            "sequence_parallel": True,
            "data": {"kind": "synthetic"},
        }
    )
    with pytest.raises(UserError, match="LlamaDecoderLayer does not work on each token alone there"):
        preflight(job, model=built("llama"))


def test_the_blocks_of_a_layer_are_its_parts_with_matrices() -> None:
    from everstep.engine.hf.model import Family

    family = Family(transformers.AutoConfig.for_model("gemma3_text", **SMALL), None)
    assert set(blocks_of(family.whole, family.anatomy).values()) == {("self_attn", "mlp")}


def test_rows_that_shards_cannot_halve_are_refused_in_a_sentence() -> None:
    job = Job.from_dict(
        {
            "model": {"preset": "gpt-tiny"},
            "shards": 2,
            "sequence_parallel": True,
            "data": {"kind": "synthetic"},
        }
    )

    class Odd:
        def batch(self, step: int, microbatch: int) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.ones(2, 15, dtype=torch.long)}

    with pytest.raises(UserError, match="rows of 15 tokens"):
        preflight(job, model=built("llama"), data=Odd())
