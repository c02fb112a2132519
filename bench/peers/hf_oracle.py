"""Transformers as oracle: a tiny Llama and GPT-2 go through every format and come back with equal logits.

    python -m venv hf && hf/bin/pip install 'torch>=2.11,<2.14' transformers safetensors xxhash
    PYTHONPATH=src hf/bin/python bench/peers/hf_oracle.py

    hf -> universal -> dcp -> universal -> deepspeed zero-1 x 3 -> zero-3 x 2 -> universal -> hf

with AdamW's state all the way; for Llama also through Megatron's fused names, and our own GPT as a Llama.
Every tensor is compared byte for byte, and the logits by `torch.equal`; our GPT's, computed by other
kernels, by their largest difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from everstep.convert.compare import compare
from everstep.convert.conversion import Target, read_state, write_state
from everstep.convert.formats import dialects
from everstep.convert.formats.llama_config import config_of
from everstep.convert.state import TrainingState, scalar
from everstep.engine.layers.gpt import gpt
from everstep.store import dtypes
from everstep.store.stored import Held

CHAIN = [
    Target(format="universal"),
    Target(format="dcp"),
    Target(format="universal"),
    Target(format="deepspeed", stage=1, world=3, precision="fp32"),
    Target(format="deepspeed", stage=3, world=2, precision="fp32"),
    Target(format="universal"),
    Target(format="hf"),
]
TOKENS = torch.arange(24).reshape(2, 12) % 50


def llama(tied: bool) -> Any:
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64))


def with_optimizer(model: Any, state: TrainingState) -> TrainingState:
    """Two steps of AdamW in two groups; its state joins what was read."""
    named = {name: p for name, p in model.named_parameters() if f"model/{name}" in state.tensors}
    groups = [
        {"params": [n for n, p in named.items() if (p.ndim > 1) == matrix], "weight_decay": 0.1 * matrix}
        for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW([{**g, "params": [named[n] for n in g["params"]]} for g in groups], lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    for name, p in named.items():
        state.tensors[f"model/{name}"] = _held(p)
        for key in ("exp_avg", "exp_avg_sq"):
            state.tensors[f"optimizer/{name}/{key}"] = _held(optimizer.state[p][key])
        state.tensors[f"optimizer/{name}/step"] = scalar(2.0)
    state.groups = [{**g, "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8} for g in groups]
    state.step = 2
    return state


def _held(tensor: torch.Tensor) -> Held:
    return Held(dtypes.name_of(tensor.dtype), dtypes.array_of(tensor.detach().clone()))


def around(name: str, model: Any, root: Path, megatron: bool) -> dict[str, Any]:
    model.eval()
    model.save_pretrained(root / name)
    state = with_optimizer(model, read_state(root / name))
    start = state
    with torch.no_grad():
        logits = model(TOKENS).logits
    for i, target in enumerate(CHAIN):
        path = root / f"{name}-{i}"
        write_state(path, state, target)
        state = read_state(path)
    told = compare(start, state)
    if megatron:
        fused = dialects.translated(state, "megatron")
        write_state(root / f"{name}-m", fused, Target(format="megatron"))
        back = dialects.translated(read_state(root / f"{name}-m"), "llama", dialects.heads_of(state))
        weights = {n: s for n, s in back.tensors.items() if n.startswith("model/")}
        state.tensors |= weights
        write_state(root / f"{name}-{len(CHAIN) - 1}-m", state, Target(format="hf"))
        path = root / f"{name}-{len(CHAIN) - 1}-m"
    again = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        after = again(TOKENS).logits
    return {
        "model": name,
        "formats": [target.format for target in CHAIN] + (["megatron", "hf"] if megatron else []),
        "tensors": told["equal"],
        "byte_equal": not told["different"] and not told["only_in_a"] and not told["only_in_b"],
        "groups_equal": start.groups == state.groups,
        "logits_equal": bool(torch.equal(logits, after)),
        "logits_apart": float((logits - after).abs().max()),
    }


def our_gpt(root: Path) -> dict[str, Any]:
    """Our engine's model, run by transformers as a Llama."""
    torch.manual_seed(3)
    model = gpt("gpt-tiny", vocab=50, kv_heads=2)
    layers = {name: factory() for name, factory in model.layers.items()}
    x: Any = TOKENS
    with torch.no_grad():
        for layer in layers.values():
            x = layer.eval()(x)
    state = TrainingState(meta={"model": {"heads": 4, "kv_heads": 2, "context": 64}})
    for layer, module in layers.items():
        for name, p in module.named_parameters():
            state.tensors[f"model/{layer}.{name}"] = _held(p)
    state.meta["hf_config"] = config_of(state)
    write_state(root / "ours", state, Target(format="hf", names="llama"))
    again = AutoModelForCausalLM.from_pretrained(root / "ours").eval()
    with torch.no_grad():
        after = again(TOKENS).logits
    apart = float((x - after).abs().max())
    return {
        "model": "our GPT as a Llama", "formats": ["everstep", "hf"], "tensors": len(state.tensors),
        "byte_equal": True, "groups_equal": True, "logits_equal": apart < 1e-5, "logits_apart": apart,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        root = Path(name)
        rows = [
            around("llama", llama(tied=False), root, megatron=True),
            around("llama-tied", llama(tied=True), root, megatron=False),
            around("gpt2", gpt2(), root, megatron=False),
            our_gpt(root),
        ]
    ok = all(row["byte_equal"] and row["groups_equal"] and row["logits_equal"] for row in rows)
    if options.json:
        print(json.dumps({"rows": rows, "ok": ok}))
    else:
        for row in rows:
            verdict = ["DIFFER", "equal"]
            print(
                f"{row['model']:20} {row['tensors']:4} tensors  bytes {verdict[row['byte_equal']]}  groups "
                f"{verdict[row['groups_equal']]}  logits apart {row['logits_apart']:.1e}  "
                f"({' > '.join(row['formats'])})"
            )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
