"""What a worker trains: a job's settings with its model, data and optimizer, found or given."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from everstep.core.worker.rules import TaskRules
from everstep.engine import device as devices
from everstep.engine.datasets.data import Dataset
from everstep.engine.layers.model import Model, partition, slots
from everstep.engine.prepare.fitting import GIB
from everstep.engine.prepare.resolve import (
    data_of,
    evaluation_of,
    model_of,
    optimizer_of,
    refuse_untied,
    schedule_of,
)
from everstep.engine.prepare.shard_trial import with_summed
from everstep.engine.shards.collectives import Collectives
from everstep.engine.stage.evaluation import Evaluation
from everstep.engine.stage.recordings import AtRest, CudaRecorder, has_room
from everstep.engine.stage.stage import Stage, StageSettings
from everstep.engine.state.optimizer import OptimizerFactory, Updater
from everstep.engine.state.schedules import Rate
from everstep.engine.state.sharded import ShardedUpdater, tied_refused
from everstep.engine.sums.sums import Empty
from everstep.errors import UserError
from everstep.job.job import Job

AnyUpdater = Updater | ShardedUpdater


@dataclass(frozen=True, slots=True)
class Program:
    job: Job
    model: Model
    data: Dataset
    optimizer: OptimizerFactory
    evaluation: Evaluation | None = None
    rate: Rate | None = None  # None: that of the job

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", with_summed(self.model, self.job))

    @staticmethod
    def of(job: Job) -> Program:
        """From the words of a job file."""
        model = model_of(job)
        rate = schedule_of(job, model)
        return Program(job, model, data_of(job), optimizer_of(job), evaluation_of(job), rate)

    def rules(self) -> TaskRules:
        job = self.job
        return TaskRules(
            replicas=job.replicas,
            stages=job.stages,
            microbatches=job.microbatches,
            steps=job.steps + (self.evaluation is not None),
            closes=self.evaluation is not None,
            clip=job.optimizer.clip,
            stagger=job.optimizer.stagger,
            tied=self._tied_stages(),
            chunks=job.chunks,
            checkpoint_every=job.checkpoint.interval if job.checkpoint else 0,
            copy_every=job.copy_interval,
            vote_every=job.vote_period,
            vote_all=job.verify.votes == "every",
            replays=job.verify.nan != "off",
            spike=job.verify.band if job.verify.spike != "off" else 0.0,
        )

    def build(
        self,
        stage: int,
        *,
        device: torch.device | None = None,
        empty: Empty | None = None,
        shards: Collectives | None = None,
        at_rest: AtRest = nullcontext,
    ) -> tuple[Stage, AnyUpdater]:
        """One worker's layers and their optimizer. `empty` gives the buffers that peers read from. `shards`:
        for one shard of the worker. `at_rest`: around what waits for all that the device does.
        """
        job = self.job
        parts = partition(self.model, job.stages)
        made = Stage(
            self.model,
            parts[stage],
            data=self.data,
            device=device or devices.pick(job.device),
            settings=StageSettings(
                seed=job.seed,
                precision=job.precision,
                accumulate=job.sums,
                recompute=job.recompute_every if job.recompute else 0,
                attention_alone=job.recompute_part == "attention",
                contributions=job.microbatches_in_step,
                sharded=job.optimizer.shard,
            ),
            empty=empty,
            shards=shards,
            evaluation=self.evaluation,
        )
        if made.device.type == "cuda" and shards is None and self._records:
            limit = None if job.memory_gib is None else job.memory_gib * GIB
            room = partial(has_room, made.device, limit, at_rest=at_rest)
            made.record(partial(CudaRecorder, made.device), room)
        rate = self.rate or (lambda step: job.rate(step - 1))
        if job.chunks:
            if made.tied_names:
                raise UserError(tied_refused(made.tied_names[0]))
            ema = job.optimizer.ema
            return made, ShardedUpdater(made, self.optimizer, rate, chunks=job.chunks, ema=ema)
        if made.tied_names:
            refuse_untied(self.model, parts, self.optimizer)
        return made, Updater(made, self.optimizer, rate, job.optimizer.ema)

    @property
    def _records(self) -> bool:
        """Are ops on a GPU launched as CUDA graphs?"""
        if self.job.graphs == "auto":
            return self.model.assembly.recordable and not self.job.recompute
        return self.job.graphs == "always"

    def _tied_stages(self) -> tuple[int, int] | None:
        """The two stages that hold the halves of tied pairs; None when every pair is within a stage."""
        if not self.model.tied:
            return None
        parts = partition(self.model, self.job.stages)
        names = self.model.names
        trained = slots(self.model, range(len(names)))

        def stage_of(parameter: str) -> int:
            owner = max((name for name in names if parameter.startswith(name + ".")), key=len)
            return next(s for s, mine in enumerate(parts) if names.index(owner) in mine)

        changing = [(a, b) for a, b in self.model.tied if a in trained and b in trained]
        apart = {(stage_of(a), stage_of(b)) for a, b in changing if stage_of(a) != stage_of(b)}
        pairs = {(min(pair), max(pair)) for pair in apart}
        if len(pairs) > 1:
            raise UserError(
                f"tied parameters lie in {len(pairs)} different pairs of stages; one pair of stages "
                "can share tensors: use fewer stages or tie fewer layers."
            )
        return pairs.pop() if pairs else None
