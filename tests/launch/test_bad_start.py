"""A worker that cannot even start ends the task with its own words."""

from dataclasses import replace

from everstep.job.job import ModelSpec
from everstep.node.fork_server import ForkServer
from harness.sweep import Sweep


def test_a_model_that_cannot_be_built_is_told_in_its_own_words(fork_server: ForkServer) -> None:
    sweep = Sweep(fork_server=fork_server)
    broken = replace(sweep.job, replicas=2, stages=2, model=ModelSpec(build="no_such_module:build"))
    outcome = sweep.run(broken, ())
    assert outcome.failure is not None
    assert "no_such_module" in outcome.failure
