"""A job's model and data with masks, side losses and microbatches of different sizes, for real workers."""

from typing import Any

import torch
from torch import Tensor, nn

from everstep import Model, token_loss

VOCAB, WIDTH = 17, 16


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"hidden": self.tokens(batch["input_ids"]), "mask": batch["attention_mask"], "side": []}


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gate, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Dropout(0.1)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        h = value["hidden"] + self.dropout(self.mix(value["hidden"]).tanh()) * value["mask"].unsqueeze(-1)
        return value | {"hidden": h, "side": [*value["side"], self.gate(h).softmax(-1).square().mean()]}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, value: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return self.out(value["hidden"]), torch.stack(value["side"]).sum()


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    total, weight = token_loss(output[0], batch["labels"])
    return total + 0.1 * output[1] * weight, weight


def model() -> Model:
    return Model(layers=[First, *[Middle] * 3, Last], loss=loss)


class Data:
    def batch(self, step: int, microbatch: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(100 * step + microbatch)
        rows, length = 2 + microbatch % 3, 9
        ids = torch.randint(0, VOCAB, (rows, length), generator=draw)
        mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=draw)
        labels = torch.where(mask, (3 * ids + 1) % VOCAB, -100)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
