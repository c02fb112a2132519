"""A training script as people write them for torchrun: DDP, gloo or NCCL, and its own checkpoints.

    torchrun --standalone --nproc_per_node 2 examples/torchrun_style.py
    everstep run --nproc 2 examples/torchrun_style.py --steps 50

There is nothing of Everstep in it. Kill a rank while it runs: all ranks are started again, and it goes on
from its newest checkpoint. `--die-at 12` does that by itself, once.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("nccl" if a_gpu_per_rank() else "gloo")
    train(parse())  # its model is gone when it returns: torch 2.13 may hang if DDP outlives its process group
    dist.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    rank, device = dist.get_rank(), local_device()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = load(args.checkpoint, model, optimizer) + 1
    for step in range(first, args.steps + 1):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if args.die_at == step and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if step % args.every == 0 or step == args.steps:
            save(args.checkpoint, step, model, optimizer)
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)


def a_gpu_per_rank() -> bool:
    """NCCL refuses two ranks on one GPU: with fewer GPUs than ranks, all of them train on the CPU."""
    return torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])


def local_device() -> torch.device:
    if not a_gpu_per_rank():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 writes; the rename makes it whole or not there."""
    if dist.get_rank() == 0:
        new = path.with_suffix(".new")
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, new)
        new.rename(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step that the checkpoint was written after; 0 without one."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=Path("torchrun_style.pt"))
    parser.add_argument("--die-at", type=int, help="rank 1 kills itself in this step of the first start")
    return parser.parse_args()


if __name__ == "__main__":
    main()
