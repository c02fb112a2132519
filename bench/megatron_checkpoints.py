"""Checkpoints of a real tensor-parallel run of megatron-core: are they read, and written, as it does?

    pip install --no-deps --target lib megatron-core
    PYTHONPATH=src:.:lib python bench/megatron_checkpoints.py --folder out --shards 2

megatron-core trains a tiny GPT (grouped heads, SwiGLU, RMSNorm, rotary positions) over gloo and saves it as
Megatron-LM does: `mp_rank_XX/model_optim_rng.pt`. Then `everstep ckpt convert` takes it to Hugging Face's
Llama, whose logits are compared with Megatron's, and back to as many ranks: the same tensors, to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# Megatron's layers by Transformer Engine hold the norm before a matrix with it; so does what we write.
FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
VOCAB, WIDTH, HEADS, GROUPS, HIDDEN, LAYERS, LENGTH, STEPS = 64, 16, 4, 2, 32, 2, 16, 4


def rank_main(folder: Path, rank: int, shards: int) -> None:
    """One tensor-parallel rank, on the CPU: megatron-core asks CUDA for its device and its random states."""
    import megatron.core.tensor_parallel.random as randomness
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    current: Any = torch.cuda
    current.current_device = lambda: torch.device("cpu")
    randomness.CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    dist.init_process_group("gloo", rank=rank, world_size=shards)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=shards)
    sizes = {
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "ffn_hidden_size": HIDDEN,
    }
    config = TransformerConfig(
        **sizes,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        tensor_model_parallel_size=shards,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    torch.manual_seed(7)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    given = {
        "position_ids": torch.arange(LENGTH)[None],
        "attention_mask": torch.ones(LENGTH, LENGTH).tril()[None, None] < 0.5,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCAB, (1, LENGTH + 1), generator=drawn)
        optimizer.zero_grad()
        model(input_ids=tokens[:, :-1], labels=tokens[:, 1:], **given).mean().backward()
        optimizer.step()
    model.eval()
    tokens = torch.randint(0, VOCAB, (1, LENGTH), generator=drawn)
    with torch.no_grad():
        logits = model(input_ids=tokens, **given).contiguous()
    parts = [torch.empty_like(logits) for _ in range(shards)]
    dist.all_gather(parts, logits)
    saved = folder / f"megatron/iter_{STEPS:07d}/mp_rank_{rank:02d}"
    saved.mkdir(parents=True)
    flags = {"swiglu": True, "group_query_attention": True, "tensor_model_parallel_size": shards}
    args = argparse.Namespace(**sizes, **flags)
    held = {"args": args, "checkpoint_version": 3.0, "iteration": STEPS}
    torch.save({**held, "model": model.state_dict_for_save_checkpoint()}, saved / "model_optim_rng.pt")
    if rank == 0:
        (folder / "megatron/latest_checkpointed_iteration.txt").write_text(str(STEPS))
        told = {"tokens": tokens.tolist(), "logits": torch.cat(parts, -1).tolist()}
        (folder / "logits.json").write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)


def convert(*words: str | Path) -> None:
    command = [sys.executable, "-m", "everstep.cli.main", "ckpt", "convert", *map(str, words)]
    subprocess.run(command, check=True, timeout=300)


def logits_apart(folder: Path) -> float:
    """transformers' Llama with the converted weights against Megatron's own logits."""
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    told = json.loads((folder / "logits.json").read_text())
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(load_file(folder / "hf/model.safetensors"), strict=True)
    with torch.no_grad():
        ours = model(torch.tensor(told["tokens"])).logits
    return float((ours - torch.tensor(told["logits"])).abs().max())


def differing(folder: Path, shards: int) -> list[str]:
    """Tensors of the files we wrote that are not those Megatron wrote."""
    import torch

    found = []
    for rank in range(shards):
        place = f"iter_{STEPS:07d}/mp_rank_{rank:02d}/model_optim_rng.pt"
        theirs, ours = (
            torch.load(folder / name / place, weights_only=False)["model"] for name in ("megatron", "back")
        )
        for fused, alone in FUSED.items():
            ours = {key.replace(fused, alone): value for key, value in ours.items()}
        tensors = {key: value for key, value in theirs.items() if torch.is_tensor(value)}
        found += [f"rank {rank}: {key}" for key in tensors.keys() ^ ours.keys()]
        found += [
            f"rank {rank}: {key}"
            for key, value in tensors.items()
            if key in ours and not torch.equal(value, ours[key])
        ]
    return found


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--folder", type=Path, required=True, help="must not exist")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        warnings.simplefilter("ignore")
        rank_main(given.folder, given.rank, given.shards)
    given.folder.mkdir(parents=True)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank)], env={**os.environ, **meet}
        )
        for rank in range(given.shards)
    ]
    codes = [rank.wait(timeout=400) for rank in ranks]
    if any(codes):
        return 1
    trained, back = given.folder / "megatron", given.folder / "back"
    convert(trained, given.folder / "hf", "--to", "hf", "--names", "llama")
    convert(
        given.folder / "hf", back, "--to", "megatron-legacy", "--tp", str(given.shards), "--names", "megatron"
    )
    apart, other = logits_apart(given.folder), differing(given.folder, given.shards)
    print(json.dumps({"shards": given.shards, "logits_apart": apart, "tensors_that_differ": other}))
    return 0 if apart < 1e-6 and not other else 1


if __name__ == "__main__":
    sys.exit(main())
