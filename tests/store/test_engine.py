"""A run saved under one shape goes on under another, with the losses of the run that never stopped."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from everstep.cli import main
from everstep.convert.conversion import read_state
from everstep.convert.formats import dialects
from everstep.convert.formats.hf import llama_config
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec
from everstep.launch.local.api import run_job
from everstep.launch.local.outcome import Outcome
from everstep.node.fork_server import ForkServer
from everstep.store.folder import complete_steps, open_checkpoint

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
