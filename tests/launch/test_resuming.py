"""A checkpoint of another model is refused before a worker is started, in one sentence."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.cli import main
from everstep.engine.layers.model import Model, drawn, every_parameter
from everstep.engine.prepare.resolve import model_of
from everstep.engine.stage.stage import Stage
from everstep.engine.state.optimizer import Updater
from everstep.engine.worker.work_items import whole_tensors
from everstep.errors import UserError
from everstep.job.job import CheckpointSpec, Job, ModelSpec
from everstep.launch.local.arguments import shape_of_call
from everstep.launch.local.history import History
from everstep.launch.local.resuming import refuse_another_model, refuse_epochs_of_another_batch
from everstep.layout.box import Box
from everstep.node.disk_orders import work_on_disk
from everstep.protocol.events import CheckpointCommitted
from everstep.protocol.messages import CheckpointFolder, CommitCheckpoint, Sender, TaskEvent
from everstep.protocol.ops import Worker
from everstep.protocol.work import SaveCheckpoint, StateDirections
from everstep.store import folder
from everstep.store.state_keeper import StateKeeper

TINY = {"vocab": 32, "width": 16, "heads": 2, "hidden": 24}


def job(tmp_path: Path, **model) -> Job:
    spec = CheckpointSpec(folder="kept", interval=5)
    return Job(model=ModelSpec(preset="gpt-tiny", options={**TINY, **model}), base=tmp_path, checkpoint=spec)


def save(made: Job, step: int, *, trained: bool = False) -> None:
    model = model_of(made)
    slices = [
        (f"model/{name}", tuple(p.shape), Box((0,) * p.ndim, tuple(p.shape)), p.detach())
        for index, layer in enumerate(model.names)
        for name, p in every_parameter(layer, drawn(model, index, 0)).items()
    ]
    if trained:
        moments = [(name.removeprefix("model/"), *of) for name, *of in slices]
        slices += [(f"optimizer/{name}/exp_avg", shape, box, value) for name, shape, box, value in moments]
    part = folder.write_slices(made.base / "kept", step, "all", slices)
    folder.commit(made.base / "kept", step, [part], {})


def test_the_same_model_and_an_empty_folder_pass(tmp_path: Path) -> None:
    one = job(tmp_path, depth=2)
    refuse_another_model(one, model_of(one))
    save(one, 5)
    refuse_another_model(one, model_of(one))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"depth": 2, "width": 32}, "embed.tokens.weight is 32 x 16 there and is 32 x 32 in this job"),
        ({"depth": 3}, "is not in it"),
    ],
)
def test_another_model_is_refused_with_what_differs(tmp_path: Path, change, words: str) -> None:
    save(job(tmp_path, depth=2), 5)
    other = job(tmp_path, **change)
    with pytest.raises(UserError, match="a checkpoint of another model \\(step 5\\)") as refused:
        refuse_another_model(other, model_of(other))
    assert words in str(refused.value)


def test_a_checkpoint_with_more_trained_parameters_is_refused(tmp_path: Path) -> None:
    """A model that was trained whole and goes on with some of its parameters frozen, or with fewer layers:
    the others' trained values were dropped silently, and the run went on from what they were at first.
    """
    made = job(tmp_path, depth=2)
    save(made, 5, trained=True)
    refuse_another_model(made, model_of(made))
    fewer = job(tmp_path, depth=1)
    with pytest.raises(UserError, match=r"was trained, and this job does not train it"):
        refuse_another_model(fewer, model_of(fewer))
    save(made, 6)  # weights alone, as of a converted checkpoint
    refuse_another_model(fewer, model_of(fewer))


def test_a_checkpoint_that_cannot_be_read_is_left_to_the_start_of_the_run(tmp_path: Path) -> None:
    save(job(tmp_path, depth=2), 5)
    (tmp_path / "kept" / "step-00000005" / "index.json").write_text("{")
    other = job(tmp_path, depth=3)
    refuse_another_model(other, model_of(other))


def test_the_command_says_it_and_starts_nothing(tmp_path: Path, capsys) -> None:
    save(job(tmp_path, depth=2), 5)
    file = tmp_path / "job.toml"
    file.write_text(
        'replicas = 1\nstages = 1\nmicrobatches = 2\nsteps = 9\n[model]\npreset = "gpt-tiny"\nvocab = 32\n'
        'width = 32\nheads = 2\nhidden = 24\ndepth = 2\n[data]\nkind = "synthetic"\n'
        '[checkpoint]\nfolder = "kept"\ninterval = 5\n'
    )
    assert main.run(["train", str(file), "--no-web"]) == 2
    assert "has a checkpoint of another model (step 5)" in " ".join(capsys.readouterr().err.split())


def test_a_layer_with_a_slash_in_its_name_is_found_in_its_checkpoint(tmp_path: Path) -> None:
    made = Job(
        model=ModelSpec(build="x:y"), base=tmp_path, checkpoint=CheckpointSpec(folder="kept", interval=5)
    )
    layers = {"encoder/0": partial(nn.Linear, 8, 8), "encoder/1": partial(nn.Linear, 8, 1)}
    model = Model(layers=layers, loss=nn.functional.mse_loss)
    stage = Stage(model, range(2), data=Ones(), device=torch.device("cpu"))
    updater = Updater(stage)
    stage.forward(1, 0)
    stage.input_grad(1, 0)
    stage.weight_grad(1, 0)
    updater.apply(1, updater.mean(stage.take_gradients(), 1))
    said: list[Any] = []
    me = Sender("task", Worker(0, 0), 1)
    states = StateKeeper(me, made, node="n", memory_root=tmp_path / "memory", secret="00", say=said.append)
    states.save(SaveCheckpoint(1, 0), whole_tensors(updater.state(1), 0, 1), updater.groups(1))
    states.finish()
    at = CheckpointFolder(base=str(tmp_path), folder="kept", keep=3)
    order = CommitCheckpoint(task="task", step=1, parts=(said[0].part,))
    assert work_on_disk(order, at) == TaskEvent(task="task", event=CheckpointCommitted(step=1))
    refuse_another_model(made, model)
    found: dict[str, torch.Tensor] = {}
    assert states.load(1, list(stage.slots), StateDirections(), found.update)
    expected = updater.state(1)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    updater.load(found, 1)


class Ones:
    def batch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(4, 8) * step, torch.ones(4, 1)


def test_epochs_are_refused_after_a_change_of_the_batch(tmp_path: Path) -> None:
    """It said "52 of 52 steps" for 13 epochs of which it had trained 7."""
    before = job(tmp_path)
    save(before, 5)
    history = History.of(before)
    history.begin(5)
    history.close()
    refuse_epochs_of_another_batch(before)
    refuse_epochs_of_another_batch(before.reshaped(4, 1))
    with pytest.raises(UserError, match="the 5 steps that are saved had 4 microbatches each, not 8: give"):
        refuse_epochs_of_another_batch(replace(before, replicas=2))


@pytest.mark.parametrize(
    ("overrides", "replicas", "microbatches"),
    [({}, 2, 4), ({"stages": 1}, 2, 4), ({"replicas": 4}, 4, 2), ({"replicas": 3, "batch": 9}, 3, 3)],
)
def test_another_number_of_replicas_keeps_the_batch(
    overrides: dict[str, int], replicas: int, microbatches: int
) -> None:
    made = shape_of_call({"replicas": 2, "stages": 2, "microbatches": 4, "steps": 9}, overrides)
    assert (made["replicas"], made["microbatches"]) == (replicas, microbatches)
    assert "batch" not in made


def test_a_batch_that_replicas_cannot_share_is_refused_with_one_that_they_can() -> None:
    with pytest.raises(
        UserError, match=r"8 microbatches, which 3 replicas .* a divisor of 8, .* --batch 9\."
    ):
        shape_of_call({"replicas": 2, "stages": 2, "microbatches": 4}, {"replicas": 3})
