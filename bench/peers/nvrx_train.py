"""The trial under NVIDIA's resiliency extension, in process: the survivor restarts `train` without its peer.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python nvrx_train.py DIARY FOLDER STEPS DEVICE [MS]

One command per rank: under torchrun a worker's death ends its siblings. Without MS all its intervals
are NVRx's defaults (1 s).
"""

from __future__ import annotations

import sys
from pathlib import Path

import nvrx_restarts
import torch
from ddp_train import train
from trial import Diary


def main() -> None:
    diary, folder, steps, device, *interval = sys.argv[1:]
    torch.set_num_threads(1)
    interval_ms = int(interval[0]) if interval else None
    nvrx_restarts.run(
        lambda _: train(Diary(diary), Path(folder), int(steps), device), interval_ms=interval_ms
    )


if __name__ == "__main__":
    main()
