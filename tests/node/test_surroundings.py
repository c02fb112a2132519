"""The environment and the working folder of a job's workers."""

import os
import sys
from pathlib import Path

import pytest

from everstep.errors import UserError
from everstep.job.job import Job, load_job
from everstep.job.presets import flops_per_token, shape
from everstep.launch.local.api import run_job
from everstep.node.fork_server import ForkServer, ForkServerDied
from everstep.node.worker import _surrounded
from everstep.server.metrics import work_in_step

JOB = {"model": {"preset": "gpt-tiny"}, "data": {"kind": "synthetic"}}


def test_a_worker_runs_in_its_job_s_environment_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "job.toml").write_text(
        'workdir = "work"\n[model]\npreset = "gpt-tiny"\n[data]\nkind = "synthetic"\n'
        '[environment]\nHF_HOME = "/models"\nlog = "~"\n'
    )
    monkeypatch.setenv("HF_HOME", "elsewhere")
    monkeypatch.setenv("log", "")
    monkeypatch.chdir(tmp_path)
    job = Job.from_dict(load_job("job.toml").to_dict())
    assert _surrounded(job).base == str(tmp_path)
    assert os.environ["HF_HOME"] == "/models"
    assert dict(os.environ)["log"] == "~", "no path of the job"
    assert Path.cwd() == tmp_path / "work"


def test_a_folder_that_is_not_on_the_node_is_said(tmp_path: Path) -> None:
    job = Job.from_dict({**JOB, "base": str(tmp_path), "workdir": "no"})
    with pytest.raises(UserError, match="workdir 'no' cannot be used on this node: No such"):
        _surrounded(job)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"A B": "1"}, r"environment\.A B is not a name of a variable"),
        ({"A": 1}, r"environment\.A is 1; it must be text in quotes"),
        ({"LD_PRELOAD": "x"}, r"environment\.LD_PRELOAD has no effect on a worker"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "set it for the agent"),
        ("x", r"environment is 'x'; it must be a table"),
    ],
)
def test_variables_that_cannot_be_are_refused(environment: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Job.from_dict({**JOB, "environment": environment})


def test_the_python_of_a_job_is_a_command() -> None:
    job = Job.from_dict({**JOB, "python": "apptainer exec --nv 'my image.sif' python"})
    assert job.needs().python == ("apptainer", "exec", "--nv", "my image.sif", "python")
    assert Job.from_dict(JOB).needs().python == ()
    with pytest.raises(UserError, match="python is empty"):
        Job.from_dict({**JOB, "python": " "})
    with pytest.raises(UserError, match='python "a \'b" is not a command: No closing quotation'):
        Job.from_dict({**JOB, "python": "a 'b"})
    with pytest.raises(UserError, match="start this run with that Python"):
        run_job(job)


def test_workers_are_forked_by_the_python_of_their_job() -> None:
    server = ForkServer(trains=False, python=("env", "EVERSTEP_MARK=here", sys.executable)).start()
    try:
        server.warm_up()
        assert b"EVERSTEP_MARK=here" in Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
    finally:
        server.close()


def test_a_python_that_is_not_on_the_node_or_has_no_everstep_is_named() -> None:
    with pytest.raises(UserError, match="python '/no/python' cannot be started on this node: No such file"):
        ForkServer(trains=False, python=("/no/python",)).start()
    server = ForkServer(trains=False, python=("false",)).start()
    with pytest.raises(ForkServerDied, match=r"exited with code 1; .*is everstep installed for false"):
        server.warm_up()
    server.close()


def test_model_flops_are_those_of_its_tokens() -> None:
    form = shape("gpt-tiny")
    tokens, flops = work_in_step({**JOB, "replicas": 2, "microbatches": 3})
    assert tokens == 4 * form.context * 6
    assert flops == tokens * flops_per_token(form)
    assert work_in_step({**JOB, "model": {"build": "mine:model"}})[1] is None
