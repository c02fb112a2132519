"""Fine-tune a Hugging Face model on workers that heal, and export it:  everstep run examples/hf_finetune.py

Without --model it makes a tiny Llama first, runs/tiny-llama, that reads bytes. Kill a worker while it trains:

    everstep run --kill stage=1,replica=0,step=7 examples/hf_finetune.py
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--model", type=Path, help="folder of config and weights")
parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn, line by line")
parser.add_argument("--out", type=Path, default=Path("runs/tuned"), help="folder to export to")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--train", default="*", help='parameters to train, such as "*.self_attn.*"')
parser.add_argument("--gpu", action="store_true", help="a Llama of 1.1 billion parameters, bf16, on GPUs")
options = parser.parse_args()

folder = options.model or Path("runs/llama-1b" if options.gpu else "runs/tiny-llama")
if not folder.exists():  # the launcher makes it; workers find it
    tiny = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    large = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
    shape = large | {"num_attention_heads": 32, "num_key_value_heads": 4} if options.gpu else tiny
    config = LlamaConfig(vocab_size=256, max_position_embeddings=512, tie_word_embeddings=True, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)

lines = [line for line in options.text.read_bytes().splitlines() if len(line) > 8]
rows, length = (8, 256) if options.gpu else (4, 64)


def batch(step: int, microbatch: int) -> dict[str, torch.Tensor]:
    """Lines of the text, padded to one length; padding is masked and does not count."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    for row in range(rows):
        line = lines[((step * 8 + microbatch) * rows + row) % len(lines)][:length]
        ids[row, : len(line)] = torch.tensor(list(line))
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


result = everstep.train(
    model=everstep.hf(folder, train=options.train),
    data=batch,
    replicas=2,
    stages=2,
    microbatches=4,
    steps=options.steps,
    lr=1e-4 if options.gpu else 3e-3,
    warmup=5,
    checkpoint={"folder": f"{options.out}-checkpoints", "interval": options.steps},
    **({"device": "cuda", "precision": "bf16", "recompute": True} if options.gpu else {}),
)
losses = list(result.losses.values())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {len(result.incidents)} incidents healed")

made = everstep.export(f"{options.out}-checkpoints", options.out)
model = AutoModelForCausalLM.from_pretrained(made.folder)
prompt = torch.tensor([list(b"import ")])
answer = model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[0]
print(f"{made.folder}: {made.architecture}, {made.parameters:,} parameters")
print(bytes(answer.tolist()).decode(errors="replace"))
