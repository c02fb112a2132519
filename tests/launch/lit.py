"""A LightningModule of plain parts, trained by everstep.fit or by Lightning's own Trainer: losses as JSON.

python lit.py OUT              by two replicas
python lit.py OUT --plain      by lightning.Trainer in one process, the same batches, in the same order
"""

import argparse
import json
import os
import sys
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everstep
from everstep.engine.prepare.context import current_worker

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--plain", action="store_true")
parser.add_argument("--dropout", type=float, default=0.0)
options = parser.parse_args()
STEPS, REPLICAS, MICROBATCHES = 6, 2, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(options.dropout)

    def forward(self, x):
        return x + self.drop(nn.functional.gelu(self.linear(x)))


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))
        nn.init.normal_(self.embed.weight, std=0.3)

    def forward(self, ids):
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        ids, targets = batch
        loss = nn.functional.cross_entropy(self(ids).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        ids, targets = batch
        logits = self(ids)
        self.log("val_loss", nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        self.log("hits", (logits.argmax(-1) == targets).float().mean())

    def configure_optimizers(self):
        decayed = [p for _, p in self.named_parameters() if p.ndim > 1]
        others = [p for _, p in self.named_parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
        )
        steps = self.trainer.estimated_stepping_batches
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


draw = torch.Generator().manual_seed(3)
ids = torch.randint(0, 32, (4 * 4 * STEPS, 9), generator=draw)
loader = DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=4)
torch.manual_seed(os.getpid() if current_worker() else 1)  # workers start from the launcher's values
model = Lit()
if options.plain:
    losses = []

    class Keep(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            losses.append(float(outputs["loss"]) * REPLICAS * MICROBATCHES)

    trainer = lightning.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=REPLICAS * MICROBATCHES,
        gradient_clip_val=0.2,
        accelerator="cpu",
        callbacks=[Keep()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    scores = trainer.validate(model, loader, verbose=False)[0]
    each = REPLICAS * MICROBATCHES
    found = [sum(losses[i * each : (i + 1) * each]) / each for i in range(STEPS)]
    document = {"losses": found, "scores": scores}
else:
    result = everstep.fit(
        model,
        loader,
        loader,
        replicas=REPLICAS,
        microbatches=MICROBATCHES,
        steps=STEPS,
        clip=0.2,
        page=False,
        eval_batches=24,
    )
    document = {
        "losses": list(result.losses.values()),
        "scores": result.evaluations[STEPS],
        "incidents": len(result.incidents),
    }
torch.save(model.state_dict(), options.out)
print(json.dumps(document))
sys.stdout.flush()
