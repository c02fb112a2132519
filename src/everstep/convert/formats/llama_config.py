"""The config.json of our GPT as a Llama: the same arithmetic, so transformers can run what we trained."""

from __future__ import annotations

from typing import Any

from everstep.convert.state import TrainingState, equal
from everstep.errors import UserError


def config_of(state: TrainingState, heads: int = 0, kv_heads: int = 0) -> dict[str, Any]:
    shapes = {name: stored.shape for name, stored in state.parameters().items()}
    card = state.meta.get("model") or {}
    query = heads or int(card.get("heads") or 0)
    if not query:
        raise UserError("the checkpoint does not say how many heads the model has; give --heads.")
    vocab, width = shapes["embed.tokens.weight"]
    size = width // query
    embed, head = (state.tensors[f"model/{n}"] for n in ("embed.tokens.weight", "head.logits.weight"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": shapes["blocks.0.mlp.gate.weight"][0],
        "num_hidden_layers": sum(name.endswith(".attention.q.weight") for name in shapes),
        "num_attention_heads": query,
        "num_key_value_heads": kv_heads or shapes["blocks.0.attention.k.weight"][0] // size,
        "head_dim": size,
        "max_position_embeddings": int(card.get("context") or 2048),
        "rms_norm_eps": 1e-6,
        "rope_theta": float(card.get("rope_base") or 10_000.0),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": bool(card.get("tied")) and equal(embed, head),
        "torch_dtype": "float32",
    }
