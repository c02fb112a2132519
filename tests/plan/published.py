"""Throughput that others have published, row by row: what the model is held against.

    narayanan   Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
                Megatron-LM" (arXiv 2104.04473), table 1. A100, full recomputation, interleaved 1F1B. The
                FLOPs of that table count the recomputed forward.
    korthikanti Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
                (arXiv 2205.05198), tables 3 and 5. A100, seconds a step, with full recomputation and with
                sequence parallelism and selective recomputation; three chunks for 175B and 530B.
    llama3      Llama Team 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), table 4. H100, bf16. The
                tokens of a batch (16M) fix the replicas of the 128K row.
    everstep    our own engine, one H200, 1.06 B parameters, bf16 (`bench/overhead.py --single`):
                one worker, model FLOPs.

The Megatron tables give the global batch but not the microbatch of 2104.04473: there the model takes the best
that fits, as the authors say they did.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from everstep_lab.plan import memory
from everstep_lab.plan.hardware import GPUS, Gpu, Stack
from everstep_lab.plan.models import PRESETS, ModelFigures
from everstep_lab.plan.stacks import EVERSTEP, LLAMA3, MEGATRON_2021, MEGATRON_2022
from everstep_lab.plan.task_shape import Floats
from everstep_lab.plan.throughput import PlannedCut, StepTime, step_time


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One published figure. `step_s` or `tflops` (per GPU, counting `flops` a step)."""

    source: str
    model: ModelFigures
    gpu: Gpu
    stack: Stack
    stages: int
    shards: int
    replicas: int
    recompute: str
    microbatch: int | None = None  # None: the best that fits
    chunks: int | None = None
    context: int = 1
    tflops: float | None = None
    step_s: float | None = None
    counts_recompute: bool = False

    @property
    def gpus(self) -> int:
        return self.stages * self.shards * self.replicas * self.context

    @property
    def flops(self) -> float:
        return self.model.flops_per_step * (4 / 3 if self.counts_recompute else 1.0)

    @property
    def published(self) -> float:
        """TFLOP/s per GPU, by the row's own count."""
        if self.tflops is not None:
            return self.tflops
        assert self.step_s is not None
        return self.flops / self.step_s / self.gpus / 1e12

    def cuts(self) -> Iterator[PlannedCut]:
        batches = (self.microbatch,) if self.microbatch else (1, 2, 4, 8)
        chunks = (self.chunks,) if self.chunks else range(1, self.stack.most_chunks + 1)
        for microbatch, chunk in product(batches, chunks):
            uneven = self.model.batch % (self.replicas * microbatch) or (
                self.model.layers % (self.stages * chunk)
            )
            if uneven and None in (self.microbatch, self.chunks):
                continue
            yield PlannedCut(
                stages=self.stages,
                shards=self.shards,
                microbatch=microbatch,
                recompute=self.recompute,
                chunks=chunk,
                context=self.context,
            )

    def predict(
        self, stack: Stack | None = None, gpu: Gpu | None = None
    ) -> tuple[float, PlannedCut, StepTime]:
        """TFLOP/s per GPU by the row's own count, and how it comes about."""
        best: tuple[float, PlannedCut, StepTime] | None = None
        used, chip = stack or self.stack, gpu or self.gpu
        alone = np.array([float(self.replicas)])
        for cut in self.cuts():
            parts = step_time(self.model, chip, used, cut, alone)
            tflops = self.flops / float(parts.total[0]) / self.gpus / 1e12
            if (best is None or tflops > best[0]) and (self.microbatch or self._fits(used, cut, alone)):
                best = tflops, cut, parts
        assert best is not None, f"{self.source}: no microbatch fits"
        return best

    def _fits(self, stack: Stack, cut: PlannedCut, alone: Floats) -> bool:
        need = memory.needed(
            self.model,
            stack,
            stages=cut.stages,
            shards=cut.shards,
            replicas=alone,
            microbatch=cut.microbatch,
            recompute=cut.recompute,
            chunks=cut.chunks,
            context=cut.context,
        )
        return bool(memory.fits(self.gpu, need)[0])

    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predict()[0] / self.published - 1


def _gpt(name: str, layers: int, hidden: int, heads: int, batch: int) -> ModelFigures:
    return ModelFigures(
        name=name, layers=layers, hidden=hidden, heads=heads, vocab=51200, sequence=2048, batch=batch
    )


def _narayanan() -> Iterator[PublishedRow]:
    for name, heads, hidden, layers, shards, stages, gpus, batch, tflops in (
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
        ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
        ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
        ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
        ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138),
        ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
        ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
        ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
        ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
        ("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 163),
    ):
        yield PublishedRow(
            source="narayanan",
            model=_gpt(name, layers, hidden, heads, batch),
            gpu=GPUS["A100"],
            stack=MEGATRON_2021,
            stages=stages,
            shards=shards,
            replicas=gpus // (stages * shards),
            recompute="full",
            tflops=float(tflops),
            counts_recompute=True,
        )


def _korthikanti() -> Iterator[PublishedRow]:
    for name, heads, hidden, layers, stages, batch, microbatch, chunks, full_s, present_s in (
        ("22B", 64, 6144, 48, 1, 4, 4, 1, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 64, 1, 3, 18.13, 13.75),
        ("530B", 128, 20480, 105, 35, 280, 1, 3, 49.05, 37.83),
        ("1T", 160, 25600, 128, 64, 512, 1, 1, 94.42, 71.49),
    ):
        row = PublishedRow(
            source="korthikanti",
            model=_gpt(name, layers, hidden, heads, batch),
            gpu=GPUS["A100"],
            stack=MEGATRON_2021,
            stages=stages,
            shards=8,
            replicas=1,
            recompute="full",
            microbatch=microbatch,
            chunks=chunks,
            step_s=full_s,
        )
        yield row
        yield replace(row, stack=MEGATRON_2022, recompute="selective", step_s=present_s)


def _llama3() -> Iterator[PublishedRow]:
    base = PRESETS["llama3-405b"]
    for context, replicas, sequence, batch, tflops in (
        (1, 64, 8192, 2048, 430),
        (1, 128, 8192, 2048, 400),
        (16, 8, 131072, 128, 380),
    ):
        yield PublishedRow(
            source="llama3",
            model=replace(base, sequence=sequence, batch=batch),
            gpu=GPUS["H100"],
            stack=LLAMA3,
            stages=16,
            shards=8,
            replicas=replicas,
            recompute="none",
            microbatch=1,
            chunks=8,
            context=context,
            tflops=float(tflops),
        )


def _own() -> PublishedRow:
    model = ModelFigures(
        name="gpt-1b",
        layers=18,
        hidden=2048,
        heads=16,
        vocab=32000,
        sequence=2048,
        batch=32,
        feed_forward=5632,
        gated=True,
        tied=False,
        causal_kernel=True,
    )
    return PublishedRow(
        source="everstep",
        model=model,
        gpu=GPUS["H200"],
        stack=EVERSTEP,
        stages=1,
        shards=1,
        replicas=1,
        recompute="none",
        microbatch=8,
        chunks=1,
        tflops=437.0,
    )


ROWS: tuple[PublishedRow, ...] = (*_narayanan(), *_korthikanti(), *_llama3(), _own())
