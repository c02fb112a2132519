"""The sweep itself: a point that shows nothing must not pass."""

from collections import deque
from typing import Any, cast

import pytest

from everstep.drive.step_rows import StepRow, StepRows
from everstep.launch.local.outcome import Outcome
from everstep.node.fork_server import ForkServer
from everstep.protocol.incidents import Incident
from everstep.protocol.ops import Worker
from harness.sweep import Point, Sweep

KILLED, SLOW = "killed by SIGKILL", "slow worker"


def ended(*whats: str) -> Outcome:
    """A run of one step with these incidents; its loss is right."""
    row = StepRow(step=1, loss=2.0, grad_norm=1.0, seconds=0.1, epoch=1, attempt=0, at=1.0)
    incidents = [
        Incident(number=n, workers=[Worker(n, 0)], what=what, step=1, evidence_at=1.0)
        for n, what in enumerate(whats)
    ]
    return Outcome(steps=StepRows(rows=deque([row]), committed=4), incidents=incidents, issued=4)


@pytest.mark.parametrize(
    ("whats", "passes"),
    [((KILLED, KILLED), True), ((KILLED,), False), ((), False), ((KILLED, SLOW), False)],
    ids=["both died", "one died", "nobody died", "one was slow"],
)
def test_a_point_passes_only_if_every_planned_death_happened(whats: tuple[str, ...], passes: bool) -> None:
    sweep = Sweep(fork_server=cast(ForkServer, object()))
    sweep.run = lambda job, faults, **more: ended(*whats if faults else ())  # type: ignore[assignment]
    result: dict[str, Any] = sweep.try_point(Point("two deaths", ("step=1", "step=1")))
    assert result["max_relative_loss_difference"] == 0.0
    assert result["ok"] is passes
    assert passes or "of 2 died" in result["failure"]
