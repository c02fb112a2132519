"""The training systems whose throughput we know, as `hardware.Stack`s.

The constants of `Stack` were fitted to the A100 rows of `published.py`; the
Llama-3 rows, on another chip and another system, were then met without a further constant. Our engine got
one of its own, from the one row we have.
"""

from __future__ import annotations

from dataclasses import replace

from everstep.errors import UserError
from everstep.schedule.footprint import REDUCED, SUMS
from everstep_lab.plan.hardware import Stack
from everstep_lab.plan.pipeline_orders import OURS

MEGATRON_2021 = Stack(name="megatron-2021", schedule="interleaved", most_chunks=2)
MEGATRON_2022 = replace(MEGATRON_2021, name="megatron-2022", most_chunks=3, sequence_parallel=True)
MEGATRON = replace(MEGATRON_2022, name="megatron", fused_attention=True)
MEGATRON_ZERO_1 = replace(MEGATRON, name="megatron-zero1", zero_1=True)
LLAMA3 = replace(MEGATRON_ZERO_1, name="llama3", most_chunks=8)
EVERSTEP = Stack(
    name="everstep",
    schedule=OURS,
    fused_attention=True,
    most_shards=8,
    gradient=SUMS["strict"] + REDUCED,
    matmul_efficiency=0.6,
)
STACKS = {
    stack.name: stack for stack in (MEGATRON, MEGATRON_ZERO_1, MEGATRON_2021, MEGATRON_2022, LLAMA3, EVERSTEP)
}


def stack(name: str) -> Stack:
    if name not in STACKS:
        raise UserError(f"stack {name!r} is not known; use one of {', '.join(STACKS)}.")
    return STACKS[name]
