"""Folders that are not what they seem: one sentence, exit code 2, source untouched, nothing left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from everstep.cli import main
from everstep.store.stored import Held
from everstep_convert.conversion import Target, write_state
from everstep_convert.state import TrainingState
from tests.store.zero_files import write_zero

Converts = Callable[..., str]


@pytest.fixture
def refusal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Converts:
    """What a conversion says that must be refused."""

    def run(source: Path, target: Path | None = None, *options: str) -> str:
        before, others = _seen(source), {p for p in tmp_path.rglob("*") if source not in p.parents}
        out = target or tmp_path / "out"
        assert main.run(["ckpt", "convert", str(source), str(out), *options]) == 2
        said = capfd.readouterr().err
        assert said.count("\n") == 1, said
        assert _seen(source) == before
        assert {p for p in tmp_path.rglob("*") if source not in p.parents} == others
        return said

    return run


def _seen(folder: Path) -> list[tuple[str, int, int]]:
    return [(str(p), p.lstat().st_size, p.lstat().st_mtime_ns) for p in sorted([folder, *folder.rglob("*")])]


def _state() -> TrainingState:
    weight = np.arange(60, dtype=np.uint32).reshape(12, 5)
    names = ("model/w", "optimizer/w/exp_avg", "optimizer/w/exp_avg_sq")
    tensors = {name: Held("F32", weight + i) for i, name in enumerate(names)}
    tensors["optimizer/w/step"] = Held("F32", np.array(7.0, np.float32).view(np.uint32))
    return TrainingState(step=7, tensors=tensors, groups=[{"params": ["w"], "lr": 0.1, "weight_decay": 0.0}])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same state as ZeRO-2, ZeRO-3 and DCP."""
    root = tmp_path_factory.mktemp("made")
    for stage in (2, 3):
        write_zero(root / f"z{stage}", _state(), stage=stage, world=3)
    write_state(root / "dcp", _state(), Target(format="dcp"))
    return root


@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_s_file_does_not_stand_for_another_s(
    made: Path, tmp_path: Path, refusal: Converts, stage: int
) -> None:
    """ZeRO-3's has no rank inside: a third of every parameter was another third's, and nobody noticed."""
    folder = shutil.copytree(made / f"z{stage}", tmp_path / "copy")
    first, second, _ = sorted(folder.glob("*/*optim_states.pt"))
    shutil.copy(first, second)
    assert f"{second} cannot be read: it was written as {first.name}, another rank's;" in refusal(folder)


def test_ranks_of_two_checkpoints_are_one_sentence(made: Path, tmp_path: Path, refusal: Converts) -> None:
    folder = shutil.copytree(made / "z2", tmp_path / "copy")
    mine, other = (sorted(f.glob("*/*optim_states.pt"))[1] for f in (folder, made / "z3"))
    shutil.copy(other, mine)
    said = refusal(folder)
    assert "its optimizer files are of ZeRO stages 2 and 3, mixed from several checkpoints." in said


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_of_a_missing_rank_is_not_a_frozen_one(
    stage: int, tmp_path: Path, refusal: Converts
) -> None:
    """All of `b` lies on rank 1: without its file `b` was converted, without its optimizer state."""
    state = _state()
    for name in ("model/{}", "optimizer/{}/exp_avg", "optimizer/{}/exp_avg_sq", "optimizer/{}/step"):
        state.tensors[name.format("b")] = state.tensors[name.format("w")]
    state.groups[0]["params"] = ["w", "b"]
    write_zero(tmp_path / "zero", state, stage=stage, world=2)
    next((tmp_path / "zero").rglob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")).unlink()
    assert "of 1 of 2 ranks are there" in refusal(tmp_path / "zero")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_file_of_model_states_is_named(
    rank: int, made: Path, tmp_path: Path, refusal: Converts
) -> None:
    """Of ZeRO-3: what that rank alone had, such as parts of frozen parameters, was not missed."""
    folder = shutil.copytree(made / "z3", tmp_path / "copy")
    gone = next(folder.glob(f"*/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"))
    gone.unlink()
    assert f"{gone.name} is missing" in refusal(folder)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ('{"weight_map": {"a": "m1.safetensors", "b": "m1.safetensors"}}', "names tensor 'b'"),
        ('{"weight_map": {"a": "m1.safetensors", "a": "m2.safetensors"}}', "a key is there twice"),
        ('{"weight_map": ["m1.safetensors"]}', "has no table weight_map"),
        ('["m1.safetensors"]', "has no table weight_map"),
    ],
)
def test_an_index_that_promises_what_is_not_there(
    index: str, says: str, tmp_path: Path, refusal: Converts
) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    for name in ("m1", "m2"):
        save_file({"a": np.arange(3.0)}, source / f"{name}.safetensors")
    (source / "model.safetensors.index.json").write_text(index)
    assert says in refusal(source, None, "--to", "universal")


@pytest.mark.parametrize("surplus", ["model-00003-of-00002.safetensors", "model.safetensors"])
def test_weights_beside_those_of_the_index_are_not_left_out_silently(
    surplus: str, tmp_path: Path, refusal: Converts
) -> None:
    """transformers itself takes model.safetensors where both are there."""
    source = tmp_path / "hf"
    source.mkdir()
    for name, key in (("model-00001-of-00002.safetensors", "a"), (surplus, "b")):
        save_file({key: np.arange(3.0)}, source / name)
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    (source / "model.safetensors.index.json").write_text(index)
    assert f"{surplus} is there beside the files of" in refusal(source, None, "--to", "universal")


def test_a_pipe_among_the_files_is_not_waited_for(made: Path, tmp_path: Path, refusal: Converts) -> None:
    folder = shutil.copytree(made / "dcp", tmp_path / "copy")
    data = next(folder.glob("*.distcp"))
    data.unlink()
    os.mkfifo(data)
    assert "not a regular file" in refusal(folder)


def test_latest_that_names_nothing(made: Path, tmp_path: Path, refusal: Converts) -> None:
    folder = shutil.copytree(made / "z2", tmp_path / "copy")
    (folder / "latest").write_text("global_step999")
    assert "latest names 'global_step999', which is not a folder here." in refusal(folder)


@pytest.mark.parametrize("to", ["universal", "hf"])
def test_a_target_that_is_a_file_or_inside_the_source(
    made: Path, tmp_path: Path, refusal: Converts, to: str
) -> None:
    (tmp_path / "file").write_text("x")
    folder = shutil.copytree(made / "dcp", tmp_path / "copy")
    for target in (tmp_path / "file", tmp_path / "file" / "deeper"):
        assert f"{tmp_path / 'file'} is not a directory" in refusal(folder, target, "--to", to)
    (tmp_path / "link").symlink_to(folder)
    for target in (folder / "inner", tmp_path / "link" / "inner", folder):
        assert "is inside the source" in refusal(folder, target, "--to", to)


def test_a_full_disk_is_one_sentence(made: Path, refusal: Converts, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("everstep_convert.formats.hf.write_file", full)
    assert "is not written: [Errno 28] No space left on device." in refusal(made / "dcp", None, "--to", "hf")
