"""Faults of a GPU, made on purpose: for tests of what happens when a kernel goes wrong or never ends."""

from __future__ import annotations

import ctypes

import torch

from everstep.errors import UserError
from everstep.net.arena import CudaMemory, cuda_runtime

KINDS = ("illegal", "oom", "spin")
_SPIN_CYCLES = 2_000_000_000 * 600  # about ten minutes
_BLOCK = 64 << 20


def strike(kind: str, device: torch.device) -> None:
    """`illegal`: a kernel writes to memory that was freed, which ends the CUDA context. `oom`: more memory
    than there is. `spin`: a kernel that does not end.
    """
    if device.type != "cuda":
        raise UserError(f'--kill with how={kind} needs a GPU; set device = "cuda".')
    if kind == "oom":
        torch.empty(1 << 48, dtype=torch.uint8, device=device)
    elif kind == "spin":
        torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
    else:
        memory = CudaMemory(device)
        address, _ = memory.allocate(_BLOCK)
        there = memory.view(address, _BLOCK, None)
        cuda_runtime().cudaFree(ctypes.c_void_p(address))
        there.fill_(1)
