"""Callbacks that are ready: early stopping, CSV and JSONL files, TensorBoard, Weights & Biases, MLflow.

All of them log a step once, whatever fails: see `callbacks`. Other packages are imported when first used.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from everstep.errors import UserError


class EarlyStop:
    """Stops once a metric of the evaluation has not improved for `patience` evaluations."""

    def __init__(
        self,
        *,
        metric: str = "loss",
        patience: int = 3,
        least_change: float = 0.0,
        larger_is_better: bool = False,
    ) -> None:
        if patience < 1:
            raise UserError(f"EarlyStop has patience={patience}; it must be at least 1.")
        self.metric, self.patience, self.least_change = metric, patience, least_change
        self._sign = -1.0 if larger_is_better else 1.0
        self._best, self._best_step, self._since = math.inf, 0, 0

    def on_start(self, run: Mapping[str, Any]) -> None:
        """What earlier starts have found counts."""
        for step, values in sorted(run["evaluations"].items()):
            if self.metric in values:
                self.on_eval(step, values)

    def on_eval(self, step: int, values: Mapping[str, float]) -> str | None:
        if self.metric not in values:
            raise UserError(f"EarlyStop looks at {self.metric!r}; the evaluation has {', '.join(values)}.")
        value = self._sign * values[self.metric]
        if value < self._best - self.least_change:
            self._best, self._best_step, self._since = value, step, 0
            return None
        self._since += 1
        if self._since < self.patience:
            return None
        best = f"{self._sign * self._best:.6g} (step {self._best_step})"
        times = "1 evaluation" if self._since == 1 else f"{self._since} evaluations"
        return f"{self.metric} has not improved on {best} for {times}"


class CsvLog:
    """One line per step in a CSV file; what an earlier start has written stays."""

    FIELDS = ("step", "loss", "grad_norm", "lr", "seconds")

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def on_step(self, row: Mapping[str, Any]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self.path.is_file() or self.path.stat().st_size == 0
            self._file = self.path.open("a", newline="", encoding="utf-8")
            if is_new:
                csv.writer(self._file).writerow(self.FIELDS)
        csv.writer(self._file).writerow([row.get(name, "") for name in self.FIELDS])
        self._file.flush()

    def on_end(self, result: Any) -> None:
        if self._file is not None:
            self._file.close()


class JsonlLog:
    """One JSON object per step, evaluation, checkpoint and incident."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def on_step(self, row: Mapping[str, Any]) -> None:
        self._write({"kind": "step", **row})

    def on_eval(self, step: int, values: Mapping[str, float]) -> None:
        self._write({"kind": "evaluation", "step": step, **values})

    def on_checkpoint(self, step: int, folder: str) -> None:
        self._write({"kind": "checkpoint", "step": step, "folder": folder})

    def on_incident(self, incident: Mapping[str, Any]) -> None:
        self._write({"kind": "incident", **incident})

    def _write(self, line: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class TensorBoardLog:
    """TensorBoard, by torch's own writer; a later start appends."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._writer: Any = None

    def on_start(self, run: Mapping[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise UserError("TensorBoardLog needs tensorboard; pip install tensorboard.") from None
        try:
            self._writer = SummaryWriter(self.folder)
        except OSError as error:
            raise UserError(f"TensorBoardLog cannot write to {self.folder}: {error.strerror}.") from None

    def on_step(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(f"train/{name}", value, row["step"])
        self._writer.flush()

    def on_eval(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"eval/{name}", value, step)
        self._writer.flush()

    def on_incident(self, incident: Mapping[str, Any]) -> None:
        self._writer.add_text("incidents", f"{incident['what']}: {incident['label']}", incident["step"])
        self._writer.flush()

    def on_end(self, result: Any) -> None:
        self._writer.close()


class WandbLog:
    """Weights & Biases. Arguments go to `wandb.init`; an `id` with `resume="allow"` continues a run."""

    def __init__(self, **init: Any) -> None:
        self.init = init
        self._run: Any = None

    def on_start(self, run: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise UserError("WandbLog needs wandb; pip install wandb.") from None
        self._run = wandb.init(**self.init)

    def on_step(self, row: Mapping[str, Any]) -> None:
        self._run.log(
            {f"train/{name}": value for name, value in row.items() if name != "step"}, step=row["step"]
        )

    def on_eval(self, step: int, values: Mapping[str, float]) -> None:
        # The evaluation of a step is known one step later, and wandb takes steps in order only.
        self._run.log({f"eval/{name}": value for name, value in values.items()} | {"eval/step": step})

    def on_incident(self, incident: Mapping[str, Any]) -> None:
        self._run.log({"incidents": incident["number"]})

    def on_end(self, result: Any) -> None:
        self._run.finish(exit_code=0 if result is not None else 1)


class MlflowLog:
    """MLflow, into `mlflow`'s own tracking place. Arguments go to `mlflow.start_run`."""

    def __init__(
        self, *, tracking_uri: str | None = None, experiment: str | None = None, **start: Any
    ) -> None:
        self.tracking_uri, self.experiment, self.start = tracking_uri, experiment, start
        self._mlflow: Any = None

    def on_start(self, run: Mapping[str, Any]) -> None:
        try:
            import mlflow
        except ModuleNotFoundError:
            raise UserError("MlflowLog needs mlflow; pip install mlflow-skinny.") from None
        self._mlflow = mlflow
        if self.tracking_uri is not None:
            mlflow.set_tracking_uri(self.tracking_uri)
        if self.experiment is not None:
            mlflow.set_experiment(self.experiment)
        mlflow.start_run(**self.start)

    def on_step(self, row: Mapping[str, Any]) -> None:
        self._mlflow.log_metrics({n: v for n, v in row.items() if n != "step"}, step=row["step"])

    def on_eval(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({f"eval_{name}": value for name, value in values.items()}, step=step)

    def on_incident(self, incident: Mapping[str, Any]) -> None:
        self._mlflow.log_metric("incidents", incident["number"], step=incident["step"])

    def on_end(self, result: Any) -> None:
        self._mlflow.end_run("FINISHED" if result is not None else "FAILED")
