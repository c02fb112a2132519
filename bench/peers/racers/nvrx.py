"""NVRx in process: survivors restart the function without the dead rank. One command per rank."""

from __future__ import annotations

import os
from datetime import timedelta

import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist
from loop import MEET_S, Diary, Disk, Training, run

INTERVALS = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "last_call_wait",
)


def main() -> None:
    diary = Diary()
    # The wrapper's own store listens one port higher than the training's.
    store = {"host_name": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"]) + 1}

    def restartable(call_wrapper=None) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=MEET_S))
        disk = Disk(os.environ["RACE_FOLDER"])
        run(diary, Training(), disk, dist.get_rank(), dist.get_world_size(), call_wrapper.ping)

    restartable.__annotations__["call_wrapper"] = inprocess.CallWrapper
    # Intervals of 100 ms were the better of the two in bench/peers/run.py; hangs after 5 s without a ping.
    inprocess.Wrapper(
        store_kwargs=store,
        soft_timeout=timedelta(seconds=5),
        hard_timeout=timedelta(seconds=8),
        heartbeat_timeout=timedelta(seconds=8),
        **{name: timedelta(milliseconds=100) for name in INTERVALS},
    )(restartable)()


if __name__ == "__main__":
    main()
