"""Data that takes a while to load, so that a small model's steps are as long as a large one's."""

from __future__ import annotations

import time

from torch import Tensor

from everstep.engine.datasets.data import Synthetic
from everstep.job.presets import shape


class SlowSynthetic:
    """The synthetic data of a job with this preset, each batch after a rest."""

    in_a_thread = True

    def __init__(self, preset: str, rows: int, rest_s: float, sequence: int | None = None) -> None:
        form = shape(preset)
        self._data = Synthetic(vocab=form.vocab, sequence=sequence or form.context, rows=rows)
        self._rest_s = rest_s

    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._rest_s)
        return self._data.batch(step, microbatch)
