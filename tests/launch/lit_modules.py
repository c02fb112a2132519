"""LightningModules of the tests. In a file of their own: what Lightning imports takes ten seconds of a core,
and only the process that runs those tests needs it.
"""

from typing import Any

import lightning
import torch
from torch import nn


class Small(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.first(batch)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Small):
    def on_after_backward(self) -> None:
        pass


class Silent(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Asking(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.global_step


class Plateau(Small):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]


class Several(Small):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.last)]


class Normed(Small):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(norm() for _ in range(2))


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


class Cycling(Small):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1, betas=(0.8, 0.9))
        one = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8, **self.options)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": one, "interval": "step"}}


class Scored(Small):
    """Logs a metric and no loss, as Lightning allows."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_acc", (batch[0] > 0).float().mean())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)
