"""An optimizer in three runs of real workers (clean, healed, resumed), each compared with a plain loop of
torch: one process, one module, `backward()`, `optimizer.step()`.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine.datasets.data import Dataset
from everstep.engine.layers.model import drawn, end, every_parameter, in_precision, slots
from everstep.engine.prepare.preflight import preflight
from everstep.engine.prepare.resolve import data_of, model_of, optimizer_of
from everstep.engine.stage.stage import DTYPES
from everstep.engine.sums.grids import Limits
from everstep.engine.sums.sums import GradientSums
from everstep.errors import UserError
from everstep.job.job import CheckpointSpec, Job, ModelSpec, OptimizerSpec
from everstep.launch.local import export
from harness.sweep import SHORT, Sweep

STEPS, SAVED, KILLED = 8, 4, 6
OPTIONS = {"depth": 2, "width": 64, "heads": 2, "hidden": 96, "vocab": 64}
Weights = dict[str, Tensor]


def job_of(build: str, base: Path | str, *, stages: int, options: dict[str, Any] | None = None) -> Job:
    """Every update is eager."""
    return Job(
        model=ModelSpec(preset="gpt-tiny", options=OPTIONS),
        data=SHORT,
        optimizer=OptimizerSpec(
            build=build, options=options or {}, decay="constant", clip=1000.0, stagger="always"
        ),
        steps=STEPS,
        replicas=2,
        stages=stages,
        microbatches=4,
        transport="tcp",
        base=str(base),
    )


def plain_loop(job: Job) -> tuple[dict[int, float], Weights]:
    """The loss of every step, and the weights after the last. In 16 bits with masters in fp32. Gradients are
    rounded to the job's grid. With a worker's threads: products of matrices split over two have other last
    bits (SOAP: 1.2e-7).
    """
    torch.set_num_threads(job.threads)
    model, data = model_of(job), data_of(job)
    layers = nn.ModuleList(drawn(model, index, job.seed) for index in range(len(model.names)))
    named = [
        (name, p)
        for layer, module in zip(model.names, layers, strict=True)
        for name, p in every_parameter(layer, module).items()
    ]
    masters = named
    if job.precision != "fp32":
        masters = [(name, nn.Parameter(p.detach().clone())) for name, p in named]
        for module in layers:
            in_precision(module, DTYPES[job.precision])
    optimizer = optimizer_of(job)(masters)
    if hasattr(optimizer, "train"):
        optimizer.train()
    losses, count = {}, job.microbatches_in_step
    table = slots(model, range(len(model.names)))
    size, whole = end(table), slice(0, end(table))
    sums = GradientSums(table, size, kind=job.sums, contributions=count, device=torch.device("cpu"))
    limits = Limits(list(table), sums.grid)
    for step in range(1, job.steps + 1):
        sums.begin(step, limits.at(step))
        total = 0.0
        for microbatch in range(count):
            loss = _loss(layers, model.loss, data, step, microbatch)
            loss.backward()
            total += loss.item()
            for index, (_, p) in enumerate(named):
                assert p.grad is not None
                sums.hold(index, p.grad)
            sums.added()
            for _, p in named:
                p.grad = None
        part, mean = sums.part(whole), torch.empty(size)
        sums.means(whole, [whole], [part], float(count), mean)
        limits.follow(step, part.peaks)
        for name, p in masters:
            p.grad = table[name].of(mean).clone()
        optimizer.step()
        optimizer.zero_grad()
        for (_, p), (_, master) in zip(named, masters, strict=True):
            p.data.copy_(master.data)
        losses[step] = total / count
    return losses, {name: p.detach().clone() for name, p in masters}


def _loss(layers: nn.ModuleList, loss: Any, data: Dataset, step: int, microbatch: int) -> Tensor:
    x, targets = data.batch(step, microbatch)
    for layer in layers:
        x = layer(x)
    found: Tensor = loss(x, targets)
    return found


def compared(job: Job, sweep: Sweep) -> dict[str, Any]:
    """What each run differs in from the plain loop, or the sentence with which the job is refused."""
    try:
        preflight(job)
    except UserError as refused:
        return {"refused": str(refused)}
    expected = plain_loop(job)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        kills = (f"stage={job.stages - 1},replica=0,step={KILLED - 2},op=I1",)
        for name, faults in (("clean", ()), ("healed", kills)):
            run = _saving(job, f"{folder}/{name}")
            found[name] = _difference(run, sweep.run(run, faults), expected)
        resumed = _saving(job, f"{folder}/resumed")
        sweep.run(resumed, (), until=KILLED)
        found["resumed"] = _difference(resumed, sweep.run(resumed, ()), expected)
    return found


def _saving(job: Job, folder: str) -> Job:
    return replace(job, checkpoint=CheckpointSpec(folder=folder, interval=SAVED))


def _difference(job: Job, outcome: Any, expected: tuple[dict[int, float], Weights]) -> Any:
    """0.0: every loss and every bit of the last weights are those of the plain loop."""
    if outcome.failure is not None:
        return outcome.failure
    losses, weights = expected
    assert job.checkpoint is not None
    try:
        ours = export.load(job.checkpoint.folder)
    except UserError as error:
        return str(error)
    found = outcome.all_losses()
    worst = max(abs(found[step] - loss) / abs(loss) for step, loss in losses.items() if step in found)
    return max(worst, max(float((ours[name] - value).abs().max()) for name, value in weights.items()))
