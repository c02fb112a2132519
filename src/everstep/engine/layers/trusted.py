"""Fast kernels that are used only where they have given what their reference gives.

A kernel is tried on a sample, once for each process and device. Memory that is lacking at that moment says
nothing of the kernel and is raised. Anything else that goes wrong is tried once more, then the reference is
used. Where kernel and reference give the same bits, that is all. One that rounds in its own way makes other
bits, so the workers of a stage must have found the same: such kernels are tried before a worker says that it
has started, and `rounds_without` is what it says of them (`WorkerStarted.without`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from everstep.log import warn

ATTEMPTS = 2


class _Verdict(NamedTuple):
    is_good: bool
    rounds: bool


_found: dict[tuple[str, str, object], _Verdict] = {}  # a process computes on one device of a type


def trusted(
    kernel: str, device: torch.device, agrees: Callable[[], bool], *, rounds: bool, of: object = None
) -> bool:
    """Does this kernel give what its reference gives? `rounds`: in its own way, so its bits are others. `of`:
    what else the answer depends on.
    """
    key = kernel, device.type, of
    if key not in _found:
        _found[key] = _Verdict(_tried(kernel, agrees), rounds)
    return _found[key].is_good


def rounds_without(device: torch.device) -> tuple[str, ...]:
    """The kernels with other bits than their references, for which this process uses those on this device."""
    bad = {
        kernel
        for (kernel, on, _), verdict in _found.items()
        if on == device.type and verdict.rounds and not verdict.is_good
    }
    return tuple(sorted(bad))


def _tried(kernel: str, agrees: Callable[[], bool]) -> bool:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            is_good = agrees()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if attempt == ATTEMPTS:
                warn(f"computes without {kernel}: {error}")
        else:
            if not is_good:
                warn(f"computes without {kernel}: on this device they give other results than torch's own")
            return is_good
    return False
