"""What a storm measures before its first fault: its forecast is made of these times."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from everstep.errors import EverstepError
from harness.cluster import Cluster

WARM_STEPS, BESIDE_STEPS = 20, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """A job that is submitted again and again; its losses are those of one clean run."""

    name: str
    weight: float
    job: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StormMeasures:
    cluster: Cluster
    kinds: dict[str, JobKind]
    disk: Path  # where checkpoints go

    def measure(self) -> dict[str, dict[str, float]]:
        """Before the storm, by kind of task: seconds per step alone and beside one of each other kind, and
        seconds from submission to the first step's end, with fork servers that are up and with cold ones.
        """
        rounds = [(self.kinds.values(), 2), *(([kind], WARM_STEPS) for kind in self.kinds.values())]
        found: dict[str, dict[str, float]] = {}
        for number, (kinds, steps) in enumerate(rounds):  # in the first, fork servers come up
            for kind in kinds:
                self._submit(kind, f"calm-{kind.name}-{number}", steps)
            for kind in kinds:
                told = self._finished(f"calm-{kind.name}-{number}")
                cold_s = found.get(kind.name, {"cold_s": _begin(told)})["cold_s"]
                found[kind.name] = {"alone_s": _usual(told), "begin_s": _begin(told), "cold_s": cold_s}
        again_s = self._measure_start()
        for kind in self.kinds.values():
            self._submit(kind, f"calm-{kind.name}-beside", BESIDE_STEPS)
        told = {kind: self._finished(f"calm-{kind}-beside") for kind in self.kinds}
        ends_at = min(each["rows"][-1]["at"] for each in told.values())  # until then all of them trained
        for kind, each in told.items():
            rows = [row for row in each["rows"] if row["at"] <= ends_at]
            found[kind] |= {"beside_s": _usual({"rows": rows}), "again_s": again_s}
        return found

    def _submit(self, kind: JobKind, name: str, steps: int) -> None:
        """With checkpoints, as in the storm."""
        checkpoint = {**kind.job["checkpoint"], "folder": str(self.disk / name)}
        job = kind.job | {"steps": steps, "checkpoint": checkpoint}
        self.cluster.submit(job, name, weight=kind.weight)

    def _finished(self, name: str) -> Any:
        told = self.cluster.finished(name)
        shutil.rmtree(self.disk / name, ignore_errors=True)
        return told

    def cancel(self) -> None:
        for task in self.cluster.client.get("/v1/status")["tasks"]:
            with contextlib.suppress(EverstepError):
                self.cluster.client.post(f"/v1/tasks/{task['task']}/cancel")

    def _measure_start(self) -> float:
        """While all kinds train: seconds until a killed worker takes part again."""
        names = {f"calm-{kind.name}-starts": kind for kind in self.kinds.values()}
        for name, kind in names.items():
            self.cluster.submit(kind.job | {"steps": 100_000, "checkpoint": None}, name, weight=kind.weight)
        for name, kind in names.items():  # an operator's shape: the planner changes nothing meanwhile
            self.cluster.step_reached(2, name)
            shape = {"replicas": kind.job["replicas"], "stages": kind.job["stages"]}
            self.cluster.until(
                lambda name=name, shape=shape: self.cluster.client.post(f"/v1/tasks/{name}/reshape", shape),
                f"{name} takes the operator's shape",
            )
        for name in names:
            self.cluster.all_members(name)
        took_s = self._restarted(next(iter(names)))
        for name in names:
            self.cluster.client.post(f"/v1/tasks/{name}/cancel")
            self.cluster.finished(name)
        return took_s

    def _restarted(self, name: str) -> float:
        row = self.cluster.until(lambda: next(iter(self.cluster.workers(name).values())), "a worker's pid")
        epoch, before = self.cluster.task(name)["epoch"], time.monotonic()
        os.kill(int(row["pid"]), signal.SIGKILL)
        self.cluster.until(lambda: self.cluster.task(name)["epoch"] > epoch, "the death is noticed")
        self.cluster.all_members(name)
        return time.monotonic() - before


def _usual(told: Any) -> float:
    """Of a step, without the first few. The mean, as every fifth one writes a checkpoint; but for the tenth
    that took longest, in which a task may have changed its shape.
    """
    seconds = sorted(row["seconds"] for row in told["rows"][3:] or told["rows"])
    return fmean(seconds[: max(1, len(seconds) * 9 // 10)])


def _begin(told: Any) -> float:
    return float(told["rows"][0]["at"] - told["submitted_at"])
