"""Attention that keeps its arguments from F to I, and is run again in I: the bits are the same as without.
A whole layer that is run again is `Stage._layer`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_ATTENTION = re.compile(r"(.*_)?(attn|attention)")  # names of modules


def attention_in(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that are called attention: their matrices are part of them."""
    named = {
        path: part for path, part in layer.named_modules() if _ATTENTION.fullmatch(path.rpartition(".")[2])
    }
    return [part for path, part in named.items() if not any(path.startswith(f"{one}.") for one in named)]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionAgain:
    """The forward of a module that keeps its arguments, and is run again in the backward."""

    forward: Callable[..., Any]
    keep: Callable[..., None]  # is told what is kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        self.keep(args, kwargs)
        # Its draws are in the middle of the layer's, so they begin where the generators are.
        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
