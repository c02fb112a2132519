"""A run saved under one shape goes on under another, with the losses of the run that never stopped."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file

from everstep.cli import main
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec
from everstep.launch.local.api import run_job
from everstep.launch.local.outcome import Outcome
from everstep.node.fork_server import ForkServer
from everstep.store.dtypes import tensor_of
from everstep.store.folder import complete_steps, open_checkpoint
from everstep.store.stored import read_all
from everstep_convert.conversion import read_state
from everstep_convert.formats import dialects
from everstep_convert.formats.hf import llama_config

MICROBATCHES = 4  # in a step, however many replicas share them


def job(folder: Path, replicas: int, stages: int) -> Job:
    return Job(
        model=ModelSpec(preset="gpt-tiny", options={"depth": 2, "tied": True}),
        data=DataSpec(kind="synthetic", rows=1, sequence=16),
        checkpoint=CheckpointSpec(folder=str(folder), interval=3),
        steps=6,
        replicas=replicas,
        stages=stages,
        microbatches=MICROBATCHES // replicas,
    )


@pytest.fixture(scope="module")
def whole(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """2 replicas x 2 stages, six steps, a checkpoint after three."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = run_job(job(folder, 2, 2), fork_server=fork_server)
    assert complete_steps(folder) == [3, 6]
    shutil.rmtree(folder / "step-00000006")
    return folder, outcome


@pytest.mark.parametrize(("replicas", "stages"), [(1, 4), (4, 1)])
def test_another_shape_goes_on_with_the_same_losses(
    fork_server: ForkServer, whole: tuple[Path, Outcome], tmp_path: Path, replicas: int, stages: int
) -> None:
    folder, before = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    outcome = run_job(job(tmp_path, replicas, stages), fork_server=fork_server)
    assert outcome.resumed_from == 3
    ours, theirs = outcome.by_step(), before.by_step()
    assert sorted(ours) == [4, 5, 6]
    for step in ours:
        assert ours[step].loss == pytest.approx(theirs[step].loss, rel=1e-6)


def test_a_run_goes_on_in_another_precision_and_back(
    fork_server: ForkServer, whole: tuple[Path, Outcome], tmp_path: Path
) -> None:
    """fp32 to step 3, bf16 to step 6 in another shape, fp32 to step 9: what is saved is fp32 throughout."""
    folder, before = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    in_bf16 = run_job(replace(job(tmp_path, 1, 2), precision="bf16"), fork_server=fork_server)
    back = run_job(replace(job(tmp_path, 2, 2), steps=9), fork_server=fork_server)
    assert (in_bf16.resumed_from, back.resumed_from) == (3, 6)
    for step, row in in_bf16.by_step().items():
        theirs = before.by_step()[step].loss
        assert row.loss != theirs  # it did compute in another precision
        assert row.loss == pytest.approx(theirs, rel=0.02)
    assert sorted(back.by_step()) == [7, 8, 9]
    assert back.by_step()[7].loss == pytest.approx(in_bf16.by_step()[6].loss, rel=0.2)
    for step, precision in ((3, "fp32"), (6, "bf16"), (9, "fp32")):
        found = open_checkpoint(tmp_path / f"step-{step:08d}")
        assert found.meta["precision"] == precision
        trained = {name: one.dtype for name, one in found.tensors.items() if not name.startswith("extra/")}
        assert set(trained.values()) == {"F32"}


def test_what_the_engine_saves_tells_all_that_a_run_needs(whole: tuple[Path, Outcome]) -> None:
    found = open_checkpoint(whole[0] / "step-00000003")
    assert found.meta["data"] == {"next_step": 4, "microbatches_in_step": MICROBATCHES}
    assert found.meta["shape"] == {"replicas": 2, "stages": 2, "microbatches": 2}
    assert [group["weight_decay"] for group in found.index.groups] == [0.1, 0.0]
    state = read_state(whole[0])
    named = {name for group in state.groups for name in group["params"]}
    assert named == set(state.parameters())
    assert len(found.index.files) == 4  # of each stage, a part a replica: they share the writing
    assert llama_config(state)["num_attention_heads"] == 4
    assert dialects.dialect_of(dialects.translated(state, "megatron")) == "megatron"


def script_state(universal: Path, optimizer_name: str, step: object) -> dict[str, Any]:
    """What a script of torch would save of the same training, with names of its own."""
    state = read_state(universal)
    values = {name: tensor_of(read_all(one), one.dtype).clone() for name, one in state.tensors.items()}
    groups = [dict(group) for group in state.groups]
    moments: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name.startswith("optimizer/"):
            parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
            moments.setdefault(parameter, {})[key.partition("#")[0]] = value
    model = {
        name.removeprefix("model/"): value for name, value in values.items() if name.startswith("model/")
    }
    return {
        "model": model,
        optimizer_name: {"state": moments, "param_groups": groups},
        "step": step,
        "epoch": 1,
    }


