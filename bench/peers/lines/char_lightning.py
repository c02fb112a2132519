import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from shared import MICROBATCHES, OUT, ROWS, STEPS, WORLD, Chars, char_layers, char_loss, sample, whole
from torch.utils.data import DataLoader


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = whole(char_layers())

    def training_step(self, batch, batch_idx):
        loss = char_loss(self.inner(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", char_loss(self.inner(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    model = Lit()
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=MICROBATCHES,
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp",
        logger=CSVLogger(OUT),
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(OUT / "checkpoints", every_n_train_steps=10, save_last=True)],
        enable_progress_bar=False,
    )
    val = DataLoader(Chars("val"), batch_size=ROWS)
    train = DataLoader(Chars("train"), batch_size=ROWS, shuffle=True)
    trainer.fit(model, train, val, ckpt_path="last")
    scores = trainer.validate(model, val, verbose=False)
    if trainer.is_global_zero:
        print("validation", scores[0]["val_loss"])
        print(sample(model.inner.eval()))
