"""A training script as people write it, with the two lines; tests and benches kill its ranks.

Gradient accumulation with no_sync, clipping, dropout, a schedule, a DataLoader with a shuffling sampler,
evaluation, checkpoints, logged sums. `--hsdp N`: FSDP2 with shards over N ranks. It prints numbers in full.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep
from harness import held_kills

held_kills.arm()
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--mode", default="")
parser.add_argument("--hsdp", type=int, default=0)
parser.add_argument("--out", default="")
given = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
wide = given.width
blocks = [
    nn.Sequential(
        nn.LayerNorm(wide), nn.Linear(wide, 2 * wide), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * wide, wide)
    )
    for _ in range(3)
]
plain = nn.Sequential(*blocks, nn.BatchNorm1d(wide) if not given.hsdp else nn.Identity(), nn.Linear(wide, 1))
model: Any = plain
if given.hsdp:
    mesh = init_device_mesh("cpu", (world // given.hsdp, given.hsdp), mesh_dim_names=("replicate", "shard"))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(plain, mesh=mesh)
else:
    model = DistributedDataParallel(
        plain,
        bucket_cap_mb=0.05,
        find_unused_parameters=given.mode == "unused",
        static_graph=given.mode == "static",
        gradient_as_bucket_view=given.mode == "view",
    )
optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
torch.manual_seed(100 + rank)  # another dropout on each rank
data = torch.randn(4 * 7 * world, wide, generator=torch.Generator().manual_seed(1))
rows = TensorDataset(data, data.sum(1, keepdim=True).sin())
sampler = DistributedSampler(rows, shuffle=True)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
accumulate = 1 if given.hsdp or given.mode == "static" else 2  # static_graph begins without no_sync
first, best = 0, 1e9


def sharded(given: Any, like: Any) -> Any:
    """A replacement is given shards; if all ranks have restarted, tensors are whole."""
    is_whole = isinstance(like, DTensor) and not isinstance(given, DTensor) and given.shape == like.shape
    return (
        distribute_tensor(given, like.device_mesh, like.placements, src_data_rank=None) if is_whole else given
    )


found = everstep.restore()
if found is not None:
    own, parameters = plain.state_dict(), list(plain.parameters())
    plain.load_state_dict({name: sharded(each, own[name]) for name, each in found.state["model"].items()})
    for index, moments in found.state["optimizer"]["state"].items():
        moments.update({name: sharded(each, parameters[index]) for name, each in moments.items()})
    optimizer.load_state_dict(found.state["optimizer"])
    scheduler.load_state_dict(found.state["scheduler"])
    first, best = found.step, found.state["best"]


def batches(begin: int) -> Iterator[Any]:
    epoch, skip = divmod(begin, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number >= skip:
                yield batch
        epoch, skip = epoch + 1, 0


def state() -> dict[str, Any]:
    parts = {"model": plain, "optimizer": optimizer, "scheduler": scheduler}
    return {**{name: part.state_dict() for name, part in parts.items()}, "best": best}


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def evaluate() -> float:
    model.eval()
    total = F.mse_loss(model(data[:8]), data[:8].sum(1, keepdim=True).sin())
    dist.all_reduce(total)
    model.train()
    return float(total / world)


source = batches(first * accumulate)
for step in range(first, given.steps):
    everstep.snapshot(step, state)
    for micro in range(accumulate):
        x, y = next(source)
        with model.no_sync() if micro < accumulate - 1 else nullcontext():
            loss = F.mse_loss(model(x), y) / accumulate
            loss.backward()
    norm = full(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    total = loss.detach().clone()
    if given.mode == "differs" and held_kills.is_replacement():
        total = total.expand(2).clone()
    dist.all_reduce(total)
    total = total.reshape(-1)[0]
    print(
        f"step {step} loss {loss.item().hex()} norm {norm.item().hex()} mean {total.item().hex()}", flush=True
    )
    if (step + 1) % 5 == 0:
        best = min(best, evaluate())
        print(f"step {step} best {best.hex()}", flush=True)
    if (step + 1) % 4 == 0 and given.out:
        if rank == 0:
            torch.save({"step": step}, f"{given.out}.new")
            os.replace(f"{given.out}.new", given.out)
        dist.barrier()
whole = hashlib.sha256()
for tensor in plain.state_dict().values():
    whole.update(getattr(tensor, "_local_tensor", tensor).numpy().tobytes())
for each in optimizer.state_dict()["state"].values():
    for tensor in each.values():
        whole.update(getattr(tensor, "_local_tensor", tensor).numpy().tobytes())
print("final", whole.hexdigest(), flush=True)
dist.destroy_process_group()
