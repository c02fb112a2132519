"""A LightningModule, as it is, on workers that heal:  everstep run examples/lightning_gpt.py

everstep run --kill stage=0,replica=1,step=7 examples/lightning_gpt.py
everstep run examples/lightning_gpt.py --gpu --steps 1000
"""

import argparse
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--checkpoint", type=Path, help="folder to save to, and to resume from")
parser.add_argument("--gpu", action="store_true", help="a larger model, on CUDA")
options = parser.parse_args()
WIDTH, DEPTH, HEADS, LENGTH = (768, 12, 12, 512) if options.gpu else (64, 4, 4, 64)
TEXT = b"".join(p.read_bytes() for p in sorted((Path(__file__).parent.parent / "docs").glob("*.md")))


class Text(lightning.LightningDataModule):
    def setup(self, stage):
        whole = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
        rows = whole[: len(whole) // LENGTH * LENGTH].view(-1, LENGTH).long()
        validate = torch.arange(len(rows)) % 10 == 0
        self.train_rows, self.val_rows = rows[~validate], rows[validate]

    def train_dataloader(self):
        return DataLoader(self.train_rows, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_rows, batch_size=8)


class Gpt(lightning.LightningModule):
    def __init__(self, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.letter, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = {"batch_first": True, "norm_first": True, "dropout": 0.1, "activation": "gelu"}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **block) for _ in range(DEPTH)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.letter.weight
        nn.init.normal_(self.letter.weight, std=0.02)

    def forward(self, ids):
        x = self.letter(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(self.norm(x))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        logits, targets = self(batch[:, :-1]), batch[:, 1:]
        self.log("val_loss", nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        self.log("val_accuracy", (logits.argmax(-1) == targets).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=steps, cycle_momentum=False
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


torch.manual_seed(1)  # the weights that training starts from
model = Gpt()
result = everstep.fit(
    model,
    datamodule=Text(),
    replicas=2,
    microbatches=2,
    steps=options.steps,
    clip=1.0,
    eval_batches=8,
    checkpoint=options.checkpoint,
    **({"device": "cuda", "precision": "bf16"} if options.gpu else {}),
)
scores, losses = result.evaluations[options.steps], result.losses
print(f"loss {losses[1]:.3f} -> {losses[options.steps]:.3f}; {len(result.incidents)} incidents healed")
print(f"validation loss {scores['val_loss']:.4f}, accuracy {scores['val_accuracy']:.3f}")
model.eval()
written = torch.tensor([list(b"Everstep ")])
for _ in range(60):
    with torch.no_grad():
        last = model(written[:, -LENGTH:])[0, -1]
    written = torch.cat([written, last.argmax().view(1, 1)], 1)
print(bytes(written[0].tolist()).decode(errors="replace"))
