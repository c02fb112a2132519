import torch
from shared import MICROBATCHES, OUT, ROWS, STEPS, WORLD, Lines, tiny_llama

import everstep

everstep.train(
    model=everstep.hf(tiny_llama()),
    data=everstep.rows(Lines(), rows=ROWS),
    replicas=WORLD,
    microbatches=MICROBATCHES,
    steps=STEPS,
    optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
    checkpoint={"folder": str(OUT / "checkpoints"), "interval": 10},
)
everstep.export(OUT / "checkpoints", OUT / "tuned")
