"""Shards of one worker, as real processes with real collectives: the same losses as one process, the norm
counted once, states as boxes of the logical tensors.
"""

import gc
import multiprocessing
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from torch import nn

from everstep.engine.datasets.data import Dataset, Synthetic
from everstep.engine.layers.boundary import Boundary
from everstep.engine.layers.gpt import gpt
from everstep.engine.layers.model import Model
from everstep.engine.layers.shard_plan import Cut, from_theirs
from everstep.engine.prepare.preflight import preflight
from everstep.engine.prepare.shard_trial import with_summed
from everstep.engine.shards.collectives import GroupCollectives
from everstep.engine.shards.layers import refuse_unequal
from everstep.engine.shards.slices import sliced, together
from everstep.engine.stage.evaluation import Evaluation
from everstep.engine.stage.stage import Stage, StageSettings
from everstep.engine.state.optimizer import Updater, adamw
from everstep.errors import UserError
from everstep.job.job import Job, ModelSpec
from everstep.layout.box import Box

CPU = torch.device("cpu")
PATIENCE_S = 240
DATA = Synthetic(vocab=128, sequence=16, rows=2, seed=1)


def small_gpt(**changes: Any) -> Model:
    return gpt(**{"width": 32, "heads": 4, "depth": 2, "vocab": 128, "context": 16, **changes})


# Forked by a process that has only imported: a backward starts threads, which a fork leaves out.
STARTS = multiprocessing.get_context("forkserver")
# torch._dynamo: optimizers import it in their first step, which takes each process seconds.
STARTS.set_forkserver_preload(
    ["torch._dynamo", "everstep.engine.prepare.preflight", "everstep.engine.shards.collectives"]
)


def in_shards(count: int, work: Callable[[GroupCollectives], Any], **more: Any) -> list[Any]:
    """What `work` gives in each of `count` processes."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, shards = [], []
        for index in range(count):
            here, there = STARTS.Pipe(duplex=False)
            join = partial(GroupCollectives, Path(folder) / "store", index, count, CPU, **more)
            shard = STARTS.Process(target=_shard, args=(there, join, work), daemon=True)
            shard.start()
            there.close()
            pipes.append(here)
            shards.append(shard)
        try:
            return [_result(pipe) for pipe in pipes]
        finally:
            for shard in shards:
                shard.kill()
                shard.join()


def _shard(results: Connection, join: Callable[[], GroupCollectives], work: Callable[..., Any]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays: `work` collects often
    results.send(work(join()))


def _result(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE_S), "a shard hangs"
    try:
        return pipe.recv()
    except EOFError:
        pytest.fail("a shard failed: see what it printed")


def trained(
    build: Callable[[], Model],
    shards: GroupCollectives | None = None,
    *,
    steps: int = 3,
    data: Dataset = DATA,
    **more: Any,
) -> dict[str, Any]:
    model = build()
    layers = range(len(model.layers))
    settings = StageSettings(**{"accumulate": "fp32", **more})
    stage = Stage(model, layers, data=data, device=CPU, settings=settings, shards=shards)
    updater = Updater(stage, adamw(lr=1e-3))
    losses, norms = [], []
    for step in range(1, steps + 1):
        for microbatch in range(2):
            stage.forward(step, microbatch)
            losses.append(float(stage.loss(step, microbatch)))
            stage.input_grad(step, microbatch)
            stage.weight_grad(step, microbatch)
        mean = updater.mean(stage.take_gradients(), 2).clone()
        norms.append(updater.sum_of_squares(mean))
        updater.apply(step, mean)
    whole = {
        name: [float(number) for number in parameter.detach().flatten()]
        for name, parameter in stage.parameters.items()
        if not stage.cut.is_split(name)
    }
    return {"losses": losses, "norms": norms, "whole": whole}


@pytest.mark.parametrize(("count", "changes"), [(2, {}), (4, {}), (2, {"tied": True}), (2, {"kv_heads": 2})])
def test_losses_and_norms_are_those_of_one_process(count: int, changes: dict[str, Any]) -> None:
    run = partial(trained, partial(small_gpt, **changes))
    one, found = run(), in_shards(count, run)
    assert all(shard == found[0] for shard in found), "every shard has the same losses and norms, to the bit"
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=2e-6)
    assert found[0]["norms"] == pytest.approx(one["norms"], rel=2e-5)


def test_recompute_and_dropout_are_functions_of_the_logical_tensors() -> None:
    run = partial(trained, partial(small_gpt, dropout=0.1), recompute=True)
    one, found = run(), in_shards(2, run)
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=2e-6)


def scored(shards: GroupCollectives | None = None) -> list[float]:
    """The evaluation loss and a metric of the first weights."""
    model = small_gpt()

    def right(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (logits.argmax(-1) == targets).float().mean()

    evaluation = Evaluation(data=DATA, every=1, batches=3, steps=4, microbatches=1, metrics={"right": right})
    layers = range(len(model.layers))
    stage = Stage(model, layers, data=DATA, device=CPU, shards=shards, evaluation=evaluation)
    stage.evaluate(2, 0)
    return list(stage.scores(2, 0))


def test_evaluation_sees_the_whole_vocabulary() -> None:
    one, found = scored(), in_shards(2, scored)
    assert found[0] == found[1]
    assert found[0] == pytest.approx(one, rel=2e-6)


class Net(nn.Module):
    """A user's layer, with biases, and a norm on split values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.scale = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        return x + self.down(self.scale(hidden.unflatten(-1, (-1, 8))).flatten(-2))


