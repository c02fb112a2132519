"""First weights that cost next to nothing: what is measured does not depend on them."""

from __future__ import annotations

import torch


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
