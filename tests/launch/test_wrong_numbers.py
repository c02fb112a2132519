"""Bits flipped in a real worker: it is found and named, and the losses are those of a run without a flip."""

import math
import random
from pathlib import Path

import pytest

from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec, OptimizerSpec, VerifySpec
from everstep.launch.local.outcome import Outcome
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.ops import Worker
from harness.planted import planted_in
from tests.launch.flips import Flips, Trial, flip_in_checkpoint, flip_in_memory_copy, job_for
from tests.launch.odd_rows import STEP

TRIALS = [
    Trial(
        what="gradient", worker=Worker(1, 0), step=8, replicas=2, stages=1, bit=3, element=99, microbatch=1
    ),
    Trial(what="weights", worker=Worker(2, 1), step=9, replicas=3, stages=2, bit=0, element=7, microbatch=0),
    Trial(
        what="boundary", worker=Worker(0, 1), step=7, replicas=2, stages=2, bit=20, element=5, microbatch=0
    ),
    Trial(
        what="optimizer", worker=Worker(0, 0), step=10, replicas=3, stages=1, bit=12, element=3, microbatch=0
    ),
]


@pytest.fixture(scope="module")
def flips(fork_server: ForkServer) -> Flips:
    return Flips(fork_server)


@pytest.mark.parametrize(
    "trial",
    [TRIALS[0], *(pytest.param(trial, marks=pytest.mark.slow) for trial in TRIALS[1:])],
    ids=lambda trial: trial.what,
)
def test_a_flipped_bit_is_found_and_leaves_no_trace_in_the_losses(flips: Flips, trial: Trial) -> None:
    found = flips.run(trial)
    assert found["failure"] is None
    assert found["found"], found
    assert found["right"], found
    assert found["after_steps"] <= 1, found
    assert found["losses_equal"], found


def test_flipped_bits_in_checkpoints_and_memory_copies_are_found() -> None:
    rng = random.Random(5)
    assert all(flip(rng)["found"] for _ in range(20) for flip in (flip_in_checkpoint, flip_in_memory_copy))


@pytest.mark.slow
def test_a_nan_that_does_not_come_again_is_a_machine_s(fork_server: ForkServer, tmp_path: Path) -> None:
    """Without votes: the step is held back before it counts, and computed again."""
    clean = LocalTask(job_for(2, 2, votes="off"), fork_server=fork_server).run().all_losses()
    bad = Trial(
        what="boundary", worker=Worker(1, 1), step=8, replicas=2, stages=2, bit=30, element=5, microbatch=0
    )
    job = planted_in(job_for(2, 2, votes="off"), tmp_path, bad.fault())
    outcome = LocalTask(job, fork_server=fork_server).run()
    (incident,) = outcome.incidents
    assert incident.verdict is not None
    assert incident.verdict.kind == "wrong numbers"
    assert "a machine" in incident.verdict.because
    assert outcome.all_losses() == clean


def odd(fork_server: ForkServer, bad: str, folder: Path | None = None, **verify: str) -> Outcome:
    job = Job(
        model=ModelSpec(build="odd_rows:model"),
        data=DataSpec(build="odd_rows:Data", options={"bad": bad}),
        optimizer=OptimizerSpec(lr=1e-3),
        steps=STEP + 3,
        replicas=2,
        microbatches=2,
        verify=VerifySpec(votes="sampled", cost=0.1, **verify),  # type: ignore[arg-type]
        checkpoint=None if folder is None else CheckpointSpec(folder=str(folder), interval=4),
        base=str(Path(__file__).parent),
    )
    outcome = LocalTask(job, fork_server=fork_server).run()
    assert outcome.failure is None
    return outcome


def test_a_nan_of_the_data_is_told_from_a_machine_s_and_skipped(fork_server: ForkServer) -> None:
    outcome = odd(fork_server, "nan")
    (incident,) = outcome.incidents
    assert incident.verdict is not None
    assert incident.verdict.kind == "non-finite gradient"
    assert incident.verdict.because.endswith("(a second worker agrees): the data or the model")
    assert incident.remedies[-1].what == "skip the batch"
    assert [row.step for row in outcome.steps.rows if not math.isfinite(row.loss)] == [STEP]


@pytest.mark.slow
def test_a_spike_of_the_data_is_skipped_where_the_job_says_so(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    outcome = odd(fork_server, "spike", tmp_path / "saved", spike="skip")
    (incident,) = outcome.incidents
    assert incident.verdict is not None
    assert incident.verdict.kind == "loss spike"
    assert incident.verdict.because.endswith("the data or the model")
    losses = outcome.all_losses()
    usual = odd(fork_server, "", tmp_path / "clean", spike="skip").all_losses()
    assert [losses[step] for step in range(1, STEP)] == [usual[step] for step in range(1, STEP)]
    assert losses[STEP] > 100 * usual[STEP]
    # Skipped: the next step has the weights that the bad one had, and data are the same in every step.
    assert losses[STEP + 1] == usual[STEP]


@pytest.mark.slow
def test_code_that_is_not_deterministic_is_named_and_no_machine_blamed(fork_server: ForkServer) -> None:
    """Other losses than a run before is all that is wrong with it: it trains to its end."""
    job = Job(
        model=ModelSpec(build="odd_rows:model_of_chance"),
        data=DataSpec(build="odd_rows:Data"),
        optimizer=OptimizerSpec(lr=1e-3),
        steps=12,
        replicas=3,
        microbatches=2,
        verify=VerifySpec(votes="every"),
        base=str(Path(__file__).parent),
    )
    task = LocalTask(job, fork_server=fork_server)
    outcome = task.run()
    assert outcome.failure is None
    (incident,) = outcome.incidents
    assert incident.verdict is not None
    assert incident.verdict.kind == "nondeterministic code"
    assert not any(node.isolated_slots for node in task.coordinator.nodes.values())
    assert len(outcome.steps.rows) == 12
