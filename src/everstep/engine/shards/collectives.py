"""Collectives among the shards of one worker: gloo over loopback on CPUs, NCCL on GPUs.

The shards live and die together (`node.shard_group`), so nothing here can be left waiting for a dead member:
its own process is ended first. That is why plain process groups of torch will do, where between workers they
would not (`links`).

For a given number of shards the order of additions is fixed, so the bits are too. gloo adds in the order of
the shards. NCCL adds along rings that follow the wiring of the GPUs, which of two numbers makes one sum and
of more makes several: there each shard gets its part of all tensors, adds them up in order, and the parts are
gathered. As many bytes move as in a ring.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_c10d: Any = dist  # more is there than its annotations say
_NEVER = datetime.timedelta(days=365)  # who waits too long is found by the detector, which names the shard


class Collectives(Protocol):
    """Of one shard; every shard calls the same ones in the same order."""

    index: int
    count: int

    def sum(self, tensor: Tensor) -> Tensor: ...  # in place, and returned

    def max(self, tensor: Tensor) -> Tensor: ...

    def gather(self, tensor: Tensor) -> list[Tensor]: ...  # of every shard, in order


class GroupCollectives:
    """Over a process group of its own: torch's global group stays free for the user's code.

    `inside` is told True before each one and False after it, so that a shard that stays behind can be named.
    """

    def __init__(
        self,
        store: Path,
        index: int,
        count: int,
        device: torch.device,
        *,
        ordered: bool = False,
        inside: Callable[[bool], None] = lambda is_inside: None,
    ) -> None:
        self.index, self.count, self._inside = index, count, inside
        self._in_order = ordered and count > 2
        self._group = _group(_c10d.FileStore(str(store), count), index, count, device)

    def sum(self, tensor: Tensor) -> Tensor:
        if not self._in_order:
            return self._reduced(tensor, dist.ReduceOp.SUM)
        size = -(-tensor.numel() // self.count)
        padded = tensor.new_zeros(self.count * size)
        padded[: tensor.numel()] = tensor.reshape(-1)
        own = self._sum_in_order(padded.view(self.count, size))
        return tensor.copy_(torch.cat(self.gather(own))[: tensor.numel()].view_as(tensor))

    def max(self, tensor: Tensor) -> Tensor:
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """As bytes: gloo and NCCL do not know every type."""
        self._inside(True)
        found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.count)]
        self._group.allgather([[*map(_bytes, found)]], [_bytes(tensor.contiguous())]).wait()
        self._inside(False)
        return found

    def _sum_in_order(self, parts: Tensor) -> Tensor:
        """One row per shard; of the rows for this shard the sum, rounded once."""
        self._inside(True)
        rows = torch.empty_like(parts)
        self._group.alltoall_base(rows, parts, [], [], dist.AllToAllOptions()).wait()
        self._inside(False)
        wide = torch.float32 if parts.dtype.itemsize < 4 else parts.dtype
        total = rows[0].to(wide, copy=True)
        for row in rows[1:]:
            total += row
        return total.to(parts.dtype)

    def _reduced(self, tensor: Tensor, how: Any) -> Tensor:
        self._inside(True)
        options = dist.AllreduceOptions()
        options.reduceOp = how
        self._group.allreduce([tensor], options).wait()
        self._inside(False)
        return tensor


def summed(collectives: Collectives, values: Sequence[float], device: torch.device) -> tuple[float, ...]:
    """Each value added up over the shards, correctly rounded, so the same on every one."""
    own = torch.tensor(values, dtype=torch.float64, device=device)
    rows = [one.tolist() for one in collectives.gather(own)]
    return tuple(math.fsum(column) for column in zip(*rows, strict=True))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _group(store: Any, index: int, count: int, device: torch.device) -> Any:
    if device.type == "cuda":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        torch.cuda.set_device(device)
        return dist.ProcessGroupNCCL(store, index, count, options)
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _NEVER
    return dist.ProcessGroupGloo(store, index, count, options)
