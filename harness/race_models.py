"""The models that a race can be run with: the one place where their sizes, batches and intervals are given.

Every racer reads `MODEL`; `race.py --model` chooses it, and says so in `RACE_MODEL`. No torch here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

CHOICE = "RACE_MODEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    width: int
    depth: int
    heads: int
    rows: int  # of a microbatch
    checkpoint_every: int  # steps
    beat_s: float  # without a sign of life from a worker: it hangs, to systems that are told this time
    vocabulary: int = 256
    length: int = 64
    microbatches: int = 8  # of a step, whatever the number of workers

    @property
    def parameters(self) -> int:
        embeddings = (self.vocabulary + self.length) * self.width
        block = 12 * self.width**2 + 13 * self.width
        return embeddings + self.depth * block + 2 * self.width + self.width * self.vocabulary

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.microbatches * self.rows * self.length


# `beat_s`: a slow worker's step takes three times as long, 4 s of the large one, and is no hang.
MODELS = {
    model.name: model
    for model in (
        Model(name="small", width=128, depth=4, heads=4, rows=8, checkpoint_every=10, beat_s=5),
        Model(name="large", width=384, depth=5, heads=6, rows=6, checkpoint_every=5, beat_s=8),
    )
}


def chosen() -> Model:
    return MODELS[os.environ.get(CHOICE, "small")]


MODEL = chosen()
