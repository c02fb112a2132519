"""Real processes: evaluations of a run with deaths in them are those of a run without, to the bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.engine.prepare.resolve import data_of, evaluation_of
from everstep.engine.telemetry.faults import parse_fault
from everstep.errors import UserError
from everstep.job.job import CheckpointSpec, DataSpec, EvaluationSpec, Job, ModelSpec, OptimizerSpec
from everstep.launch.local.api import run_with_callbacks
from everstep.launch.local.data_needs import prepare
from everstep.launch.local.outcome import Outcome
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.messages import Patience
from everstep.protocol.ops import Worker
from everstep.store.folder import open_step
from tests.launch.evaluated_model import Data, error, model

JOB = Job(
    model=ModelSpec(build="evaluated_model:model"),
    data=DataSpec(build="evaluated_model:Data"),
    optimizer=OptimizerSpec(lr=1e-2),
    evaluation=EvaluationSpec(
        every=4,
        batches=13,
        data=DataSpec(build="evaluated_model:Data", options={"seed": 1}),
        metrics=["evaluated_model:error"],
    ),
    steps=10,
    replicas=2,
    stages=2,
    microbatches=3,
    base=str(Path(__file__).parent),
)


@pytest.fixture(scope="module")
def clean(fork_server: ForkServer) -> Outcome:
    return run_with_callbacks(JOB, watch=lambda kind, what: None, fork_server=fork_server)


def test_the_loss_is_that_of_a_plain_loop_without_dropout(fork_server: ForkServer, tmp_path: Path) -> None:
    """After one step of one worker: the weights are in its checkpoint."""
    job = replace(
        JOB, steps=1, replicas=1, stages=1, checkpoint=CheckpointSpec(folder=str(tmp_path / "c"), interval=9)
    )
    outcome = run_with_callbacks(job, watch=lambda kind, what: None, fork_server=fork_server)
    made = model()
    layers = torch.nn.ModuleDict({str(name): build() for name, build in made.layers.items()}).eval()
    saved = open_step(tmp_path / "c", "step-00000001")
    names = [name for name in saved.tensors if name.startswith("model/")]
    layers.load_state_dict({name.removeprefix("model/"): t for name, t in saved.read(names).items()})
    total = wrong = rows = 0.0
    for number in range(13):
        x, y = Data(1).batch(1, number)
        with torch.no_grad():
            for layer in layers.values():
                x = layer(x)
        total += float(torch.nn.functional.mse_loss(x, y)) * len(y)
        wrong += float(error(x, y)[0])
        rows += len(y)
    assert outcome.evaluations[1] == {
        "loss": pytest.approx(total / rows),
        "error": pytest.approx(wrong / rows),
    }


def test_evaluations_are_distributed_and_come_after_the_last_step_too(clean: Outcome) -> None:
    assert clean.failure is None
    assert list(clean.evaluations) == [4, 8, 10]
    assert [row.step for row in clean.rows] == list(range(1, 11))
    assert clean.issued == clean.committed == 60


def test_a_kill_in_an_evaluation_changes_nothing(fork_server: ForkServer, clean: Outcome) -> None:
    kills = (
        "stage=1,replica=0,step=5,op=F1",
        "stage=0,replica=1,step=9,op=F2",
        "stage=1,replica=1,step=9,op=R",
    )

    def watch(kind: str, what: Any) -> None:
        if kind == "step" and what.step == 10:
            tasks[0].kill(Worker(0, 0))  # in the closing step, which only evaluates

    tasks: list[LocalTask] = []
    task = LocalTask(
        JOB,
        fork_server=fork_server,
        faults=tuple(map(parse_fault, kills)),
        watch=watch,
        patience=Patience(restarts_per_node=99),
    )
    tasks.append(task)
    outcome = task.run()
    died = {worker for incident in outcome.incidents for worker in incident.workers}
    assert died >= {parse_fault(kill).worker for kill in kills}
    assert outcome.evaluations == clean.evaluations
    assert outcome.all_losses() == clean.all_losses()


def test_streams_of_training_and_of_evaluation_are_two(fork_server: ForkServer, tmp_path: Path) -> None:
    """They had one buffer, so each could get the other's batches, in silence."""
    seen = []
    for kind in ("Data", "streamed"):
        train = DataSpec(build=f"evaluated_model:{kind}")
        test = replace(train, options={"seed": 1})
        job = replace(
            JOB,
            data=train,
            evaluation=EvaluationSpec(every=2, batches=13, data=test),
            steps=5,
            checkpoint=CheckpointSpec(folder=str(tmp_path / kind), interval=9),
        )
        prepare(job, data_of(job), evaluation_of(job))
        outcome = run_with_callbacks(job, watch=lambda kind, what: None, fork_server=fork_server)
        assert outcome.failure is None
        seen.append((outcome.all_losses(), outcome.evaluations))
    assert seen[0] == seen[1]


