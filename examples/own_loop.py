"""Your own model with what a loop has around its steps: evaluation, metrics, EMA, a rate of your own, early
stop, callbacks, resume.

everstep run examples/own_loop.py
everstep run --kill stage=1,replica=0,step=30 examples/own_loop.py
everstep run examples/own_loop.py --gpu --steps 2000

It learns to read clocks: from the picture of a clock's hands, hour and minute. The same command again resumes
from the newest checkpoint; --fresh starts over.
"""

import argparse
import math
import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "everstep-own-loop")
parser.add_argument("--fresh", action="store_true", help="forget earlier checkpoints")
parser.add_argument("--stop-at", type=float, default=0.0, help="stop once so many hours are read right")
parser.add_argument("--gpu", action="store_true", help="a larger model, on CUDA")
options = parser.parse_args()
SIDE, WIDTH, DEPTH = (64, 1024, 8) if options.gpu else (16, 128, 3)
LOG = options.folder / "log.csv"


class Clocks(torch.utils.data.Dataset):
    """Every minute of twelve hours, drawn with a little noise."""

    def __init__(self, part):
        self.minutes = [minute for minute in range(720) if (minute % 7 == 0) == (part == "test")]

    def __len__(self):
        return len(self.minutes)

    def __getitem__(self, row):
        minute = self.minutes[row]
        picture = torch.zeros(SIDE, SIDE)
        for length, turn in ((0.25, minute / 720), (0.45, minute % 60 / 60)):
            along, angle = torch.linspace(0, length, SIDE), 2 * math.pi * turn
            x, y = 0.5 + math.sin(angle) * along, 0.5 - math.cos(angle) * along
            picture[(y * SIDE).long(), (x * SIDE).long()] = 1.0
        return (picture + 0.1 * torch.randn(SIDE, SIDE)).flatten(), torch.tensor([minute // 60, minute % 60])


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.outer, self.drop = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.outer(nn.functional.gelu(self.inner(self.norm(x)))))


def loss(output, time):
    hour, minute = output[:, :12], output[:, 12:]
    return nn.functional.cross_entropy(hour, time[:, 0]) + nn.functional.cross_entropy(minute, time[:, 1])


def hours_right(output, time):
    return (output[:, :12].argmax(1) == time[:, 0]).float().mean()


def rate(step):
    """Warm up over a tenth of the run, then fall along a half cosine. `step` counts from 1."""
    warm = max(1, options.steps // 10)
    return step / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / options.steps))


class Watch:
    """A callback: runs in the launcher, and hears of everything once, whatever fails."""

    def on_start(self, run):
        print(f"starts after step {run['resumed_from']} of {run['steps']}")

    def on_eval(self, step, values):
        print(f"step {step}: loss {values['loss']:.3f}, hours right {values['hours_right']:.0%}")
        if options.stop_at and values["hours_right"] >= options.stop_at:
            return f"{values['hours_right']:.0%} of the hours are read right"

    def on_incident(self, incident):
        print(f"worker {incident['worker']} {incident['what']} in step {incident['step']}, healed")

    def on_checkpoint(self, step, folder):
        print(f"saved step {step}")


layers = {
    "eye": lambda: nn.Linear(SIDE * SIDE, WIDTH),
    **{f"block{i}": Residual for i in range(DEPTH)},
    "answer": lambda: nn.Linear(WIDTH, 12 + 60),
}
if options.fresh and not everstep.in_worker():  # a worker that starts again must not delete what is saved
    shutil.rmtree(options.folder, ignore_errors=True)
options.folder.mkdir(parents=True, exist_ok=True)
result = everstep.train(
    model=layers,
    loss=loss,
    data=everstep.rows(Clocks("train"), rows=16),
    eval_data=everstep.rows(Clocks("test"), rows=16, shuffle=False),
    eval_every=max(1, options.steps // 6),
    metrics={"hours_right": hours_right},
    optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3, weight_decay=0.01),
    schedule=rate,
    clip=1.0,
    ema=0.98,
    callbacks=[Watch(), everstep.CsvLog(LOG), everstep.EarlyStop(metric="loss", patience=4)],
    checkpoint={"folder": str(options.folder / "checkpoints"), "interval": max(1, options.steps // 3)},
    replicas=2,
    stages=2,
    microbatches=2,
    steps=options.steps,
    **({"device": "cuda", "precision": "bf16"} if options.gpu else {}),
)
print(f"{len(result.losses)} losses, {len(result.incidents)} incidents healed, log in {LOG}")


def read(weights):
    """Hours read right with these weights, in plain PyTorch."""
    model = nn.ModuleDict({name: build() for name, build in layers.items()}).eval()
    model.load_state_dict(weights)
    torch.manual_seed(0)
    right = []
    for picture, time in torch.utils.data.DataLoader(Clocks("test"), batch_size=64):
        with torch.no_grad():
            for layer in model.values():
                picture = layer(picture)
        right.append(hours_right(picture, time) * len(time))
    return float(sum(right)) / len(Clocks("test"))


checkpoints = options.folder / "checkpoints"
trained, averaged = read(everstep.load(checkpoints)), read(everstep.load(checkpoints, ema=True))
print(f"hours right: trained weights {trained:.0%}, their average (EMA) {averaged:.0%}")
