"""What the bits of a worker depend on besides its job. Workers say it to each other (`transport`)."""

from __future__ import annotations

import platform

import torch

from everstep.engine.layers import attention_library


def computes_with(device: torch.device) -> str:
    if device.type != "cuda":
        return f"torch {torch.__version__} on {platform.machine()}"
    front_end = attention_library.version()
    attention = f"cuDNN's front end {front_end}" if front_end else "no cuDNN front end"
    return f"torch {torch.__version__} on {torch.cuda.get_device_name(device)}, {attention}"
