"""Fast kernels that are used only where they have given what their reference gives.

A kernel is tried on a sample, once for each process and device. Memory that is lacking at that moment says
nothing of the kernel and is raised. Anything else that goes wrong is tried once more, then the reference is
used. A kernel that rounds in its own way makes other bits than its reference, so the workers of a stage must
have found the same: such kernels are tried before a worker says that it has started, and `not_trusted` is
what it says of them (`WorkerStarted.without`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from everstep.log import warn

ATTEMPTS = 2
_found: dict[tuple[str, str, object], bool] = {}  # a process computes on one device of a type


def trusted(kernel: str, device: torch.device, agrees: Callable[[], bool], *, of: object = None) -> bool:
    """Does this kernel give what its reference gives? `of`: what else the answer depends on."""
    key = kernel, device.type, of
    if key not in _found:
        _found[key] = _tried(kernel, agrees)
    return _found[key]


def not_trusted(device: torch.device) -> tuple[str, ...]:
    """The kernels for which this process uses their references on this device."""
    bad = {kernel for (kernel, on, _), is_good in _found.items() if on == device.type and not is_good}
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
