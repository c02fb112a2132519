"""Workers of several processes: any shard's death ends its worker, and training heals as from any death."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.engine.shards.marks import read_marks
from everstep.job.job import CheckpointSpec, DataSpec, ModelSpec
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.ops import Worker
from harness.sweep import SHORT, Sweep, points

# Deaths between ops and in the reduce are those of any worker: storms with shards (`tests/lab`) have them,
# and with real processes the slow scenes.
CHOSEN = [
    pytest.param("op stage=0,replica=0,step=3,op=F3", marks=pytest.mark.slow),
    "inside stage=1,replica=1,step=3,op=F2",
    pytest.param("inside stage=0,replica=0,step=3,op=I1", marks=pytest.mark.slow),
    pytest.param("reduce stage=1,replica=0,step=3,op=R,when=sending", marks=pytest.mark.slow),
    # Without shards in `test_deaths.py`; with sharded states of shards below.
    pytest.param("lost stage, checkpoint", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def sweep(fork_server: ForkServer) -> Sweep:
    return Sweep(steps=5, shards=2, depth=2, data=SHORT, fork_server=fork_server)


@pytest.mark.parametrize("start", CHOSEN)
def test_a_shards_death_leaves_the_losses_of_a_clean_run(sweep: Sweep, start: str) -> None:
    result = sweep.try_point(next(p for p in points(2) if p.name.startswith(start)))
    assert result["ok"], result
    assert result["max_relative_loss_difference"] == 0.0
    assert result["incidents"] >= 1


@pytest.mark.slow
def test_experts_over_shards_heal_and_their_checkpoint_goes_to_one_process(
    sweep: Sweep, tmp_path: Path
) -> None:
    """Killed inside the sum of the experts' outputs; saved by two shards, continued by one."""
    transformers = pytest.importorskip("transformers")
    constant = replace(sweep.job.optimizer, decay="constant")
    config = transformers.MixtralConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=16,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "mixtral")
    model = ModelSpec(hf=str(tmp_path / "mixtral"))
    job = replace(sweep.job, model=model, replicas=2, stages=1, steps=4, optimizer=constant)
    clean = sweep.run(job, ())
    saving = replace(job, checkpoint=CheckpointSpec(folder=str(tmp_path / "states"), interval=2))
    killed = ("stage=0,replica=1,step=2,op=F1,when=inside,shard=1",)
    healed = sweep.run(replace(saving, steps=2), killed)
    assert [incident.what for incident in healed.incidents] == ["lost its shard 1 (killed by SIGKILL)"]
    for step in (1, 2):
        assert healed.by_step()[step].loss == clean.by_step()[step].loss
    again = sweep.run(replace(saving, replicas=1, shards=1, microbatches=2 * job.microbatches), ())
    assert again.resumed_from == 2
    for step in (3, 4):
        assert again.by_step()[step].loss == pytest.approx(clean.by_step()[step].loss, rel=1e-5)


def test_sharded_optimizer_states_of_shards_come_back_from_a_checkpoint(sweep: Sweep, tmp_path: Path) -> None:
    """Chunks of two shards are boxes of the logical tensors; both replicas of the stage die."""
    optimizer = replace(sweep.job.optimizer, clip=0.05, decay="constant")
    job = replace(sweep.job, replicas=2, stages=1, steps=5, optimizer=replace(optimizer, shard=True))
    plain = sweep.run(replace(job, optimizer=optimizer), ())
    saving = replace(job, checkpoint=CheckpointSpec(folder=str(tmp_path), interval=2))
    sweep.run(replace(saving, steps=2), ())  # the last state is always saved
    lost = ("stage=0,replica=0,step=4,op=I1,shard=0", "stage=0,replica=1,step=4,op=I1,shard=1")
    healed = sweep.run(saving, lost)
    assert healed.resumed_from == 2
    wanted = {step: row.loss for step, row in plain.by_step().items() if step > 2}
    assert {step: row.loss for step, row in healed.by_step().items()} == wanted
    assert any(incident.restored_from == 2 for incident in healed.incidents)
    one = replace(saving, shards=1, steps=6, optimizer=optimizer)
    assert sweep.run(one, ()).resumed_from in (4, 5)


