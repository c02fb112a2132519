"""What people give wrongly to `everstep.train`: one sentence each, with the fix, before a worker starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import everstep
from everstep.errors import UserError
from everstep.launch.local import api
from everstep.launch.local.arguments import job_of_call


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def batch(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + microbatch))
    return x, x


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x), x


class Opaque(Pair):
    def forward(self, x: Tensor) -> Any:
        return {"x": self.inner(x), "what": object()}


class WantsMask(Pair):
    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return self.inner(x)


ONE, WEIGHT = nn.Linear(4, 4), nn.Parameter(torch.zeros(4, 4))


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = WEIGHT

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Made:
    """Made in its own test: the first optimizer of a process loads the compiler, which takes seconds."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(linear().parameters(), lr=0.1)


FIVE = [(torch.zeros(4), torch.zeros(4))] * 5

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"model": [linear, Pair]}, "return one tensor, or give a loss that takes them all."),
    (
        {"model": [Pair, linear]},
        "let '1' take all of it as one argument, or let the layer before give one tensor.",
    ),
    ({"model": [Opaque, linear]}, "a layer gives a tensor, or tuples, lists and dicts of tensors."),
    ({"model": [linear, WantsMask]}, "a layer gets one argument, which is all that the layer before gives."),
    (
        {"model": nn.Sequential(nn.Linear(4, 4))},
        "give its layers in order, each as a function that builds it",
    ),
    ({"model": [nn.Linear(4, 4)]}, "give a factory such as lambda: Linear(...)"),
    ({"model": [nn.Linear]}, "give a function without arguments: lambda: Linear(...)."),
    ({"model": [lambda: ONE, lambda: ONE]}, "are one module; build a new one in each function"),
    ({"model": [Sharing, Sharing]}, "give each its own, and Model(tied="),
    ({"model": [linear, lambda: nn.BatchNorm1d(4)]}, "use LayerNorm, RMSNorm or track_running_stats=False."),
    ({"data": [1, 2, 3]}, "give everstep.rows(data, rows=...)"),
    ({"data": "train.bin"}, "give everstep.tokens('train.bin') for a file of tokens"),
    ({"data": torch.utils.data.DataLoader(torch.zeros(4, 4))}, "or everstep.stream(data)."),  # type: ignore[arg-type]
    ({"data": lambda step, m: (np.zeros((2, 4)),) * 2}, "turn arrays into tensors with torch.from_numpy."),
    (
        {"data": lambda step, m: (torch.zeros(2, 4).long(), torch.zeros(2, 4))},
        "use .float(), or an nn.Embedding",
    ),
    ({"data": lambda step: 1}, "it is called with (step, microbatch)."),
    ({"data": lambda step, m: (torch.randn(2, 4),) * 2}, "make it a function of its arguments and the seed"),
    ({"loss": "mse"}, "give a function of (output, targets), such as torch.nn.functional.mse_loss."),
    (
        {"loss": lambda output, targets: output},
        "a tensor of one number, such as a mean, or (sum, weight).",
    ),
    ({"optimizer": Made(sgd)}, "give a function: optimizer=lambda named: torch.optim.SGD(named, lr=...)."),
    ({"optimizer": "LBFGS"}, "LBFGS needs a closure, which a pipeline does not do; use another one"),
    ({"optimizer": "SparseAdam"}, "SparseAdam needs sparse gradients, which a pipeline does not do; use"),
    ({"optimizer": "Muon"}, "optimizer Muon cannot be made: Muon only supports 2D parameters"),
    ({"optimizer": "AdmW"}, "did you mean 'AdamW'?"),
    ({"optimizer": torch.optim.SGD, "lr": 0.5}, "set it there: optimizer=lambda named:"),
    (
        {"schedule": Made(lambda: torch.optim.lr_scheduler.StepLR(sgd(), 1))},
        "give a function: schedule=lambda optimizer:",
    ),
    ({"schedule": lambda step: 2 - step}, "schedule(3) is -1.0; the rate is multiplied with it"),
    ({"schedule": lambda step: [1.0, 0.5][step - 1]}, "schedule(3) raised IndexError"),
    ({"loss": nn.MSELoss}, "give an object: MSELoss(...)."),
    ({"epochs": 2, "data": everstep.rows(FIVE, rows=2)}, "steps and epochs are both given"),
    (
        {"eval_data": everstep.rows(FIVE, rows=8), "eval_every": 1},
        "eval_data has 5 rows, and a batch of it 8, so some would count twice; give it rows=5 or fewer.",
    ),
    ({"clip": lambda step: 1.0}, 'name the function in a file of its own as "module:function".'),
    ({"checkpoint": {"foler": "x"}}, "did you mean 'folder'? Its keys: folder, interval, keep, start_over."),
    ({"presicion": "bf16"}, "did you mean 'precision'?"),
    ({"learning_rate": 0.1}, "here it is called lr."),
    ({"gpus": 2}, 'here it is called replicas and stages, with device="cuda".'),
    ({"seed": "a"}, "seed is 'a'; it must be a whole number."),
    ({"checkpoint": 3}, 'checkpoint is 3; give a folder, such as checkpoint="checkpoints".'),
    ({"checkpoint": ""}, "checkpoint is ''; give a folder"),
    ({"model": lambda: None}, "model is a function; give its layers in order, as a list of functions"),
    ({"model": nn.Linear}, "model is the class Linear; give its layers"),
    ({"loss": lambda output, targets: 1.0}, "the loss gives a float; it must be a tensor of one number"),
    ({"callbacks": [everstep.EarlyStop]}, "give an object: EarlyStop(...)."),
    ({"metrics": {"error": batch}}, "need eval_data; give the data to evaluate on."),
    ({"eval_data": lambda number: batch(1, number)}, "in the evaluation, data batch(1, 0) raised TypeError"),
    ({"eval_data": lambda step, m: batch(step, m // (m < 7))}, "data batch(1, 7) raised ZeroDivisionError"),
    (
        {"eval_data": lambda step, m: {"x": batch(step, m)[0]}},
        "in the evaluation, layer '0' cannot take what the data gives, a dict with the keys x",
    ),
    (
        {"eval_data": batch, "metrics": {"error": lambda output, targets: output[0, 0, 0, 0]}},
        "in the evaluation, the metric 'error' cannot take what layer '1' gives, a tensor of shape (2, 4)",
    ),
    (
        {"eval_data": batch, "metrics": {"error": lambda output, targets: (output - targets).abs()}},
        "the metric 'error' gives a tensor of shape (2, 4); it must give one number",
    ),
    ({"eval_data": batch, "metrics": {"error": lambda output, targets: "low"}}, "'error' gives a str; it"),
    ({"eval_data": everstep.stream(lambda: map(batch, range(9), range(9)))}, "length; give eval_batches."),
    (
        {"eval_data": everstep.stream(lambda: map(batch, range(3), range(3))), "eval_batches": 4},
        "in the evaluation, the stream ended after 3 batches; give an evaluation 3 batches",
    ),
]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: everstep.rows(FIVE, batch_size=2), "of everstep.rows; here it is called rows."),
        (lambda: everstep.table("x", batch_size=2), "of everstep.table; here it is called rows."),
        (lambda: everstep.tokens("x.bin", block_size=8), "here it is called sequence."),
        (lambda: everstep.rows(FIVE, num_workers=2), "called load_ahead, an argument of everstep.train."),
        (lambda: everstep.stream(FIVE, block_size=2), "everstep.stream; its keys: collate, "),
        (lambda: everstep.rows(FIVE, shufle=True), "did you mean 'shuffle'?"),
        (lambda: everstep.rows(FIVE, 8), "takes one argument without a name; name the others: rows,"),
        (lambda: everstep.tokens("x.bin"), "everstep.tokens needs sequence; its arguments: files,"),
        (lambda: everstep.blend(FIVE, FIVE), "everstep.blend needs weights; its arguments: data, weights."),
    ],
)
def test_an_argument_that_data_does_not_take_is_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(UserError) as told:
        call()
    assert sentence in str(told.value)


