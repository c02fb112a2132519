"""The trial for systems that run your own loop: data parallel by gloo or NCCL, a checkpoint to restart from.

torchrun --standalone --nproc_per_node 2 --max-restarts 3 ddp_train.py DIARY FOLDER STEPS DEVICE
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from trial import CHECKPOINT_EVERY, Data, Diary, layers, loss, optimizer


def train(diary: Diary, folder: Path, steps: int, device: str) -> None:
    """From the newest checkpoint to the last step. May be called again in the same process after a fault."""
    if device == "cuda":  # ranks that share a GPU: for NCCL each is on a machine of its own
        os.environ.update(NCCL_HOSTID=f"rank-{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo")
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world, life = dist.get_rank(), dist.get_world_size(), f"{os.getpid()} at {time.monotonic()}"
    torch.manual_seed(0)
    model = nn.Sequential(*(build() for build in layers())).to(device)
    optim, data = optimizer(list(model.named_parameters())), Data()
    done = load(folder, model, optim, device)
    for step in range(done + 1, steps + 1):
        x, y = (tensor.to(device) for tensor in data.batch(step, rank))
        optim.zero_grad()
        loss(model(x), y).backward()
        average(model, world)
        optim.step()
        if device == "cuda":
            torch.cuda.synchronize()
        diary.write(rank=rank, step=step, life=life, world=world)
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            save(folder, step, model, optim)
    dist.barrier()
    dist.destroy_process_group()


def average(model: nn.Module, world: int) -> None:
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    parts = (flat / world).split([g.numel() for g in gradients])
    torch._foreach_copy_(gradients, [part.view(g.shape) for part, g in zip(parts, gradients, strict=True)])


def save(folder: Path, step: int, model: nn.Module, optim: torch.optim.Optimizer) -> None:
    state = {"step": step, "model": model.state_dict(), "optimizer": optim.state_dict()}
    torch.save(state, folder / "new.pt")
    (folder / "new.pt").rename(folder / "newest.pt")


def load(folder: Path, model: nn.Module, optim: torch.optim.Optimizer, device: str) -> int:
    if not (folder / "newest.pt").exists():
        return 0
    state = torch.load(folder / "newest.pt", weights_only=True, map_location=device)
    model.load_state_dict(state["model"])
    optim.load_state_dict(state["optimizer"])
    return state["step"]


def main() -> None:
    diary, folder, steps, device = sys.argv[1:5]
    torch.set_num_threads(1)
    train(Diary(diary), Path(folder), int(steps), device)


if __name__ == "__main__":
    main()
