"""How fast a run is, in the words of people who train: tokens per second, TFLOP/s, MFU, time left.

FLOPs are those of the model: 6 per token and parameter that a token is multiplied with; what attention
multiplies, and what is computed again, is not counted. MFU is their share of what the GPUs can do at best in
bf16, where their peak is known.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from everstep.drive.step_rows import StepRow
from everstep.engine.layers.boundary import Value, tensors_in
from everstep.engine.layers.model import Model, multiplications
from everstep.job.job import Job

RECENT = 9  # steps whose median counts
# Dense bf16 with fp32 sums, FLOP/s, by words of the device's name; of two that match the first counts. The
# figures are NVIDIA's as other programs quote them (nanochat; torchtitan where it has them); the data sheets
# themselves were not read. Many of them count 2:4 sparsity, twice as much. None: not known.
PEAK_BF16: dict[str, float | None] = {
    "GB200": 2.5e15,  # 5 PFLOPS with sparsity
    "B200": 2.25e15,  # HGX: 4.5 PFLOPS with sparsity
    "H200 NVL": None,
    "H200": 989e12,  # SXM: 1,979 with sparsity
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,  # SXM: 1,979 with sparsity
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,  # in neither of the two
    "RTX 4090 (Laptop|D)": None,
    "RTX 4090": 165.2e12,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step is, in numbers. `tokens`: None where the data are not tokens."""

    rows: int
    tokens: int | None = None
    flops: float | None = None
    peak: float | None = None  # FLOP/s of all GPUs in use


def workload_of(job: Job, model: Model, batch: tuple[Value, Value]) -> Workload:
    """From the first microbatch."""
    inputs = batch[0]["input_ids"] if isinstance(batch[0], dict) and "input_ids" in batch[0] else batch[0]
    first = tensors_in(inputs)[0]
    rows = (first.shape[0] if first.ndim else 1) * job.microbatches_in_step
    if not _is_tokens(first):
        return Workload(rows=rows)
    tokens = first.numel() * job.microbatches_in_step
    return Workload(rows=rows, tokens=tokens, flops=6 * multiplications(model) * tokens, peak=peak_of(job))


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not tensor.is_floating_point() and tensor.shape[1] > 1


def peak_of(job: Job) -> float | None:
    if not job.device.startswith("cuda") or job.precision == "fp32" or not torch.cuda.is_available():
        return None
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return peak_named(names[: job.replicas * job.stages * job.shards])


def peak_named(names: list[str]) -> float | None:
    """Of these devices; None if one of them is not known, or is a part of a GPU."""
    found = []
    for name in names:
        peak = next((peak for words, peak in PEAK_BF16.items() if re.search(rf"\b{words}\b", name)), None)
        if peak is None or "MIG" in name:
            return None
        found.append(peak)
    return sum(found) or None


@dataclass(slots=True, kw_only=True)
class Pace:
    """Of one run, step by step."""

    steps: int
    workload: Workload | None = None
    incidents: int = 0
    row: StepRow | None = None
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def hear(self, kind: str, what: Any) -> None:
        """What a watcher of the run hears."""
        match kind, what:
            case "workload", Workload():
                self.workload = what
            case "step", StepRow():
                self._step(what)
            case "incident", _:
                self.incidents += 1

    def _step(self, row: StepRow) -> None:
        self.row = row
        if row.seconds > 0:
            self._seconds.append(row.seconds)

    def words(self) -> list[str]:
        """The parts of a live line, behind the step."""
        if self.row is None:
            return []
        usual = median(self._seconds) if self._seconds else 0.0
        parts = [f"loss {self.row.loss:.4f}"]
        if usual > 0:
            parts += self._rates(usual)
            parts.append(f"{duration(usual * max(0, self.steps - self.row.step))} left")
        if self.incidents:
            parts.append("1 incident" if self.incidents == 1 else f"{self.incidents} incidents")
        return parts

    def _rates(self, step_s: float) -> list[str]:
        known = self.workload
        if known is None:
            return [f"{step_s * 1e3:.0f} ms per step"]
        if known.tokens is None:
            return [f"{amount(known.rows / step_s)} rows/s"]
        found = [f"{amount(known.tokens / step_s)} tokens/s"]
        if known.flops:
            rate = known.flops / step_s
            found.append(f"{rate / 1e12:.3g} TFLOP/s")
            if known.peak:
                found[-1] += f" ({rate / known.peak:.0%} MFU)"
        return found


def amount(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
