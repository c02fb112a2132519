"""Optimizers of others: what they keep anywhere is put back after an eager step and travels with a state, or
they are refused before they train a different model without a word.
"""

import random
import re
from dataclasses import replace

import pytest
import torch
from pipeline import CPU, stages
from toy_optimizers import (
    CARRIED,
    REFUSED,
    Attributes,
    Coupled,
    Drawing,
    GroupCount,
    ListInState,
    Modes,
    ObjectInState,
)

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.gpt import gpt
from everstep.engine.prepare.preflight import preflight
from everstep.engine.prepare.program import Program
from everstep.engine.stage.stage import Stage
from everstep.engine.state.optimizer import Updater
from everstep.engine.state.optimizer_state import OptimizerState
from everstep.engine.state.optimizer_trial import try_optimizer
from everstep.errors import UserError
from everstep.job.job import Job, ModelSpec, OptimizerSpec

DATA = Synthetic(vocab=32, sequence=8, rows=2)
SMALL = {"vocab": 32, "width": 16, "heads": 2, "hidden": 24, "depth": 2}


def of(kind):
    """Matrices and vectors in groups of their own, as most people have them."""

    def build(named):
        groups = [[p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim <= 1]]
        return kind([{"params": group} for group in groups if group])

    return build


def updaters(kind, count: int = 1, **options) -> list[Updater]:
    return [Updater(stage, of(kind), **options) for stage in stages(gpt(**SMALL), count, DATA)]


def gradient(stage: Stage, step: int) -> torch.Tensor:
    whole = torch.zeros(stage.size)
    for name, slot in stage.slots.items():  # by name: the same however the model is cut
        generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + step)
        slot.of(whole).copy_(torch.randn(slot.shape, generator=generator))
    return whole


def copied(updater: Updater) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(value.shape, dtype=value.dtype).copy_(value)
        for name, value in updater.state().items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", CARRIED)
def test_an_eager_step_leaves_no_trace_and_equals_a_plain_one(kind) -> None:
    (eager,), (plain,) = updaters(kind), updaters(kind)
    for step in (2, 3, 4):
        before = copied(eager)
        eager.preview(step, gradient(eager.stage, 100 + step))
        assert same(copied(eager), before)
        eager.undo()
        eager.preview(step, gradient(eager.stage, step))
        plain.apply(step, gradient(plain.stage, step))
        assert torch.equal(eager.stage.working, plain.stage.working)
        eager.commit(step, gradient(eager.stage, step))
        assert same(copied(eager), copied(plain))
        assert torch.equal(eager.stage.working, eager.stage.masters)


@pytest.mark.parametrize("kind", CARRIED)
def test_a_joiner_goes_on_with_the_same_bits_whatever_it_did_before(kind) -> None:
    (member,), (joiner,) = updaters(kind), updaters(kind)
    for step in (2, 3, 4):
        member.apply(step, gradient(member.stage, step))
    joiner.apply(2, gradient(joiner.stage, 9))
    joiner.load(copied(member))
    assert same(copied(joiner), copied(member))
    for step in (5, 6):
        member.apply(step, gradient(member.stage, step))
        joiner.apply(step, gradient(joiner.stage, step))
    assert same(copied(joiner), copied(member))


@pytest.mark.parametrize("kind", CARRIED)
def test_a_state_from_before_the_first_step_undoes_all(kind) -> None:
    (used,), (fresh,) = updaters(kind), updaters(kind)
    used.apply(2, gradient(used.stage, 2))
    used.load(copied(fresh))
    assert same(copied(used), copied(fresh))
    for one in (used, fresh):
        one.apply(3, gradient(one.stage, 3))
    assert torch.equal(used.stage.masters, fresh.stage.masters)


