"""What torch.compile may fuse: a whole layer around its Linears, or the parts of it that say so.

Linears stay as they are, for their weight gradients are queued and run as ops of their own (`linear`).
Everything between them is pointwise or a small reduction; compiled, it reads and writes memory once. The
layers of our own models mark functions, and nothing else of them is compiled; other layers are compiled
whole:

    @region
    def gated(gate, up):
        return silu(gate) * up

All are called as they are until `enable` is called, once per process, before training. What is compiled
rounds otherwise than what is not, always in the same way: a job's bits do not depend on who runs it, as long
as all its workers compile or none does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from everstep.errors import UserError

_T = TypeVar("_T")
_backend: str | None = None  # None: nothing is compiled
SHAPES = 64  # of batches
# What a Linear is given in I is kept until W: it must not be written to by what comes after it.
_KEEPING = {"allow_buffer_reuse": False, "inplace_buffers": False}


def enable(backend: str = "inductor") -> None:
    """From now on every region of this process is compiled when it is first called."""
    global _backend
    import torch._dynamo as dynamo

    _backend = backend
    # What was compiled too often would be run as it is from then on: with other bits, on the worker that has
    # met more shapes.
    dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit = SHAPES
    dynamo.config.fail_on_recompile_limit_hit = True


def are_enabled() -> bool:
    return _backend is not None


def compiled(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function, or the forward of a layer, as the compiler makes it; its failures as sentences."""
    assert _backend is not None
    from torch._dynamo import exc

    options = _KEEPING if _backend == "inductor" else None
    fused = torch.compile(function, dynamic=False, backend=_backend, options=options)  # type: ignore[arg-type]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fused(*args, **kwargs)
        except exc.FailOnRecompileLimitHit:
            raise UserError(
                f"compile = true has compiled {name} for {SHAPES} kinds of batches, and here is another one; "
                "pad rows to a few lengths, or set compile = false."
            ) from None
        except exc.TorchDynamoException as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise UserError(
                f"compile = true: {name} cannot be compiled ({type(error).__name__}: {first}); "
                "set compile = false."
            ) from error

    return call


def region(function: Callable[..., _T]) -> Callable[..., _T]:
    """A function of tensors without side effects, to be fused where a job says `compile = true`."""

    @functools.cache
    def made() -> Callable[..., Any]:
        return compiled(function.__name__, function)

    @functools.wraps(function)
    def call(*args: Any) -> _T:
        return function(*args) if _backend is None else made()(*args)

    return call