def test_the_shard_that_failed_is_named(sweep: Sweep) -> None:
    job = replace(sweep.job, replicas=2, stages=1)
    (incident,) = sweep.run(job, ("stage=0,replica=1,step=3,op=I1,shard=1",)).incidents
    assert incident.what == "lost its shard 1 (killed by SIGKILL)"
    (incident,) = sweep.run(job, ("stage=0,replica=1,step=3,op=I1,shard=1,how=raise",)).incidents
    assert "shard 1: RuntimeError: planted fault" in incident.what


def test_a_stopped_shard_is_named_and_not_only_its_worker(sweep: Sweep) -> None:
    job = replace(sweep.job, replicas=2, stages=1)

    def stop_follower(kind: str, what: Any) -> None:
        if kind == "step" and what.step == 2:
            marks = read_marks(task.processes[Worker(1, 0)].beacon.path, 2)
            assert marks is not None
            os.kill(marks[1].pid, signal.SIGSTOP)

    task = LocalTask(job, fork_server=sweep.fork_server, watch=stop_follower)
    outcome = task.run()
    assert outcome.failure is None
    assert len(outcome.by_step()) == job.steps
    verdicts = [incident.verdict.because for incident in outcome.incidents if incident.verdict is not None]
    assert any("the process of shard 1 of worker 1:0 is stopped" in because for because in verdicts), verdicts


def test_a_shard_that_ends_before_the_others_have_met_it_is_noticed(sweep: Sweep, tmp_path: Path) -> None:
    job = replace(
        sweep.job,
        replicas=2,
        stages=1,
        model=ModelSpec(build="dying:model", options={"folder": str(tmp_path)}),
        data=DataSpec(kind="synthetic", sequence=16),
        base=str(Path(__file__).parent),
    )
    outcome = sweep.run(job, ())
    assert outcome.failure is None
    assert (tmp_path / "struck").exists()
    assert len(outcome.by_step()) == job.steps


# The average itself is in `tests/engine/test_schedules.py`, names of shards in the next test.
@pytest.mark.slow
def test_an_average_of_the_weights_is_saved_by_its_logical_names(sweep: Sweep, tmp_path: Path) -> None:
    average = replace(sweep.job.optimizer, ema=0.9)
    job = replace(sweep.job, replicas=1, stages=2, steps=4, optimizer=average)
    for shards in (1, 2):
        saving = CheckpointSpec(folder=str(tmp_path / str(shards)), interval=4)
        sweep.run(replace(job, shards=shards, checkpoint=saving), ())
    one, two = (everstep.load(tmp_path / str(shards), ema=True) for shards in (1, 2))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        # Adam makes a step of its own out of the rounding of a gradient near zero; the average and the
        # weights differ by 5e-4 and more.
        assert torch.allclose(tensor, two[name], rtol=1e-4, atol=5e-5), name


def test_a_checkpoint_of_shards_is_one_of_logical_tensors(sweep: Sweep, tmp_path: Path) -> None:
    """Saved by two shards, continued by one process: the same losses, but for rounding."""
    constant = replace(sweep.job.optimizer, decay="constant")  # whatever the number of steps
    job = replace(sweep.job, replicas=1, stages=2, shards=2, steps=6, optimizer=constant)
    clean = sweep.run(replace(job, shards=1), ())
    saving = replace(job, checkpoint=CheckpointSpec(folder=str(tmp_path), interval=3))
    sweep.run(replace(saving, steps=3), ())  # the last state is always saved
    again = sweep.run(replace(saving, shards=1), ())
    assert again.resumed_from == 3
    ours, theirs = again.by_step(), clean.by_step()
    for step in range(again.resumed_from + 1, 7):
        assert ours[step].loss == pytest.approx(theirs[step].loss, rel=1e-5)
