"""Exact sums of gradients over a process group: the same bits for any ring, order of ranks, or machines.

Floating point sums depend on their order, and in which order a backend adds is its own affair: of the ring,
the algorithm and the number of nodes. Integers do not care. So a tensor is cut into blocks, the largest
exponent of each block is agreed on by all ranks, every element becomes an integer on its block's grid, the
backend adds integers, and the sum becomes a number again. It is rounded twice: to the grid and at the end.

    tensor ──► largest exponent per block ──► all-reduce MAX ──► integers ──► all-reduce SUM ──► tensor
                 1/256 of the bytes                               as many bytes as fp32

An integer has 31 bits, of which the number of ranks takes some: with 8 ranks an element keeps 27 bits below
the largest of its block, more than the 24 of an fp32 beside it. What is smaller than that is rounded off.

Rejected: 64-bit integers, which double what is sent; grids from the step before, of which one rank may find
in mid-step that its gradients do not fit.

    everstep.exact.attach(ddp_model)      # once, after DistributedDataParallel(...)
    everstep.exact.all_reduce(tensor)     # in place of torch.distributed.all_reduce
"""

import contextlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from everstep.errors import UserError

BLOCK = 256  # elements with one grid
_BITS = 30  # of the sum, its sign apart
_LOWEST = -96  # exponent of a block; what is all below 2**-96 is rounded as if one element were that large
_HIGHEST = 128  # of fp32
_NOT_FINITE = 1 << 20  # above all exponents: a block with NaN or an infinity is NaN everywhere


def attach(model: Any) -> None:
    """Let a `DistributedDataParallel` model sum its gradients exactly. Call it once, before the first
    backward; a model takes one communication hook, so it can have no other.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        kind = type(model).__name__
        raise UserError(f"everstep.exact.attach takes a DistributedDataParallel model; this is a {kind}.")
    model.register_comm_hook(_Buckets(model.process_group), _reduce_bucket)


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> None:
    """`torch.distributed.all_reduce` of floating point numbers, in place, with exact sums: SUM or AVG."""
    if not _can_be_exact(tensor, op):
        raise UserError("everstep.exact.all_reduce takes SUM or AVG of fp32, bf16 or fp16.")
    size = dist.get_world_size(group)
    units, numbers = _agreed(_in_blocks(tensor.reshape(1, -1)), group, size)
    dist.all_reduce(numbers, group=group)
    _write(tensor, numbers, units, size if op == dist.ReduceOp.AVG else 1)


def reduce_scatter(output: Tensor, given: Tensor, op: Any, group: dist.ProcessGroup | None = None) -> None:
    """The same for `torch.distributed.reduce_scatter_tensor`."""
    size, own = dist.get_world_size(group), dist.get_rank(group)
    units, numbers = _agreed(_in_blocks(given.reshape(size, -1)), group, size)
    mine = numbers.new_empty(numbers.shape[0] // size, BLOCK)
    _REDUCE_SCATTER(mine, numbers, group=group)
    _write(output, mine, units.view(size, -1)[own], size if op == dist.ReduceOp.AVG else 1)


def install() -> None:
    """Make the sums of a script's gradients exact: DDP's and FSDP2's. Once, before the script begins (by
    `everstep run --exact`). Its other sums stay as they are: beside a count, a loss would lose bits.
    """
    ddp, real = torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel.__init__

    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **named)
        attach(self)

    ddp.__init__ = begin  # type: ignore[method-assign]
    _fsdp_collectives.dist = _OfFsdp()  # type: ignore[assignment,attr-defined]


class _OfFsdp:
    """What FSDP2 takes for `torch.distributed`. It waits for none of these sums but in their stream."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if _can_be_exact(tensor, op):
            all_reduce(tensor, op, group)
        else:
            dist.all_reduce(tensor, op, group)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not _can_be_exact(input, op):
            return _REDUCE_SCATTER(output, input, op, group, async_op)
        reduce_scatter(output, input, op, group)
        return None

    reduce_scatter_single = reduce_scatter_tensor  # its name from torch 2.13 on


_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Waiting(NamedTuple):
    """A bucket whose grids the ranks are agreeing on."""

    flat: Tensor
    exponents: Tensor
    agreed: Any  # their work
    mean: torch.futures.Future[Tensor]


