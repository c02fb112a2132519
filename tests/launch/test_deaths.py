"""Real processes, real SIGKILLs: a healed run ends with the losses of a clean one, to the bit.

`bench/sweep.py` holds all points; these are one of each kind. Those of `ALSO` are run by `--slow`.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from everstep.job.job import CheckpointSpec, DataSpec, ModelSpec, NetSpec, OptimizerSpec
from everstep.net import seal
from everstep.node.fork_server import ForkServer
from everstep.protocol.ops import Worker
from harness.sweep import SHORT, TOLERANCE, Point, Sweep, compare, points, sharded

CHOSEN = [
    "op stage=0,replica=0,step=3,op=F0",
    "op stage=1,replica=1,step=3,op=I2",
    "op stage=0,replica=1,step=3,op=W3",
    "reduce stage=1,replica=0,step=3,op=R,when=sending",
    "reduce stage=0,replica=1,step=3,op=R,when=during",
    "reduce stage=0,replica=0,step=3,op=U,when=before",
    "reduce stage=1,replica=1,step=3,op=U,when=after",
    "pair same stage of three",
    "pair neighbours crossed",
    "pair whole replica after the last stage has reduced",
    "pair while the first heals",
    "lost stage, checkpoint",
    "raises instead of dying",
    "eager, undone and two deaths",
]
# `make sweep` (`.ci/run`) has all of these by tcp; by default one of each kind, and of each transport.
ALSO = {
    "op stage=0,replica=0,step=3,op=F0",
    "op stage=0,replica=1,step=3,op=W3",
    "reduce stage=0,replica=1,step=3,op=R,when=during",
    "reduce stage=0,replica=0,step=3,op=U,when=before",
    "reduce stage=1,replica=1,step=3,op=U,when=after",
    "pair same stage of three",
    "pair neighbours crossed",
    "pair whole replica after the last stage has reduced",
    "pair while the first heals",
    "raises instead of dying",
}
needs_cryptography = pytest.mark.skipif(
    not seal.is_available(seal.Suite.AES_GCM), reason="the package cryptography is not installed"
)


@pytest.fixture(scope="module")
def sweep(fork_server: ForkServer) -> Sweep:
    return Sweep(steps=5, depth=2, data=SHORT, fork_server=fork_server)


@pytest.mark.parametrize(
    "start", [pytest.param(name, marks=pytest.mark.slow) if name in ALSO else name for name in CHOSEN]
)
def test_a_death_leaves_the_losses_of_a_clean_run(sweep: Sweep, start: str) -> None:
    """In turn by tcp, over shared memory, in which a dead worker's tensors are still read, and by lanes."""
    point = next(p for p in points() if p.name.startswith(start))
    sweep.transport = ("tcp", "files", "pipe")[CHOSEN.index(start) % 3]
    result = sweep.try_point(point)
    assert result["ok"], result
    assert result["max_relative_loss_difference"] == 0.0
    assert result["incidents"] >= 1
    assert result["replayed_elsewhere"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"model": ModelSpec(preset="gpt-tiny", options={"depth": 2, "tied": True, "dropout": 0.1})},
        pytest.param(
            {"precision": "bf16", "memory_interval": 1, "optimizer": OptimizerSpec(shard=True)},
            marks=pytest.mark.slow,
        ),
        # Sums and recomputation are compared by the bit in `tests/engine`.
        pytest.param({"recompute": True, "accumulate": "fp32"}, marks=pytest.mark.slow),
        pytest.param(
            {"model": ModelSpec(preset="gpt-tiny", options={"depth": 2, "tied": True}), "stages": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param({"net": NetSpec(authenticate="always"), "memory_interval": 1}, marks=pytest.mark.slow),
        pytest.param(
            {"net": NetSpec(encrypt=True), "memory_interval": 1}, marks=[pytest.mark.slow, needs_cryptography]
        ),
    ],
    ids=[
        "tied across stages, dropout",
        "bf16, sharded states",
        "recompute, sums in fp32",
        "tied in one stage",
        "authenticated links",
        "encrypted links",
    ],
)
def test_what_is_trained_does_not_matter(sweep: Sweep, changes: dict) -> None:
    job = replace(sweep.job, **{"replicas": 2, "stages": 2, **changes})
    clean = sweep.run(job, ())
    last = job.stages - 1
    healed = sweep.run(job, (f"stage={last},replica=0,step=3,op=I1", "stage=0,replica=1,step=4,op=F2"))
    assert [incident.what for incident in healed.incidents] == ["killed by SIGKILL"] * 2
    assert [incident.workers for incident in healed.incidents] == [[Worker(0, last)], [Worker(1, 0)]]
    for incident in healed.incidents:
        assert incident.killed_at is not None
        assert incident.resumed_at is not None
        assert incident.killed_at < incident.evidence_at < incident.resumed_at
    difference = compare(clean, healed, job)["max_relative_loss_difference"]
    assert difference <= (TOLERANCE if job.accumulate == "fp32" else 0.0)