@pytest.mark.parametrize("kind", [kind for kind in CARRIED if kind not in (Coupled, Drawing, Attributes)])
def test_a_state_goes_on_when_the_model_is_cut_into_other_stages(kind) -> None:
    parts, (whole,) = updaters(kind, 2), updaters(kind)
    for step in (2, 3):
        for part in parts:
            part.apply(step, gradient(part.stage, step))
    together = {name: tensor for part in parts for name, tensor in copied(part).items()}
    whole.load(together)
    assert same(copied(whole), together)
    again = updaters(kind, 2)
    for part in again:
        part.load(copied(whole))
    for one in (*again, *parts, whole):
        one.apply(4, gradient(one.stage, 4))
    for part, before in zip(again, parts, strict=True):
        assert same(copied(part), copied(before))
    assert same(copied(whole), {name: tensor for part in again for name, tensor in copied(part).items()})


@pytest.mark.parametrize("kind", CARRIED)
def test_the_gradient_of_a_step_is_not_changed(kind) -> None:
    (updater,) = updaters(kind)
    mean = gradient(updater.stage, 1)
    updater.apply(2, mean)
    assert torch.equal(mean, gradient(updater.stage, 1))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", [*CARRIED, *REFUSED])
def test_an_optimizer_is_tried_and_accepted_or_refused_by_name(kind, several: bool) -> None:
    (updater,) = updaters(kind)
    state = torch.default_generator.get_state()

    def tried() -> None:
        try_optimizer(of(kind), updater.optimizer, updater.named, device=CPU, several=several)

    coupled = "computes the step of a parameter from other parameters too"
    refusal = REFUSED.get(kind) or (coupled if several and kind in (Coupled, Attributes) else None)
    if refusal is None:
        tried()
    else:
        with pytest.raises(UserError, match=re.escape(refusal)):
            tried()
    assert torch.equal(torch.default_generator.get_state(), state)


def test_a_job_with_an_optimizer_that_trains_wrongly_is_refused_before_the_start() -> None:
    job = Job(model=ModelSpec(preset="gpt-tiny"), stages=2, replicas=2)
    preflight(job, model=gpt(**SMALL), data=DATA, optimizer=of(GroupCount))
    with pytest.raises(UserError, match="use stages = 1"):
        preflight(job, model=gpt(**SMALL), data=DATA, optimizer=of(Coupled))


@pytest.mark.parametrize(
    ("build", "refused"),
    [
        (of(GroupCount), False),
        (of(ListInState), True),
        (lambda named: torch.optim.Adafactor(named), True),
        (lambda named: torch.optim.AdamW(named), False),
    ],
)
def test_an_optimizer_that_looks_at_whole_matrices_is_refused_for_shards(build, refused: bool) -> None:
    """Each shard stepped with its part alone: other numbers than with one shard, and nothing was said."""
    job = Job(model=ModelSpec(preset="gpt-tiny"), shards=2)
    preflight(replace(job, shards=1), model=gpt(**SMALL), data=DATA, optimizer=build)
    if not refused:
        preflight(job, model=gpt(**SMALL), data=DATA, optimizer=build)
        return
    with pytest.raises(UserError, match="from its other parts too, and shards have one part each"):
        preflight(job, model=gpt(**SMALL), data=DATA, optimizer=build)


def test_a_worker_tries_its_optimizer_before_the_first_step_of_a_run() -> None:
    """A task of a cluster is checked by nobody else."""
    whole, parts = updaters(Coupled), updaters(Coupled, 2)
    whole[0].apply(1, gradient(whole[0].stage, 1))
    with pytest.raises(UserError, match="use stages = 1"):
        parts[0].preview(1, gradient(parts[0].stage, 1))


def test_two_groups_with_different_counts_cannot_become_one() -> None:
    (updater,) = updaters(GroupCount)
    updater.apply(2, gradient(updater.stage, 2))
    updater.optimizer.param_groups[1]["k"] = 7
    (one,) = [
        Updater(stage, lambda named: GroupCount([p for _, p in named]))
        for stage in stages(gpt(**SMALL), 1, DATA)
    ]
    with pytest.raises(UserError, match="in one group now"):
        one.load(copied(updater))


def test_only_classes_of_the_optimizers_own_package_are_made_from_a_state() -> None:
    (updater,) = updaters(ObjectInState)
    updater.apply(2, gradient(updater.stage, 2))
    given = copied(updater)
    beside = next(name for name in given if name.startswith("extra/optimizer/"))
    for other in ("subprocess:Popen", "toy_optimizers:_Toy.step", "toy_optimizers:Enum"):
        text = bytes(given[beside].tolist()).replace(b"toy_optimizers:Projector", other.encode())
        with pytest.raises(UserError, match=re.escape(other)):
            updater.load({**given, beside: torch.tensor(list(text), dtype=torch.uint8)})


