import torch
from shared import MICROBATCHES, OUT, ROWS, STEPS, WORLD, Points, near, point_layers, rate
from torch.nn.functional import mse_loss

import everstep


class Told:
    def on_eval(self, step, values):
        print(step, values["loss"], values["near"])


everstep.train(
    model=point_layers(),
    loss=mse_loss,
    data=everstep.rows(Points("train"), rows=ROWS),
    eval_data=everstep.rows(Points("val"), rows=ROWS, shuffle=False),
    eval_every=10,
    metrics={"near": near},
    optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    schedule=rate,
    clip=1.0,
    ema=0.99,
    replicas=WORLD,
    microbatches=MICROBATCHES,
    steps=STEPS,
    checkpoint={"folder": str(OUT / "checkpoints"), "interval": 10},
    callbacks=[Told(), everstep.EarlyStop(patience=3)],
)
print(len(everstep.load(OUT / "checkpoints", ema=True)), "averaged tensors")
