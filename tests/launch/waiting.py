"""Data of which one step waits until a file is gone."""

import time
from pathlib import Path
from typing import Any

from everstep.engine.datasets.data import Synthetic


class Data:
    def __init__(self, step: int, file: str) -> None:
        self._data = Synthetic(vocab=256, sequence=16, rows=1)
        self._step, self._file = step, Path(file)

    def batch(self, step: int, microbatch: int) -> Any:
        while step == self._step and self._file.exists():
            time.sleep(0.01)
        return self._data.batch(step, microbatch)
