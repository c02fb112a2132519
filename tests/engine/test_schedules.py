"""Rates as functions of the step: the user's own, and torch's schedulers asked once."""

from typing import Any

import pytest
import torch

from everstep.engine.layers.model import Model
from everstep.engine.prepare.resolve import optimizer_of
from everstep.engine.stage.stage import Stage
from everstep.engine.state.optimizer import Updater, torch_optimizer
from everstep.engine.state.schedules import rate_of
from everstep.errors import UserError
from everstep.job.job import Job, ModelSpec, OptimizerSpec


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CosineAnnealingLR", {"T_max": 20}),
        ("StepLR", {"step_size": 5}),
        ("OneCycleLR", {"max_lr": 1.0, "total_steps": 20}),
        ("LinearLR", {}),
    ],
)
def test_a_scheduler_of_torch_gives_its_own_rates(name: str, options: dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.2, momentum=0.9)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
    by_name = rate_of(name, lr=0.2, steps=20, options=options)
    by_function = rate_of(lambda o: getattr(torch.optim.lr_scheduler, name)(o, **options), lr=0.2, steps=20)
    for step in range(1, 20):
        expected = optimizer.param_groups[0]["lr"]
        assert 0.2 * by_name(step) == pytest.approx(expected)
        assert by_function(step) == by_name(step)
        optimizer.step()
        scheduler.step()


def test_a_function_of_the_step_is_used_as_it_is() -> None:
    assert rate_of(lambda step: 1 / step, lr=1.0, steps=10)(4) == 0.25


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        ("CosineAnealingLR", "did you mean 'CosineAnnealingLR'"),
        ("ReduceLROnPlateau", "follows a metric and not the step"),
        ("StepLR", "cannot be made: .*schedule_options"),
        (7, "schedule is a int; give a function of the step"),
        (lambda step: -1.0, "schedule.1. is -1.0"),
        (lambda: 1.0, "schedule.1. raised TypeError"),
    ],
)
def test_what_is_no_schedule_is_said_with_the_fix(schedule: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        rate_of(schedule, lr=0.1, steps=5)


def test_a_scheduler_that_is_built_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UserError, match="StepLR already built; give a function"):
        rate_of(torch.optim.lr_scheduler.StepLR(optimizer, 3), lr=0.1, steps=5)


def test_optimizers_by_name() -> None:
    job = Job(
        model=ModelSpec(preset="gpt-tiny"),
        optimizer=OptimizerSpec(name="SGD", lr=0.1, options={"momentum": 0.9}),
    )
    made = optimizer_of(job)([("a", torch.nn.Parameter(torch.zeros(2)))])
    assert isinstance(made, torch.optim.SGD)
    assert made.defaults["momentum"] == 0.9
    assert made.defaults["weight_decay"] == 0  # torch's own, not that of our AdamW
    with pytest.raises(UserError, match=r"'AdamV' is not one of torch\.optim; did you mean"):
        torch_optimizer("AdamV", {})
    with pytest.raises(UserError, match=r"optimizer SGD cannot be made: .*beta"):
        torch_optimizer("SGD", {"beta": 1})([("a", torch.nn.Parameter(torch.zeros(2)))])


def updater(ema: float | None) -> Updater:
    model = Model(layers=[lambda: torch.nn.Linear(3, 2)], loss=torch.nn.functional.mse_loss)

    class Data:
        def batch(self, step: int, microbatch: int) -> Any:
            return torch.ones(1, 3), torch.ones(1, 2)

    stage = Stage(model, range(1), data=Data(), device=torch.device("cpu"))
    return Updater(stage, lambda named: torch.optim.SGD(named, lr=0.5), ema=ema)


def test_the_average_follows_steps_that_count_and_travels_with_the_state() -> None:
    one = updater(0.75)
    expected = one.stage.masters.clone()
    gradient = torch.randn(one.stage.size)
    for step in (1, 2, 3):
        one.preview(step, gradient)  # an eager update is no step yet
        one.undo()
        one.apply(step, gradient)
        expected = expected.lerp(one.stage.masters, 0.25)
    state = {name: tensor.clone() for name, tensor in one.state().items()}
    averages = torch.cat([state[f"extra/ema/{name}"].flatten() for name in one.stage.slots])
    assert torch.equal(averages, torch.cat([v.flatten() for v in one.stage.views(expected).values()]))
    other = updater(0.75)
    other.load(state)
    one.apply(4, gradient)
    other.apply(4, gradient)
    for name, tensor in one.state().items():
        assert torch.equal(tensor, other.state()[name])
    assert not any(name.startswith("extra/ema") for name in updater(None).state())
