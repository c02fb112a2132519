"""Recorded ops give the bits of eager ones. On a CPU, a recording is run again into its first tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from pipeline import by_name, run_step, stages
from torch import Tensor

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.stage import weight_sums
from everstep.engine.stage.evaluation import Evaluation
from everstep.engine.stage.recordings import ATTEMPTS, WARM_UP, has_room
from everstep.engine.stage.stage import Stage
from everstep.engine.sums.sums import GradientSums

DATA = Synthetic(vocab=64, sequence=16, rows=2, seed=3)
SMALL = {"vocab": 64, "width": 16, "heads": 2, "hidden": 24, "depth": 2}
RunStep = Callable[..., Tensor]


class RunAgain:
    made = 0

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        RunAgain.made += 1
        first = run()

        def replay() -> None:
            for old, new in zip(first, run(), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new.detach())

        return [tensor.detach() for tensor in first], replay

    def memory(self) -> tuple[int, int]:
        return 1000, 300


def pipeline(
    count: int,
    *,
    recorded: bool,
    at_once: int = 9,
    late: bool = False,
    evaluation: Evaluation | None = None,
    **shape,
) -> list[Stage]:
    made = stages(gpt(**SMALL, **shape), count, DATA, evaluation=evaluation)
    for stage in made:
        if late:
            stage.sums = GradientSums(
                stage.slots, stage.size, kind="strict", contributions=256, device=stage.device, late=True
            )
        if recorded:
            room = iter(range(at_once))
            stage.record(RunAgain, lambda nbytes, room=room: next(room, None) is not None)
    return made


def one_by_one(pipe: list[Stage], step: int, microbatches: int) -> Tensor:
    for microbatch in range(microbatches):
        x = grad = None
        for stage in pipe:
            x = stage.forward(step, microbatch, x)
        for stage in reversed(pipe):
            grad = stage.input_grad(step, microbatch, grad)
        for stage in pipe:
            stage.weight_grad(step, microbatch)
    return torch.stack([pipe[-1].loss(step, microbatch) for microbatch in range(microbatches)])


def assert_equal(
    eager: list[Stage], recorded: list[Stage], run: Callable[..., Tensor], steps: int = 3
) -> None:
    for step in range(1, steps + 1):
        losses = [run(pipe, step, 4) for pipe in (eager, recorded)]
        assert torch.equal(*losses)
        sums = [by_name(pipe, [stage.take_gradients() for stage in pipe]) for pipe in (eager, recorded)]
        for name, expected in sums[0].items():
            assert torch.equal(expected, sums[1][name]), name
        for pipe in (eager, recorded):
            for stage in pipe:
                stage.working.mul_(1.01)  # an update, in place


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("at_once", [9, 1])
@pytest.mark.parametrize("run", [run_step, one_by_one])
def test_recorded_ops_have_the_bits_of_eager_ones(
    count: int, at_once: int, run: Callable[..., Tensor]
) -> None:
    RunAgain.made = 0
    recorded = pipeline(count, recorded=True, at_once=at_once)
    assert_equal(pipeline(count, recorded=False), recorded, run)
    under_way = 4 if run is run_step else 1
    each = min(at_once, under_way)
    assert RunAgain.made == 2 * count * each
    for stage in recorded:
        assert stage.recordings is not None
        assert (stage.recordings.whole_bytes, stage.recordings.idle_bytes) == (1000 * each, 300 * each)
        assert stage.stash_bytes() == 1000 * each


def test_memory_is_freed_at_rest_and_only_if_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing waits for all that the device does, and so for transfers of other workers."""
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (500 if said else 300, 1000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("free"))

    @contextmanager
    def at_rest() -> Iterator[None]:
        said.append("rest")
        yield
        said.append("on")

    room = partial(has_room, torch.device("cuda", 0), None, at_rest=at_rest)
    assert room(200)
    assert not said
    assert room(400)
    assert said == ["rest", "free", "on"]


@pytest.mark.parametrize("at_once", [9, 1])
def test_what_must_be_added_again_is_made_from_the_right_microbatch(at_once: int) -> None:
    """Late sums: whether a contribution fits is known only when the next one is added."""
    RunAgain.made = 0
    eager, recorded = (pipeline(1, recorded=r, at_once=at_once, late=True) for r in (False, True))
    for pipe in (eager, recorded):
        pipe[0].sums.begin(None, [-40] * len(pipe[0].slots))  # far too low: everything is promoted
    assert_equal(eager, recorded, one_by_one)
    assert RunAgain.made == 2 * min(at_once, 2)


def test_the_last_microbatch_of_a_step_needs_no_tensors_beside_those_of_the_next_step() -> None:
    """Late sums are settled by the reduce: four microbatches under way, four recordings, not five."""
    RunAgain.made = 0
    eager, recorded = (pipeline(1, recorded=r, late=True) for r in (False, True))
    assert_equal(eager, recorded, run_step)
    assert RunAgain.made == 2 * 4


