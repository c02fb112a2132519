"""What layers keep from F to I: attention run again, memory on the host. The bits are the same as without."""

from typing import Any

import pytest
import torch
from pipeline import by_name, run_step, stages
from torch import Tensor, nn

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.layers.model import Model
from everstep.engine.prepare.figures import layer_figures, settings_of, stage_figures
from everstep.engine.prepare.preflight import preflight
from everstep.engine.stage import kept
from everstep.engine.stage.kept import attention_in
from everstep.errors import UserError
from everstep.job.job import Job

DATA = Synthetic(vocab=64, sequence=32, rows=4, seed=3)
CPU = torch.device("cpu")


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
    "offload": {"offload": True},
    "offload beside recompute": {"offload": True, "recompute": 2},
}


@pytest.mark.parametrize("build", [small, llama])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_bits_are_those_of_a_run_that_keeps_everything(
    build: Any, way: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LEAST", 1)
    losses, sums, held = trained(build(), precision=precision)
    again = trained(build(), precision=precision, **WAYS[way])
    assert again[0] == losses
    assert all(torch.equal(again[1][name], gradient) for name, gradient in sums.items())
    assert sum(again[2]) < sum(held)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 3])
def test_the_memory_model_knows_what_is_held(way: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LEAST", 1)
    model = small(dropout=0.0)
    layers = layer_figures(model, DATA.batch(1, 0), "fp32")
    pipeline = stages(model, count, DATA, **WAYS[way])
    run_step(pipeline, 1, 1)
    for stage in pipeline:
        figures = stage_figures(layers, stage.layers, **{"recompute": 0, **WAYS[way]})
        assert figures.held_forward == pytest.approx(stage.held_bytes[0], rel=0.05, abs=2000)


def test_memory_is_moved_once_however_many_keep_it() -> None:
    """Views of one tensor come back as views of one memory, with their strides."""
    given = torch.randn(64, 512, requires_grad=True)
    offload = kept.Offload(CPU, lambda: torch.empty(0))
    saved: list[Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, x.t(), x[8:, 4:])
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            saved.extend(ctx.saved_tensors)
            return torch.ones(64, 512)

    x = given * 2
    with offload.of_a_layer([]):
        made = Keeps.apply(x)
    expected = [x.detach().clone(), x.detach().t(), x.detach()[8:, 4:]]
    x.data.zero_()  # its own memory is not looked at again
    wanted = [tensor.clone() for tensor in (given.detach() * 2, (given.detach() * 2).t())]
    made.backward()
    assert len({tensor.untyped_storage().data_ptr() for tensor in saved}) == 1
    assert [tensor.stride() for tensor in saved] == [tensor.stride() for tensor in expected]
    assert torch.equal(saved[0], wanted[0])
    assert torch.equal(saved[1], wanted[1])
    assert torch.equal(saved[2], wanted[0][8:, 4:])


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
        ({"offload": True}, 'device is "cpu"'),
        ({"offload": True, "device": "cuda", "graphs": "always"}, 'graphs is "always"'),
        ({"offload": True, "device": "cuda", "recompute": True}, "recompute_every = 2 or more"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_a_sentence(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        preflight(Job.from_dict(WORDS | words))


def test_a_model_without_attention_is_told_so() -> None:
    own = Model(layers={"a": lambda: nn.Embedding(64, 8), "b": lambda: nn.Linear(8, 64)})
    with pytest.raises(UserError, match="no layer has a module of the name attention"):
        preflight(Job.from_dict(WORDS | {"recompute": True, "recompute_part": "attention"}), model=own)


def test_what_waits_on_the_host_is_shown_by_the_plan() -> None:
    from everstep.schedule.footprint import items

    job = Job.from_dict(WORDS | {"device": "cuda", "offload": True})
    layers = layer_figures(small(), DATA.batch(1, 0), "fp32", "cuda")
    figures = stage_figures(layers, range(5), recompute=0, offload=True)
    found = {item.name: item for item in items(figures, settings_of(job), stash=2, hosted=4)}
    assert found["stashes on the host"].host == 2 * figures.host > 0
    assert found["stashes on the host"].device == 0
