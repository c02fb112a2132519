"""The live line: what it says of a run, and that a terminal gets it."""

from __future__ import annotations

import os
import pty
import sys

import pytest

from everstep.drive.step_rows import StepRow
from everstep.engine.prepare.preflight import preflight
from everstep.job.job import DataSpec, Job, ModelSpec
from everstep.launch.local.pace import Pace, Workload, peak_named, workload_of
from everstep.launch.local.plain_lines import LiveLine

JOB = Job(
    model=ModelSpec(preset="gpt-tiny"), data=DataSpec(kind="synthetic", rows=2), steps=100, microbatches=4
)


def row(step: int, seconds: float = 2.0) -> StepRow:
    return StepRow(step=step, loss=1.5, grad_norm=1.0, seconds=seconds, epoch=1, attempt=1, at=0.0)


def test_a_line_says_loss_rates_time_left_and_incidents() -> None:
    pace = Pace(steps=100)
    pace.hear("workload", Workload(rows=8, tokens=16_384, flops=4e15, peak=4e15))
    for step in (1, 2, 3):
        pace.hear("step", row(step))
    pace.hear("incident", object())
    assert pace.words() == [
        "loss 1.5000",
        "8.19k tokens/s",
        "2e+03 TFLOP/s (50% MFU)",
        "3:14 left",
        "1 incident",
    ]


def test_rows_are_counted_where_there_are_no_tokens_and_milliseconds_where_nothing_is_known() -> None:
    pace = Pace(steps=10, workload=Workload(rows=64))
    pace.hear("step", row(10, 0.5))
    assert pace.words() == ["loss 1.5000", "128 rows/s", "0:00 left"]
    pace.workload = None
    assert pace.words()[1] == "500 ms per step"


def test_the_work_of_a_step_is_that_of_all_its_microbatches() -> None:
    checked = preflight(JOB)
    found = workload_of(JOB, checked.model, checked.batch)
    assert found.rows == 2 * JOB.microbatches_in_step
    assert found.tokens == found.rows * 64
    embedding = 256 * 64
    multiplied = checked.parameters - 0.95 * embedding
    assert found.flops == pytest.approx(6 * multiplied * found.tokens, rel=0.01)
    assert found.peak is None  # of a CPU it is not known


@pytest.mark.parametrize(
    ("names", "peak"),
    [
        (["NVIDIA H200"] * 2, 2 * 989e12),
        (["NVIDIA A100-SXM4-80GB"], 312e12),
        (["NVIDIA H200 MIG 1g.18gb"], None),
        (["NVIDIA H100 PCIe"], 756e12),
        (["NVIDIA H100 NVL"], 835e12),
        (["NVIDIA H100 80GB HBM3"], 989e12),
        (["NVIDIA H200 NVL"], None),  # slower than the other one, and by how much we have not found
        (["NVIDIA GeForce RTX 4090"], 165.2e12),
        (["NVIDIA GeForce RTX 4090 Laptop GPU"], None),
        (["NVIDIA GeForce RTX 4090 D"], None),
        (["NVIDIA L40"], None),  # neither an L4 nor an L40S
        (["NVIDIA RTX A1000"], None),
        (["NVIDIA H200", "GeForce Unheard Of"], None),
        ([], None),
    ],
)
def test_the_peak_is_known_of_whole_gpus_that_are_known(names: list[str], peak: float | None) -> None:
    assert peak_named(names) == peak


def test_a_terminal_sees_a_spinner_then_the_line_and_incidents_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, other = pty.openpty()
    try:
        with os.fdopen(other, "w", encoding="utf-8") as screen:
            monkeypatch.setattr(sys, "stderr", screen)
            with LiveLine(JOB) as line:
                assert line.text().endswith("starting 1 worker")
                line("step", row(50))
                line("evaluation", (50, {"loss": 0.25}))
                shown = os.read(terminal, 4096).decode()
            shown += os.read(terminal, 4096).decode()
    finally:
        os.close(terminal)
    assert "evaluation after step 50: loss 0.250000\r\n" in shown
    assert shown.rstrip().endswith("██████████░░░░░░░░░░ 50/100  loss 1.5000  2000 ms per step  1:40 left")
