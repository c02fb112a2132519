"""`everstep.fit` trains a LightningModule as Lightning's own Trainer does, and recovers from a kill."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everstep
from everstep.drive.step_rows import means
from everstep.engine.layers.model import in_training
from everstep.engine.lightning.hooks import StepCalls, loss_of
from everstep.engine.lightning.model import LightningProgram, WholeStep
from everstep.engine.lightning.module_optimizers import optimizer_here, rate_from
from everstep.engine.stage.evaluation import added, score
from everstep.errors import UserError
from everstep.launch.local import api
from everstep.launch.local import lightning as fitting
from everstep.launch.local.lightning import _tried
from everstep.launch.local.report import evaluation_line

SCRIPT = Path(__file__).with_name("lit.py")
pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="lightning is not installed (pip install 'everstep[lightning]')"
)


@pytest.fixture(scope="module")
def lit() -> Any:
    return import_module("tests.launch.lit_modules")


def run(*arguments: str, kill: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    if kill is not None:
        command[1:1] = ["-m", "everstep.cli.main", "run", "--no-web", "--kill", kill]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def trained(path: Path, *arguments: str, kill: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    ended = run(str(path), *arguments, kill=kill)
    assert ended.returncode == 0, ended.stderr[-3000:]
    line = next(line for line in ended.stdout.splitlines() if line.startswith("{"))
    return json.loads(line), torch.load(path)


@pytest.mark.slow
def test_a_module_trains_as_with_lightnings_trainer_and_a_kill_changes_no_bit(tmp_path: Path) -> None:
    plain, theirs = trained(tmp_path / "plain", "--plain")
    clean, ours = trained(tmp_path / "clean")
    killed, healed = trained(tmp_path / "killed", kill="stage=0,replica=0,step=3,op=F1")
    assert clean["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert clean["scores"]["val_loss"] == pytest.approx(plain["scores"]["val_loss"], rel=1e-5)
    assert clean["scores"]["hits"] == pytest.approx(plain["scores"]["hits"], abs=1e-6)
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, atol=1e-5), name
    assert killed["incidents"] >= 1
    assert killed["losses"] == clean["losses"]
    assert killed["scores"] == clean["scores"]
    assert all(torch.equal(healed[name], ours[name]) for name in ours)


@pytest.mark.parametrize(
    ("given", "arguments", "sentence"),
    [
        (lambda lit: lit.Cycling(), {}, "the scheduler OneCycleLR changes betas of the optimizer"),
        (
            lambda lit: lit.Normed(lambda: nn.BatchNorm1d(8)),
            {},
            "layer 'Normed' keeps running statistics (BatchNorm1d in blocks.0)",
        ),
        (
            lambda lit: lit.Normed(lit.spectral),
            {},
            "layer 'Normed' changes its buffer 'blocks.0.parametrizations.weight.0._u'",
        ),
        (lambda lit: lit.Manual(), {}, "Manual has automatic_optimization = False"),
        (lambda lit: lit.Hooked(), {}, "Hooked has the hook on_after_backward"),
        (lambda lit: lit.Silent(), {}, "training_step returned nothing; it must return the loss"),
        (lambda lit: lit.Asking(), {}, "asks its trainer for 'global_step'"),
        (lambda lit: lit.Plateau(), {}, "ReduceLROnPlateau, which follows a metric and not the step"),
        (lambda lit: lit.Several(), {}, "gives several optimizers"),
        (
            lambda lit: lit.Small(),
            {"stages": 2},
            "stages is not an argument of everstep.fit; here it is 1: a module is trained whole",
        ),
        (lambda lit: lit.Small(), {"epochs": 2}, "needs steps or epochs, one of them"),
        (
            lambda lit: lit.Small(),
            {"max_epochs": 2},
            "not an argument of everstep.fit; here it is called epochs.",
        ),
        (
            lambda lit: lit.Small(),
            {"devices": 2},
            "here it is called replicas and stages.",
        ),
        (
            lambda lit: lit.Small(),
            {"optimizer": "SGD"},
            "optimizer is not an argument of everstep.fit; here it is configure_optimizers.",
        ),
        (lambda lit: nn.Linear(1, 1), {}, "was given a Linear; it takes a LightningModule"),
        (lambda lit: lit.Small, {}, "was given the class Small; give a module"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_said_in_one_sentence(
    lit: Any, given: Callable[[Any], Any], arguments: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "launch", api.LocalLaunch(script=[__file__]))
    monkeypatch.setattr(api, "run_with_callbacks", lambda *args, **more: pytest.fail("workers were started"))
    loader = DataLoader(torch.randn(64, 4), batch_size=4)
    with pytest.raises(UserError) as told:
        everstep.fit(given(lit), loader, **{"steps": 2, "page": False, **arguments})
    assert sentence in str(told.value)
    assert str(told.value).count("\n") == 0


def test_a_cycle_of_the_rate_alone_leaves_the_momentum_as_it_was_given(lit: Any) -> None:
    module = lit.Cycling(cycle_momentum=False)
    rate = rate_from(module, 8, None)
    assert rate is not None
    assert len({rate(step) for step in range(1, 9)}) == 8
    made = optimizer_here(module, list(module.named_parameters()), 8)
    assert made.param_groups[0]["betas"] == (0.8, 0.9)


def test_frozen_parts_in_eval_stay_there_on_workers_and_in_the_launcher(lit: Any) -> None:
    module = lit.Small()
    module.blocks[0].requires_grad_(False).eval()
    with _tried(module):
        program = LightningProgram(module, Path("unused"), 4)
        whole = in_training(copy.deepcopy(module))
        step = WholeStep(whole, torch.device("cpu"), 4)
        modes = [part.training for part in whole.blocks]
        assert modes == [False, True]
        step({"batch": torch.ones(2, 4)}, lambda index, function, *args, **kwargs: function(*args, **kwargs))
        assert [part.training for part in whole.blocks] == modes
    assert list(program.model().layers) == ["module"]
    assert [part.training for part in module.blocks] == modes


def test_batches_steps_and_validation_are_lightnings_by_default(
    lit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """256 rows in batches of 16 on two replicas were 4 steps in 2 epochs; under DDP they are 16."""
    given: dict[str, Any] = {}

    class Trained(Exception):
        pass

    def train(program: Any, data: Any, tested: Any, names: Any, in_epoch: Any, settings: Any) -> Any:
        given.update(settings, names=names, in_epoch=in_epoch)
        raise Trained

    monkeypatch.setattr(fitting, "_train", train)
    monkeypatch.setattr(api, "launch", api.LocalLaunch(script=[str(tmp_path / "train.py")]))
    loader = DataLoader(TensorDataset(torch.randn(256, 4)), batch_size=16)
    with pytest.raises(Trained):
        everstep.fit(lit.Scored(), loader, loader, replicas=2, epochs=2)
    assert (given["steps"], given["in_epoch"], given["eval_every"]) == (16, 8, 8)
    assert (given["replicas"], given["microbatches"]) == (2, 1)
    assert given["names"] == ("val_acc",)
    assert "16 steps of 2 batches of the loader each" in capsys.readouterr().err


def test_a_module_that_logs_no_loss_has_none_in_its_evaluations(lit: Any) -> None:
    """`loss: nan` stood in result.evaluations, in files and on the page."""
    output = StepCalls(lit.Scored(), 4).evaluate([torch.ones(2, 4)])
    logged, targets = output["logged"]["val_acc"], torch.ones(2)
    scores = [score("loss", loss_of(output, None), targets), score("val_acc", logged, targets)]
    found = means(("loss", "val_acc"), [added([scores, scores])])
    assert found == {"val_acc": 1.0}
    assert evaluation_line(8, found) == "evaluation after step 8: val_acc 1.000000"
    assert "loss nan" in evaluation_line(8, {"loss": float("nan"), "val_acc": 0.5}), "a real one is said"
