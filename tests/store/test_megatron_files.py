"""Files of a real tensor-parallel run of megatron-core 0.16.1."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from everstep.cli import main

# Megatron's layers by Transformer Engine hold the norm before a matrix with it; so does what we write.
FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
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


def test_the_way_back_gives_megatrons_own_tensors(tmp_path: Path) -> None:
    """QKV by groups of heads, gate and up, columns and rows: each rank has what it wrote, to the bit."""
    convert(REAL / "megatron", tmp_path / "hf", "--to", "hf", "--names", "llama")
    back = tmp_path / "back"
    convert(tmp_path / "hf", back, "--to", "megatron-legacy", "--tp", "2", "--names", "megatron")
    for rank in range(2):
        theirs, ours = (tensors(root, rank) for root in (REAL / "megatron", back))
        assert theirs.keys() == ours.keys()
        assert [key for key in theirs if not torch.equal(theirs[key], ours[key])] == []


def tensors(root: Path, rank: int) -> dict[str, Any]:
    file = root / f"iter_0000004/mp_rank_{rank:02d}/model_optim_rng.pt"
    held = torch.load(file, weights_only=False)["model"]
    for fused, alone in FUSED.items():
        held = {key.replace(fused, alone): value for key, value in held.items()}
    return {key: value for key, value in held.items() if torch.is_tensor(value)}
