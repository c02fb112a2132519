"""Tiny configs of many architectures of transformers, each with what is special about it."""

from __future__ import annotations

from typing import Any

from harness.masked_tokens import VOCAB

_BASE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDE = {**_BASE, **_TOKENS, "intermediate_size": 64, "max_position_embeddings": 64}
_GROUPED = {**_WIDE, "num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
_OLD = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, **_TOKENS}
_OPT = {"ffn_dim": 64, "word_embed_proj_dim": 16, "max_position_embeddings": 64, "dropout": 0.0}
_NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)

# model_type: (the config's values, what is special)
TINY: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({**_GROUPED, "tie_word_embeddings": True}, "tied embeddings"),
    "mistral": ({**_GROUPED, "sliding_window": 8}, "sliding window"),
    "qwen2": (_GROUPED, "biases"),
    "qwen3": ({**_GROUPED, "head_dim": 8}, "norms of q and k"),
    "gemma": ({**_GROUPED, "head_dim": 8}, "scaled embeddings, tied"),
    "gemma2": ({**_GROUPED, "head_dim": 8, "sliding_window": 8}, "two kinds of layers, soft caps"),
    "gemma3_text": ({**_GROUPED, "head_dim": 8, "sliding_window": 8}, "two rotary tables"),
    "phi": (_WIDE, "parallel attention and MLP"),
    "phi3": (_GROUPED, "fused projections"),
    "gpt2": ({**_OLD, **_NO_DROPOUT}, "no pp_plan, Conv1D, learned positions"),
    "gpt_neox": (_WIDE, "partial rotary"),
    "opt": (
        {**_BASE, **_TOKENS, **_OPT},
        "no pp_plan, projections around the layers",
    ),
    "bloom": (
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 4, "n_head": 4, **_TOKENS},
        "no pp_plan, ALiBi, a norm behind the embedding",
    ),
    "falcon": ({**_BASE, **_TOKENS, "alibi": False}, "no pp_plan, layers give tuples"),
    "mixtral": (
        {**_GROUPED, "num_local_experts": 4, "output_router_logits": True},
        "experts, router loss over all stages",
    ),
    "qwen2_moe": (
        {
            **_GROUPED,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
        },
        "experts and a shared one, router loss",
    ),
    "qwen3_moe": (
        {**_EXPERTS, "num_experts": 4, "head_dim": 8, "output_router_logits": True},
        "experts, norms of q and k, router loss",
    ),
    "deepseek_v3": (
        {
            **_EXPERTS,
            **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
            **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
        "experts and a shared one, latent attention, a layer without experts",
    ),
    "gpt_oss": (
        {**_EXPERTS, "num_local_experts": 4, "head_dim": 8, "output_router_logits": True},
        "experts with biases, sinks in attention, router loss",
    ),
    "stablelm": (_GROUPED, "partial rotary, LayerNorm"),
    "olmo": (_GROUPED, "norms without weights"),
    "olmo2": (_GROUPED, "norms behind"),
    "granite": ({**_GROUPED, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}, "multipliers"),
    "cohere": (_GROUPED, "scaled logits, tied"),
    "smollm3": (_GROUPED, "layers without positions"),
    "starcoder2": ({**_GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0}, "biases, tied"),
    "mamba": ({**_BASE, **_TOKENS}, "no attention"),
}

# The same of architectures that no test trains: for features that must not depend on the architecture.
_J = {**_OLD, **_NO_DROPOUT, "rotary_dim": 4}
_SEQ = {"vocab_size": VOCAB, "d_model": 32, "num_layers": 4, "attention_heads": 4, "ffn_dim": 64, **_TOKENS}
STRANGERS: dict[str, tuple[dict[str, Any], str]] = {
    "apertus": (_GROUPED, "a trained activation"),
    "arcee": (_GROUPED, "squared ReLU"),
    "biogpt": ({**_WIDE, "layerdrop": 0.0, **_NO_DROPOUT}, "no pp_plan, learned positions"),
    "cohere2": ({**_GROUPED, "sliding_window": 8}, "parallel blocks, windows, tied"),
    "codegen": (_J, "no pp_plan, fused projections"),
    "ernie4_5": (_GROUPED, "rotary in pairs"),
    "exaone4": ({**_GROUPED, "head_dim": 8, "sliding_window": 8}, "norms behind, windows"),
    "glm4": ({**_GROUPED, "head_dim": 8}, "four norms, fused MLP"),
    "gptj": (_J, "no pp_plan, parallel blocks"),
    "helium": ({**_GROUPED, "head_dim": 8}, "rotary in pairs"),
    "minicpm3": (
        {
            **_WIDE,
            **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
            **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
            "num_key_value_heads": 4,
        },
        "latent attention",
    ),
    "olmo3": ({**_GROUPED, "sliding_window": 8}, "one norm for all heads, windows"),
    "seed_oss": (
        {**_GROUPED, "head_dim": 8, **dict.fromkeys(("attention_dropout", "residual_dropout"), 0.0)},
        "biases",
    ),
    "xglm": ({**_SEQ, "dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}, "no pp_plan, sinusoids"),
}