PLAN = {
    "embed": "vocab",
    "*.up": "column",
    "*.down": "row",
    "*.scale": "whole_summed",
    "head": "column_gather",
}


def own_model() -> Model:
    layers = {
        "embed": partial(nn.Embedding, 128, 32),
        "net": Net,
        "more": Net,
        "head": partial(nn.Linear, 32, 128),
    }
    return Model(layers=layers, shard_plan=PLAN)


def test_a_model_of_ones_own_is_split_by_a_plan_of_patterns() -> None:
    run = partial(trained, own_model)
    one, found = run(), in_shards(2, run)
    assert found[0] == found[1]
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=2e-6)
    assert found[0]["norms"] == pytest.approx(one["norms"], rel=2e-5)


class Kept(nn.Module):
    """Between a row and a column matrix, or between a column and a row one: a layer that no shard splits."""

    def __init__(self, each: Callable[[], nn.Module], *, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.up, self.each, self.down = nn.Linear(32, 64), each(), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.inside:
            return x + self.down(torch.tanh(self.up(self.each(x))))
        heads = self.up(x).unflatten(-1, (-1, 8))
        return x + self.down(self.each(heads).flatten(-2))


class Biased(nn.Module):
    """Adds a row of a table to every head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.table(torch.arange(x.shape[-3], device=x.device) % 4)[:, None])


def kept_model(each: Callable[[], nn.Module], inside: bool, style: str) -> Model:
    layers = {"embed": partial(nn.Embedding, 128, 32), "net": partial(Kept, each, inside=inside)}
    return Model(
        layers={**layers, "head": partial(nn.Linear, 32, 128)},
        shard_plan={**PLAN, "net.each": style, "net.each.table": style},
    )


PER_HEAD, PER_TOKEN = partial(nn.Linear, 8, 8), partial(nn.Linear, 32, 32)


@pytest.mark.parametrize(
    ("each", "inside", "style"),
    [
        (PER_HEAD, True, "whole_summed"),
        (Biased, True, "whole_summed"),
        (PER_TOKEN, False, "whole"),
    ],
    ids=["a Linear per head", "an Embedding per head", "a Linear on whole values"],
)
def test_whole_linears_and_tables_are_trained_alike_on_every_shard(
    each: Callable[[], nn.Module], inside: bool, style: str
) -> None:
    run = partial(trained, partial(kept_model, each, inside, style))
    one, found = run(), in_shards(2, run)
    assert found[0] == found[1], "losses, norms and whole parameters, to the bit"
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=2e-6)
    assert found[0]["norms"] == pytest.approx(one["norms"], rel=2e-5)


def refused(build: Callable[[], Model], shards: GroupCollectives) -> str:
    with pytest.raises(UserError) as caught:
        trained(build, shards)
    return str(caught.value)


def test_a_whole_linear_on_split_values_is_refused_where_the_plan_does_not_name_it() -> None:
    build = partial(kept_model, PER_HEAD, True, "whole")
    for words in in_shards(2, partial(refused, build)):
        assert words.startswith("net.each.weight is whole on every shard, and its gradient differs")


class Other:
    """The other of two shards has the same gradients but for a share of them."""

    index, count = 0, 2

    def __init__(self, share: float) -> None:
        self._share = share

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(tensor * (1 + self._share))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_differ_by_a_few_per_cent_are_not_rounding(dtype: torch.dtype) -> None:
    """Heads with nearly equal gradients passed at 5 %, and were trained on a part of them from then on."""
    gradients = {"net.scale": torch.linspace(-1, 1, 999).to(dtype)}
    refuse_unequal(gradients, cast(Any, Other(0.0)))
    with pytest.raises(UserError, match="its gradient differs from shard to shard"):
        refuse_unequal(gradients, cast(Any, Other(0.06)))


def left_behind(shards: GroupCollectives, *, recompute: bool) -> int:
    """The inputs of column matrices that outlive their microbatch. The first one of the second stage is a
    leaf, as it arrives from the stage before.
    """
    model = own_model()
    pipe = [
        Stage(
            model, layers, data=DATA, device=CPU, shards=shards, settings=StageSettings(recompute=recompute)
        )
        for layers in (range(1), range(1, 4))
    ]
    inputs: list[weakref.ref[torch.Tensor]] = []
    for path, part in ((p, m) for module in pipe[1]._modules for p, m in module.named_modules()):
        if path in ("up", ""):
            part.register_forward_pre_hook(lambda part, given: inputs.append(weakref.ref(given[0])))
    for microbatch in range(3):
        pipe[1].forward(1, microbatch, pipe[0].forward(1, microbatch))
        pipe[0].input_grad(1, microbatch, pipe[1].input_grad(1, microbatch))
        for stage in pipe:
            stage.weight_grad(1, microbatch)
    gc.collect()
    assert len(inputs) >= 9
    return sum(one() is not None for one in inputs)


@pytest.mark.parametrize("recompute", [False, True])
def test_no_input_of_a_column_matrix_outlives_its_microbatch(recompute: bool) -> None:
    work = partial(left_behind, recompute=recompute)
    assert in_shards(2, work) == [0, 0]


def resident_mib(shards: GroupCollectives, *, recompute: bool) -> list[float]:
    """After some microbatches, and after ten more."""
    model = small_gpt(width=64, context=256)
    data = Synthetic(vocab=128, sequence=256, rows=8, seed=3)
    stage = Stage(
        model,
        range(len(model.layers)),
        data=data,
        device=CPU,
        shards=shards,
        settings=StageSettings(recompute=recompute),
    )
    found = []
    for step in range(1, 14):
        stage.forward(step, 0)
        stage.input_grad(step, 0)
        stage.weight_grad(step, 0)
        stage.take_gradients()
        if step in (3, 13):
            gc.collect()
            found.append(psutil.Process().memory_info().rss / 2**20)
    return found


# That no input outlives its microbatch is asked of every case above; here the process as a whole is weighed.
@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_memory_of_shards_does_not_grow_with_the_microbatches(recompute: bool) -> None:
    """Where the inputs of column matrices were kept, 10 microbatches left 120 MiB behind, or 220."""
    work = partial(resident_mib, recompute=recompute)
    for before, after in in_shards(2, work):
        assert after - before < 20


class Dropping(nn.Module):
    """Drops whole values, split ones, and whole ones again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.before, self.inside, self.after = nn.Dropout(0.3), nn.Dropout(0.5), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inside(torch.ones_like(self.up(self.before(x))) + self.up(x))
        self.masks = [hidden == 0]
        y = self.down(hidden)
        after = self.after(torch.ones_like(y))
        self.masks.append(after == 0)
        return x + y * after


def dropping() -> Model:
    layers = {"embed": partial(nn.Embedding, 128, 32), "net": Dropping, "more": Dropping}
    return Model(layers={**layers, "head": partial(nn.Linear, 32, 128)}, shard_plan=PLAN)


def masks(shards: GroupCollectives | None = None) -> list[list[int]]:
    """Which elements were dropped, in the two layers, inside and after; gradients must not depend on whether
    layers are recomputed.
    """
    found, gradients = [], []
    for recompute in (False, True):
        stage = Stage(
            dropping(),
            range(4),
            data=DATA,
            device=CPU,
            shards=shards,
            settings=StageSettings(recompute=recompute),
        )
        stage.forward(1, 0)
        found = [mask.flatten().int().tolist() for layer in stage._modules[1:3] for mask in layer.masks]
        stage.input_grad(1, 0)
        stage.weight_grad(1, 0)
        gradients.append(stage.take_gradients())
    assert torch.equal(*gradients)
    return found


def test_shards_drop_other_elements_of_their_heads_and_the_same_of_what_is_whole() -> None:
    first, second = in_shards(2, masks)
    inside, after = (0, 2), (1, 3)
    for place in inside:
        kept = sum(a == b for a, b in zip(first[place], second[place], strict=True)) / len(first[place])
        assert 0.4 < kept < 0.6, "as two draws of a coin agree"
    assert first[0] != first[2], "two layers draw differently"
    assert [first[place] for place in after] == [second[place] for place in after]


def ordered_sums(shards: GroupCollectives) -> list[list[float]]:
    draw = torch.Generator().manual_seed(shards.index)
    numbers = torch.randn(7, 3, generator=draw) * 10.0 ** torch.randint(-4, 5, (7, 3), generator=draw)
    found = [
        shards.sum(numbers.clone()),
        shards.sum(numbers.clone().bfloat16()),
        shards.sum(torch.tensor(1.5)),
    ]
    return [one.float().flatten().tolist() for one in found]


@pytest.mark.parametrize("count", [3, 4])
def test_sums_of_three_and_more_shards_are_added_in_the_order_of_the_shards(count: int) -> None:
    """As GPUs do it, where NCCL's own order would follow their wiring. In 16 bits they are rounded once."""
    found = in_shards(count, ordered_sums, ordered=True)
    assert all(one == found[0] for one in found)
    own: list[list[torch.Tensor]] = []
    for index in range(count):
        draw = torch.Generator().manual_seed(index)
        numbers = torch.randn(7, 3, generator=draw) * 10.0 ** torch.randint(-4, 5, (7, 3), generator=draw)
        own.append([numbers, numbers.bfloat16(), torch.tensor(1.5)])
    for place, got in enumerate(found[0]):
        total = own[0][place].float()
        for other in own[1:]:
            total = total + other[place]
        assert got == total.to(own[0][place].dtype).float().flatten().tolist()


USED = DATA.batch(1, 0)[0].unique()
PADDING, OTHER = USED[USED >= 64][:2].tolist()  # two tokens of the second shard


def padded() -> Model:
    layers = {"embed": partial(nn.Embedding, 128, 32, padding_idx=PADDING), "net": Net}
    return Model(layers={**layers, "head": partial(nn.Linear, 32, 128)}, shard_plan=PLAN)


def padding_gradient(shards: GroupCollectives | None = None) -> list[float]:
    """Of the padding's row, and of another one."""
    stage = Stage(padded(), range(3), data=DATA, device=CPU, shards=shards)
    stage.forward(1, 0)
    stage.input_grad(1, 0)
    stage.weight_grad(1, 0)
    rows = stage.views(stage.take_gradients())["embed.weight"]
    first = 0 if shards is None else shards.index * len(rows)
    wanted = [row - first for row in (PADDING, OTHER)]
    return [float(rows[row].norm()) for row in wanted if 0 <= row < len(rows)]


def test_the_row_of_the_padding_is_not_trained_on_any_shard() -> None:
    one, found = padding_gradient(), in_shards(2, padding_gradient)
    assert one[0] == 0.0 < one[1]
    assert found[0] == []
    assert found[1] == pytest.approx(one)


WHOLE = torch.arange(2 * 16 * 32, dtype=torch.float32).view(2, 16, 32)


def sent_in_slices(shards: GroupCollectives) -> dict[str, Any]:
    sent = sliced(Boundary.of(WHOLE), shards)
    there = together(sent, shards, CPU)
    return {"bytes": sum(t.nbytes for t in sent.tensors), "same": torch.equal(there.tensors[0], WHOLE)}


def test_a_boundary_tensor_is_sent_once_by_all_shards_together() -> None:
    found = in_shards(2, sent_in_slices)
    assert sum(one["bytes"] for one in found) == WHOLE.nbytes
    assert all(one["same"] for one in found)


def test_a_shards_tensors_are_boxes_of_the_logical_ones() -> None:
    cut = Cut({"*.out": "row", "*.q": "column"}, index=1, count=2)
    out = cut.split("b.out.weight", (6, 8))
    assert out is not None
    assert (out.shape, out.box) == ((6, 4), Box((0, 4), (6, 4)))
    assert cut.split_of_part("b.out.weight", (6, 4)) == out
    assert cut.split("b.out.bias", (6,)) is None
    assert cut.local_shape("b.q.bias", (6,)) == (3,)
    assert cut.local_shape("b.norm.weight", (6,)) == (6,)


@pytest.mark.parametrize(
    ("shards", "changes", "words"),
    [
        (3, {}, "model.heads 4"),
        (4, {"kv_heads": 2}, "model.kv_heads 2"),
        (2, {"vocab": 257}, "model.vocab 257"),
        (4, {"hidden": 90}, "model.hidden 90"),
    ],
)
def test_a_gpt_that_shards_cannot_share_evenly_is_refused_before_anything_starts(
    shards: int, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=f"shards is {shards}, which does not divide {words}; give a divisor"):
        Job(model=ModelSpec(preset="gpt-tiny", options=changes), shards=shards)
    job = Job(model=ModelSpec(build="module:function"), shards=shards)
    with pytest.raises(UserError, match=words):
        preflight(job, model=gpt("gpt-tiny", **changes))


def test_a_model_of_ones_own_that_cannot_be_split_is_refused_before_anything_starts() -> None:
    job = Job(model=ModelSpec(build="module:function"), shards=3)
    with pytest.raises(UserError, match=r"shards is 3, which does not divide dimension 0 of embed\.weight"):
        preflight(job, model=own_model())


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.added = nn.Linear(32, 32), nn.Linear(32, 32)


def test_a_part_that_the_plan_cannot_split_is_refused_before_anything_starts() -> None:
    """An adapter in the place of a matrix was found by the workers: they were started twice, and failed."""

    def adapted() -> nn.Module:
        net = Net()
        net.up = Adapted()  # type: ignore[assignment]
        return net

    model = own_model()
    broken = replace(model, layers={**model.layers, "more": adapted})
    job = Job(model=ModelSpec(build="module:function"), shards=2, stages=2)
    with pytest.raises(UserError, match=r"splits more\.up as 'column'; it is a Adapted, not an nn\.Linear"):
        preflight(job, model=broken)


def test_grouped_heads_of_a_hugging_face_model_fewer_than_shards_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    from everstep.engine.hf.model import hf

    config = transformers.AutoConfig.for_model(
        "llama",
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    job = Job(model=ModelSpec(build="module:function"), shards=4)
    with pytest.raises(UserError, match="shards is 4, which does not divide num_key_value_heads 2"):
        preflight(job, model=hf(config))


def refusals() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield (
        "does not divide dimension 0 of embed.tokens.weight",
        lambda: Stage(small_gpt(vocab=130), range(4), data=DATA, device=CPU, shards=Alone(4)),
    )
    yield "the styles are column", lambda: Cut({"*.q": "colums"}, 0, 2)
    yield "'moe_tp_experts'; the styles are", lambda: Cut(from_theirs({"x": "moe_tp_experts"}), 0, 2)
    yield "does not say what of it can be split", lambda: Cut({}, 0, 2)


class Alone:
    """A shard without the others, for what needs no collective."""

    def __init__(self, count: int) -> None:
        self.index, self.count = 0, count

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] * self.count


@pytest.mark.parametrize(
    ("words", "mistake"), list(refusals()), ids=["size", "style", "their style", "no plan"]
)
def test_what_cannot_be_split_is_said(words: str, mistake: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match=words):
        mistake()


def theirs(kind: str) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(
        kind,
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        tie_word_embeddings=kind == "qwen3",
        pad_token_id=0,
    )


def of_theirs(kind: str) -> Model:
    from everstep.engine.hf.model import hf

    return with_summed(hf(theirs(kind)), Job(model=ModelSpec(build="module:function"), shards=2))


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("olmo3", "glm4", "granite_swa")]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", *SLOW])
def test_a_hugging_face_model_comes_with_its_own_plan(kind: str) -> None:
    """The losses are those of transformers in one process, to 2e-6."""
    pytest.importorskip("transformers")
    run = partial(trained, partial(of_theirs, kind))
    found = in_shards(2, run)
    assert found[0] == found[1]
    assert found[0]["losses"] == pytest.approx(by_transformers(theirs(kind)), rel=2e-6)
    assert found[0]["norms"] == pytest.approx(run()["norms"], rel=2e-5)


def test_the_plan_of_a_hugging_face_model_is_completed() -> None:
    """Apertus trains its activation, between split matrices."""
    pytest.importorskip("transformers")
    run = partial(trained, partial(of_theirs, "apertus"))
    one, found = run(), in_shards(2, run)
    assert found[0] == found[1]
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=2e-6)
    assert found[0]["norms"] == pytest.approx(one["norms"], rel=2e-5)


def by_transformers(config: Any) -> list[float]:
    """The losses of the same training, by transformers' model and torch alone: three steps of two batches."""
    import transformers

    from everstep.engine.hf.model import hf

    model = transformers.AutoModelForCausalLM.from_config(config)
    ours = hf(config)
    first = Stage(ours, range(len(ours.layers)), data=DATA, device=CPU).parameters
    missing = model.load_state_dict({name: p.detach().clone() for name, p in first.items()}, strict=False)
    assert not missing.unexpected_keys
    optimizer = adamw(lr=1e-3)(list(model.named_parameters()))
    losses = []
    for step in range(1, 4):
        for microbatch in range(2):
            tokens, targets = DATA.batch(step, microbatch)
            logits = model(input_ids=tokens).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