def test_two_streams_in_one_folder_are_refused(tmp_path: Path) -> None:
    both, evaluation = everstep.stream(lambda: iter(()), folder=tmp_path), evaluation_of(JOB)
    assert evaluation is not None
    evaluation = replace(evaluation, data=both.for_evaluation(JOB, 3))
    with pytest.raises(UserError, match=r"training and of evaluation are both stored in .* each"):
        prepare(JOB, both.for_job(JOB), evaluation)


def test_another_shape_evaluates_the_same(fork_server: ForkServer, clean: Outcome) -> None:
    outcome = run_with_callbacks(JOB.reshaped(1, 3), watch=lambda kind, what: None, fork_server=fork_server)
    assert outcome.evaluations == clean.evaluations


class Told:
    def __init__(self, stop_after: int | None = None) -> None:
        self.steps: list[int] = []
        self.evaluations: list[int] = []
        self.checkpoints: list[int] = []
        self.incidents = 0
        self.stop_after = stop_after

    def on_step(self, row: dict[str, Any]) -> str | None:
        self.steps.append(row["step"])
        return "it is good enough" if row["step"] == self.stop_after else None

    def on_eval(self, step: int, values: dict[str, float]) -> None:
        self.evaluations.append(step)

    def on_checkpoint(self, step: int, folder: str) -> None:
        self.checkpoints.append(step)
        assert Path(folder, "index.json").is_file(), "the folder of that step"

    def on_incident(self, incident: dict[str, Any]) -> None:
        self.incidents += 1


def test_callbacks_hear_of_everything_once_over_deaths_restores_and_starts(
    fork_server: ForkServer, clean: Outcome, tmp_path: Path
) -> None:
    """Both workers of stage 1 die in step 8: the run goes back to step 6. Then it is stopped, and resumed."""
    job = replace(JOB, checkpoint=CheckpointSpec(folder=str(tmp_path / "c"), interval=3, keep=9))
    first, second, third = Told(stop_after=8), Told(), Told()
    faults = tuple(parse_fault(f"stage=1,replica={replica},step=8,op=R") for replica in (0, 1))
    outcome = run_with_callbacks(
        job, [first], watch=lambda kind, what: None, fork_server=fork_server, faults=faults
    )
    assert outcome.failure is None
    reached = first.steps[-1]
    assert first.steps == list(range(1, reached + 1))
    assert first.checkpoints[-1] == reached  # a run that ends early is saved, too
    assert 8 <= reached < 10
    assert first.incidents >= 1
    outcome = run_with_callbacks(job, [second], watch=lambda kind, what: None, fork_server=fork_server)
    assert outcome.resumed_from == reached
    assert first.steps + second.steps == list(range(1, 11))
    assert first.evaluations + second.evaluations == [4, 8, 10]
    assert outcome.all_losses() == {row.step: row.loss for row in clean.rows}
    assert outcome.evaluations == clean.evaluations
    outcome = run_with_callbacks(
        job, [third], watch=lambda kind, what: None, fork_server=fork_server
    )  # nothing is left
    assert third.steps == []
    assert outcome.all_losses()[10] == clean.rows[-1].loss
