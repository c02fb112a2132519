"""DeepSpeed ZeRO-2 on CPUs over gloo, with its own checkpoints.

DeepSpeed's engine refuses a checkpoint of another number of ranks: its own tool makes it universal first.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from trial import SAVE_EVERY, STEPS, Trial

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 10**9,
}


def make_universal(folder: Path) -> bool:
    """If the newest checkpoint is of another number of ranks; by rank 0, the others wait for it."""
    newest = folder / "latest"
    if not newest.exists():
        return False
    tag = newest.read_text().strip()
    saved = len(list((folder / tag).glob("*zero_pp_rank_*_optim_states.pt")))
    if saved == dist.get_world_size():
        return False
    if dist.get_rank() == 0:
        where = ["--input_folder", str(folder / tag), "--output_folder", str(folder / f"{tag}_universal")]
        options = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *where, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    dist.barrier()
    return True


def main() -> None:
    trial = Trial()
    # Compiled at the first start, for ranks of one machine. The name deepspeed.comm.torch is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optim = torch.optim.AdamW(model.parameters())
    folder, begin = trial.folder / "deepspeed", 1
    is_universal = make_universal(folder)
    config = CONFIG | {"checkpoint": {"load_universal": is_universal}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optim, config=config)
    if (folder / "latest").exists() and engine.load_checkpoint(str(folder))[0] is not None:
        begin = engine.global_steps + 1
    for step in range(begin, STEPS):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step * 1000 + trial.rank))
        engine.backward(engine(x).square().mean())
        engine.step()
        if step % SAVE_EVERY == 0:
            engine.save_checkpoint(str(folder), tag=str(step))
        trial.step(step)


if __name__ == "__main__":
    main()
