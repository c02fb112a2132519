"""`compile = "auto"`: one decision per task, from what cannot change in its life."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everstep
from everstep.errors import UserError
from everstep.job import compiling
from everstep.job.compiling import LEAST_STEPS, CompileChoice, choice_for, settled, why_unable
from everstep.job.job import Job
from everstep.launch.local.data_needs import tokens_of_each
from everstep.node import worker

GPT: dict[str, Any] = {
    "model": {"preset": "gpt-1b"},
    "data": {"kind": "synthetic", "rows": 8},
    "device": "cuda",
    "steps": 1000,
}
ROWS = {"kind": "tokens", "path": "x.bin", "rows": 4, "sequence": 2048}


def hugging_face(folder: Path, **config: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 99, **config}))
    return {**GPT, "base": str(folder), "model": {"hf": "."}, "data": ROWS}


@pytest.mark.parametrize(
    ("changes", "chosen", "because"),
    [
        ({}, True, "1000 steps are worth"),
        ({"precision": "bf16", "replicas": 2, "stages": 3, "recompute": True}, True, "faster"),
        ({"data": {"kind": "table", "path": "x", "rows": 8, "pack": True}}, True, "faster"),
        ({"compile": True, "device": "cpu", "steps": 1}, True, ""),
        ({"compile": False}, False, ""),
        ({"device": "cpu"}, False, "on CPUs compiling takes minutes"),
        ({"steps": LEAST_STEPS}, True, "200 steps"),
        ({"steps": LEAST_STEPS - 1}, False, "less than 200 steps"),
        ({"python": "/envs/llm/bin/python"}, False, "the Python of its workers"),
        ({"shards": 2}, False, "split over shards"),
        ({"recompute": True, "recompute_part": "attention"}, False, ""),
        ({"model": {"build": "mine:model"}}, False, "the layers are your own"),
        ({"data": {"build": "mine:Data"}}, False, "many lengths"),
        ({"data": {"kind": "table", "path": "x", "rows": 8}}, False, "many lengths"),
        ({"evaluation": {"data": {"kind": "table", "path": "x"}}}, False, "many lengths"),
        ({"model": {"preset": "gpt-350m"}}, False, "8 M numbers per layer, and with less than 16 M"),
        ({"data": {"kind": "synthetic", "rows": 4}}, True, "faster"),
        ({"data": {"kind": "synthetic", "rows": 2}}, False, "8 M numbers per layer"),
    ],
)
def test_the_job_alone_decides(changes: dict[str, Any], chosen: bool, because: str) -> None:
    found = choice_for(Job.from_dict({**GPT, **changes}))
    assert found.compile is chosen
    assert because in found.because
    assert bool(found.because) is bool(because), "a reason where the job does not say it, and only there"


@pytest.mark.parametrize(
    ("config", "chosen", "because"),
    [
        ({"hidden_size": 2048}, True, "faster"),
        ({"hidden_size": 1024}, True, "faster"),
        ({"n_embd": 768}, False, "6 M numbers per layer, and with less than 8 M"),
        ({"hidden_size": 2048, "model_type": "mamba"}, False, "not been tried with mamba models"),
        ({}, False, "the width of the model is not known"),
    ],
)
def test_models_of_hugging_face_say_their_width(
    tmp_path: Path, config: dict[str, Any], chosen: bool, because: str
) -> None:
    found = choice_for(Job.from_dict(hugging_face(tmp_path, **config)))
    assert found.compile is chosen
    assert because in found.because


def test_a_script_says_by_its_data_how_long_rows_are() -> None:
    words = {"build": "in-the:script", "card": {"hf_config": {"model_type": "llama", "hidden_size": 2048}}}
    job = Job.from_dict({**GPT, "model": words, "data": {"build": "in-the:script"}})
    assert "many lengths" in choice_for(job).because
    assert choice_for(job, microbatch=8192).compile


def test_data_of_a_script_has_one_length_where_rows_are_cut_or_packed(tmp_path: Path) -> None:
    np.zeros(1000, dtype=np.uint16).tofile(tmp_path / "x.bin")
    cut = everstep.tokens(tmp_path / "x.bin", sequence=16, rows=4, token="uint16")
    documents = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    packed = everstep.rows(documents, rows=2, pack=8)
    padded = everstep.rows(documents, rows=2)
    assert tokens_of_each(cut) == 64
    assert tokens_of_each(packed, cut) == 16
    assert tokens_of_each(padded) is None
    assert tokens_of_each(cut, padded) is None, "an evaluation has its own lengths"
    assert tokens_of_each(lambda step, microbatch: None) is None


def test_what_a_run_has_begun_with_is_kept() -> None:
    """Also where the rule would say the opposite: the steps of a run may be changed when it resumes."""
    job = Job.from_dict(GPT)
    assert choice_for(job, kept=False) == CompileChoice(False, "the run that it resumes was not compiled")
    short = Job.from_dict({**GPT, "steps": 5, "device": "cpu"})
    assert choice_for(short, kept=True) == CompileChoice(True, "the run that it resumes was compiled")
    said = Job.from_dict({**GPT, "compile": False})
    assert choice_for(said, kept=True) == CompileChoice(False, "")


def test_workers_get_true_or_false_and_checkpoints_say_which() -> None:
    job = Job.from_dict(GPT)
    assert job.compile == "auto"
    assert not job.compiles, "what nobody has settled is eager"
    for chosen in (True, False):
        made = settled(job, CompileChoice(chosen, "x"))
        assert made.compile is chosen
        assert Job.from_dict(json.loads(json.dumps(made.to_dict()))).compiles is chosen
        assert made.reshaped(2, 2).compiles is chosen
        assert made.checkpoint_meta(3)["compile"] is chosen


def test_a_machine_that_cannot_compile_is_eager_unless_compiling_is_asked_for() -> None:
    job, unable = Job.from_dict(GPT), "there is no C compiler ('gcc')"
    choice = choice_for(job, unable=unable)
    assert choice == CompileChoice(False, unable)
    assert not settled(job, choice, unable=unable).compiles
    asked = Job.from_dict({**GPT, "compile": True})
    with pytest.raises(UserError) as told:
        settled(asked, choice_for(asked, unable=unable), unable=unable)
    assert str(told.value) == (
        "compile = true cannot be done on this machine: there is no C compiler ('gcc'); install what is "
        "missing, or set compile = false."
    )
    with pytest.raises(UserError, match=r"true \(the run that it resumes was compiled\) cannot be done"):
        settled(job, choice_for(job, kept=True, unable=unable), unable=unable)


def test_what_a_machine_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gcc", "g++", "ccache"):
        (tmp_path / name).touch(mode=0o755)
    here = {"PATH": str(tmp_path), "CPATH": "/headers"}
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: name)
    for device in ("cuda", "cpu"):
        assert why_unable(device, here) == ""
        assert why_unable(device, {**here, "CC": "ccache gcc", "CXX": "ccache g++"}) == ""
        assert why_unable(device, {**here, "CC": " ", "CXX": " "}) == ""
    nowhere = {**here, "PATH": "/nowhere"}
    assert why_unable("cuda", nowhere) == "there is no C compiler ('gcc' or 'clang' or 'cc')"
    assert why_unable("cpu", {**here, "CXX": "icpx"}) == "there is no C++ compiler ('icpx')"
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python's headers are not installed" in why_unable("cuda", {"PATH": str(tmp_path)})
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    assert why_unable("cuda", here) == "triton is not installed (pip install triton)"
    assert why_unable("cpu", here) == ""


def test_a_worker_on_such_a_machine_says_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback of torch's compiler, in the middle of the first step."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(worker.regions, "enable", lambda: pytest.fail("compiles"))
    job = Job.from_dict({"model": {"preset": "gpt-tiny"}, "compile": True})
    with pytest.raises(UserError, match=r"no C\+\+ compiler \('g\+\+'\); install .* set compile = false\.$"):
        worker._device_of(job)
