"""Files of a real tensor-parallel run of megatron-core 0.16.1."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from everstep.cli import main

REAL = Path(__file__).parent / "data/megatron-tp2"


def convert(*words: str | Path) -> None:
    assert main.run(["ckpt", "convert", *map(str, words)]) == 0


def test_its_llama_has_megatrons_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    convert(REAL / "megatron", tmp_path / "hf", "--to", "hf", "--names", "llama")
    told = json.loads((REAL / "logits.json").read_text())
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(load_file(tmp_path / "hf/model.safetensors"), strict=True)
    with torch.no_grad():
        logits = model(torch.tensor(told["tokens"])).logits
    assert torch.allclose(logits, torch.tensor(told["logits"]), atol=1e-6)


# Experts, as Megatron writes them: by its own naming of folders and tensors, not by a run of it.

EXPERTS, LAYERS, HIDDEN, INNER = 4, 2, 8, 6


def whole_model(naming: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    found = {"embedding.word_embeddings.weight": torch.randn(16, HIDDEN, generator=draw)}
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}"
        found[f"{at}.mlp.router.weight"] = torch.randn(EXPERTS, HIDDEN, generator=draw)
        found[f"{at}.mlp.shared_experts.linear_fc1.weight"] = torch.randn(2 * 10, HIDDEN, generator=draw)
        found[f"{at}.mlp.shared_experts.linear_fc2.weight"] = torch.randn(HIDDEN, 10, generator=draw)
        for expert in range(EXPERTS):
            first, second = (
                (f"local_experts.{expert}.linear_fc1.weight", f"local_experts.{expert}.linear_fc2.weight")
                if naming == "local_experts"
                else (f"linear_fc1.weight{expert}", f"linear_fc2.weight{expert}")
            )
            found[f"{at}.mlp.experts.{first}"] = torch.randn(2 * INNER, HIDDEN, generator=draw)
            found[f"{at}.mlp.experts.{second}"] = torch.randn(HIDDEN, INNER, generator=draw)
    found["decoder.final_layernorm.weight"] = torch.randn(HIDDEN, generator=draw)
    return found


def write_ranks(root: Path, naming: str, tp: int, pp: int, ep: int) -> None:
    each = EXPERTS // ep
    args = argparse.Namespace(swiglu=True, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep)
    for t in range(tp):
        for p in range(pp):
            for e in range(ep):
                model = {}
                for name, tensor in whole_model(naming).items():
                    words = name.split(".")
                    if (words[0] == "embedding" and p) or ("final" in name and p < pp - 1):
                        continue
                    if words[1] == "layers":
                        if int(words[2]) * pp // LAYERS != p:
                            continue
                        words[2] = str(int(words[2]) - p * LAYERS // pp)
                    if ".experts." in name:
                        number = int(words[6]) if naming == "local_experts" else int(words[-1][6:])
                        if number // each != e:
                            continue
                        if naming == "local_experts":
                            words[6] = str(number % each)
                        else:
                            words[-1] = f"weight{number % each}"
                    if "fc1" in name:  # of the gate, and of up
                        tensor = torch.cat([half.chunk(tp)[t] for half in tensor.chunk(2)])
                    elif "fc2" in name:
                        tensor = tensor.chunk(tp, 1)[t]
                    elif "embedding" in name:
                        tensor = tensor.chunk(tp)[t]
                    model[".".join(words)] = tensor.clone()
                suffix = (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
                folder = root / f"iter_0000004/mp_rank_{t:02d}{suffix}"
                folder.mkdir(parents=True)
                torch.save({"model": model, "iteration": 4, "args": args}, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("4")


@pytest.mark.parametrize("naming", ["local_experts", "grouped"])
@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 2), (2, 2, 4), (2, 1, 1)])
def test_experts_of_all_ranks_make_the_whole_model(
    tmp_path: Path, naming: str, tp: int, pp: int, ep: int
) -> None:
    """Two expert ranks were read as two pipeline stages: twice the layers, half of the experts in each."""
    write_ranks(tmp_path / "in", naming, tp, pp, ep)
    convert(tmp_path / "in", tmp_path / "hf", "--to", "hf")
    ours, theirs = load_file(tmp_path / "hf/model.safetensors"), whole_model(naming)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_an_expert_rank_that_is_missing_or_differs_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_ranks(tmp_path / "in", "local_experts", 1, 1, 2)
    file = tmp_path / "in/iter_0000004/mp_rank_00_001/model_optim_rng.pt"
    held = torch.load(file, weights_only=False)
    held["model"]["decoder.layers.0.mlp.router.weight"][0, 0] += 1
    torch.save(held, file)
    assert main.run(["ckpt", "convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "decoder.layers.0.mlp.router.weight" in capfd.readouterr().err
    file.unlink()
    file.parent.rmdir()
    assert main.run(["ckpt", "convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "1 expert-parallel ranks of 2" in capfd.readouterr().err
