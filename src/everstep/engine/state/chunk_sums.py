"""Sharded states: the reduce by chunks. The owner adds up, and every holder has the sums of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everstep.engine.stage.counted import counted, squares_of
from everstep.engine.stage.stage import Stage
from everstep.engine.sums.sum_parts import SumPart
from everstep.engine.sums.sum_units import CHUNK
from everstep.protocol.parcels import Parcel
from everstep.protocol.work import AssembleSum, SumChunk

Received = Mapping[Parcel, tuple[tuple[Tensor, ...], Any]]
Empty = Callable[[int], Tensor]  # fp32, this many elements, where peers can read it


class ChunkSums:
    """The means of the chunks that this worker holds, by step."""

    def __init__(self, ranges: Sequence[slice], empty: Empty) -> None:
        self._ranges, self._empty = ranges, empty
        self.means: dict[int, dict[int, Tensor]] = {}

    def add_up(self, stage: Stage, task: SumChunk, ordered: Sequence[Sequence[SumPart]]) -> tuple[float, ...]:
        """The chunks that are this worker's, from all parts of each: the squares of each stretch."""
        means: dict[int, Tensor] = {}
        norms: list[list[Tensor]] = []
        for index, chunk in enumerate(task.chunks):
            where = self._ranges[chunk]
            mean = self._empty(where.stop - where.start)
            stretches = [
                slice(at, min(at + CHUNK, where.stop)) for at in range(where.start, where.stop, CHUNK)
            ]
            parts = [parts[index] for parts in ordered]
            stage.sums.means(where, stretches, parts, task.weight, mean, origin=where.start)
            means[chunk] = mean
            norms += [
                [mean[own.start - where.start : own.stop - where.start] for own in counted(stage, at)]
                for at in stretches
            ]
        self.means[task.step] = means
        return squares_of(stage, norms)

    def for_holder(self, step: int, chunks: Sequence[int]) -> tuple[tuple[Tensor, ...], Any]:
        return tuple(self.means[step][chunk] for chunk in chunks), list(chunks)

    def assemble(self, stage: Stage, task: AssembleSum, received: Received) -> None:
        """Sums of chunks that this worker guards: its own copies, for the owner uses its memory again."""
        for parcel in task.chunks:
            tensors, chunks = received[parcel]
            for chunk, tensor in zip(chunks, tensors, strict=True):
                mean = torch.empty(tensor.shape, dtype=tensor.dtype, device=stage.device)
                self.means[task.step][int(chunk)] = mean.copy_(tensor, non_blocking=True)
        if stage.shards is not None:  # no shard reads from a peer any more when the leader says HELD
            stage.shards.gather(torch.zeros(1, device=stage.device))
