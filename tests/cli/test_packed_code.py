"""A job's own code is packed when it is submitted; a worker started later imports that and nothing else."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.errors import UserError
from everstep.job import code
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec

MINE = "from helpers.deep import ANSWER\ndef build(): return ANSWER\n"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "deep.py").write_text("ANSWER = 'packed'\n")
    (tmp_path / "helpers" / "words.json").write_text("{}")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.bin").write_bytes(b"data")
    (tmp_path / "large.json").write_bytes(b" " * (2 << 20))
    (tmp_path / "ck" / "step-1").mkdir(parents=True)
    (tmp_path / "ck" / "step-1" / "index.json").write_text("{}")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hook.py").write_text("")
    return Job(
        model=ModelSpec(build="mine:build"),
        data=DataSpec(kind="synthetic"),
        checkpoint=CheckpointSpec(folder="ck"),
        base=str(tmp_path),
    )


# Loads the engine once, and builds each job in a fork: a worker's own process.
BUILD = """
import json, os, sys
from everstep.engine.prepare.resolve import _of_job
from everstep.job.job import Job
assert "torch._dynamo" not in sys.modules, "the compiler takes as long to load as torch"
for line in sys.stdin:
    if os.fork() == 0:
        job = Job.from_dict(json.loads(line))
        try:
            print(_of_job(job, job.model.build, "model.build")(), flush=True)
        except Exception as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_what_is_edited_after_a_submission_does_not_reach_its_workers(job: Job, tmp_path: Path) -> None:
    packed = replace(job, code=code.pack(job))
    (tmp_path / "helpers" / "deep.py").write_text("ANSWER = 'edited'\n")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", BUILD], text=True, **pipes) as builder:

        def built(job: Job) -> str:
            print(json.dumps(job.to_dict()), file=builder.stdin, flush=True)
            return builder.stdout.readline().strip()

        assert built(packed) == "packed"
        assert built(job) == "edited"
        (packed.path(packed.code or "") / "helpers" / "deep.py").write_text("ANSWER = 'forged'\n")
        assert "was changed since it was packed" in built(packed)


def test_code_is_copied_and_the_rest_is_linked(job: Job, tmp_path: Path) -> None:
    folder = job.path(code.pack(job))
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert files == ["helpers/deep.py", "helpers/words.json", "large.json", "mine.py"]
    assert (folder / "corpus" / "a.bin").read_bytes() == b"data"
    links = {path.name for path in folder.rglob("*") if path.is_symlink()}
    assert links == {"corpus", "large.json", "ck"}
    assert (folder / "corpus").resolve() == tmp_path / "corpus"


def test_the_same_code_is_packed_once_and_other_code_elsewhere(job: Job, tmp_path: Path) -> None:
    first = code.pack(job)
    assert code.pack(job) == first
    (tmp_path / "mine.py").write_text(MINE + "# more\n")
    second = code.pack(job)
    assert second != first
    assert {path.name for path in (tmp_path / code.FOLDER).iterdir()} == {Path(first).name, Path(second).name}


def test_what_cannot_be_packed_is_said(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MOST_FILES", 1)
    with pytest.raises(UserError, match="move the job file and its code to a folder of their own"):
        code.pack(job)


def test_only_jobs_with_code_of_their_own_are_packed(job: Job) -> None:
    assert code.names_code(job)
    assert not code.names_code(replace(job, model=ModelSpec(preset="gpt-tiny")))
    assert code.names_code(replace(job, model=ModelSpec(preset="gpt-tiny"), callbacks=["mine:Stop"]))
