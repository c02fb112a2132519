"""Callbacks and ready-made loggers, without workers."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import everstep
from everstep.drive.step_rows import StepRow
from everstep.engine.datasets.order import RowOrder
from everstep.errors import UserError
from everstep.job.job import CheckpointSpec, Job, ModelSpec
from everstep.launch.local.callbacks import CallbackWatcher, checked
from everstep.launch.local.history import History, settings_of
from everstep.launch.local.outcome import Outcome


def row(step: int, loss: float = 1.0) -> StepRow:
    return StepRow(step=step, loss=loss, grad_norm=2.0, seconds=0.5, epoch=1, attempt=0, at=0.0)


def job(folder: Path | None = None) -> Job:
    spec = None if folder is None else CheckpointSpec(folder=str(folder))
    return Job(model=ModelSpec(preset="gpt-tiny"), steps=10, checkpoint=spec)


def watcher(callbacks: list[Any], folder: Path | None = None, resumed_from: int = 0) -> CallbackWatcher:
    made = CallbackWatcher(job(folder), checked(callbacks), History.of(job(folder)), lambda kind, what: None)
    made._history.begin(resumed_from)
    return made


def test_a_step_is_told_once_whatever_is_done_again(tmp_path: Path) -> None:
    seen: list[int] = []
    told = watcher([lambda row: seen.append(row["step"])], tmp_path)
    for step in (1, 2, 3, 2, 3, 4):  # back to step 1 and again
        told("step", row(step))
    told.end(None)
    again = watcher([lambda row: seen.append(row["step"])], tmp_path, resumed_from=2)
    for step in (3, 4, 5):
        again("step", row(step))
    assert seen == [1, 2, 3, 4, 5]


def test_losses_of_earlier_starts_are_in_the_result_also_behind_a_torn_line(tmp_path: Path) -> None:
    told = watcher([], tmp_path)
    for step in (1, 2, 3):
        told("step", row(step, loss=step / 7))
    told.end(None)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    history = History.of(job(tmp_path))
    outcome = Outcome(resumed_from=2)
    history.add_earlier(outcome)
    assert outcome.all_losses() == {1: 1 / 7, 2: 2 / 7}


def test_another_run_in_the_folder_starts_another_history(tmp_path: Path) -> None:
    first = watcher([], tmp_path)
    first("step", row(1))
    first.end(None)
    seen: list[int] = []
    watcher([lambda row: seen.append(row["step"])], tmp_path)("step", row(1))
    assert seen == [1]
    assert (tmp_path / "history.before.jsonl").is_file()


def test_a_callback_that_raises_is_dropped_and_the_others_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    class Bad:
        def on_step(self, row: Any) -> None:
            raise KeyError("loss2")

    seen: list[int] = []
    told = watcher([Bad(), lambda row: seen.append(row["step"])])
    told("step", row(1))
    told("step", row(2))
    assert seen == [1, 2]
    said = capsys.readouterr().err
    assert said.count("callback Bad.on_step raised KeyError: 'loss2'") == 1
    assert "training continues without Bad" in said


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(UserError, match=r"has the class CsvLog; give an object: CsvLog\(...\)"):
        checked([everstep.CsvLog])
    with pytest.raises(UserError, match="callbacks has a int, which has none of on_start, on_step"):
        checked([7])


def test_early_stop_counts_evaluations_without_progress() -> None:
    stop = everstep.EarlyStop(patience=2, least_change=0.1)
    answers = [
        stop.on_eval(step, {"loss": loss}) for step, loss in enumerate((3.0, 2.0, 1.95, 1.5, 1.6, 1.45))
    ]
    assert answers[:-1] == [None] * 5
    assert answers[-1] == "loss has not improved on 1.5 (step 3) for 2 evaluations"
    best = everstep.EarlyStop(metric="accuracy", patience=1, larger_is_better=True)
    assert [bool(best.on_eval(0, {"accuracy": a})) for a in (0.1, 0.2, 0.2)] == [False, False, True]
    with pytest.raises(UserError, match="looks at 'f1'; the evaluation has loss"):
        everstep.EarlyStop(metric="f1").on_eval(1, {"loss": 1.0})


def test_early_stop_counts_what_earlier_starts_have_found() -> None:
    """Its patience began again with every start."""
    stop = everstep.EarlyStop(patience=2)
    stop.on_start({"steps": 9, "resumed_from": 4, "evaluations": {4: {"loss": 2.5}, 2: {"loss": 2.0}}})
    assert stop.on_eval(6, {"loss": 2.1}) == "loss has not improved on 2 (step 2) for 2 evaluations"


def test_files(tmp_path: Path) -> None:
    callbacks = [everstep.CsvLog(tmp_path / "a" / "log.csv"), everstep.JsonlLog(tmp_path / "log.jsonl")]
    told = watcher(callbacks)
    told("step", row(1))
    told("evaluation", (1, {"loss": 0.5}))
    told._task = SimpleNamespace(outcome=Outcome())  # type: ignore[assignment]
    told.end(None)
    lines = list(csv.DictReader((tmp_path / "a" / "log.csv").open()))
    assert [(line["step"], line["loss"]) for line in lines] == [("1", "1.0")]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert kinds == ["step", "evaluation"]


@pytest.mark.slow
def test_tensorboard_reads_back_what_was_logged_also_by_a_later_start(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resumed_from, steps in ((0, (1, 2)), (2, (3,))):
        told = watcher([everstep.TensorBoardLog(tmp_path / "runs")], tmp_path, resumed_from=resumed_from)
        told._begin(SimpleNamespace(outcome=Outcome(resumed_from=resumed_from)))
        for step in steps:
            told("step", row(step, loss=1 / step))
        told("evaluation", (steps[-1], {"accuracy": 0.5}))
        told.end(None)
    found = events.EventAccumulator(str(tmp_path / "runs"))
    found.Reload()
    losses = [(one.step, pytest.approx(one.value)) for one in found.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert [one.step for one in found.Scalars("eval/accuracy")] == [2, 3]


def test_wandb_gets_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    log = everstep.WandbLog(project="test", mode="offline", dir=str(tmp_path))
    told = watcher([log])
    told._tell("on_start", {"steps": 3})
    for step in (1, 2, 1, 2, 3):
        told("step", row(step, loss=1 / step))
    told("evaluation", (3, {"loss": 0.25}))
    summary = dict(log._run.summary)
    told._tell("on_end", None)
    assert summary["train/loss"] == pytest.approx(1 / 3)
    assert summary["eval/loss"] == 0.25
    assert summary["_step"] >= 3
    written = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(written) == 1
    assert wandb.run is None


@pytest.mark.slow
def test_mlflow_gets_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    mlflow = pytest.importorskip("mlflow")
    log = everstep.MlflowLog(tracking_uri=f"file://{tmp_path}/runs", experiment="test")
    told = watcher([log])
    told._tell("on_start", {"steps": 3})
    run = mlflow.active_run().info.run_id
    for step in (1, 2, 1, 2, 3):
        told("step", row(step, loss=1 / step))
    told("evaluation", (2, {"loss": 0.25}))
    told._tell("on_end", None)
    client = mlflow.MlflowClient(f"file://{tmp_path}/runs")
    assert [(m.step, m.value) for m in client.get_metric_history(run, "loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1 / 3),
    ]
    assert [m.step for m in client.get_metric_history(run, "eval_loss")] == [2]


def test_what_a_callback_does_to_its_row_no_other_one_sees(tmp_path: Path) -> None:
    seen: list[float] = []
    told = watcher([lambda row: row.clear(), lambda row: seen.append(row["loss"])], tmp_path)
    told("step", row(1, loss=0.5))
    told.end(None)
    assert seen == [0.5]
    assert History.of(job(tmp_path)).steps[1]["loss"] == 0.5


def test_a_function_that_raises_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def mine(row: Any) -> None:
        raise ValueError("no such panel")

    watcher([mine])("step", row(1))
    said = capsys.readouterr().err
    assert "callback mine raised ValueError: no such panel" in said
    assert "training continues without mine" in said


def test_sys_exit_in_a_callback_ends_the_run_between_two_turns() -> None:
    """Raised where an event is half handled, it would leave a run that never ends."""
    seen: list[int] = []

    def leave(row: Any) -> None:
        sys.exit(3)

    told = watcher([leave, lambda row: seen.append(row["step"])])
    told("step", row(1))
    assert seen == [1]
    with pytest.raises(SystemExit) as left:
        told("tick", None)
    assert left.value.code == 3
    told("tick", None)  # the turns of the ending


def test_a_start_that_goes_on_with_other_settings_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, now = (
        settings_of(replace(job(tmp_path), seed=seed, stages=s), RowOrder(size=r, rows=2, microbatches=4))
        for seed, s, r in CHANGED
    )
    for settings, resumed_from in ((before, 0), (before, 3), (now, 3), (now, 3)):
        history = History.of(job(tmp_path))
        history.settings = settings
        history.begin(resumed_from)
        history.close()
    said = capsys.readouterr().err
    assert said == "resumes with other settings than before: seed 0 -> 5, rows of data 10 -> 31\n"


@pytest.mark.parametrize("changed", [False, True])
def test_steps_that_are_done_again_with_other_settings_are_logged_again(
    tmp_path: Path, changed: bool
) -> None:
    """An earlier start got to step 4 and left a checkpoint of step 2."""
    history = History.of(job(tmp_path))
    history.begin(0)
    assert all(history.step(row(step).document()) for step in (1, 2, 3, 4))
    history.evaluated(4, {"loss": 1.0})
    history.close()
    again = History.of(job(tmp_path))
    again.settings = settings_of(replace(job(tmp_path), seed=5 if changed else 0))
    again.begin(2)
    assert [again.step(row(step, loss=9.0).document()) for step in (3, 4, 5)] == [changed, changed, True]
    assert again.evaluated(4, {"loss": 2.0}) is changed
    again.close()
    assert History.of(job(tmp_path)).steps[3]["loss"] == (9.0 if changed else row(3).document()["loss"])


CHANGED = ((0, 1, 10), (5, 2, 31))  # seed, stages (which change nothing that is learnt), rows
