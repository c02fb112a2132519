"""The evaluation batches that travel with a stage's microbatches: their values, and what they added up to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from everstep.engine.datasets.data import split
from everstep.engine.layers.boundary import Value
from everstep.engine.layers.model import Through, evaluating
from everstep.engine.stage.evaluation import Evaluation, added
from everstep.engine.stage.stage_loss import StageLoss

At = tuple[int, int]  # step, microbatch


class StageEvaluation:
    """`loss`: on the last stage. `fed`: makes what the first layer gets of a batch; on the first stage.
    `seed`: of a batch's random draws, the same whenever and wherever it is scored.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        modules: list[nn.Module],
        through: Through,
        *,
        loss: StageLoss | None,
        fed: Callable[[Value], Value] | None,
        seed: Callable[[int], None],
    ) -> None:
        self._evaluation, self._modules, self._through = evaluation, modules, through
        self._seed = seed
        self._loss, self._fed = loss, fed
        self._values: dict[At, list[Value]] = {}  # for the next stage: of one microbatch at most
        self._scores: dict[At, tuple[float, ...]] = {}

    @torch.no_grad()
    def run(self, at: At, before: list[Value] | None) -> None:
        """`before`: what the stage before has made of the batches."""
        step, microbatch = at
        found: list[Value] = []
        with evaluating(self._modules):
            for place, number in enumerate(self._evaluation.numbers(microbatch)):
                found.append(self._one(number, None if before is None else before[place]))
        if self._loss is not None:
            self._scores = {key: scores for key, scores in self._scores.items() if key[0] >= step - 1}
            self._scores[at] = added(found)
        self._values = {at: [] if self._loss is not None else found}

    def _one(self, number: int, value: Value | None) -> Value:
        inputs, targets = None, None
        if self._fed is not None or self._loss is not None:
            inputs, targets = split(self._evaluation.data.batch(1, number))
        if self._fed is not None:
            value = self._fed(inputs)
        self._seed(number)
        value = self._through(value, lambda index, layer, *args, **kwargs: layer(*args, **kwargs))
        if self._loss is not None:
            value = self._evaluation.scores(*self._loss.to_be_scored(value, targets))
        return value

    def is_done(self, at: At) -> bool:
        return at in self._values

    def take(self, at: At) -> list[Value] | None:
        """The values for the next stage; None: this step evaluates nothing."""
        return self._values.pop(at, None)

    def scores(self, at: At) -> tuple[float, ...]:
        """What the batches added up to, on the last stage."""
        return self._scores.get(at, ())

    def clear(self) -> None:
        self._values.clear()
