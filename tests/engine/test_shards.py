"""Shards of one worker, as real processes with real collectives: the same losses as one process, the norm
counted once, states as boxes of the logical tensors.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.engine.datasets.data import Synthetic
from everstep.engine.layers.boundary import Boundary
from everstep.engine.layers.gpt import gpt
from everstep.engine.layers.model import Model
from everstep.engine.layers.shard_plan import Cut, from_theirs
from everstep.engine.prepare.preflight import preflight
from everstep.engine.shards.collectives import GroupCollectives
from everstep.engine.shards.slices import sliced, together
from everstep.engine.stage.evaluation import Evaluation
from everstep.engine.stage.stage import Stage
from everstep.engine.state.optimizer import Updater, adamw
from everstep.errors import UserError
from everstep.job.job import Job, ModelSpec
from everstep.layout.box import Box

CPU = torch.device("cpu")
PATIENCE_S = 240
DATA = Synthetic(vocab=128, sequence=16, rows=2, seed=1)


def small_gpt(**changes: Any) -> Model:
    return gpt(**{"width": 32, "heads": 4, "depth": 2, "vocab": 128, "context": 16, **changes})


def in_shards(count: int, work: Callable[[GroupCollectives], Any], **more: Any) -> list[Any]:
    """What `work` gives in each of `count` processes. All are children: this process never has the threads
    of a group, which a later fork would leave out while they may hold a lock.
    """
    with tempfile.TemporaryDirectory() as folder:
        group = [
            partial(GroupCollectives, Path(folder) / "store", index, count, CPU, **more)
            for index in range(count)
        ]
        children = [_forked(lambda join=join: work(join())) for join in group]
        try:
            return [_result(read) for _, read in children]
        finally:
            for pid, _ in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _forked(work: Callable[[], Any]) -> tuple[int, int]:
    """A child's pid, and a pipe that its result comes through."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        signal.alarm(PATIENCE_S)  # one that hangs is ended, and its empty result fails the test
        os.write(write, json.dumps(work()).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _result(read: int) -> Any:
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    assert text, "a shard failed or hung: see what it printed"
    return json.loads(text)


def trained(model: Model, shards: GroupCollectives | None, *, steps: int = 3, **more: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    layers = range(len(model.layers))
    stage = Stage(model, layers, data=DATA, device=CPU, accumulate="fp32", shards=shards, **more)
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
    return {"losses": losses, "norms": norms}


@pytest.mark.parametrize(("count", "changes"), [(2, {}), (4, {}), (2, {"tied": True}), (2, {"kv_heads": 2})])
def test_losses_and_norms_are_those_of_one_process(count: int, changes: dict[str, Any]) -> None:
    one = trained(small_gpt(**changes), None)
    found = in_shards(count, lambda shards: trained(small_gpt(**changes), shards))
    assert all(shard == found[0] for shard in found), "every shard has the same losses and norms, to the bit"
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=2e-6)
    assert found[0]["norms"] == pytest.approx(one["norms"], rel=2e-5)


def test_recompute_and_dropout_are_functions_of_the_logical_tensors() -> None:
    model = small_gpt(dropout=0.1)
    one = trained(model, None, recompute=True)
    found = in_shards(2, lambda shards: trained(model, shards, recompute=True))
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=2e-6)


@pytest.mark.parametrize("count", [2, 4])
def test_a_split_sequence_gives_the_losses_of_one_process(count: int) -> None:
    """Tied weights, dropout and recompute together: the norms' gradients are added up, masks are those of the
    whole sequence.
    """
    model = small_gpt(dropout=0.1, tied=True)
    one = trained(model, None, recompute=True)
    found = in_shards(count, lambda shards: trained(model, shards, recompute=True), splits_sequence=True)
    assert all(shard == found[0] for shard in found)
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=2e-6)
    assert found[0]["norms"] == pytest.approx(one["norms"], rel=2e-5)


