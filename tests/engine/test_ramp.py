"""A batch that grows with the step: as a run with so many microbatches, and no data is skipped."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline import by_name, run_step, stages

from everstep.engine.datasets.data import Synthetic
from everstep.engine.datasets.ramp import BatchRamp, RampedData
from everstep.engine.layers.gpt import gpt
from everstep.engine.prepare.preflight import preflight
from everstep.engine.prepare.program import Program
from everstep.errors import UserError
from everstep.job.job import Job

DATA = Synthetic(vocab=64, sequence=16, rows=2, seed=3)


@given(
    st.integers(1, 12),
    st.dictionaries(st.integers(2, 9).map(str), st.floats(0.01, 1.0), max_size=3),
    st.floats(0.01, 1.0),
)
def test_those_that_count_take_the_data_one_after_the_other(
    microbatches: int, later: dict[str, float], first: float
) -> None:
    ramp = BatchRamp.of({"1": first, **later}, microbatches)
    assert ramp is not None
    places = []
    for step in range(1, 12):
        counting = [m for m in range(microbatches) if ramp.counts(step, m)]
        assert len(counting) == ramp.counting(step)
        places += [ramp.place(step, m) for m in counting]
    numbers = [(step - 1) * microbatches + m for step, m in places]
    assert numbers == list(range(len(numbers)))


def test_half_of_a_batch_is_half_of_each_replicas() -> None:
    ramp = BatchRamp.of({"1": 0.5}, 16)
    assert ramp is not None
    each = [sum(ramp.counts(1, replica * 4 + m) for m in range(4)) for replica in range(4)]
    assert each == [2, 2, 2, 2]


def test_a_step_of_half_a_batch_is_one_of_half_as_many_microbatches() -> None:
    model = gpt(vocab=64, width=32, heads=4, hidden=48, depth=2)
    ramp = BatchRamp(((1, 2),), 4)
    found = []
    for data, more, count in ((RampedData(DATA, ramp), {"ramp": ramp}, 4), (DATA, {}, 2)):
        pipeline = stages(model, 2, data, seed=3, contributions=4, **more)
        losses = run_step(pipeline, 1, count)
        weights = [pipeline[-1].weight(1, m) for m in range(count)]
        sums = by_name(pipeline, [stage.take_gradients() for stage in pipeline])
        found.append((float(losses.sum()), sum(weights), sums))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(found[0][2][name], gradient) for name, gradient in found[1][2].items())


WORDS: dict[str, Any] = {"model": {"preset": "gpt-tiny"}, "data": {"kind": "synthetic"}}


@pytest.mark.parametrize("ramp", [{"0": 0.5}, {"1": 1.5}, {"1": 0}, {"1": "all"}, {"soon": 0.5}, {"1": True}])
def test_shares_that_are_none_are_refused(ramp: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="give steps from 1 on, and shares of the batch"):
        Job.from_dict(WORDS | {"ramp": ramp})


def test_a_ramp_begins_with_the_first_step() -> None:
    with pytest.raises(UserError, match="ramp begins at step 5"):
        Job.from_dict(WORDS | {"ramp": {"5": 0.5}})


def test_a_stream_cannot_ramp() -> None:
    class Stream:
        def preview(self) -> Any:
            return DATA.batch(1, 0)

        def batch(self, step: int, microbatch: int) -> Any:
            return DATA.batch(step, microbatch)

    with pytest.raises(UserError, match="ramp cannot be combined with a stream"):
        preflight(Job.from_dict(WORDS | {"ramp": {"1": 0.5}}), data=Stream())


def test_the_data_of_a_program_ramps_with_the_job_once() -> None:
    program = Program.of(Job.from_dict(WORDS | {"ramp": {"1": 0.5, "3": 1.0}, "microbatches": 4}))
    plain = Program.of(Job.from_dict(WORDS | {"microbatches": 4})).data
    assert torch.equal(program.data.batch(2, 1)[0], plain.batch(1, 2)[0])
    assert torch.equal(program.data.batch(3, 0)[0], plain.batch(2, 0)[0])
    stage, _ = program.build(0)
    stage.load(2, 1)
    assert torch.equal(stage._batches[2, 1][0], plain.batch(1, 2)[0])
