"""First weights that cost next to nothing: what is measured does not depend on them."""

from __future__ import annotations

from typing import Any

import torch

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.layers.model import Model
from everstep.job.presets import MODELS


def quick_weights() -> None:
    """For this process. Drawing a large model takes longer than some steps of it."""
    table = torch.randn((1 << 20) + 7)  # odd: no two rows of a tensor are alike

    def normal(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: object) -> torch.Tensor:
        with torch.no_grad():
            if tensor.is_meta:
                return tensor
            flat = tensor.reshape(-1)
            for start in range(0, flat.numel(), table.numel()):
                piece = flat[start : start + table.numel()]
                torch.mul(table[: piece.numel()], std, out=piece)
        return tensor

    torch.nn.init.normal_ = normal
    torch.nn.init.kaiming_uniform_ = lambda tensor, *_, **__: tensor  # type: ignore[assignment]


def quick_gpt(name: str, **changes: Any) -> Model:
    """For a job: `model.build`."""
    quick_weights()
    return gpt(name, **changes)


def quick_tokens(vocab: int, lines: int, length: int) -> Synthetic:
    """For a job: `data.build`."""
    return Synthetic(vocab=vocab, rows=lines, sequence=length)


def quick_job(preset: str, options: dict[str, Any], rows: int, sequence: int) -> dict[str, Any]:
    """The tables `model` and `data` of a job."""
    vocab = options.get("vocab", MODELS[preset].shape.vocab)
    return {
        "model": {"build": "harness.quick_weights:quick_gpt", "name": preset, **options},
        "data": {
            "build": "harness.quick_weights:quick_tokens",
            "vocab": vocab,
            "lines": rows,
            "length": sequence,
        },
    }
