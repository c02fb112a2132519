"""Data of which one step waits until a file is gone, a minute at most."""

import time
from pathlib import Path
from typing import Any

from everstep.engine.datasets.data import Synthetic

MOST_S = 60.0


class Data:
    def __init__(self, step: int, file: str) -> None:
        self._data = Synthetic(vocab=256, sequence=16, rows=1)
        self._step, self._file = step, Path(file)

    def batch(self, step: int, microbatch: int) -> Any:
        until = time.monotonic() + MOST_S
        while step == self._step and self._file.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return self._data.batch(step, microbatch)
