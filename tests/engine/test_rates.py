"""The learning rate of a step, whoever made the optimizer and the schedule: what a torch loop would have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.engine.datasets.data import dataset_of
from everstep.engine.layers.model import Model
from everstep.engine.prepare.preflight import preflight
from everstep.errors import UserError
from everstep.job.job import DataSpec, Job, ModelSpec, OptimizerSpec

STEPS = 6


def rates(
    optimizer: Any = None, schedule: Any = None, stages: int = 1, base: str = ".", **spec: Any
) -> list[float]:
    job = Job(
        model=ModelSpec(build="in-the:script"),
        data=DataSpec(build="in-the:script"),
        optimizer=OptimizerSpec(**spec),
        steps=STEPS,
        stages=stages,
        base=base,
    )
    model = Model(layers=[lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4)], loss=nn.functional.mse_loss)
    data = dataset_of(lambda step, microbatch: (torch.zeros(2, 4), torch.zeros(2, 4)))
    checked = preflight(job, model=model, data=data, optimizer=optimizer, schedule=schedule)
    return [checked.rate(step) for step in range(1, STEPS + 1)]


def in_a_torch_loop(schedule: Any, lr: float) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)
    scheduler, found = schedule(optimizer), []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step() if len(found) < STEPS else None
    return found


def test_the_rate_is_that_of_the_jobs_words() -> None:
    assert rates(lr=0.5, decay="constant", warmup=2) == [0.25, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_the_rate_of_an_own_optimizer_is_its_own() -> None:
    assert rates(lambda named: torch.optim.SGD(named, lr=0.25), decay="constant") == [0.25] * STEPS


def test_of_an_own_optimizers_groups_the_first_is_shown() -> None:
    def groups(named: Any) -> torch.optim.Optimizer:
        pairs = list(named)
        return torch.optim.AdamW(
            [
                {"params": [p for _, p in pairs if p.ndim > 1], "lr": torch.tensor(0.125)},
                {"params": [p for _, p in pairs if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=1.0,
        )

    assert rates(groups, lambda step: 1 / step, decay="constant")[:2] == [0.125, 0.0625]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    ],
    ids=["a rate of its own", "a part of the rate"],
)
def test_one_of_torchs_schedules_with_an_own_optimizer_has_the_rates_of_a_torch_loop(schedule: Any) -> None:
    found = rates(lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9), schedule)
    assert found == pytest.approx(in_a_torch_loop(schedule, 0.1))


def test_a_job_file_with_an_own_optimizer_and_a_schedule_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine_for_rates.py").write_text(
        "import torch\ndef sgd(named): return torch.optim.SGD(named, lr=0.1, momentum=0.9)\n"
    )
    options = {"max_lr": 0.1, "total_steps": STEPS}
    found = rates(
        build="mine_for_rates:sgd", schedule="OneCycleLR", schedule_options=options, base=str(tmp_path)
    )
    assert max(found) == pytest.approx(0.1, rel=0.02)


def test_an_optimizer_that_only_the_first_stage_could_make_is_refused_before_anything_starts() -> None:
    def first_only(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([dict(named)["0.weight"]], lr=0.1)

    with pytest.raises(UserError, match=r"the optimizer cannot be made for layers '1'.*KeyError: '0.weight'"):
        rates(first_only, stages=2)
