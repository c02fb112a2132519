"""An update, its exact undoing, and a state that another worker can take over."""

import math
from collections.abc import Callable

import pytest
import torch
from pipeline import CPU, plain, run_step, stages

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.layers.model import Model
from everstep.engine.stage import counted
from everstep.engine.stage.stage import Stage
from everstep.engine.state import optimizer as optimizer_module
from everstep.engine.state.optimizer import Updater, adamw, buckets
from everstep.engine.state.optimizer_state import Named
from everstep.engine.worker.work_items import state_hashes
from everstep.errors import UserError

DATA = Synthetic(vocab=32, sequence=8, rows=2)
SMALL = {"vocab": 32, "width": 16, "heads": 2, "hidden": 24, "depth": 2}


class Counted(torch.optim.Optimizer):
    """A user's own optimizer: momentum, and a step count that is a plain int."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("speed", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                p.sub_(state["speed"] * group["lr"] / state["count"])


FACTORIES: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "adamw": adamw(lr=1e-2),
    "adam, not fused": lambda named: torch.optim.Adam(named, lr=1e-2, amsgrad=True),
    "sgd": lambda named: torch.optim.SGD(named, lr=1e-1, momentum=0.9, dampening=0.1),
    "plain sgd": lambda named: torch.optim.SGD(named, lr=1e-1),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=1e-3, momentum=0.5),
    "user's own": lambda named: Counted([p for _, p in named], lr=1e-2),
}


def stage(**options) -> Stage:
    return stages(gpt(**SMALL), 1, DATA, **options)[0]


def snapshot(updater: Updater) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in updater.state().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def gradient(of: Stage, step: int) -> torch.Tensor:
    return torch.randn(of.size, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_preview_changes_only_what_is_computed_with_and_is_undone_exactly(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_module, "BUCKET", 300)  # several buckets
    here, plain = stage(precision=precision), stage(precision=precision)
    updater, expected = Updater(here, FACTORIES[name]), Updater(plain, FACTORIES[name])
    for step in range(4):
        before, working = snapshot(updater), here.working.clone()
        updater.preview(step, gradient(here, 100 + step))
        assert same(snapshot(updater), before)
        assert not torch.equal(working, here.working)
        updater.undo()
        assert torch.equal(working, here.working)
        updater.preview(step, gradient(here, step))
        expected.apply(step, gradient(here, step))
        assert torch.equal(here.working, plain.working)
        assert same(snapshot(updater), before)
        updater.commit(step, gradient(here, step))
        assert same(snapshot(updater), snapshot(expected))
        assert torch.equal(here.working, here.masters.to(here.working.dtype))
        for one in (updater, expected):
            one.apply(step, gradient(here, 50 + step), 0.5)
        assert same(snapshot(updater), snapshot(expected))


def test_the_layers_compute_with_a_preview() -> None:
    here, there = stage(), stage()
    updater, other = Updater(here), Updater(there)
    updater.preview(0, gradient(here, 0))
    other.apply(0, gradient(there, 0))
    for one in (here, there):
        one.forward(1, 0)
    assert torch.equal(here.loss(1, 0), there.loss(1, 0))
    updater.undo()
    here.forward(1, 1)
    fresh = stage()
    fresh.forward(1, 1)
    assert torch.equal(here.loss(1, 1), fresh.loss(1, 1))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_votes_on_states_do_not_ask_whether_an_update_was_eager(precision: str) -> None:
    """A worker that joined after the last eager update was called wrong: its layers compute with the masters
    themselves, those of its peers with weights beside them.
    """
    here, there = stage(precision=precision), stage(precision=precision)
    eager, later = Updater(here), Updater(there)
    eager.preview(0, gradient(here, 0))
    eager.commit(0, gradient(here, 0))
    later.apply(0, gradient(there, 0))
    assert state_hashes(here, eager.state()) == state_hashes(there, later.state())
    with torch.no_grad():
        here.working.view(torch.int16)[5] ^= 1
    assert state_hashes(here, eager.state()) != state_hashes(there, later.state())


def test_buckets_hold_every_parameter_once_and_are_as_small_as_asked() -> None:
    named = Updater(stage()).named
    found = buckets(named, 500)
    assert [pair for bucket in found for pair in bucket] == named
    assert all(len(bucket) == 1 or sum(p.numel() for _, p in bucket) <= 500 for bucket in found)
    assert len(buckets(named, 10**9)) == 1


@pytest.mark.parametrize("name", FACTORIES)
def test_a_state_taken_over_by_another_worker_goes_on_with_the_same_bits(name: str) -> None:
    one, other = stage(), stage(seed=1)
    updaters = [Updater(one, FACTORIES[name]), Updater(other, FACTORIES[name])]
    for step in range(3):
        updaters[0].apply(step, gradient(one, step))
    updaters[1].apply(0, gradient(other, 9))
    updaters[1].load(snapshot(updaters[0]))
    assert same(snapshot(updaters[0]), snapshot(updaters[1]))
    for updater in updaters:
        updater.apply(3, gradient(one, 3))
    assert same(snapshot(updaters[0]), snapshot(updaters[1]))
    assert torch.equal(one.working, other.working)


@pytest.mark.parametrize("owned", [True, False])
def test_what_is_read_for_a_load_alone_is_kept_and_what_others_have_is_copied(owned: bool) -> None:
    """A copy of what was read left as much unused memory in the heap as a tensor has, for every other one."""
    one, other = Updater(stage()), Updater(stage(seed=1))
    one.apply(0, gradient(one.stage, 0))
    given = snapshot(one)
    other.load(given, owned=owned)
    assert same(snapshot(one), snapshot(other))
    moments = [t for state in other.optimizer.state.values() for t in state.values() if t.ndim]
    theirs = {tensor.data_ptr() for tensor in given.values()}
    assert [moment.data_ptr() in theirs for moment in moments] == [owned] * len(moments)
    assert moments


def test_a_state_from_before_the_first_step_empties_the_optimizer() -> None:
    fresh, used = Updater(stage()), Updater(stage())
    used.apply(0, gradient(used.stage, 0))
    used.load(snapshot(fresh))
    assert not used.optimizer.state
    assert same(snapshot(fresh), snapshot(used))


def test_state_is_named_logically() -> None:
    updater = Updater(stage())
    updater.apply(0, gradient(updater.stage, 0))
    state = updater.state()
    assert {
        "model/embed.tokens.weight",
        "optimizer/embed.tokens.weight/exp_avg",
        "optimizer/blocks.0.mlp.up.weight/step",
    } <= state.keys()
    assert state["optimizer/head.norm.weight/step"].shape == ()
    assert state["model/embed.tokens.weight"].dtype == torch.float32


def test_the_update_is_that_of_torch_on_the_plain_model() -> None:
    model = gpt(**SMALL)
    (ours,) = stages(model, 1, DATA)
    updater = Updater(ours, adamw(lr=1e-2), rate=lambda step: 1 / (1 + step))
    start = {name: p.clone() for name, p in ours.views(ours.masters).items()}
    reference = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    matrices = {"params": [p for p in reference.values() if p.ndim > 1], "weight_decay": 0.1}
    vectors = {"params": [p for p in reference.values() if p.ndim == 1], "weight_decay": 0.0}
    theirs = torch.optim.AdamW([matrices, vectors], lr=1e-2, betas=(0.9, 0.95), fused=True)
    for step in range(3):
        gradients, _ = plain(model, reference, DATA, step, 4)
        for name, p in reference.items():
            p.grad = gradients[name] / 4
        norm = torch.nn.utils.clip_grad_norm_(list(reference.values()), 0.5)
        for group in theirs.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        theirs.step()
        run_step([ours], step, 4)
        mean = updater.mean(ours.take_gradients(), 4)
        assert updater.sum_of_squares(mean) ** 0.5 == pytest.approx(float(norm), rel=1e-6)
        updater.apply(step, mean, min(1.0, 0.5 / updater.sum_of_squares(mean) ** 0.5))
        for name, p in ours.views(ours.masters).items():
            # Adam divides by the root of a square: a last bit in the gradient is that bit in the update.
            assert torch.allclose(p, reference[name], rtol=1e-5, atol=1e-6), (step, name)


def test_apply_leaves_the_mean_gradient_as_it_was() -> None:
    updater = Updater(stage())
    mean = gradient(updater.stage, 0)
    before = mean.clone()
    updater.apply(0, mean, 0.25)
    updater.apply(1, mean)
    assert torch.equal(mean, before)


def test_a_tied_pair_counts_once_in_the_norm_and_stays_one_tensor() -> None:
    model = gpt(**SMALL, tied=True)
    (ours,) = stages(model, 1, DATA)
    updater = Updater(ours, adamw(lr=1e-2))
    for step in range(2):
        run_step([ours], step, 2)
        total = ours.take_gradients()
        mean = updater.mean(total, 2)
        views = ours.views(mean)
        joined = views[model.tied[0][0]] + views[model.tied[0][1]]
        single = [view for name, view in views.items() if name not in model.tied[0]]
        once = sum(float(view.double().square().sum()) for view in [joined, *single])
        assert updater.sum_of_squares(mean) == pytest.approx(once, rel=1e-12)
        before = mean.clone()
        updater.apply(step, mean)
        assert torch.equal(mean, before)
        weights = ours.views(ours.masters)
        assert torch.equal(weights["embed.tokens.weight"], weights["head.logits.weight"])


def test_a_gradient_that_is_not_finite_shows_in_the_norm() -> None:
    updater = Updater(stage())
    for bad in (float("nan"), float("inf")):
        mean = gradient(updater.stage, 0)
        mean[3] = bad
        assert not torch.isfinite(torch.tensor(updater.sum_of_squares(mean)))


def test_a_stage_without_parameters_has_nothing_to_update() -> None:
    model = Model(layers=[torch.nn.Tanh])
    updater = Updater(Stage(model, range(1), data=DATA, device=CPU))
    updater.preview(0, torch.zeros(0))
    updater.commit(0, torch.zeros(0))
    updater.undo()
    assert updater.sum_of_squares(torch.zeros(0)) == 0
    assert updater.state() == {}


def test_a_state_of_another_model_is_refused_by_name() -> None:
    updater = Updater(stage())
    state = snapshot(updater)
    with pytest.raises(UserError, match=r"model/head.norm.weight has shape"):
        updater.load({**state, "model/head.norm.weight": torch.zeros(3)})
    del state["model/head.norm.weight"]
    with pytest.raises(UserError, match=r"no tensor model/head.norm.weight"):
        updater.load(state)


def test_the_norm_of_a_tied_model_converts_no_tensor_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vector_norm` with a dtype makes a copy first: of a tied table and of all layers between, 8 bytes per
    element. The number is the same.
    """
    stage = stages(gpt(**SMALL, tied=True), 1, DATA)[0]
    updater = Updater(stage)
    flat = torch.zeros(stage.size)  # between tensors there is padding
    for slot in stage.slots.values():
        slot.of(flat).normal_(generator=torch.Generator().manual_seed(slot.offset))
    norms, converted = torch._foreach_norm, []
    monkeypatch.setattr(counted, "CPU_BLOCK", 500)
    monkeypatch.setattr(
        torch,
        "_foreach_norm",
        lambda pieces, *more: converted.extend(one.numel() for one in pieces) or norms(pieces, *more),
    )
    found = updater.sum_of_squares(flat)
    assert max(converted) == 500
    joined = {name: slot.of(flat).double() for name, slot in stage.slots.items()}
    second = joined.pop(stage.model.tied[0][1])
    joined[stage.model.tied[0][0]] += second
    assert found == pytest.approx(sum(float(one.square().sum()) for one in joined.values()), rel=1e-6)


def test_a_sum_of_squares_is_rounded_once_whatever_version_of_python_adds_it_up() -> None:
    """From Python 3.12 on the built-in `sum` rounds otherwise than before."""
    (stage,) = stages(gpt(**SMALL), 1, DATA)
    numbers = [3.0e8, *[1.0] * 40]  # 9e16 + 1 is 9e16
    squares = [n**2 for n in numbers]
    in_order = 0.0
    for square in squares:
        in_order += square
    (found,) = counted.squares_of(stage, [[torch.tensor([n]) for n in numbers]])
    assert found == math.fsum(squares) != in_order


def test_a_state_of_another_optimizer_is_named_when_the_next_step_misses_something() -> None:
    """It was a KeyError: 'sum'."""
    before, after = (Updater(stage(), of) for of in (torch.optim.AdamW, torch.optim.Adagrad))
    before.apply(1, torch.ones(before.stage.size))
    after.load({name: tensor.clone() for name, tensor in before.state(1).items()}, 1)
    with pytest.raises(UserError, match=r"^Adagrad does not find 'sum' in the state that was loaded"):
        after.apply(2, torch.ones(after.stage.size))
