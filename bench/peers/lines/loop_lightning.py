import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from shared import MICROBATCHES, OUT, ROWS, STEPS, WORLD, Points, near, point_layers, rate, whole
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = whole(point_layers())

    def training_step(self, batch, batch_idx):
        return mse_loss(self.inner(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        output = self.inner(batch[0])
        values = {"loss": mse_loss(output, batch[1]), "near": near(output, batch[1])}
        self.log_dict(values, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate(done + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Told(lightning.Callback):
    def on_validation_end(self, trainer, module):
        values = trainer.callback_metrics
        if trainer.is_global_zero and "loss" in values:
            print(trainer.global_step, float(values["loss"]), float(values["near"]))


if __name__ == "__main__":
    model = Lit()
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=MICROBATCHES,
        gradient_clip_val=1.0,
        val_check_interval=10 * MICROBATCHES,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp",
        logger=False,
        callbacks=[
            Told(),
            EMAWeightAveraging(decay=0.99),
            EarlyStopping("loss", patience=3),
            ModelCheckpoint(OUT / "checkpoints", every_n_train_steps=10, save_last=True),
        ],
        enable_progress_bar=False,
    )
    val = DataLoader(Points("val"), batch_size=ROWS)
    trainer.fit(model, DataLoader(Points("train"), batch_size=ROWS, shuffle=True), val, ckpt_path="last")
    if trainer.is_global_zero:
        print(len(model.inner.state_dict()), "averaged tensors")