def test_a_split_sequence_is_sent_to_the_next_stage_without_a_collective() -> None:
    def held(shards: GroupCollectives) -> Any:
        stage = Stage(small_gpt(), range(2), data=DATA, device=CPU, shards=shards)
        made = stage.forward(1, 0)
        assert made is not None
        sent = sliced(made, shards)
        return [list(sent.tensors[0].shape), sent is made, together(sent, shards, CPU) is made]

    assert in_shards(2, held, splits_sequence=True) == [[[2, 8, 32], True, True]] * 2


def test_a_sequence_that_cannot_be_split_is_refused_by_name() -> None:
    words = {"model": {"preset": "gpt-tiny"}, "shards": 2, "sequence_parallel": True}
    with pytest.raises(UserError, match=r"shards is 2, which does not divide data\.sequence 31"):
        Job.from_dict({**words, "data": {"kind": "synthetic", "sequence": 31}})
    bare = Model(
        layers={"up": lambda: nn.Linear(8, 8), "down": lambda: nn.Linear(8, 8)},
        loss="mse",
        shard_plan={"up": "column", "down": "row"},
    )
    with pytest.raises(UserError, match="sequence_parallel = true needs a shard_plan"):
        preflight(Job.from_dict({**words, "data": {"kind": "synthetic"}}), model=bare)


def scored(model: Model, shards: GroupCollectives | None) -> list[float]:
    """The evaluation loss and a metric of the first weights."""
    torch.set_num_threads(1)

    def right(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (logits.argmax(-1) == targets).float().mean()

    evaluation = Evaluation(data=DATA, every=1, batches=3, steps=4, microbatches=1, metrics={"right": right})
    layers = range(len(model.layers))
    stage = Stage(model, layers, data=DATA, device=CPU, shards=shards, evaluation=evaluation)
    stage.evaluate(2, 0)
    return list(stage.scores(2, 0))


def test_evaluation_sees_the_whole_vocabulary() -> None:
    one = scored(small_gpt(), None)
    found = in_shards(2, lambda shards: scored(small_gpt(), shards))
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
        "embed": lambda: nn.Embedding(128, 32),
        "net": Net,
        "more": Net,
        "head": lambda: nn.Linear(32, 128),
    }
    return Model(layers=layers, shard_plan=PLAN)


def test_a_model_of_ones_own_is_split_by_a_plan_of_patterns() -> None:
    one = trained(own_model(), None)
    found = in_shards(2, lambda shards: trained(own_model(), shards))
    assert found[0] == found[1]
    assert found[0]["losses"] == pytest.approx(one["losses"], rel=2e-6)
    assert found[0]["norms"] == pytest.approx(one["norms"], rel=2e-5)


def test_a_boundary_tensor_is_sent_once_by_all_shards_together() -> None:
    whole = torch.arange(2 * 16 * 32, dtype=torch.float32).view(2, 16, 32)

    def work(shards: GroupCollectives) -> dict[str, Any]:
        sent = sliced(Boundary.of(whole), shards)
        there = together(sent, shards, CPU)
        return {"bytes": sum(t.nbytes for t in sent.tensors), "same": torch.equal(there.tensors[0], whole)}

    found = in_shards(2, work)
    assert sum(one["bytes"] for one in found) == whole.nbytes
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


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_hugging_face_model_comes_with_its_own_plan(kind: str) -> None:
    """The losses are those of transformers in one process, to 2e-6."""
    transformers = pytest.importorskip("transformers")
    from everstep.engine.hf.model import hf

    config = transformers.AutoConfig.for_model(
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
    )

    def work(shards: GroupCollectives | None) -> dict[str, Any]:
        return trained(hf(config), shards)

    found = in_shards(2, work)
    assert found[0] == found[1]
    assert found[0]["losses"] == pytest.approx(by_transformers(config), rel=2e-6)
    assert found[0]["norms"] == pytest.approx(work(None)["norms"], rel=2e-5)


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
