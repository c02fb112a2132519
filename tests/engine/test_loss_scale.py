"""fp16: the loss scale is a state that every stage follows by itself, as torch's GradScaler would."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline import CPU, run_step, stages

from everstep.engine.prepare.preflight import preflight
from everstep.engine.prepare.resolve import data_of, model_of
from everstep.engine.stage.stage import Stage, StageSettings
from everstep.engine.stage.stage_loss import LossScale
from everstep.engine.state.optimizer import Updater
from everstep.engine.state.sharded import ShardedUpdater
from everstep.errors import UserError
from everstep.job.job import DataSpec, Job, ModelSpec, OptimizerSpec
from harness.optimizer_runs import OPTIONS, plain_loop

JOB = Job(
    model=ModelSpec(preset="gpt-tiny", options=OPTIONS),
    data=DataSpec(kind="synthetic", rows=1, sequence=16),
    optimizer=OptimizerSpec(decay="constant", clip=None),
    steps=14,
    microbatches=4,
    precision="fp16",
    loss_scale=2.0**19,
    loss_scale_interval=2,
)


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_a_scale_follows_skipped_steps_as_that_of_torch(skips: list[bool], interval: int) -> None:
    ours, grown = LossScale(2.0**16, interval), torch.zeros(1, dtype=torch.int32)
    theirs = torch.tensor([2.0**16])
    for step, skipped in enumerate(skips, start=1):
        torch._amp_update_scale_(theirs, grown, torch.tensor([float(skipped)]), 2.0, 0.5, interval)
        ours.follow(step, skipped=not skipped)  # an update that is undone: what follows is what counts
        ours.follow(step, skipped=skipped)
        assert (ours.at(step + 1), ours.state(step)) == (theirs.item(), (theirs.item(), grown.item()))


def trained(job: Job, count: int, kind: str = "fp64") -> tuple[list[Stage], list[Updater], dict, dict]:
    """The losses and scales of stages in one process, with one update per step."""
    options = {"precision": job.precision, "loss_scale": (job.loss_scale, job.loss_scale_interval)}
    made = stages(model_of(job), count, data_of(job), accumulate=kind, **options)
    updaters = [Updater(stage) for stage in made]
    losses, scales = {}, {}
    for step in range(1, job.steps + 1):
        losses[step], scales[step] = one_step(job, made, updaters, step)
    return made, updaters, losses, scales


def one_step(job: Job, made: list[Stage], updaters: list[Any], step: int) -> tuple[float, float]:
    for stage in made:
        stage.sums.begin(step, stage.limits.at(step))
    losses = run_step(made, step, job.microbatches)
    whole = [slice(0, stage.size) for stage in made]
    parts = [stage.sums.part(here) for stage, here in zip(made, whole, strict=True)]
    means = [torch.empty(stage.size) for stage in made]
    for stage, here, part, mean in zip(made, whole, parts, means, strict=True):
        weight = job.microbatches * stage.scale_at(step)
        stage.sums.means(here, [here], [part], weight, mean)
    skipped = not all(bool(mean.isfinite().all()) for mean in means)
    for stage, updater, part, mean in zip(made, updaters, parts, means, strict=True):
        if not skipped:
            updater.apply(step, mean)
        stage.updated(step, list(part.peaks), skipped=skipped)
    (scale,) = {stage.scale_at(step + 1) for stage in made}
    return sum(losses.tolist()) / len(losses), scale


def test_losses_and_scales_are_those_of_a_plain_loop_with_a_grad_scaler() -> None:
    scales: dict[int, float] = {}
    job = replace(JOB, optimizer=OptimizerSpec(decay="constant", clip=None))
    losses, weights = plain_loop(job, scales)
    found = trained(job, 2)
    assert found[3] == scales
    assert len(set(scales.values())) > 3  # it fell, and it rose again
    assert any(scales[step + 1] > scales[step] for step in range(1, job.steps))
    assert list(found[2].values()) == pytest.approx(list(losses.values()), rel=1e-3)
    ours = {name: p.detach() for updater in found[1] for name, p in updater.named}
    assert max(float((ours[name] - value).abs().max()) for name, value in weights.items()) < 2e-3


def test_strict_sums_of_scaled_gradients_have_the_same_bits_in_any_order() -> None:
    options = {"precision": "fp16", "loss_scale": (2.0**11, 2000), "accumulate": "strict40"}
    found = []
    for order in ((0, 1, 2), (2, 0, 1)):
        (stage,) = stages(model_of(JOB), 1, data_of(JOB), **options)
        run_step([stage], 1, 3, order=order)
        mean, whole = torch.empty(stage.size), slice(0, stage.size)
        stage.sums.means(whole, [whole], [stage.sums.part(whole)], 3 * stage.scale_at(1), mean)
        found.append(mean)
    assert found[0].isfinite().all()
    assert found[0].equal(found[1])


def test_a_state_has_the_scale_and_any_other_cut_finds_it() -> None:
    job = replace(JOB, steps=5)
    made, updaters, _, scales = trained(job, 2, "strict40")
    state = {name: t.clone() for updater in updaters for name, t in updater.state(job.steps).items()}
    options = {"precision": "fp16", "loss_scale": (2.0, 7), "accumulate": "strict40"}
    for count in (1, 3):
        for stage in stages(model_of(job), count, data_of(job), **options):
            Updater(stage).load(state, job.steps)
            assert stage.scale_at(job.steps + 1) == scales[job.steps]
            assert stage.beside(job.steps).items() <= state.items()
    settings = StageSettings(**options, sharded=True)
    (whole,) = [Stage(model_of(job), range(4), data=data_of(job), device=CPU, settings=settings)]
    chunks = ShardedUpdater(whole, chunks=3)
    chunks.load(state, job.steps, range(3))
    told = {one.tensor: one.values for chunk in range(3) for one in chunks.slices(chunk, job.steps)}
    assert {name for name in told if name.startswith("extra/")} == {
        n for n in state if n.startswith("extra/")
    }
    assert all(told[name].equal(state[name]) for name in told if name.startswith("extra/"))
    (plain,) = stages(model_of(job), 1, data_of(job), accumulate="strict40")  # as if there had been no scale
    Updater(plain).load(state, job.steps)
    grids = {n.removeprefix("extra/grid/"): int(t) for n, t in state.items() if n.startswith("extra/grid/")}
    assert plain.limits.state(job.steps) == grids
    scaled = {**made[0].limits.state(job.steps), **made[1].limits.state(job.steps)}
    assert {scaled[name] - grids[name] for name in grids} == {int(scales[job.steps]).bit_length() - 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_scale": 1000.0}, "loss_scale is 1000; give a power of two, such as 1024"),
        ({"loss_scale": -2.0}, "loss_scale is -2; give a power of two"),
        ({"loss_scale_interval": 0}, "loss_scale_interval is 0"),
        ({"precision": "bf16"}, 'loss_scale is for precision = "fp16", and precision is "bf16"'),
        ({"graphs": "always"}, 'graphs = "always" records a backward with one loss scale'),
        (
            {"model": ModelSpec(build="frozen:after", options={}), "stages": 2},
            "keeps its loss scale beside trained parameters, and stage 1 has none; use fewer stages",
        ),
    ],
)
def test_what_does_not_go_with_fp16_is_one_sentence(changes: dict, words: str, tmp_path: Path) -> None:
    (tmp_path / "frozen.py").write_text(
        "from torch import nn\n"
        "def after():\n"
        "    return {'a': lambda: nn.Linear(8, 8), 'b': lambda: nn.Linear(8, 8).requires_grad_(False)}\n"
    )
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        preflight(replace(JOB, base=str(tmp_path), **changes))
