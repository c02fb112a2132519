"""What holds for every process that we fork."""

from __future__ import annotations

import os
import signal
from typing import Any

# For a process that others are forked from: what it loads may ask torch whether there is a GPU. Asked by CUDA
# instead of NVML, those that are forked could not use one.
ASKS_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def leave_to_owner() -> None:
    """This process does not end by SIGTERM: a scheduler (`scancel`, systemd) sends it to all processes of a
    job. The agent or launcher hears it too, lets workers make their state safe and ends them. What this
    process forks, such as workers of a DataLoader, ends by it as always.
    """
    here = os.getpid()

    def heard(number: int, frame: Any) -> None:
        if os.getpid() != here:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, heard)
