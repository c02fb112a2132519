"""Parts of a layer that torch.compile may fuse: what lies between the Linears.

The Linears themselves stay as they are, for their weight gradients are queued and run as ops of their own
(`linear`). Everything between them is pointwise or a small reduction; compiled, it reads and writes memory
once. Marked functions are called as they are until `enable` is called, once per process, before training:

    @region
    def gated(gate, up):
        return silu(gate) * up

A compiled region rounds otherwise than an eager one, always in the same way: a job's bits do not depend on
who runs it, as long as all its workers compile or none does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
_enabled = False


def enable() -> None:
    """From now on every region of this process is compiled when it is first called."""
    global _enabled
    _enabled = True


def are_enabled() -> bool:
    return _enabled


def region(function: Callable[..., _T]) -> Callable[..., _T]:
    """A function of tensors without side effects, to be fused where a job says `compile = true`."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def call(*args: Any) -> _T:
        return compiled()(*args) if _enabled else function(*args)

    return call
