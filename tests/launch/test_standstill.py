"""Lanes of all workers stand still at once: nobody is ended, nothing is lost."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.job.job import DataSpec
from everstep.node.fork_server import ForkServer
from harness.sweep import Sweep, compare


@pytest.fixture
def sweep(fork_server: ForkServer) -> Iterator[Sweep]:
    running = Sweep(fork_server=fork_server, steps=5)
    yield running
    running.close()


@pytest.mark.parametrize(("replicas", "stages"), [(4, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_lanes_that_stand_still_are_given_up_and_the_losses_are_a_clean_runs(
    sweep: Sweep, tmp_path: Path, replicas: int, stages: int
) -> None:
    def data(step: int) -> DataSpec:
        return DataSpec(build="circling:Data", options={"step": step, "folder": str(tmp_path)})

    job = replace(sweep.job, replicas=replicas, stages=stages, base=str(Path(__file__).parent))
    clean = sweep.run(replace(job, data=data(99)), ())
    assert not list(tmp_path.iterdir())
    healed = sweep.run(replace(job, data=data(3)), ())
    assert compare(clean, healed, job)["max_relative_loss_difference"] == 0.0
    assert not any(incident.killed_at for incident in healed.incidents), "no worker is ended for it"
    assert list(tmp_path.iterdir())
    assert [one.what for one in healed.incidents if ": pipe lane: " not in one.what] == []