def test_recorded_ops_are_not_waited_for_in_the_middle_of_w(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check lets tensors go, and those of recordings stay."""
    monkeypatch.setattr(weight_sums, "CHECKED", 1)
    for is_recorded in (False, True):
        pipe = pipeline(1, recorded=is_recorded, late=True)
        for step in (1, 2):
            one_by_one(pipe, step, WARM_UP)
            pipe[0].take_gradients()
        checks = []
        monkeypatch.setattr(pipe[0].sums, "check", lambda checks=checks: checks.append(1))
        one_by_one(pipe, 3, 1)
        assert (len(checks) == 1) == is_recorded


def test_layers_that_draw_random_numbers_are_not_recorded() -> None:
    RunAgain.made = 0
    assert_equal(*(pipeline(1, recorded=r, dropout=0.2) for r in (False, True)), one_by_one)
    assert RunAgain.made == 0


def test_a_recording_that_fails_leaves_everything_as_it_was() -> None:
    class Fails:
        attempts = 0

        def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
            Fails.attempts += 1
            run()
            raise RuntimeError("no graph for this")

    recorded = pipeline(1, recorded=False)
    recorded[0].record(Fails, lambda nbytes: True)
    assert_equal(pipeline(1, recorded=False), recorded, one_by_one)
    assert recorded[0].recordings.is_off
    assert Fails.attempts == ATTEMPTS


def test_a_dropped_microbatch_gives_its_tensors_back() -> None:
    RunAgain.made = 0
    (stage,) = pipeline(1, recorded=True, at_once=1)
    for step in (1, 2):
        for microbatch in range(WARM_UP + 3):
            stage.forward(step, microbatch)
            stage.drop(step, microbatch)
        assert RunAgain.made == (0 if step == 1 else 2), "after the first update"


def test_weights_that_have_moved_are_recorded_anew() -> None:
    RunAgain.made = 0
    eager, recorded = pipeline(1, recorded=False), pipeline(1, recorded=True)
    assert_equal(eager, recorded, one_by_one, steps=2)
    for pipe in (eager, recorded):
        pipe[0].separate_weights()
        pipe[0].masters.zero_()
    assert_equal(eager, recorded, one_by_one, steps=2)
    assert RunAgain.made == 4


EVALUATION = Evaluation(data=DATA, every=2, batches=6, steps=5, microbatches=4)


@pytest.mark.parametrize(("count", "run"), [(1, one_by_one), (2, run_step), (2, one_by_one), (3, run_step)])
def test_steps_that_evaluate_have_the_bits_of_eager_ones(count: int, run: RunStep) -> None:
    """Also the closing step, and the recorded steps between."""
    RunAgain.made = 0
    eager, recorded = (pipeline(count, recorded=r, evaluation=EVALUATION) for r in (False, True))

    def scored(pipe: list[Stage], step: int, microbatches: int) -> Tensor:
        losses = run(pipe, step, microbatches)
        scores = [pipe[-1].scores(step, microbatch) for microbatch in range(microbatches)]
        assert all(map(bool, scores)) == EVALUATION.evaluates(step)
        return torch.cat((losses.double(), torch.tensor(scores, dtype=torch.float64).flatten()))

    assert_equal(eager, recorded, scored, steps=6)
    assert RunAgain.made > 0


def test_work_of_a_dead_worker_in_a_step_that_evaluates_has_the_bits_of_eager_ops() -> None:
    """The last stage of the first replica dies after its forwards; that of the second does all of its work,
    from what the first stages have sent.
    """
    eager = pipeline(2, recorded=False, evaluation=EVALUATION)
    first, second = (pipeline(2, recorded=True, evaluation=EVALUATION) for _ in range(2))
    for step in (1, 2):
        for pipe in (eager, first, second):
            run_step(pipe, step, 4)
            for stage in pipe:
                stage.take_gradients()
    assert EVALUATION.evaluates(3)
    expected = run_step(eager, 3, 4)
    home = {0: first, 1: first, 2: second, 3: second}
    sent = {microbatch: pipe[0].forward(3, microbatch) for microbatch, pipe in home.items()}
    for microbatch in (0, 1):
        first[1].forward(3, microbatch, sent[microbatch])
    for microbatch, pipe in home.items():
        second[1].forward(3, microbatch, sent[microbatch])
        pipe[0].input_grad(3, microbatch, second[1].input_grad(3, microbatch))
        second[1].weight_grad(3, microbatch)
        pipe[0].weight_grad(3, microbatch)
        assert torch.equal(second[1].loss(3, microbatch), expected[microbatch])
        assert second[1].scores(3, microbatch) == eager[1].scores(3, microbatch) != ()
    assert torch.equal(second[1].take_gradients(), eager[1].take_gradients())
    torch.testing.assert_close(
        first[0].take_gradients() + second[0].take_gradients(), eager[0].take_gradients()
    )
