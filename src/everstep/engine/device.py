"""The one place that knows which device a worker computes on: `cpu` or `cuda`.

Nothing here touches CUDA at import or for a CPU device: workers may be forked after this module is imported,
and a process that has initialised CUDA cannot be.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic

from everstep.errors import UserError

_NUMPY_MASK = 0xFFFFFFFF  # numpy's legacy generator takes 32 bits


def pick(name: str) -> torch.device:
    """`cpu` or `cuda`. A worker sees the GPU of its slot as the only one (`node.slot_devices`)."""
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.device_count() == 0:
        raise UserError(f'device {name!r} asks for a GPU and this machine shows none; use device = "cpu".')
    return torch.device("cuda", 0)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def seed(device: torch.device, value: int) -> None:
    """Seed every generator that code on `device` may draw from: torch's of the device and of the CPU, that of
    Python and that of numpy. No other: `torch.manual_seed` would wake CUDA.
    """
    random.seed(value)
    np.random.seed(value & _NUMPY_MASK)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.default_generators[device.index or 0].manual_seed(value)


def has_drawn(device: torch.device, seed: int) -> bool:
    """Has a random number been drawn since all were seeded with this? On a CPU: since ever."""
    if device.type == "cuda" and torch.cuda.default_generators[device.index or 0].get_offset() != 0:
        return True
    fresh, numpys = torch.Generator().manual_seed(seed), np.random.RandomState(seed & _NUMPY_MASK)
    return (
        not torch.equal(fresh.get_state(), torch.default_generator.get_state())
        or random.Random(seed).getstate() != random.getstate()
        or _numpy_state(numpys.get_state()) != _numpy_state(np.random.get_state())
    )


def _numpy_state(state: Any) -> tuple[bytes, int]:
    return state[1].tobytes(), state[2]


@contextlib.contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Whatever is seeded and drawn inside, the generators are afterwards as they were."""
    pythons, numpys, torchs = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        torch.default_generator.set_state(torchs)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)


def exact(device: torch.device) -> None:
    """From now on this process computes the same bits from the same inputs, whenever it is asked.

    A CPU does so anyway, given the same number of threads. A GPU sums some gradients in the order in which
    its blocks finish, those of attention above all; with exact kernels a step takes about a tenth longer. An
    operation that has none raises. To be called before CUDA is first used.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers asks; torch has no say in flash-attn
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory is an aid to debugging, and one more pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def without_exact_kernel(error: RuntimeError) -> str | None:
    """What torch says of an operation, in words of settings that a job has."""
    text = str(error)
    if "use_deterministic_algorithms" not in text:
        return None
    return (
        f"{text.split()[0]} has no deterministic kernel on this GPU, and exact sums need one; use another "
        'operation in the model, or set accumulate = "fp32", with which healed runs differ by rounding.'
    )


def synchronize(device: torch.device) -> None:
    """Return when the device has finished everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
