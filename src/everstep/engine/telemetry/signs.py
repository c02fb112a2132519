"""What a worker shows of itself while it works, and the faults that are planted in it."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Sequence

import torch

from everstep.core.worker.control import WorkerControl
from everstep.engine.telemetry.beacon import Beacon
from everstep.engine.telemetry.faults import OF_GPU, PlantedFault
from everstep.errors import UserError
from everstep.net.arena import CudaMemory, cuda_runtime


class WorkerSigns:
    """The beacon's only writer. `shard`: only faults of this shard are planted here."""

    def __init__(
        self,
        control: WorkerControl,
        beacon: Beacon | None,
        clock_ns: Callable[[], int],
        device: torch.device,
        faults: Sequence[PlantedFault],
        shard: int = 0,
    ) -> None:
        self.control, self.beacon, self._clock_ns, self._device = control, beacon, clock_ns, device
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
                if fault.how in OF_GPU:
                    strike_gpu(fault.how, self._device)
                    return
                self.show(busy=True, doing=f"dies at {op}")
                os.kill(os.getpid(), signal.SIGKILL)

    def flips(self, step: int, op: str) -> list[PlantedFault]:
        """The bits that are flipped in this op: once, unless the fault says until when."""
        found = [fault for fault in self.faults if fault.flips(step, op)]
        for fault in found:
            if fault.until is None:
                self.faults.remove(fault)
        return found

    def slower(self, step: int) -> list[float]:
        return [fault.factor for fault in self.faults if fault.slows(step)]

    def lag_s(self, step: int, stage: int) -> float:
        return sum(fault.lag_s(step, stage) for fault in self.faults)


# ------------------------------------------------------------------
# Faults of a GPU, made on purpose: for tests of what happens when a kernel goes wrong or never ends.

_SPIN_CYCLES = 2_000_000_000 * 600  # about ten minutes
_BLOCK = 64 << 20


def strike_gpu(kind: str, device: torch.device) -> None:
    """`illegal`: a kernel writes to memory that was freed, which ends the CUDA context. `oom`: more memory
    than there is. `spin`: a kernel that does not end.
    """
    if device.type != "cuda":
        raise UserError(f'--kill with how={kind} needs a GPU; set device = "cuda".')
    if kind == "oom":
        torch.empty(1 << 48, dtype=torch.uint8, device=device)
    elif kind == "spin":
        torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
    else:
        memory = CudaMemory(device)
        address, _ = memory.allocate(_BLOCK)
        there = memory.view(address, _BLOCK, None)
        cuda_runtime().cudaFree(ctypes.c_void_p(address))
        there.fill_(1)
