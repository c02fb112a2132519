"""A pipeline of stages in one process, its boundary tensors passed by hand; and the plain model beside it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from everstep.engine import device, keys
from everstep.engine.datasets.data import Dataset
from everstep.engine.layers.model import Model, partition
from everstep.engine.stage.evaluation import Evaluation
from everstep.engine.stage.stage import Stage, StageSettings

CPU = torch.device("cpu")


def stages(
    model: Model, count: int, data: Dataset, evaluation: Evaluation | None = None, **options
) -> list[Stage]:
    settings = StageSettings(**options)
    return [
        Stage(model, layers, data=data, device=CPU, settings=settings, evaluation=evaluation)
        for layers in partition(model, count)
    ]


def forward(pipeline: list[Stage], step: int, microbatch: int) -> None:
    x = None
    for stage in pipeline:
        x = stage.forward(step, microbatch, x)


def input_grad(pipeline: list[Stage], step: int, microbatch: int) -> None:
    grad = None
    for stage in reversed(pipeline):
        grad = stage.input_grad(step, microbatch, grad)


def run_step(
    pipeline: list[Stage], step: int, microbatches: int, order: Iterable[int] | None = None
) -> Tensor:
    """All F, then all I, then all W in some order: the hardest on the stashes. The losses."""
    for op in (forward, input_grad):
        for microbatch in range(microbatches):
            op(pipeline, step, microbatch)
    for microbatch in order or range(microbatches):
        for stage in pipeline:
            stage.weight_grad(step, microbatch)
    return torch.stack([pipeline[-1].loss(step, microbatch) for microbatch in range(microbatches)])


def plain(
    model: Model, weights: dict[str, Tensor], data: Dataset, step: int, microbatches: int, seed: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """What torch alone computes: one module, backward() for each microbatch, gradients summed in .grad."""
    layers = nn.ModuleList(factory() for factory in model.layers.values())
    named = {
        f"{name}.{key}": p
        for name, layer in zip(model.names, layers, strict=True)
        for key, p in layer.named_parameters()
    }
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(weights[name])
    losses = []
    for microbatch in range(microbatches):
        x, targets = data.batch(step, microbatch)
        for index, layer in enumerate(layers):
            device.seed(CPU, keys.key(seed, keys.DROPOUT, step, microbatch, index))
            x = layer(x)
        losses.append(model.loss(x, targets))
        losses[-1].backward()
    return {name: p.grad for name, p in named.items()}, torch.stack(losses).detach()


def by_name(pipeline: list[Stage], flats: list[Tensor]) -> dict[str, Tensor]:
    return {
        name: view
        for stage, flat in zip(pipeline, flats, strict=True)
        for name, view in stage.views(flat).items()
    }
