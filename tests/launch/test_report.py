"""The sentences that end a run."""

from __future__ import annotations

from typing import Any

from everstep.errors import one_sentence
from everstep.launch.local.api import Result
from everstep.launch.local.data_needs import DataWaits
from everstep.launch.local.report import death, incident_line, summary_line, times
from everstep.protocol.incidents import Incident, Remedy, Verdict
from everstep.protocol.ops import Worker


def run(**changed: Any) -> dict[str, Any]:
    usual = {
        "steps": 2,
        "resumed_from": 0,
        "losses": {"1": 3.0, "2": 2.5},
        "incidents": [{"what": "killed"}],
        "microbatches": {"issued": 8, "committed": 8},
        "ended": "completed all 2 steps",
    }
    return usual | changed


def test_a_run_says_what_was_healed() -> None:
    healed = "2 of 2 steps, loss 2.500000, 1 incident healed; microbatches: 8 issued, 8 committed once"
    assert summary_line(run()) == healed


def test_steps_that_changed_no_weight_are_counted_in_the_last_line() -> None:
    """It was said nowhere but in the row of the step, which `--every` may not print."""
    assert "loss 2.500000, 1 step skipped (its gradient was not finite), 1 incident" in summary_line(
        run(skipped=1)
    )
    assert ", 3 steps skipped (their gradients were not finite), " in summary_line(run(skipped=3))
    assert "skipped" not in summary_line(run(skipped=0))


def test_a_last_state_that_is_on_no_disk_is_not_called_healed() -> None:
    """With a full disk the run ended with "1 incident healed" and nothing saved."""
    unsaved = "its last state is not saved (No space left on device), protected up to step 0"
    line = summary_line(run(ended=f"completed all 2 steps; {unsaved}"))
    assert "healed" not in line
    assert line.endswith(f"8 committed once; {unsaved}")


def test_a_run_that_a_callback_has_stopped_says_so() -> None:
    stopped = "stopped by EarlyStop: loss has not improved on 0.04413 (step 1) for 3 evaluations"
    ended = f"{stopped}; step 2, the last one, is complete"
    line = summary_line(run(steps=320, stopped=stopped, ended=ended))
    assert line.startswith("2 of 320 steps, loss 2.500000, 1 incident healed; ")
    assert line.endswith(f"8 committed once; {stopped}")


def test_a_sentence_that_a_worker_raised_ends_once() -> None:
    """It ended in "..", and went on with ".; replanned in ?, resumed after 0 ms"."""
    assert one_sentence("raised UserError: leave it out.") == "raised UserError: leave it out."
    assert one_sentence("killed by SIGKILL") == "killed by SIGKILL."
    raised = Incident(
        number=1, workers=[Worker(0, 0)], what="UserError: leave it out.", step=3, evidence_at=0.0
    )
    assert death(raised) == "worker 0:0 UserError: leave it out"
    assert not any("replanned" in one for one in times(raised)), "there was no plan"


def test_a_result_is_printed_as_one_line() -> None:
    result = Result(losses={1: 2.5}, grad_norms={1: 1.0}, evaluations={}, document=run(steps=320))
    assert repr(result) == f"Result({summary_line(run(steps=320))})"


def test_a_wait_for_data_is_said_once_and_not_of_the_first_cold_steps() -> None:
    waits = DataWaits()
    assert [waits.warning(Worker(0, 1), 0.34, 1.0, steps) for steps in (1, 5, 9)] == [None] * 3
    first = waits.warning(Worker(0, 1), 0.34, 1.0, 10)
    assert first is not None
    assert "worker 0:1 waits 0.34 s of every 1 s step for its data" in first
    assert [waits.warning(Worker(r, 0), 0.34, 1.0, 10) for r in range(4)] == [None] * 4
    assert waits.warning(Worker(1, 0), 0.7, 1.0, 20) is not None


def test_an_incident_beside_training_says_its_cause() -> None:
    incident = Incident(
        number=1,
        workers=[],
        what="its checkpoint cannot be saved",
        step=5,
        evidence_at=1.0,
        stops_training=False,
    )
    incident.verdict = Verdict(at=1.0, kind="other", severity=3, because="No space left on device")
    incident.remedies.append(Remedy(at=1.0, what="save again later", because="training continues"))
    assert incident_line(incident) == (
        "incident 1 since step 5: its checkpoint cannot be saved (No space left on device); "
        "save again later: training continues"
    )
