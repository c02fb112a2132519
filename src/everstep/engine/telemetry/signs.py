"""What a worker shows of itself while it works, and the faults that are planted in it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from everstep.core.worker.control import WorkerControl
from everstep.engine.telemetry.beacon import Beacon
from everstep.engine.telemetry.faults import PlantedFault


class WorkerSigns:
    """The beacon's only writer. `shard`: only faults of this shard are planted here."""

    def __init__(
        self,
        control: WorkerControl,
        beacon: Beacon | None,
        clock_ns: Callable[[], int],
        faults: Sequence[PlantedFault],
        shard: int = 0,
    ) -> None:
        self.control, self.beacon, self._clock_ns = control, beacon, clock_ns
        self.shard = shard
        self._op = (0, "")  # what it is in, for faults inside a collective
        self.plant(faults)

    def plant(self, faults: Sequence[PlantedFault]) -> None:
        """These faults and no others."""
        self.faults = [fault for fault in faults if fault.shard == self.shard]

    def begin(self, step: int, op: str) -> None:
        self._op = step, op

    def entering(self) -> None:
        """This shard enters a collective."""
        step, op = self._op
        self.maybe_die(step, op, "inside")

    def show(self, *, busy: bool, doing: str) -> None:
        now = self.control.state.now
        if self.control.shows(busy=busy, doing=doing) and self.beacon is not None:
            self.beacon.write(
                at_ns=self._clock_ns(),
                epoch=self.control.state.epoch,
                step=now.step,
                done=now.executed,
                num_ops=len(now.todo),
                busy=busy,
                doing=doing,
            )

    def maybe_die(self, step: int, op: str, when: str) -> None:
        for fault in self.faults:
            if fault.strikes(step, op, when):
                self.faults.remove(fault)
                if fault.how == "raise":
                    self.show(busy=True, doing=f"raises at {op}")
                    raise RuntimeError(f"planted fault at step {step} {op}")
                self.show(busy=True, doing=f"dies at {op}")
                os.kill(os.getpid(), signal.SIGKILL)

    def slower(self, step: int) -> list[float]:
        return [fault.factor for fault in self.faults if fault.slows(step)]

    def lag_s(self, step: int, stage: int) -> float:
        return sum(fault.lag_s(step, stage) for fault in self.faults)
