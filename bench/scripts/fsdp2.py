"""FSDP2 (fully_shard, DTensor) with a DCP checkpoint of its own; with --snapshot its state is handed over."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trial import SAVE_EVERY, STEPS, Trial

if "--snapshot" in sys.argv:
    import everstep


def main() -> None:
    trial = Trial()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters())
    begin = load(trial, model, optim)
    for step in range(begin, STEPS):
        if "--snapshot" in sys.argv:
            everstep.snapshot(step, lambda: state_of(model, optim))
        stop = torch.tensor([float(trial.is_over())])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            break
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step * 1000 + trial.rank))
        optim.zero_grad()
        model(x).square().mean().backward()
        optim.step()
        save(trial, model, optim, step)
        trial.step(step)
    dist.destroy_process_group()


def load(trial: Trial, model: nn.Module, optim: Any) -> int:
    if "--snapshot" in sys.argv:
        kept = everstep.restore()
        if kept is None:
            return 1
        full = StateDictOptions(full_state_dict=True)
        parts = kept.state["model"], kept.state["optim"]
        set_state_dict(model, optim, model_state_dict=parts[0], optim_state_dict=parts[1], options=full)
        return kept.step
    saved = sorted(trial.folder.glob("dcp-*/.metadata"), key=lambda path: int(path.parent.name[4:]))
    if not saved:
        return 1
    model_state, optim_state = get_state_dict(model, optim)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=saved[-1].parent)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return int(saved[-1].parent.name[4:]) + 1


def save(trial: Trial, model: nn.Module, optim: Any, step: int) -> None:
    if "--snapshot" not in sys.argv and step % SAVE_EVERY == 0:
        dcp.save(state_of(model, optim), checkpoint_id=trial.folder / f"dcp-{step}")


def state_of(model: nn.Module, optim: Any) -> dict[str, Any]:
    model_state, optim_state = get_state_dict(model, optim)
    return {"model": model_state, "optim": optim_state}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
