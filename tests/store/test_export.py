"""What was trained goes back where it came from: a folder that transformers loads, with the same logits."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everstep
from everstep.cli.main import run as everstep_command
from everstep.engine.hf.model import hf
from everstep.engine.layers.model import Model, drawn, every_parameter
from everstep.errors import UserError
from everstep.store import folder

transformers = pytest.importorskip("transformers")
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
}


def llama() -> Any:
    return transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)


def mixtral() -> Any:
    return transformers.MixtralConfig(**SMALL, num_local_experts=4)


TOKENS = torch.arange(24).reshape(2, 12)


def trained(model: Model, root: Path) -> dict[str, Tensor]:
    """A checkpoint as workers write it, after a training that added a little to everything that it trains."""
    values = {}
    for index, name in enumerate(model.layers):
        for key, parameter in every_parameter(name, drawn(model, index, seed=5)).items():
            if parameter.requires_grad:
                draw = torch.Generator().manual_seed(len(values))
                values[key] = parameter.detach() + 0.01 * torch.randn(parameter.shape, generator=draw)
    for first, second in model.tied:
        if second in values:
            values[second] = values[first].clone()
    part = folder.write_part(root, 7, "stage-0", {f"model/{key}": value for key, value in values.items()})
    folder.commit(root, 7, [part], {"seed": 5, **model.assembly.card}, 3)
    return values


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize("make", [llama, mixtral], ids=["tied", "experts in pieces"])
def test_an_exported_model_has_the_trained_weights_and_logits(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    config = make()
    values = trained(hf(config), tmp_path / "checkpoints")
    made = everstep.export(tmp_path / "checkpoints", tmp_path / "out")
    assert (made.step, made.from_checkpoint, made.from_base) == (7, len(values), 0)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.float32
    state = loaded.state_dict()
    assert all(
        torch.equal(state[key], value) for key, value in everstep.load(tmp_path / "checkpoints").items()
    )
    whole = transformers.AutoModelForCausalLM.from_config(config)
    whole.load_state_dict(values)
    assert torch.equal(logits(loaded), logits(whole))
    half = everstep.export(tmp_path / "checkpoints", tmp_path / "half", dtype="bfloat16")
    assert transformers.AutoModelForCausalLM.from_pretrained(half.folder).dtype == torch.bfloat16


def test_a_config_with_an_infinity_is_exported(tmp_path: Path) -> None:
    """As hybrids of Mamba 2 have it; JSON has no word for it."""
    config = transformers.BambaConfig(
        **SMALL,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_n_groups=1,
        time_step_limit=(0.0, math.inf),
    )
    trained(hf(config), tmp_path / "checkpoints")
    made = everstep.export(tmp_path / "checkpoints", tmp_path / "out")
    assert made.architecture == "BambaForCausalLM"
    loaded = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert list(loaded.time_step_limit) == [0.0, math.inf]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(2)
    path = tmp_path / "base"
    transformers.AutoModelForCausalLM.from_config(llama()).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def test_what_was_frozen_comes_from_the_base_model_wherever_that_is_now(base: Path, tmp_path: Path) -> None:
    values = trained(hf(base, train="*.q_proj.weight"), tmp_path / "checkpoints")
    made = everstep.export(tmp_path / "checkpoints", tmp_path / "out")
    assert made.from_checkpoint == len(values) == 2
    assert (tmp_path / "out" / "tokenizer.json").exists()
    before = transformers.AutoModelForCausalLM.from_pretrained(base).state_dict()
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(after[key], values.get(key, before[key])) for key in before)

    base.rename(tmp_path / "moved")
    again = everstep.export(tmp_path / "checkpoints", tmp_path / "again", model=tmp_path / "moved")
    second = transformers.AutoModelForCausalLM.from_pretrained(again.folder).state_dict()
    assert all(torch.equal(second[key], after[key]) for key in after)


def with_lora(model: Any) -> None:
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model)


LORA = """
import peft
def with_lora(model):
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model)
"""


@pytest.mark.slow  # importing peft takes seconds
def test_adapters_are_merged_or_written_alone_also_from_the_shell(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    values = trained(hf(base, prepare=with_lora), tmp_path / "checkpoints")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora_of_test.py").write_text(LORA)
    with pytest.raises(UserError, match=r"if it was trained with prepare, give it: everstep ckpt export"):
        everstep.export(tmp_path / "checkpoints", tmp_path / "out")
    arguments = ["--prepare", "lora_of_test:with_lora"]
    assert everstep_command(["ckpt", "export", "checkpoints", "out", *arguments]) == 0
    assert everstep_command(["ckpt", "export", "checkpoints", "alone", *arguments, "--adapters"]) == 0
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    with_lora(whole)
    whole.load_state_dict(values, strict=False)
    merged = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert torch.allclose(logits(merged), logits(whole), atol=1e-6)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(logits(merged), logits(plain))
    assert sorted(path.name for path in Path("alone").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    adapted = peft.PeftModel.from_pretrained(plain, "alone")
    assert torch.equal(logits(adapted), logits(whole))


SCRIPT = """
import sys
import everstep
from pathlib import Path
def untouched(model):
    pass