@pytest.mark.parametrize(("given", "fix"), MISTAKES, ids=[fix for _, fix in MISTAKES])
def test_a_mistake_is_one_sentence_with_its_fix(
    given: dict[str, Any], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "launch", api.LocalLaunch(script=[__file__]))
    monkeypatch.setattr(api, "run_with_callbacks", lambda *args, **more: pytest.fail("workers were started"))
    right = {
        "model": [linear, linear],
        "data": batch,
        "loss": nn.functional.mse_loss,
        "steps": 3,
        "page": False,
    }
    given = {key: value.make() if isinstance(value, Made) else value for key, value in given.items()}
    with pytest.raises(UserError) as told:
        everstep.train(**{**right, **given})
    assert fix in str(told.value)
    assert "\n" not in str(told.value)


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(UserError, match=r"named arguments, and needs model and data: everstep.train\(model="):
        everstep.train([linear], batch)


def test_numbers_of_numpy_are_numbers() -> None:
    shape = {"replicas": np.int32(2), "stages": 1, "microbatches": 2, "steps": np.int64(4)}
    job = job_of_call(shape, {"lr": np.float32(0.5), "seed": np.int64(3)}, {})
    assert (job.steps, job.replicas, job.optimizer.lr, job.seed) == (4, 2, 0.5, 3)
    assert json.dumps(job.to_dict())


def test_a_script_on_standard_input_is_refused_before_workers_start() -> None:
    """`python < FILE` names itself "<stdin>", which workers looked for as a file."""
    script = "import everstep\neverstep.train(model=[dict], data=lambda step, microbatch: (0, 0), steps=1)\n"
    ended = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60)
    assert "outside a script" in ended.stderr.splitlines()[-1]
