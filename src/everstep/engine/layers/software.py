"""What the bits of a worker depend on besides its job. Workers say it to each other (`transport`)."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from everstep.engine.layers import attention_library

_FLAGS = ("avx512_vnni", "avx512_bf16", "amx_bf16")  # libraries choose other kernels with these


def computes_with(device: torch.device, *, has_kernels: bool = False) -> str:
    """`has_kernels`: for strict sums, on a GPU; where Triton fails, attention is computed otherwise, too."""
    if device.type != "cuda":
        return (
            f"torch {torch.__version__} on {platform.machine()}, {_instructions()}, "
            f"{torch.get_num_threads()} threads"
        )
    front_end = attention_library.version()
    attention = f"cuDNN's front end {front_end}" if front_end else "no cuDNN front end"
    kernels = "" if has_kernels else ", no kernels for strict sums"
    return f"torch {torch.__version__} on {torch.cuda.get_device_name(device)}, {attention}{kernels}"


def _instructions(info: Path = Path("/proc/cpuinfo")) -> str:
    """The maker of the CPU, and which of its instructions are used."""
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    parts = (line.partition(":") for line in reversed(lines))
    facts = {key.strip(): value.strip() for key, _, value in parts}
    there = facts.get("flags", "").split()
    found = [torch.backends.cpu.get_cpu_capability(), *(flag for flag in _FLAGS if flag in there)]
    return " ".join([facts.get("vendor_id", ""), *found]).strip()