assert sys.argv[1:] == []
CALL
"""
CALLS = {
    "train": 'everstep.train(model=[list], data=lambda s, m: Path("data").touch(), checkpoint="checkpoints")',
    "fit": "everstep.fit(None, steps=9)",
    "export": 'everstep.export("checkpoints", "written")',
}


@pytest.mark.parametrize("call", CALLS)
def test_an_export_neither_trains_nor_writes_what_the_script_of_its_prepare_would(
    call: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(hf(base), tmp_path / "checkpoints")
    monkeypatch.chdir(tmp_path)
    Path(f"script_that_{call}s.py").write_text(SCRIPT.replace("CALL", CALLS[call]))
    before = sorted(Path().rglob("*"))
    name = f"script_that_{call}s:untouched"
    export = ["ckpt", "export", "checkpoints", "out", "--prepare"]
    monkeypatch.setattr(sys, "argv", ["everstep", *export, name])
    assert everstep_command([*export, name]) == 2
    said = capsys.readouterr().err
    assert f"calls everstep.{call} while it is imported (line 8); put that behind if __name__ ==" in said
    assert [path for path in sorted(Path().rglob("*")) if "__pycache__" not in path.parts] == before

    guarded = f'if __name__ == "__main__":\n    {CALLS[call]}'
    Path(f"guarded_{call}.py").write_text(SCRIPT.replace("CALL", guarded))
    assert everstep_command([*export, f"guarded_{call}:untouched"]) == 0


def test_adapters_of_a_model_without_any_are_refused(base: Path, tmp_path: Path) -> None:
    trained(hf(base), tmp_path / "checkpoints")
    with pytest.raises(UserError, match="the model has no adapters of peft"):
        everstep.export(tmp_path / "checkpoints", tmp_path / "out", adapters=True)


def test_what_cannot_be_exported_is_told(base: Path, tmp_path: Path) -> None:
    def extended(model: Any) -> None:
        model.model.norm.extra = nn.Parameter(torch.zeros(3, device=model.model.norm.weight.device))

    odd = hf(base, prepare=extended)
    trained(odd, tmp_path / "odd")
    part = folder.write_part(tmp_path / "own", 7, "stage-0", {"model/a": torch.ones(2)})
    folder.commit(tmp_path / "own", 7, [part], {"seed": 0}, 3)
    out = tmp_path / "out"
    wrong = [
        (
            lambda: everstep.export(tmp_path / "own", out),
            "is not of a Hugging Face model; everstep.load",
        ),
        (lambda: everstep.export(tmp_path / "odd", base), "is not empty; give a new folder"),
        (lambda: everstep.export(tmp_path / "odd", out, dtype="fp8"), "dtype is 'fp8'; use one of float32"),
        (
            lambda: everstep.export(tmp_path / "odd", out, model=Model(layers=[nn.Identity])),
            "not one that everstep.hf gave",
        ),
        (
            lambda: everstep.export(tmp_path / "odd", out, model=odd),
            "model.norm.extra is not a parameter of a",
        ),
    ]
    for make, says in wrong:
        with pytest.raises(UserError) as caught:
            make()
        assert says in str(caught.value)
    assert not out.exists()
    assert everstep.load(tmp_path / "own").keys() == {"a"}
