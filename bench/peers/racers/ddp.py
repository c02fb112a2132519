"""For launchers that restart a script: torchrun, and NVRx's ft_launcher (`--beat`)."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch.distributed as dist
from loop import MEET_S, Diary, Disk, Training, run


def main() -> None:
    beat = lambda: None  # noqa: E731
    if "--beat" in sys.argv:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        client = RankMonitorClient()
        client.init_workload_monitoring()
        beat = client.send_heartbeat
    diary = Diary()
    dist.init_process_group("gloo", timeout=timedelta(seconds=MEET_S))
    run(diary, Training(), Disk(os.environ["RACE_FOLDER"]), dist.get_rank(), dist.get_world_size(), beat)


if __name__ == "__main__":
    main()