class _Buckets:
    """Of a model's hook. The grids of a bucket are agreed on while the bucket before it is summed: in a ring
    that does one thing after the other no sum waits for them. On a GPU all of it has a stream of its own.

        backward   bucket 0    bucket 1             bucket 2 (the last)
        ring       grids 0     grids 1   sum 0      grids 2   sum 1   sum 2
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        self._stream: torch.cuda.Stream | None = None
        self._waiting: _Waiting | None = None

    def add(self, flat: Tensor, *, is_first: bool, is_last: bool) -> torch.futures.Future[Tensor]:
        devices: Any = [flat.device] if flat.is_cuda else None
        mean: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        before, self._waiting = None if is_first else self._waiting, None  # a backward before may have raised
        with self._beside(flat), torch.no_grad():
            exponents = _exponents(_in_blocks(flat.view(1, -1)))
            agreed = dist.all_reduce(exponents, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            now = _Waiting(flat, exponents, agreed, mean)
            if before is not None:
                self._sum(before)
            if is_last:
                self._sum(now)
            else:
                self._waiting = now
        return mean

    def _beside(self, flat: Tensor) -> Any:
        if not flat.is_cuda:
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        flat.record_stream(self._stream)
        return torch.cuda.stream(self._stream)

    def _sum(self, bucket: _Waiting) -> None:
        bucket.agreed.wait()
        flat = bucket.flat
        units, numbers = _to_integers(_in_blocks(flat.view(1, -1)), bucket.exponents, self._size)
        work = dist.all_reduce(numbers, group=self._group, async_op=True)

        def finish(sums: torch.futures.Future[Any]) -> None:
            try:
                sums.wait()
                if flat.is_cuda:  # a stream of the future's own
                    for each in (flat, units, numbers):
                        each.record_stream(torch.cuda.current_stream(flat.device))
                with torch.no_grad():
                    _write(flat, numbers, units, self._size)
                bucket.mean.set_result(flat)
            except RuntimeError as error:
                bucket.mean.set_exception(error)  # type: ignore[arg-type]

        work.get_future().add_done_callback(finish)


def _reduce_bucket(
    buckets: _Buckets,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook: the mean over all ranks. DDP reads its annotations: they are no strings."""
    return buckets.add(bucket.buffer(), is_first=bucket.index() == 0, is_last=bucket.is_last())


def _can_be_exact(tensor: Tensor, op: Any) -> bool:
    kinds = (torch.float32, torch.bfloat16, torch.float16)  # fp64 has more bits than are kept here
    return op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and tensor.dtype in kinds


def _to_integers(blocks: Tensor, exponents: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Exponents are all ranks'. A unit per block (NaN: the block is), and the integers in these units."""
    depth = _BITS - (ranks - 1).bit_length()
    is_finite, exponents = exponents < _NOT_FINITE, exponents.clamp_(max=_HIGHEST)
    units = _power_of_two(exponents - depth).masked_fill_(~is_finite, float("nan"))
    return units, (blocks * _power_of_two(depth - exponents)[:, None]).round_().to(torch.int32)


def _agreed(blocks: Tensor, group: Any, ranks: int) -> tuple[Tensor, Tensor]:
    exponents = _exponents(blocks)
    dist.all_reduce(exponents, op=dist.ReduceOp.MAX, group=group)
    return _to_integers(blocks, exponents, ranks)


def _power_of_two(exponents: Tensor) -> Tensor:
    """To the bit, which a device's `pow` does not promise."""
    return (exponents + 127 << 23).view(torch.float32)


def _exponents(blocks: Tensor) -> Tensor:
    """Of each block the least e with |x| < 2**e for every element; a power of two is one more."""
    largest = torch.linalg.vector_norm(blocks, float("inf"), dim=1)
    exponents = torch.frexp(largest).exponent.clamp_(min=_LOWEST)
    return exponents.masked_fill_(~largest.isfinite(), _NOT_FINITE)


def _in_blocks(rows: Tensor) -> Tensor:
    """Of every row whole ones: the rows of a reduce-scatter go to different ranks."""
    rows = rows.detach().float()
    if rest := -rows.shape[1] % BLOCK:
        rows = torch.nn.functional.pad(rows, (0, rest))
    return rows.view(-1, BLOCK)


def _write(tensor: Tensor, numbers: Tensor, units: Tensor, divisor: int) -> None:
    sums = numbers.float().mul_(units[:, None])
    if divisor > 1:
        sums.div_(divisor)
    tensor.detach().copy_(sums.view(-1)[: tensor.numel()].view(tensor.shape))
