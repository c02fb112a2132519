"""Workers that run several parts of the model, with real processes: the same bits as one part per worker, and
after deaths, in another shape, from a checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.job.job import CheckpointSpec, EvaluationSpec, Job, ModelSpec, OptimizerSpec
from everstep.launch.local.outcome import Outcome
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from harness.sweep import SHORT, Sweep, losses_of

JOB = Job(
    model=ModelSpec(preset="gpt-tiny", options={"depth": 4}),
    data=SHORT,
    replicas=2,
    stages=2,
    virtual=2,
    microbatches=3,
    steps=5,
)
PLAIN = replace(JOB, stages=4, virtual=1)
TWO = ("stage=0,replica=0,step=2,op=I1", "stage=1,replica=1,step=4,op=F2")
BOTH_OF_ONE = ("stage=1,replica=0,step=3,op=F1", "stage=1,replica=1,step=3,op=W0")


@pytest.fixture(scope="module")
def sweep(fork_server: ForkServer) -> Sweep:
    return Sweep(fork_server=fork_server)


@pytest.fixture(scope="module")
def plain(sweep: Sweep) -> Outcome:
    """Four stages, one part per worker, no deaths."""
    found = sweep.run(PLAIN, ())
    assert found.failure is None
    return found


def losses(found: Outcome) -> dict[Any, Any]:
    """Every microbatch's: the same bits."""
    assert found.failure is None
    return found.losses


def test_two_parts_per_worker_train_as_twice_as_many_stages_do_and_after_two_kills(
    sweep: Sweep, plain: Outcome
) -> None:
    clean, healed = sweep.run(JOB, ()), sweep.run(JOB, TWO)
    assert losses(clean) == losses(plain)
    assert losses(healed) == losses(plain)
    assert sum(len(incident.workers) for incident in healed.incidents) == 2
    assert healed.committed == healed.issued
    assert healed.replayed_elsewhere == 0


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "interleaved": ({"virtual_order": "interleaved"}, TWO),
    "three parts": ({"virtual": 3, "model": ModelSpec(preset="gpt-tiny", options={"depth": 4})}, TWO),
    "a whole stage": ({}, BOTH_OF_ONE),
    "in reduce and update": (
        {},
        ("stage=0,replica=1,step=2,op=R,when=sending", "stage=1,replica=0,step=3,op=U,when=after"),
    ),
    "sharded states": ({"optimizer": OptimizerSpec(shard=True)}, TWO),
    "tied, in bf16, recomputed": (
        {
            "model": ModelSpec(preset="gpt-tiny", options={"depth": 4, "tied": True}),
            "precision": "bf16",
            "recompute": True,
        },
        TWO,
    ),
    "fused sums, clipped": ({"accumulate": "strict32", "optimizer": OptimizerSpec(clip=0.05)}, TWO),
    "evaluation": ({"evaluation": EvaluationSpec(data=SHORT, every=2, batches=3)}, TWO),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_deaths_leave_no_trace(sweep: Sweep, name: str) -> None:
    changes, faults = CASES[name]
    job = replace(JOB, **changes)
    clean, healed = sweep.run(job, ()), sweep.run(job, faults)
    assert losses(healed) == losses(clean)
    assert healed.evaluations == clean.evaluations
    died = sum(len(incident.workers) for incident in healed.incidents)
    assert died == len(faults), "some planned death did not happen"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (JOB, PLAIN),
        (PLAIN, JOB),
        (JOB, replace(JOB, virtual_order="interleaved")),
        (JOB, replace(JOB, replicas=3, microbatches=2, stages=1, virtual=1)),
    ],
    ids=["to four stages", "from four stages", "in another order", "to one stage"],
)
def test_a_checkpoint_is_loaded_with_other_parts(
    sweep: Sweep, plain: Outcome, tmp_path: Path, first: Job, then: Job
) -> None:
    saving = CheckpointSpec(folder=str(tmp_path), interval=2)
    sweep.run(replace(first, checkpoint=saving), (), until=3)
    again = sweep.run(replace(then, checkpoint=saving), ())
    assert again.failure is None
    assert again.resumed_from == 2
    theirs = losses_of(plain)
    assert losses_of(again) == {step: theirs[step] for step in (3, 4, 5)}


@pytest.mark.slow
def test_a_running_task_takes_another_shape_with_its_parts(fork_server: ForkServer, plain: Outcome) -> None:
    job = replace(JOB, steps=14)
    clean = LocalTask(replace(PLAIN, steps=14), fork_server=fork_server).run()
    asked = {4: (3, 1), 9: (2, 2)}

    def watch(kind: str, what: Any) -> None:
        if kind == "tick" and asked and what.last_step >= min(asked):
            what.reshape(*asked.pop(min(asked)))

    task = LocalTask(job, fork_server=fork_server, watch=watch)
    found = task.run()
    assert found.failure is None
    assert not asked
    assert losses_of(found) == losses_of(clean)
