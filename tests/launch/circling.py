"""Data that makes lanes stand still once: as if every worker's device waited for another's."""

import os
import threading
from pathlib import Path
from typing import Any

from everstep.engine.datasets.data import Synthetic
from harness.transports import PipeWire, use_pipe


class Data:
    """From the first microbatch of `step` on, who asks how far a lane is waits until one of this worker that
    was open by then is interrupted. What that carried is over, and not whole. One file in `folder` for each.
    """

    def __init__(self, step: int, folder: str) -> None:
        use_pipe()
        self._data = Synthetic(vocab=256, sequence=32, rows=2)
        self._step, self._folder = step, Path(folder)
        self._goes_on = threading.Event()
        self._interrupted: set[PipeWire] = set()

    def batch(self, step: int, microbatch: int) -> Any:
        if step == self._step:
            self._step = 0
            self._stand_still()
        return self._data.batch(step, microbatch)

    def _stand_still(self) -> None:
        is_done, shut = PipeWire.is_done, PipeWire.interrupt

        def waits(wire: PipeWire) -> bool:
            self._goes_on.wait()
            return wire in self._interrupted or is_done(wire)

        def interrupt(wire: PipeWire) -> None:
            shut(wire)
            self._interrupted.add(wire)
            (self._folder / f"{os.getpid()}-{id(wire)}").touch()
            self._goes_on.set()

        PipeWire.is_done, PipeWire.interrupt = waits, interrupt  # type: ignore[method-assign]