def test_an_optimizer_with_modes_trains_and_saves_the_weights_to_use_as_the_average() -> None:
    (updater,) = updaters(Modes)
    for step in (2, 3):
        updater.apply(step, gradient(updater.stage, step))
    found = copied(updater)
    assert same(found, copied(updater))
    updater.optimizer.eval()
    for name, view in updater.stage.views(updater.stage.masters).items():
        assert torch.equal(found[f"extra/ema/{name}"], view)
        assert not torch.equal(found[f"model/{name}"], view)
    with pytest.raises(UserError, match="keeps an average itself"):
        updaters(Modes, ema=0.9)


def no_decay_for_embeddings(named):
    """As minGPT and many recipes have it."""
    kept = [p for name, p in named if "embed" in name or p.ndim < 2]
    decayed = [p for name, p in named if "embed" not in name and p.ndim >= 2]
    groups = [{"params": kept, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


@pytest.mark.parametrize("count", [1, 2])
def test_tied_parameters_with_other_numbers_in_their_groups_are_refused_naming_both(count: int) -> None:
    job = Job(model=ModelSpec(preset="gpt-tiny"), stages=count)
    preflight(job, model=gpt(**SMALL), data=DATA, optimizer=no_decay_for_embeddings)
    names = (
        "embed.tokens.weight and head.logits.weight are one tensor, and the optimizer has weight_decay = 0.0"
    )
    tied = gpt(**SMALL, tied=True)
    with pytest.raises(UserError, match=names):
        preflight(job, model=tied, data=DATA, optimizer=no_decay_for_embeddings)
    with pytest.raises(UserError, match=names):  # in a worker, too: nobody else checks a task of a cluster
        Program(job, tied, DATA, no_decay_for_embeddings).build(0)


@pytest.mark.parametrize(("kind", "says"), [(Drawing, "others for each half"), (Coupled, "count twice")])
def test_what_an_optimizer_does_to_one_tensor_it_must_do_to_two_halves(kind, says: str) -> None:
    job = Job(model=ModelSpec(preset="gpt-tiny"))
    preflight(job, model=gpt(**SMALL), data=DATA, optimizer=of(kind))
    with pytest.raises(UserError, match=says):
        preflight(job, model=gpt(**SMALL, tied=True), data=DATA, optimizer=of(kind))


def test_replicas_and_eager_updates_draw_the_same_random_numbers() -> None:
    one, other = updaters(Drawing), updaters(Drawing)
    for (updater,), noise in ((one, 1), (other, 2)):
        torch.manual_seed(noise)
        random.seed(noise)
        updater.apply(2, gradient(updater.stage, 2))
    assert torch.equal(one[0].stage.masters, other[0].stage.masters)
    before = one[0].stage.masters.clone()
    (elsewhere,) = updaters(Drawing)
    elsewhere.apply(3, gradient(elsewhere.stage, 2))  # other draws in another step
    assert not torch.equal(before, elsewhere.stage.masters)


def test_torchs_own_optimizers_have_no_other_state_than_before() -> None:
    (updater,) = [Updater(stage) for stage in stages(gpt(**SMALL), 1, DATA)]
    updater.apply(1, gradient(updater.stage, 1))
    assert {name.split("/")[0] for name in updater.state()} == {"model", "optimizer"}
    assert {name.rpartition("/")[2] for name in updater.state() if name.startswith("optimizer/")} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    assert OptimizerState(updater.optimizer, updater.named).opaque() == {}


def test_a_rate_that_is_no_number_is_refused() -> None:
    job = Job(model=ModelSpec(preset="gpt-tiny"), optimizer=OptimizerSpec())
    with pytest.raises(UserError, match="whose lr is None"):
        preflight(
            job,
            model=gpt(**SMALL),
            data=DATA,
            optimizer=lambda named: GroupCount([p for _, p in named], lr=None),
        )
