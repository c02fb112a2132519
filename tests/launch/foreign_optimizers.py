"""Optimizers from PyPI as a job's `optimizer.build`: each is imported only when it is asked for.

A number beside a name: with how many stages it is tried at most; more are refused, because it computes a step
from all parameters together.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from everstep.engine.state.optimizer_state import Named


def plain(named: Named) -> list[Any]:
    return [p for _, p in named]


def matrices(named: Named, **of_matrices: Any) -> list[dict[str, Any]]:
    """Matrices, and the rest in a group of its own."""
    groups = [
        {"params": [p for _, p in named if p.ndim == 2], **of_matrices},
        {"params": [p for _, p in named if p.ndim != 2]},
    ]
    return [group for group in groups if group["params"]]


def _of(module: str, name: str, /, groups: Callable[[Named], Any] = plain, **options: Any) -> Any:
    def build(named: Named) -> Any:
        return getattr(importlib.import_module(module), name)(groups(named), **options)

    return build


def muon(named: Named) -> Any:
    groups = matrices(named, use_muon=True)
    return importlib.import_module("pytorch_optimizer").Muon(
        [{"use_muon": False, **group} for group in groups], lr=1e-3
    )


def galore(named: Named) -> Any:
    projected = {"rank": 4, "update_proj_gap": 2, "scale": 1.0, "proj_type": "std"}
    return importlib.import_module("galore_torch").GaLoreAdamW(matrices(named, **projected), lr=1e-3)


def lookahead(named: Named) -> Any:
    import torch

    return importlib.import_module("pytorch_optimizer").Lookahead(torch.optim.AdamW(plain(named), lr=1e-3))


prodigy = _of("prodigyopt", "Prodigy", lr=1.0)
dadaptation = _of("dadaptation", "DAdaptAdam", lr=1.0)
schedulefree = _of("schedulefree", "AdamWScheduleFree", lr=1e-3, warmup_steps=2)
lion = _of("lion_pytorch", "Lion", lr=1e-4)
adafactor = _of("transformers", "Adafactor", lr=1e-3, relative_step=False, scale_parameter=False)
adafactor_torch = _of("torch.optim", "Adafactor", lr=1e-2)
soap = _of("pytorch_optimizer", "SOAP", lr=1e-3, precondition_frequency=2)
shampoo = _of("pytorch_optimizer", "Shampoo", lr=1e-3, preconditioning_compute_steps=2)
scalable_shampoo = _of("pytorch_optimizer", "ScalableShampoo", lr=1e-3, block_size=32)
lamb = _of("pytorch_optimizer", "Lamb", lr=1e-3)
eight_bit = _of("bitsandbytes.optim", "AdamW8bit", lr=1e-3, min_8bit_size=256)
eight_bit_ao = _of("torchao.optim", "AdamW8bit", lr=1e-3, block_size=64)

# name of the function here -> the package
PACKAGES = {
    "prodigy": "prodigyopt",
    "schedulefree": "schedulefree",
    "lion": "lion_pytorch",
    "adafactor": "transformers",
    "adafactor_torch": "torch",
    "soap": "pytorch_optimizer",
    "muon": "pytorch_optimizer",
    "eight_bit": "bitsandbytes",
    "eight_bit_ao": "torchao",
    "dadaptation": "dadaptation",
    "shampoo": "pytorch_optimizer",
    "scalable_shampoo": "pytorch_optimizer",
    "lamb": "pytorch_optimizer",
    "galore": "galore_torch",
    "lookahead": "pytorch_optimizer",
}
