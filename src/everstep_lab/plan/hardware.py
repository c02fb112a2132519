"""What a GPU and its wires can do, and what of it a training stack gets out of them.

`Gpu` holds the maker's figures. `Stack` says how a training system uses them: which schedule, what is
overlapped, what is sharded, and the few constants that were fitted to published throughput (`published.py`;
git has the program).

Bandwidths are bytes per second in one direction, per GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    peak_flops: float  # dense bf16
    memory: float  # bytes
    memory_bandwidth: float
    node_bandwidth: float  # to another GPU of the node
    network_bandwidth: float  # to a GPU of another node
    efficiency: float = 1.0  # of the largest matrix products, relative to the stack's constant


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """How a training system uses the hardware."""

    name: str
    schedule: str  # a row of `pipeline_orders.ORDERS`
    most_chunks: int = 1  # interleaved: model chunks a worker may hold
    sequence_parallel: bool = False  # what tensor parallelism leaves whole is split along the sequence
    fused_attention: bool = False  # no score matrix is written to memory
    most_shards: int = 16
    zero_1: bool = False  # optimizer state split over the replicas
    gradient: float = 4.0  # bytes per parameter
    reduce_exposed: float = 0.324  # part of the gradient reduce that no compute hides
    shards_exposed: float = 1.0  # part of the tensor-parallel traffic that no compute hides
    matmul_efficiency: float = 0.744  # of peak, for matrices without end
    matmul_half: float = 134.0  # matrix width per shard at which half of that is reached
    traffic: float = 0.874  # pointwise bytes moved, relative to the count in `throughput.py`
    wire_efficiency: float = 0.8  # of the maker's bandwidth, for a long message


GIGA, TERA = 1e9, 1e12
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="A100",
            peak_flops=312 * TERA,
            memory=80 * GIGA,
            memory_bandwidth=2.0 * TERA,
            node_bandwidth=300 * GIGA,
            network_bandwidth=25 * GIGA,
        ),
        Gpu(  # an A100 with two thirds of its NVLink
            name="A800",
            peak_flops=312 * TERA,
            memory=80 * GIGA,
            memory_bandwidth=2.0 * TERA,
            node_bandwidth=200 * GIGA,
            network_bandwidth=12.5 * GIGA,
        ),
        Gpu(
            name="H100",
            peak_flops=989 * TERA,
            memory=80 * GIGA,
            memory_bandwidth=3.35 * TERA,
            node_bandwidth=450 * GIGA,
            network_bandwidth=50 * GIGA,
        ),
        Gpu(
            name="H200",
            peak_flops=989 * TERA,
            memory=141 * GIGA,
            memory_bandwidth=4.8 * TERA,
            node_bandwidth=450 * GIGA,
            network_bandwidth=50 * GIGA,
        ),
    )
}


def gpu(name: str) -> Gpu:
    found = {known.lower(): spec for known, spec in GPUS.items()}.get(name.lower())
    if found is None:
        raise UserError(f"gpu {name!r} is not known; use one of {', '.join(GPUS)}.")
    return found
