"""What the bits of a worker depend on besides its job. Workers say it to each other (`transport`)."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch

_FLAGS = ("avx512_vnni", "avx512_bf16", "amx_bf16")  # libraries choose other kernels with these


def computes_with(device: torch.device, *, without: Sequence[str] = ()) -> str:
    """`without`: the fast kernels that are not trusted there (`trusted`)."""
    if device.type != "cuda":
        return (
            f"torch {torch.__version__} on {platform.machine()}, {_instructions()}, "
            f"{torch.get_num_threads()} threads"
        )
    lacking = f", without {' and '.join(without)}" if without else ""
    return f"torch {torch.__version__} on {torch.cuda.get_device_name(device)}{lacking}"


def _instructions(info: Path = Path("/proc/cpuinfo")) -> str:
    """The maker of the CPU, and which of its instructions are used."""
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    parts = (line.partition(":") for line in reversed(lines))
    facts = {key.strip(): value.strip() for key, _, value in parts}
    there = facts.get("flags", "").split()
    found = [torch.backends.cpu.get_cpu_capability(), *(flag for flag in _FLAGS if flag in there)]
    return " ".join([facts.get("vendor_id", ""), *found]).strip()
