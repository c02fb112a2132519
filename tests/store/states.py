"""Small states to save, and how to compare what comes back."""

import json
from pathlib import Path

import torch
from torch import Tensor

from everstep.store.folder import commit, write_part

REAL = Path(__file__).parent / "data"  # written by DeepSpeed 0.19.8 and megatron-core 0.16.1


def tensors(step: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(step)
    return [
        {
            "model/embed.weight": torch.randn(5, 3, generator=draw),
            "optimizer/embed.weight/exp_avg": torch.randn(5, 3, generator=draw),
            "optimizer/embed.weight/step": torch.tensor(float(step)),
        },
        {
            "model/head.weight": torch.randn(3, 5, generator=draw).to(torch.bfloat16),
            "model/empty": torch.zeros(0, 4),
            "count": torch.tensor([step]),
            "flag": torch.tensor(True),
            "model/turned": torch.randn(4, 6, generator=draw).t(),
        },
    ]


def save(root: Path, step: int, keep: int = 3) -> Path:
    parts = [write_part(root, step, f"part-{i}", part) for i, part in enumerate(tensors(step))]
    groups = [{"params": ["embed.weight"], "lr": 0.1}, {"params": ["head.weight"], "lr": 0.01}]
    commit(root, step, json.loads(json.dumps(parts)), {"job": {"seed": 1}, "rows": step}, keep, groups=groups)
    return root / f"step-{step:08d}"


def all_of(step: int) -> dict[str, Tensor]:
    return {name: tensor for part in tensors(step) for name, tensor in part.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)
