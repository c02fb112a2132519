"""DeepSpeed ZeRO-2 on CPUs over gloo, with its own checkpoints."""

from __future__ import annotations

import deepspeed
import deepspeed.comm.torch
import torch
from torch import nn
from trial import SAVE_EVERY, STEPS, Trial

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 10**9,
    "checkpoint": {"load_universal": False},
}


def main() -> None:
    trial = Trial()
    deepspeed.comm.torch.build_shm_op = lambda: None  # compiled at the first start, for ranks of one machine
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optim = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optim, config=CONFIG)
    folder, begin = str(trial.folder / "deepspeed"), 1
    found, _ = engine.load_checkpoint(folder) if (trial.folder / "deepspeed/latest").exists() else (None, {})
    if found is not None:
        begin = engine.global_steps + 1
    for step in range(begin, STEPS):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step * 1000 + trial.rank))
        engine.backward(engine(x).square().mean())
        engine.step()
        if step % SAVE_EVERY == 0:
            engine.save_checkpoint(folder, tag=str(step))
        trial.step(step)


if __name__ == "__main__":
    main()
