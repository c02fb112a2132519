"""Plain DDP with a checkpoint of its own every ten steps; with --snapshot its state is handed to Everstep."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trial import SAVE_EVERY, STEPS, Trial

if "--snapshot" in sys.argv:
    import everstep


def main() -> None:
    trial = Trial()
    device = "cuda" if "--cuda" in sys.argv else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    ddp, optim = DistributedDataParallel(model), torch.optim.AdamW(model.parameters())
    begin = load(trial, model, optim)
    for step in range(begin, STEPS):
        if "--snapshot" in sys.argv:
            everstep.snapshot(step, lambda: {"model": model.state_dict(), "optim": optim.state_dict()})
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step * 1000 + trial.rank))
        stop = torch.tensor([float(trial.is_over())])
        dist.all_reduce(stop := stop.to(device), op=dist.ReduceOp.MAX)
        if stop.item():
            break
        optim.zero_grad()
        ddp(x.to(device)).square().mean().backward()
        optim.step()
        save(trial, model, optim, step)
        trial.step(step)
    dist.destroy_process_group()


def load(trial: Trial, model: nn.Module, optim: Any) -> int:
    path, found = trial.folder / "newest.pt", None
    if "--snapshot" in sys.argv:
        kept = everstep.restore()
        found = None if kept is None else {"step": kept.step - 1, **kept.state}
    elif path.exists():
        found = torch.load(path, weights_only=True)
    if found is None:
        return 1
    model.load_state_dict(found["model"])
    optim.load_state_dict(found["optim"])
    return int(found["step"]) + 1


def save(trial: Trial, model: nn.Module, optim: Any, step: int) -> None:
    state = {"model": model.state_dict(), "optim": optim.state_dict()}
    if "--snapshot" not in sys.argv and trial.rank == 0 and step % SAVE_EVERY == 0:
        torch.save({"step": step, **state}, trial.folder / "new.pt")
        (trial.folder / "new.pt").rename(trial.folder / "newest.pt")


if __name__ == "__main__":
    main()
