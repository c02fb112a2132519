"""Bits flipped in a real worker: it is found and named, and the losses are those of a run without a flip."""

import random

import pytest

from everstep.node.fork_server import ForkServer
from everstep.protocol.ops import Worker
from harness.flips import Flips, Trial, flip_in_checkpoint, flip_in_memory_copy

TRIALS = [
    Trial(
        what="gradient", worker=Worker(1, 0), step=8, replicas=2, stages=1, bit=3, element=99, microbatch=1
    ),
    Trial(what="weights", worker=Worker(2, 1), step=9, replicas=3, stages=2, bit=0, element=7, microbatch=0),
    Trial(
        what="boundary", worker=Worker(0, 1), step=7, replicas=2, stages=2, bit=30, element=5, microbatch=0
    ),
    Trial(
        what="optimizer", worker=Worker(0, 0), step=10, replicas=2, stages=1, bit=12, element=3, microbatch=0
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
