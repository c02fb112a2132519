"""Scalars of a run as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.protocol.incidents import Evidence, Incident, IncidentState, Remedy, Verdict
from everstep.protocol.ops import Worker
from everstep.server.scalars import RunScalars
from everstep.server.tfevents import crc32c


def row(step: int, loss: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "grad_norm": 0.5, "seconds": 0.1, "epoch": 1, "attempt": 1, **more}


def incident() -> Incident:
    return Incident(
        number=3,
        workers=[Worker(0, 1)],
        what="killed by SIGKILL",
        step=2,
        evidence_at=10.0,
        resumed_at=10.25,
        state=IncidentState.CLOSED,
        evidence=[Evidence(at=10.0, source="exit", text="worker 0:1 is gone")],
        verdict=Verdict(at=10.0, kind="crash", severity=2, because="it was killed"),
        remedies=[
            Remedy(at=10.0, what="restart the worker", because="first time", outcome="training resumed")
        ],
    )


@pytest.mark.parametrize(
    ("data", "checksum"),
    # RFC 3720, appendix B.4
    [(bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)],
)
def test_checksums_are_those_of_the_standard(data: bytes, checksum: int) -> None:
    assert crc32c(data) == checksum


def read(folder: Path) -> Any:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    run = RunScalars(tmp_path)
    losses = {step: 5.0 / step for step in range(1, 301)}
    for step, loss in losses.items():
        run.step(row(step, loss), None, 1000.0 + step)
    run.incident(incident(), 1002.5)
    run.close()
    found = read(tmp_path)
    told = found.Scalars("train/loss")
    assert [event.step for event in told] == list(losses)
    assert [event.value for event in told] == pytest.approx(list(losses.values()), rel=1e-7)
    assert told[0].wall_time == 1001.0
    assert {"pace/step_seconds", "train/grad_norm", "health/epoch"} <= set(found.Tags()["scalars"])
    (event,) = found.Tensors("incident/3")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 2
    assert "verdict: SEV2 crash, because it was killed" in text
    assert "closed after 250 ms" in text
    assert found.SummaryMetadata("incident/3").plugin_data.plugin_name == "text"


def test_steps_done_again_after_a_restore_replace_the_first_ones(tmp_path: Path) -> None:
    run = RunScalars(tmp_path)
    for step in (1, 2, 3, 4):
        run.step(row(step, 1.0), None, step)
    for step in (3, 4, 5):
        run.step(row(step, 2.0), None, 10 + step)
    run.close()
    told = read(tmp_path).Scalars("train/loss")
    assert [(event.step, event.value) for event in told] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_a_loss_that_is_no_number_is_left_out_and_infinity_is_the_largest_number(tmp_path: Path) -> None:
    run = RunScalars(tmp_path)
    run.step(row(1, float("nan"), grad_norm=float("inf")), None, 1.0)
    run.close()
    found = read(tmp_path)
    assert "train/loss" not in found.Tags()["scalars"]
    assert found.Scalars("train/grad_norm")[0].value > 3e38


def test_a_folder_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    said: list[str] = []
    run = RunScalars(tmp_path / "taken", say=said.append)
    for step in (1, 2, 3):
        run.step(row(step, 1.0), None, 1.0)
    run.close()
    assert len(said) == 1


def test_tensorboard_has_the_scores(tmp_path: Path) -> None:
    run = RunScalars(tmp_path)
    run.evaluation(4, {"loss": 0.5, "error": float("nan")}, 1000.0)
    run.close()
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"eval/loss" in written
    assert b"eval/error" not in written
