"""What all scripts of a job have in common, and none of them counts: the models and the data."""

import csv
import sys
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 20
OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
ROWS, MICROBATCHES, WORLD = 8, 2, 2  # a step has 32 rows, however they are spread
WIDTH, CONTEXT, HEADS = 64, 64, 4


# ------------------------------------------------------------------ job 1: a character model


class Chars(Dataset):
    """Windows of this project's own English, as bytes; every tenth for validation."""

    def __init__(self, part):
        text = b"".join(p.read_bytes() for p in sorted((Path(__file__).parents[3] / "docs").glob("*.md")))
        starts = range(0, len(text) - CONTEXT - 1, CONTEXT)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.starts = [s for i, s in enumerate(starts) if (i % 10 == 0) == (part == "val")][:256]

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, row):
        ids = self.text[self.starts[row] : self.starts[row] + CONTEXT + 1]
        return ids[:-1], ids[1:]


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.letter, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, x):
        return self.letter(x) + self.place(torch.arange(x.shape[1], device=x.device))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.mlp(self.norm2(x))


def head():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))


def char_layers():
    return {"embed": Embed, "block0": Block, "block1": Block, "head": head}


def char_loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def whole(layers):
    return nn.Sequential(OrderedDict((name, build()) for name, build in layers.items()))


def sample(model, length=40):
    written = [ord("\n")]
    for _ in range(length):
        with torch.no_grad():
            written.append(int(model(torch.tensor([written[-CONTEXT:]]))[0, -1].argmax()))
    return bytes(written).decode(errors="replace")


# ------------------------------------------------------------------ job 2: fine-tuning a Llama


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = OUT / "tiny-llama"
    if not (folder / "config.json").exists():
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=512,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Lines(Dataset):
    """Lines of a text, padded to one length; padding is masked and does not count."""

    def __init__(self):
        lines = (Path(__file__).parents[3] / "docs" / "glossary.md").read_bytes().splitlines()
        self.lines = [line[:64] for line in lines if len(line) > 8]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, row):
        ids = torch.zeros(64, dtype=torch.long)
        ids[: len(self.lines[row])] = torch.tensor(list(self.lines[row]))
        mask = (ids > 0).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


# ------------------------------------------------------------------ job 3: an own model with an own loop


class Points(Dataset):
    def __init__(self, part):
        draw = torch.Generator().manual_seed(int(part == "val"))
        self.x = torch.randn(512, 16, generator=draw)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row], torch.sin(self.x[row]).sum(0, keepdim=True)


def point_layers():
    def middle():
        return nn.Sequential(nn.GELU(), nn.Linear(64, 64))

    def last():
        return nn.Sequential(nn.GELU(), nn.Linear(64, 1))

    return {"first": lambda: nn.Linear(16, 64), "middle": middle, "last": last}


def near(output, targets):
    """The metric."""
    return ((output - targets).abs() < 0.5).float().mean()


def rate(step):
    """Of a step, from 1: what the rate is multiplied with."""
    return min(1.0, step / 5) * (1 - step / (2 * STEPS))


def write_csv(name, rows):
    with (OUT / name).open("w", newline="") as file:
        csv.writer(file).writerows(rows)
