"""The trial under NVIDIA's resiliency extension, in process: the survivor restarts `train` without its peer.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python nvrx_train.py DIARY FOLDER STEPS DEVICE [MS]

One command a rank: under torchrun a worker's death ends its siblings. Without MS all its intervals
are as they come (1 s).
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import nvidia_resiliency_ext.inprocess as inprocess
import torch
from ddp_train import train
from trial import Diary

INTERVALS = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "last_call_wait",
)


def main() -> None:
    diary, folder, steps, device, *interval = sys.argv[1:]
    torch.set_num_threads(1)
    settings = {name: timedelta(milliseconds=int(interval[0])) for name in INTERVALS} if interval else {}
    # NVRx's own store listens one port higher; the training's store moves on with every restart.
    store = {"host_name": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"]) + 1}

    # The argument is recognised by its type; without one the function would fail, and be restarted, for ever.
    def restartable(call_wrapper=None) -> None:
        train(Diary(diary), Path(folder), int(steps), device)

    restartable.__annotations__["call_wrapper"] = inprocess.CallWrapper
    inprocess.Wrapper(store_kwargs=store, **settings)(restartable)()


if __name__ == "__main__":
    main()
