"""A checkpoint of another model is refused before a worker is started, in one sentence."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.cli import main
from everstep.engine.datasets.data import START, of_job, trained_on
from everstep.engine.datasets.order import RowOrder
from everstep.engine.datasets.rows import rows
from everstep.engine.layers.model import Model, drawn, every_parameter
from everstep.engine.prepare.resolve import model_of
from everstep.engine.stage.stage import Stage
from everstep.engine.state.optimizer import Updater
from everstep.engine.worker.work_items import whole_tensors
from everstep.errors import UserError
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec
from everstep.launch.local import resuming
from everstep.launch.local.arguments import shape_of_call
from everstep.launch.local.history import History, settings_of
from everstep.launch.local.resuming import first_row, refuse_another_model, with_compile_settled
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


def save(made: Job, step: int, *, trained: bool = False, meta: dict[str, Any] | None = None) -> None:
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
    folder.commit(made.base / "kept", step, [part], meta or {})


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


@pytest.mark.parametrize(
    ("said", "meta", "compiles"),
    [
        ("auto", {"rng": {}}, False),  # of an earlier version
        ("auto", {"compile": False}, False),
        ("auto", {"compile": True}, True),
        (True, {}, True),
        (False, {"compile": True}, False),
    ],
)
def test_a_run_that_resumes_compiles_as_its_checkpoint_says_unless_the_job_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any, meta: dict[str, Any], compiles: bool
) -> None:
    monkeypatch.setattr(resuming, "why_unable", lambda device, environment: "")
    one = replace(job(tmp_path, depth=1), compile=said)
    assert with_compile_settled(one)[0].compiles is (said is True), "a new run, on a CPU"
    save(one, 5, meta={**meta, "seed": 0})
    made, notes = with_compile_settled(one)
    assert made.compiles is compiles
    assert list(notes) == ['compile = "auto" is true: the run that it resumes was compiled'] * bool(
        said == "auto" and compiles
    )
    assert settings_of(made)["compile"] is compiles


def test_a_damaged_newest_checkpoint_leaves_the_word_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From which the run resumes, once the damaged one is set aside."""
    monkeypatch.setattr(resuming, "why_unable", lambda device, environment: "")
    one = job(tmp_path, depth=1)
    save(one, 5, meta={"compile": True})
    save(one, 6, meta={"compile": True})
    (tmp_path / "kept" / "step-00000006" / "index.json").write_text("{")
    assert with_compile_settled(one)[0].compiles


def test_a_compiled_run_is_not_resumed_where_nothing_can_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "why_unable", lambda device, environment: "there is no C compiler")
    one = job(tmp_path, depth=1)
    save(one, 5, meta={"compile": True})
    with pytest.raises(UserError, match=r"resumes was compiled\) cannot be done .* set compile = false\.$"):
        with_compile_settled(one)


def test_a_new_run_on_such_a_machine_is_eager_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "why_unable", lambda device, environment: "there is no C compiler")
    large = {"model": {"preset": "gpt-1b"}, "data": {"kind": "synthetic", "rows": 8}}
    one = Job.from_dict({**large, "device": "cuda", "steps": 1000, "base": str(tmp_path)})
    made, notes = with_compile_settled(one)
    assert made.compile is False
    assert notes == ('compile = "auto" is false: there is no C compiler',)


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


def started(tmp_path: Path, step: int, order: RowOrder) -> None:
    """A start of a run with this order of rows, which has saved this step."""
    one = replace(job(tmp_path), microbatches=order.microbatches)
    save(one, step)
    history = History.of(one)
    history.settings = settings_of(one, order)
    history.begin(step)
    history.close()


def test_epochs_count_the_rows_that_were_seen_whatever_the_batch_was(tmp_path: Path) -> None:
    """It said "52 of 52 steps" for 13 epochs of which it had trained 7."""
    kept, seen = str(tmp_path / "kept"), []
    batches = [(5, 4, 2), (9, 2, 2), (12, 8, 1), (15, 8, 1), (20, 3, 5)]  # last step, microbatches, rows
    before = 0
    for last, microbatches, each in batches:
        order = RowOrder(size=31, rows=each, microbatches=microbatches, seed=3)
        order = replace(order, start=first_row(kept, order))
        for step in range(before + 1, last + 1):
            seen += [place for mb in range(microbatches) for place in order.places(step, mb)]
        done = order.start + order.steps(4) * microbatches * each
        assert done - microbatches * each < 4 * 31 <= done
        started(tmp_path, before := last, order)
    alone = RowOrder(size=31, rows=1, microbatches=1, seed=3)
    assert seen == [alone.places(number + 1, 0)[0] for number in range(len(seen))]
    assert len(seen) == 5 * 8 + 4 * 4 + 6 * 8 + 5 * 15


def test_rows_of_a_run_without_history_begin_at_the_first(tmp_path: Path) -> None:
    order = RowOrder(size=31, rows=2, microbatches=4)
    assert first_row(None, order) == first_row("s3://bucket/kept", order) == 0
    assert first_row({"folder": str(tmp_path / "kept")}, order) == 0
    save(job(tmp_path), 5)  # a checkpoint from elsewhere
    assert first_row(tmp_path / "kept", order) == 0


def test_evaluation_keeps_its_rows_when_training_continues_behind_others(tmp_path: Path) -> None:
    one = replace(job(tmp_path), data=DataSpec(build="in-the:script", options={START: 7}))
    data = rows([(number, 0) for number in range(31)], rows=2, shuffle=False)
    assert of_job(data, one).batch(1, 0)[0].tolist() == [0, 1]
    assert trained_on(data, one).batch(1, 0)[0].tolist() == [7, 8]


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
