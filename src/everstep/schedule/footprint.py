"""Bytes that a worker of our engine keeps from step to step, per parameter: the one place that counts them.

    per parameter          fp32     bf16
    master weights            4        4
    working weights         0, 4       2     fp32: the masters themselves, until a stage updates eagerly
    optimizer state           8        8     of Adam
    gradient sums          4, 8     4, 8     of this worker's own microbatches; see docs/strict-sums.md
    reduced gradient          4        4     of the stage
    average of the weights    4        4     only with optimizer.ema
    undo                      0        0     an eager update is computed twice instead

What microbatches hold besides is not forecast: the first step is measured, and the schedule keeps to it.
"""

from __future__ import annotations

from dataclasses import dataclass

SUMS = {"strict": 8.0, "strict40": 8.0, "fp32": 4.0}
PARTED = 5.0  # `strict40` on a GPU, of a worker that runs few microbatches in a step
WEIGHTS = {"fp32": 4.0, "bf16": 2.0}
MASTERS = REDUCED = 4.0
ADAM = 8.0
HOLDERS = 2  # of each chunk of a sharded optimizer state
USABLE = 0.92  # of a device's memory: the rest is the driver's, the libraries' and the allocator's


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What of a job decides how many bytes a parameter takes."""

    precision: str = "bf16"
    accumulate: str = "strict"
    eager: bool = False  # may a stage update before the norm of all stages is known?
    average: bool = False  # of the weights, kept beside them
    replicas: int = 1
    sharded: bool = False  # masters, optimizer state and reduced gradient at two replicas, not at all
    parted: bool = False  # are sums of 40 bits kept in 5 bytes?
    alone: bool = False  # one worker is the whole task


def per_parameter(settings: Settings) -> dict[str, float]:
    separate = settings.precision != "fp32" or settings.eager or settings.sharded
    part = min(1.0, HOLDERS / settings.replicas) if settings.sharded else 1.0
    sums = PARTED if settings.parted else SUMS[settings.accumulate]
    is_own = settings.alone and sums < SUMS["strict"]
    return {
        "master weights": MASTERS * part,
        "working weights": WEIGHTS[settings.precision] if separate else 0.0,
        "optimizer state": ADAM * part,
        "gradient sums": sums,
        "reduced gradient": 0.0 if is_own else REDUCED * part,  # it takes the place of the sums
        **({"average of the weights": MASTERS * part} if settings.average else {}),
    }
