import torch
from shared import MICROBATCHES, OUT, ROWS, STEPS, WORLD, Chars, char_layers, char_loss, sample, whole

import everstep

result = everstep.train(
    model=char_layers(),
    loss=char_loss,
    data=everstep.rows(Chars("train"), rows=ROWS),
    eval_data=everstep.rows(Chars("val"), rows=ROWS, shuffle=False),
    optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
    replicas=WORLD,
    microbatches=MICROBATCHES,
    steps=STEPS,
    checkpoint={"folder": str(OUT / "checkpoints"), "interval": 10},
    callbacks=[everstep.CsvLog(OUT / "log.csv")],
)
print("validation", result.evaluations[STEPS]["loss"])
model = whole(char_layers())
model.load_state_dict(everstep.load(OUT / "checkpoints"))
print(sample(model.eval()))
