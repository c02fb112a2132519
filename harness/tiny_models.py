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

# Further ones: newer, with other kinds of layers, other ways of routing.
_HEADS = {**_GROUPED, "head_dim": 8}
_ROUTED = {**_HEADS, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LOCAL = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
_NAMED = {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}
_SHARED = {**_ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LINEAR = {
    **_HEADS,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_CONVOLVED = {"layer_types": ["conv", "full_attention"] * 2}
_MAMBA = {**_BASE, **_TOKENS, "state_size": 8}
MORE: dict[str, tuple[dict[str, Any], str]] = {
    "bamba": (
        {
            **_GROUPED,
            **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_chunk_size"), 8),
            "mamba_n_groups": 1,
            "attn_layer_indices": [1, 3],
        },
        "Mamba 2 and attention",
    ),
    "bitnet": (_GROUPED, "norms inside"),
    "deepseek_v2": (
        {
            **_SHARED,
            **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
            **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
            "num_key_value_heads": 4,
            "topk_method": "greedy",
        },
        "latent attention, experts and shared ones",
    ),
    "diffllama": (_GROUPED, "differences of attentions"),
    "dots1": ({**_SHARED, "n_group": 1, "topk_group": 1}, "experts and a shared one"),
    "ernie4_5_moe": (
        {
            **_ROUTED,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
        },
        "experts, a frozen bias of routers",
    ),
    "falcon_mamba": (_MAMBA, "no attention"),
    "flex_olmo": (_NAMED, "experts, norms behind"),
    "gemma4_text": (
        {
            **_HEADS,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 8,
            "global_head_dim": 8,
            "num_global_key_value_heads": 2,
        },
        "two kinds of layers, no inputs of each layer",
    ),
    "glm": (_HEADS, "fused MLP"),
    "glm4_moe": (_SHARED, "experts and a shared one"),
    "gpt_bigcode": ({**_OLD, **_NO_DROPOUT}, "one key for all heads"),
    "gpt_neo": (
        {
            **_BASE,
            **_TOKENS,
            **dict.fromkeys(("embed_dropout", "attention_dropout", "resid_dropout"), 0.0),
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "max_position_embeddings": 64,
            "window_size": 8,
        },
        "windows in turn",
    ),
    "granitemoe": (_LOCAL, "experts, multipliers"),
    "granitemoeshared": ({**_LOCAL, "shared_intermediate_size": 32}, "experts and a shared one"),
    "hunyuan_v1_dense": (_HEADS, "norms of q and k"),
    "hunyuan_v1_moe": ({**_ROUTED, "num_experts": 4, "moe_topk": 2}, "experts and a shared one"),
    "jamba": (
        {
            **_NAMED,
            **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
            **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
        "Mamba, attention, experts in turn",
    ),
    "lfm2": ({**_GROUPED, **_CONVOLVED}, "convolutions and attention"),
    "lfm2_moe": (
        {**_ROUTED, **_CONVOLVED, "num_experts": 4, "num_dense_layers": 1},
        "convolutions, attention, experts",
    ),
    "llama4_text": (
        {**_HEADS, "intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": 8},
        "attention in chunks, experts and a shared one",
    ),
    "mamba2": ({**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}, "no attention"),
    "minimax": ({**_LOCAL, "head_dim": 8, "block_size": 8}, "linear attention, experts"),
    "ministral": ({**_HEADS, "sliding_window": 8}, "windows"),
    "ministral3": (_HEADS, "scaled positions"),
    "mpt": ({"vocab_size": VOCAB, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64}, "ALiBi"),
    "nanochat": (_HEADS, "norms without weights, soft caps"),
    "nemotron": (_GROUPED, "squared ReLU, partial rotary"),
    "olmoe": (_NAMED, "experts, norms of q and k"),
    "persimmon": (_WIDE, "norms of q and k, partial rotary"),
    "qwen3_5_text": (_LINEAR, "linear and gated attention"),
    "qwen3_next": (
        {**_LINEAR, **_ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 32},
        "linear and gated attention, experts",
    ),
    "recurrent_gemma": ({**_GROUPED, "lru_width": 32, "attention_window_size": 8}, "recurrence and windows"),
    "vaultgemma": ({**_HEADS, "sliding_window": 8}, "two kinds of layers"),
}
