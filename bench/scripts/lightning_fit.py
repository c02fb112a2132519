"""Lightning's Trainer with its ModelCheckpoint."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from trial import SAVE_EVERY, STEPS, Trial


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 400_000

    def __getitem__(self, index: int) -> Any:
        return torch.randn(64, generator=torch.Generator().manual_seed(index))


class Watch(Callback):
    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._trial.step(trainer.global_step)


def main() -> None:
    trial = Trial()
    folder = trial.folder / "lightning"
    torch.manual_seed(0)
    keeps = ModelCheckpoint(dirpath=folder, every_n_train_steps=SAVE_EVERY, save_last=True, save_top_k=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=STEPS,
        callbacks=[keeps, Watch(trial)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.utils.data.DataLoader(Rows(), batch_size=4)
    last = folder / "last.ckpt"
    trainer.fit(Net(), rows, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main()