@pytest.mark.parametrize("step", [3, torch.tensor([3])], ids=["number", "tensor"])
@pytest.mark.filterwarnings("ignore")
def test_a_script_loads_its_checkpoint_again_after_a_training_here(
    fork_server: ForkServer,
    whole: tuple[Path, Outcome],
    tmp_path: Path,
    step: Any,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It calls its optimizer "optim" and counts steps: torch said Missing key in checkpoint state_dict."""
    state = script_state(whole[0], "optim", step)
    torch_dcp.save(state, checkpoint_id=str(tmp_path / "theirs"))
    here, back = tmp_path / "universal", tmp_path / "back"
    assert main.run(["ckpt", "convert", str(tmp_path / "theirs"), str(here)]) == 0
    outcome = run_job(job(here, 1, 2), fork_server=fork_server)
    assert (outcome.resumed_from, complete_steps(here)) == (3, [3, 6])
    assert main.run(["ckpt", "convert", str(here), str(back), "--to", "dcp"]) == 0
    assert "training has not kept epoch of the checkpoint that it began with" in capfd.readouterr().err
    torch_dcp.load(wanted := {key: state[key] for key in ("model", "optim", "step")}, checkpoint_id=str(back))
    assert int(wanted["step"]) == 6
    after = script_state(here, "optim", 6)
    assert all(torch.equal(wanted["model"][name], value) for name, value in after["model"].items())
    name = next(iter(after["optim"]["state"]))
    assert torch.equal(wanted["optim"]["state"][name]["exp_avg"], after["optim"]["state"][name]["exp_avg"])


@pytest.mark.filterwarnings("ignore")
def test_keys_name_the_parts_of_a_script_s_checkpoint(
    whole: tuple[Path, Outcome], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def convert(source: Path, target: str, *more: str) -> int:
        return main.run(["ckpt", "convert", str(source), str(tmp_path / target), *more])

    assert convert(whole[0], "theirs", "--to", "dcp", "--keys", "model=net,optim=opt,step=trainer.at") == 0
    keys = set(torch_dcp.FileSystemReader(str(tmp_path / "theirs")).read_metadata().state_dict_metadata)
    assert {key.partition(".")[0] for key in keys} == {"net", "opt", "trainer", "everstep"}
    state = script_state(whole[0], "opt", 3)
    state["net"] = state.pop("model")
    state["at"] = state.pop("step")
    torch_dcp.save(state, checkpoint_id=str(tmp_path / "foreign"))
    assert convert(tmp_path / "foreign", "here", "--keys", "model=net,optim=opt,step=at") == 0
    found, ours = read_state(tmp_path / "here"), read_state(whole[0])
    assert (found.step, found.parameters().keys()) == (3, ours.parameters().keys())
    assert found.optimizer().keys() == ours.optimizer().keys()
    assert convert(tmp_path / "here", "again", "--to", "dcp") == 0
    torch_dcp.load(wanted := {"at": 0}, checkpoint_id=str(tmp_path / "again"))
    assert wanted == {"at": 3}
    capfd.readouterr()
    for source, more, says in (
        (whole[0], ["--keys", "model=net"], "--keys is for dcp, and this converts universal to universal"),
        (whole[0], ["--to", "dcp", "--keys", "weights=net"], "--keys weights=net is not of the form model="),
        (whole[0], ["--to", "dcp", "--keys", "model=a,optim=a"], "is not of the form"),
        (tmp_path / "foreign", ["--keys", "model=network"], "--keys names 'network', and no key of the"),
        (tmp_path / "foreign", ["--keys", "model=net,step=steps"], "--keys names 'steps' as the step, and"),
    ):
        assert convert(source, "wrong", *more) == 2
        assert says in capfd.readouterr().err
        assert not (tmp_path / "wrong").exists()


def test_what_the_engine_saves_becomes_a_llama_by_one_command(
    whole: tuple[Path, Outcome], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main.run(
        ["ckpt", "convert", str(whole[0]), str(tmp_path / "hf"), "--to", "hf", "--names", "llama"]
    )
    assert (code, capfd.readouterr().err) == (0, "")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"]) == ("llama", True)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert "lm_head.weight" not in tensors  # tied: written once
    ours = open_checkpoint(whole[0] / "step-00000003").read_box("model/blocks.1.mlp.up.weight")
    assert torch.equal(tensors["model.layers.1.mlp.up_proj.weight"], ours)
