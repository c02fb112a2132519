"""A character model of this project's own English, nanoGPT-style: trained, evaluated, sampled.

everstep run examples/char_gpt.py
everstep run --kill stage=1,replica=0,step=20 examples/char_gpt.py
everstep run examples/char_gpt.py --gpu --steps 2000
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--gpu", action="store_true", help="a larger model, on CUDA")
args = parser.parse_args()
WIDTH, DEPTH, CONTEXT, HEADS = (384, 6, 256, 6) if args.gpu else (64, 2, 64, 4)

text = "\n".join(p.read_text() for p in sorted(Path(__file__).parent.parent.glob("docs/*.md")))
letters = sorted(set(text))
ids = np.array([letters.index(c) for c in text], dtype=np.uint16)
WORK = Path(tempfile.gettempdir()) / "everstep-char-gpt"
WORK.mkdir(exist_ok=True)
for name, part in (("train.bin", ids[: -len(ids) // 10]), ("val.bin", ids[-len(ids) // 10 :])):
    (WORK / f"{name}.part").write_bytes(part.tobytes())
    (WORK / f"{name}.part").replace(WORK / name)


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.letter, self.place = nn.Embedding(len(letters), WIDTH), nn.Embedding(CONTEXT, WIDTH)

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


layers = {
    "embed": Embed,
    **{f"block{i}": Block for i in range(DEPTH)},
    "head": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(letters))),
}
FOLDER = tempfile.mkdtemp(prefix="char-gpt-")
result = everstep.train(
    model=layers,
    data=everstep.tokens(WORK / "train.bin", sequence=CONTEXT, rows=8),
    eval_data=everstep.tokens(WORK / "val.bin", sequence=CONTEXT, rows=8),
    eval_batches=8,
    lr=3e-3,
    replicas=2,
    stages=2,
    microbatches=2,
    steps=args.steps,
    device="cuda" if args.gpu else "cpu",
    checkpoint={"folder": FOLDER, "interval": args.steps},
    callbacks=[everstep.CsvLog(WORK / "log.csv")],
)
print(f"evaluation loss {result.evaluations[args.steps]['loss']:.4f}, incidents {len(result.incidents)}")

model = nn.ModuleDict({name: build() for name, build in layers.items()}).eval()
model.load_state_dict(everstep.load(FOLDER))
written = [letters.index("\n")]
for _ in range(200):
    value = torch.tensor([written[-CONTEXT:]])
    with torch.no_grad():
        for layer in model.values():
            value = layer(value)
    written.append(int(torch.multinomial((value[0, -1] / 0.8).softmax(0), 1)))
print("".join(letters[i] for i in written))
