"""A GPT under DDP over NCCL as people write it, with the two lines. Its ranks may share one GPU, so each
names a host of its own. Without a GPU: gloo. `bench/gpu/held_nccl.py` runs it and kills its ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep
from harness import held_kills

import os  # isort: skip

os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
held_kills.arm()
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--compile", action="store_true")
given = parser.parse_args()
WORDS = 16384
has_gpu = torch.cuda.is_available()
device = "cuda" if has_gpu else "cpu"
if has_gpu:
    torch.cuda.set_device(0)
torch.use_deterministic_algorithms(True)
dist.init_process_group("nccl" if has_gpu else "gloo")
rank = dist.get_rank()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.first(x)).view(rows, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        x = x + self.drop(self.out(seen.reshape(rows, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.second(x)))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, given.width), nn.Embedding(given.length, given.width)
        self.blocks = nn.ModuleList(Block(given.width) for _ in range(given.layers))
        self.norm = nn.LayerNorm(given.width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(F.linear(self.norm(h), self.words.weight).float().flatten(0, 1), y.flatten())


torch.manual_seed(1)
plain: Any = Gpt().to(device)
if given.compile:
    plain = torch.compile(plain)
model = DistributedDataParallel(plain, device_ids=[0] if has_gpu else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=has_gpu)
torch.manual_seed(100 + rank)
first = 0
if (found := everstep.restore()) is not None:
    model.load_state_dict(found.state["model"])
    optimizer.load_state_dict(found.state["optimizer"])
    first = found.step
times = []
for step in range(first, given.steps):
    began = time.perf_counter()
    everstep.snapshot(step, lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    total = 0.0
    for micro in range(given.accumulate):
        draw = torch.Generator().manual_seed(step * 1000 + micro * 10 + rank)
        rows = torch.randint(0, WORDS, (given.batch, given.length + 1), generator=draw).to(device)
        with model.no_sync() if micro < given.accumulate - 1 else nullcontext():
            with torch.autocast(device, torch.bfloat16):
                loss = model(rows[:, :-1], rows[:, 1:]) / given.accumulate
            loss.backward()
        total += loss.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step} loss {total.hex()} norm {norm.item().hex()}", flush=True)
    times.append(time.perf_counter() - began)
whole = hashlib.sha256()
for tensor in model.state_dict().values():
    whole.update(tensor.cpu().numpy().tobytes())
print("final", whole.hexdigest(), flush=True)
late = sorted(times[3:]) or times
peak = torch.cuda.max_memory_allocated() >> 20 if has_gpu else 0
size = sum(each.numel() for each in model.parameters()) / 1e6
print(f"about ms {1e3 * late[len(late) // 2]:.2f} million {size:.0f} peak_mib {peak}", flush=True)
dist.destroy_process_group()
