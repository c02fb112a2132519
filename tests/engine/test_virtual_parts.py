"""Workers that run several parts of the model: what is refused before the start, what memory they need, and
that a worker's parts compute what as many stages would.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from everstep.engine.layers.model import stage_parts
from everstep.engine.prepare.figures import layer_figures
from everstep.engine.prepare.fitting import fit, memory_here
from everstep.engine.prepare.preflight import preflight
from everstep.engine.prepare.program import Program
from everstep.engine.prepare.resolve import model_of
from everstep.errors import UserError
from everstep.job.job import DataSpec, Job, ModelSpec, VerifySpec
from everstep.protocol.shape import Fold

JOB = Job(
    model=ModelSpec(preset="gpt-tiny", options={"depth": 4}),
    data=DataSpec(kind="synthetic", rows=1, sequence=16),
    replicas=2,
    stages=2,
    virtual=2,
)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"shards": 2}, "virtual = 2 cannot be combined with shards = 2"),
        ({"graphs": "always"}, 'virtual = 2 cannot be recorded, and graphs is "always"'),
        ({"stages": 1}, "virtual = 2 needs 2 stages or more, and stages is 1"),
        ({"verify": VerifySpec(votes="every")}, 'virtual = 2 cannot be combined with verify.votes = "every"'),
        ({"virtual": 4}, "virtual is 4 with 2 stages, which makes 8 parts; the model has 6 layers"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_the_start(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        preflight(replace(JOB, **changes))


@pytest.mark.parametrize("virtual", [0, 9])
def test_a_number_of_parts_that_makes_no_sense_is_refused(virtual: int) -> None:
    with pytest.raises(UserError, match="virtual"):
        replace(JOB, virtual=virtual)


def test_a_job_with_parts_passes_its_checks_and_keeps_them_in_another_shape() -> None:
    preflight(JOB)
    assert JOB.vote_period == (0, 0)
    other = JOB.reshaped(4, 3)
    assert other.task_shape().fold == Fold(3, 2, True)
    assert JOB.most_stages() == 3


@pytest.mark.parametrize("order", ["v", "interleaved"])
def test_the_parts_of_all_stages_are_the_model(order: Any) -> None:
    job = replace(JOB, stages=3, virtual_order=order)
    model, fold = model_of(job), job.task_shape().fold
    parts = stage_parts(model, fold)
    assert [fold.stage(part) for part in range(6)] == ([0, 1, 2, 2, 1, 0] if order == "v" else [0, 1, 2] * 2)
    assert sorted(i for mine in parts for one in mine for i in one) == list(range(len(model.layers)))


def test_memory_counts_the_weights_of_all_parts_and_stashes_per_part() -> None:
    plain = replace(JOB, stages=4, virtual=1)
    model = model_of(JOB)
    batch = Program.of(JOB).data.batch(1, 0)
    layers = layer_figures(model, batch, "fp32")
    memory = memory_here(JOB)
    folded, alone = fit(JOB, model, layers, memory), fit(plain, model, layers, memory)
    sizes = [one.figures.parameters for one in alone]
    assert [one.figures.parameters for one in folded] == [sizes[0] + sizes[3], sizes[1] + sizes[2]]
    assert all(one.stash == 8 for one in (*folded, *alone))
    assert folded[0].figures.held == max(alone[0].figures.held, alone[3].figures.held)


def test_one_worker_s_parts_share_weights_and_sums_and_compute_what_stages_do() -> None:
    """By hand, without processes: both parts of both workers, one microbatch."""
    program, plain = Program.of(JOB), Program.of(replace(JOB, stages=4, virtual=1))
    workers = [program.build(stage)[0] for stage in range(2)]
    fold = JOB.task_shape().fold
    parts = [workers[fold.stage(p)].parts[fold.parts_of(fold.stage(p)).index(p)] for p in range(4)]
    stages = [plain.build(stage)[0] for stage in range(4)]
    for pipeline in (parts, stages):
        value: Any = None
        for one in pipeline:
            value = one.forward(1, 0, value)
        for one in reversed(pipeline):
            value = one.input_grad(1, 0, value)
        for one in pipeline:
            one.weight_grad(1, 0)
    assert torch.equal(parts[-1].loss(1, 0), stages[-1].loss(1, 0))
    assert workers[0].parts[0].sums is workers[0].parts[1].sums
    theirs = {name: view for one in stages for name, view in one.views(one.take_gradients()).items()}
    ours = {name: view for one in workers for name, view in one.views(one.take_gradients()).items()}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(bool(view.any()) for name, view in ours.items() if name.endswith("weight"))
