"""A batch that grows with the step, with real processes and deaths."""

from dataclasses import replace

import pytest

from everstep.job.job import VerifySpec
from everstep.node.fork_server import ForkServer
from harness.sweep import SHORT, Sweep, compare


def test_a_ramp_heals_and_its_first_step_is_that_of_a_smaller_batch(fork_server: ForkServer) -> None:
    """Killed in a microbatch that counts and in one that does not; all are voted on."""
    sweep = Sweep(steps=4, depth=2, data=SHORT, fork_server=fork_server)
    every = VerifySpec(votes="every")
    job = replace(sweep.job, replicas=2, stages=2, ramp={"1": 0.5, "3": 1.0}, verify=every)
    clean = sweep.run(job, ())
    healed = sweep.run(job, ("stage=0,replica=1,step=2,op=F1", "stage=1,replica=0,step=2,op=I2"))
    assert compare(clean, healed, job)["max_relative_loss_difference"] == 0.0
    assert len(healed.incidents) == 2
    smaller = sweep.run(replace(job, ramp={}, microbatches=2), ())
    assert clean.by_step()[1].loss == smaller.by_step()[1].loss
    assert clean.by_step()[1].grad_norm == pytest.approx(smaller.by_step()[1].grad_norm, rel=1e-6)
