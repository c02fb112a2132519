"""NVRx in process: survivors restart the function without the dead rank. One command per rank."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import loop  # which also makes the modules of the folders above importable
import nvrx_restarts
import torch.distributed as dist

from harness.race_models import MODEL


def main() -> None:
    diary = loop.Diary()

    def train(call_wrapper: Any) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=loop.MEET_S))
        disk = loop.Disk(os.environ["RACE_FOLDER"])
        loop.run(diary, loop.Training(), disk, dist.get_rank(), dist.get_world_size(), call_wrapper.ping)

    # Intervals of 100 ms were the better of two that were tried.
    nvrx_restarts.run(
        train,
        interval_ms=100,
        soft_timeout=timedelta(seconds=MODEL.beat_s),
        hard_timeout=timedelta(seconds=MODEL.beat_s + 3),
        heartbeat_timeout=timedelta(seconds=MODEL.beat_s + 3),
    )


if __name__ == "__main__":
    main()