def test_masks_side_losses_and_token_weights_keep_their_bits_through_deaths(sweep: Sweep) -> None:
    job = replace(
        sweep.job,
        replicas=2,
        stages=2,
        model=ModelSpec(build="masked:model"),
        data=DataSpec(build="masked:Data"),
        base=str(Path(__file__).parent),
    )
    clean = sweep.run(job, ())
    healed = sweep.run(job, ("stage=1,replica=0,step=3,op=I1", "stage=0,replica=1,step=4,op=W2"))
    assert [incident.what for incident in healed.incidents] == ["killed by SIGKILL"] * 2
    assert compare(clean, healed, job)["max_relative_loss_difference"] == 0.0


# A file that was cut short is refused without being read: `tests/store` and `tests/attacks`.
@pytest.mark.parametrize(
    "flipped", [pytest.param(False, marks=pytest.mark.slow), True], ids=["cut short", "a flipped bit"]
)
def test_everything_killed_restarts_from_the_newest_checkpoint_that_is_whole(
    sweep: Sweep, tmp_path: Path, flipped: bool
) -> None:
    """A flipped bit is found by a worker that loads it; then all bytes are verified, and an older one is
    taken.
    """
    job = replace(sweep.job, replicas=2, stages=2, steps=7)
    clean = sweep.run(job, ())
    saving = replace(job, checkpoint=CheckpointSpec(folder=str(tmp_path), interval=2))
    sweep.run(saving, (), until=5)
    damaged = max(tmp_path.glob("step-*"))
    part = next(damaged.glob("*.safetensors"))
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) * flipped)

    again = sweep.run(saving, ())

    assert again.failure is None
    assert again.resumed_from == int(damaged.name[-8:]) - 2
    assert len(again.refused_checkpoints) == 1
    assert part.name in again.refused_checkpoints[0]
    ours, theirs = again.by_step(), clean.by_step()
    assert all(ours[step].loss == theirs[step].loss for step in range(again.resumed_from + 1, 8))


def test_a_data_function_that_raises_ends_the_task_with_its_own_words(sweep: Sweep) -> None:
    job = replace(sweep.job, replicas=2, stages=2)
    outcome = sweep.run(job, tuple(f"stage=0,replica={k},step=2,op=F0.0,how=raise" for k in (0, 1)))
    assert outcome.failure is not None
    assert "planted fault at step 2 F0.0" in outcome.failure


def test_an_invalid_eager_update_is_undone_without_an_incident(sweep: Sweep) -> None:
    always = replace(OptimizerSpec(), stagger="always", clip=0.05)
    waiting = replace(sweep.job, replicas=2, stages=2, optimizer=replace(always, stagger="never"))
    eager = replace(waiting, optimizer=always)
    clean, undone = sweep.run(waiting, ()), sweep.run(eager, ())
    assert undone.incidents == []
    assert undone.rows[-1].epoch > clean.rows[-1].epoch, "nothing was undone"
    assert compare(clean, undone, eager)["max_relative_loss_difference"] == 0.0


def test_the_points_are_as_many_as_we_claim() -> None:
    names = [point.name for point in points()]
    assert len(names) == len(set(names))
    assert len(names) >= 60
    assert isinstance(points()[0], Point)


SHARDED = [
    "shard owner in its update stage=0,replica=1,step=3,op=U,when=sending",
    "shard owner and guard 0 1, checkpoint",
    "shard one returns, then another dies",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_with_sharded_states_a_death_leaves_the_losses_of_a_clean_run(
    fork_server: ForkServer, name: str
) -> None:
    """An owner and its guard die at once: if each died at an op of its own, the chunk might have a new guard
    by then, and nothing would have to be restored.
    """
    point = next(p for p in sharded() if p.name == name)
    if "owner and guard" in name:
        point = replace(point, faults=(), killed=(Worker(0, 0), Worker(1, 0)))
    result = Sweep(shard=True, transport="tcp", fork_server=fork_server).try_point(point)
    assert result["ok"], result
    assert result["max_relative_loss_difference"] == 0.0
    assert result["restored"] == ("owner and guard" in name)


@pytest.mark.slow
def test_deaths_in_a_row_leave_the_losses_of_a_clean_run(sweep: Sweep) -> None:
    """Each point after the rejoin of the workers that died in the one before."""
    wanted = ("reduce stage=0,replica=0,step=3,op=R,when=sending", "pair update and forward")
    sweep.transport = "tcp"
    result = sweep.try_in_a_row(
        [point for point in points() if point.name in wanted], rest_s=0.05, limit_s=120.0
    )
    assert result["ok"], result
    assert tuple(result["points"]) == wanted
    assert result["incidents"] == 3
