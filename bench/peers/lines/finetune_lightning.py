import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from shared import MICROBATCHES, OUT, ROWS, STEPS, WORLD, Lines, tiny_llama
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


class Lit(lightning.LightningModule):
    """A mean per microbatch: microbatches with few tokens count as much as those with many."""

    def __init__(self):
        super().__init__()
        self.inner = AutoModelForCausalLM.from_pretrained(tiny_llama())

    def training_step(self, batch, batch_idx):
        return self.inner(**batch, use_cache=False).loss

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
        logger=False,
        callbacks=[ModelCheckpoint(OUT / "checkpoints", every_n_train_steps=10, save_last=True)],
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(Lines(), batch_size=ROWS, shuffle=True), ckpt_path="last")
    if trainer.is_global_zero:
        model.inner.save_pretrained(OUT / "tuned")
