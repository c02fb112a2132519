"""The keeper and its leader, with a coordinator and a Slurm that are played."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import UserError
from everstep.launch.slurm import leading_keeper as slurm_leader
from everstep.launch.slurm import sbatch as slurm_sbatch
from everstep.launch.slurm import shell as slurm_shell
from everstep.launch.slurm.leading_keeper import Leader
from everstep.launch.slurm.run import Run
from everstep.launch.slurm.sbatch import SlurmLaunch
from everstep.launch.slurm.slurm_keeper import KeptProcess, SlurmKeeper, SlurmKeeperSettings
from everstep.launch.slurm.slurm_text import SlurmJob, SlurmNode

JOB = "steps = 3\n[model]\npreset = 'gpt-tiny'\n"


class Cluster:
    """What the leader speaks to: a Slurm of four nodes, and a coordinator that believes everything."""

    def __init__(self) -> None:
        self.job: SlurmJob | None = SlurmJob(
            number="7", state="RUNNING", nodes=("n1", "n2", "n3", "n4"), batch_host="n1", partition="gpu"
        )
        self.nodes = {n: SlurmNode(name=n, states=frozenset({"ALLOCATED"})) for n in self.job.nodes}
        self.spares: list[SlurmJob] = []
        self.tasks: list[dict[str, Any]] = []
        self.states = dict.fromkeys(self.job.nodes, "up")
        self.heard: list[str] = []

    def get(self, path: str) -> Any:
        nodes = [{"node": n, "state": s, "connected": s == "up"} for n, s in self.states.items()]
        return {"nodes": nodes, "tasks": self.tasks}

    def post(self, path: str, body: Any = None) -> Any:
        self.heard.append(path)
        if path == "/v1/tasks":
            self.given = body
            self.tasks = [{"task": body["name"], "state": "running", "because": "it is given"}]
            return self.tasks[0]
        _, _, _, node, verb = path.split("/")
        self.states[node] = "draining" if verb == "drain" else "up"
        return {}

    def submit(self, options: Any, arguments: Any, environment: Any) -> str:
        self.heard.append(f"sbatch {' '.join(options)} -- {' '.join(arguments)}")
        self.spares.append(SlurmJob(number="8", state="PENDING"))
        assert "EVERSTEP_TOKEN" not in environment
        return "8"

    def cancel(self, number: str) -> None:
        self.heard.append(f"scancel {number}")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    played = Cluster()
    monkeypatch.setattr(slurm_shell, "job", lambda number: played.job)
    monkeypatch.setattr(slurm_shell, "jobs_named", lambda name: played.spares)
    monkeypatch.setattr(slurm_shell, "nodes", lambda names: {n: played.nodes[n] for n in names})
    monkeypatch.setattr(slurm_shell, "submit", played.submit)
    monkeypatch.setattr(slurm_shell, "cancel", played.cancel)
    monkeypatch.setattr(slurm_leader, "Client", lambda **given: played)
    return played


def settings(tmp_path: Path, **more: Any) -> SlurmKeeperSettings:
    (tmp_path / "job.toml").write_text(JOB)
    given: dict[str, Any] = {
        "run": tmp_path / "run",
        "job_file": tmp_path / "job.toml",
        "job": "7",
        "node": "n1",
        "host": "127.0.0.1",
        "rank": 0,
        "attempt": 0,
        "slots": 1,
        "wanted": 4,
    }
    return SlurmKeeperSettings(**given | more)


def leader(tmp_path: Path) -> tuple[Leader, Run]:
    run = Run(tmp_path / "run")
    run.make(wanted=4)
    return Leader(settings(tmp_path), run, address="http://n1:7077", say=lambda line: None), run


def turns(one: Leader, *, first: int, last: int) -> None:
    for second in range(first, last):
        one.turn(float(second))


def test_the_address_is_published_when_the_coordinator_answers_and_the_task_is_given_once(
    tmp_path: Path, cluster: Cluster
) -> None:
    one, run = leader(tmp_path)
    turns(one, first=0, last=20)
    assert (run.folder / "coordinator").read_text() == "http://n1:7077\n"
    assert cluster.heard == ["/v1/tasks"]


def test_a_node_drained_in_slurm_is_drained_replaced_and_readmitted_also_by_the_next_leader(
    tmp_path: Path, cluster: Cluster
) -> None:
    one, run = leader(tmp_path)
    turns(one, first=0, last=3)
    cluster.nodes["n2"] = SlurmNode(name="n2", states=frozenset({"ALLOCATED", "DRAIN"}), reason="fan")
    turns(one, first=10, last=30)
    asked = [line for line in cluster.heard if line.startswith("sbatch")]
    assert cluster.heard.count("/v1/nodes/n2/drain") == 1
    assert len(asked) == 1
    assert "--partition=gpu --nodes=1 --job-name=everstep-7-0" in asked[0]
    assert f"{tmp_path / 'job.toml'} --spare-of 7 --attempt 0" in asked[0]
    assert run.drained == {"n2"}

    other = Leader(settings(tmp_path, node="n3"), run, address="http://n3:7077", say=lambda line: None)
    cluster.nodes["n2"] = SlurmNode(name="n2", states=frozenset({"ALLOCATED"}))
    turns(other, first=40, last=60)
    assert cluster.heard.count("/v1/nodes/n2/readmit") == 1
    assert "scancel 8" in cluster.heard
    assert run.drained == frozenset()


def test_a_finished_task_ends_the_job_and_its_spares(tmp_path: Path, cluster: Cluster) -> None:
    one, run = leader(tmp_path)
    turns(one, first=0, last=3)
    cluster.spares = [SlurmJob(number="8", state="RUNNING", nodes=("n5",))]
    cluster.tasks[0]["state"] = "finished"
    turns(one, first=3, last=5)
    assert run.exit_code == 0
    assert "scancel 8" in cluster.heard
    assert "scancel 7" not in cluster.heard, "its batch script ends it"


@pytest.mark.parametrize(
    ("state", "of_ranks", "code"), [("finished", 0, 0), ("failed", 7, 7), ("failed", 0, 1)]
)
def test_a_script_is_given_as_it_was_asked_for_and_the_run_ends_with_its_exit_code(
    tmp_path: Path, cluster: Cluster, state: str, of_ranks: int, code: int
) -> None:
    ranks = {"command": ["my train.py", "--lr", "1"], "folder": "/", "ranks": 8, "least": 2, "most": 4}
    launch = SlurmLaunch(file=tmp_path / "my train.py", run=tmp_path / "run", nodes=4, least=2, script=ranks)
    assert launch.options()[0] == "--nodes=2-4"
    run = Run(tmp_path / "run")
    assert slurm_sbatch.submit(launch) == "8"  # to a Slurm that is played
    assert run.wanted == 4
    one = Leader(
        settings(tmp_path, job_file=Path(launch.arguments()[0])),
        run,
        address="http://n1:1",
        say=lambda _: None,
    )
    turns(one, first=0, last=3)
    assert cluster.given == {"name": "my-train", "ranks": ranks}
    cluster.tasks[0] |= {"state": state, "script": {"exit_code": of_ranks}}
    turns(one, first=3, last=5)
    assert run.exit_code == code


def test_a_job_without_its_batch_script_is_cancelled_at_the_end(tmp_path: Path, cluster: Cluster) -> None:
    one, run = leader(tmp_path)
    turns(one, first=0, last=3)
    cluster.job = SlurmJob(number="7", state="RUNNING", nodes=("n2", "n3", "n4"), batch_host="n1")
    cluster.tasks[0]["state"] = "failed"
    turns(one, first=3, last=5)
    assert run.exit_code == 1
    assert "scancel 7" in cluster.heard


def test_a_job_file_that_is_wrong_ends_the_run_with_2(tmp_path: Path, cluster: Cluster) -> None:
    one, run = leader(tmp_path)
    (tmp_path / "job.toml").write_text("stepz = 3\n")
    turns(one, first=0, last=3)
    assert run.exit_code == 2


def test_a_slurm_that_does_not_answer_ends_nothing(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(number: str) -> SlurmJob:
        raise slurm_shell.SlurmFailed("squeue did not answer within 30 s")

    one, run = leader(tmp_path)
    monkeypatch.setattr(slurm_shell, "job", down)
    turns(one, first=0, last=30)
    assert run.exit_code is None


# ------------------------------------------------------------------ processes


def child(tmp_path: Path, code: str, say: Callable[[str], None] = lambda line: None) -> KeptProcess:
    command = [sys.executable, "-c", code, "child"]
    return KeptProcess(command, log=tmp_path / "child.log", token="secret", say=say)


def test_a_child_that_ends_is_started_again_later_each_time(tmp_path: Path) -> None:
    told: list[str] = []
    one = child(tmp_path, "raise SystemExit(3)", told.append)
    starts, before = [], None
    for tick in range(1, 400):
        one.keep(tick * 0.1)
        if one.pid is not None and one.pid != before:
            starts.append(tick * 0.1)
            before = one.pid
            while one.lives:
                time.sleep(0.001)
    waits = [round(b - a, 1) for a, b in pairwise(starts)]
    assert waits == sorted(waits)
    assert 2.0 <= waits[0] <= 2.3
    assert waits[2] >= 8.0
    assert told[0].startswith("child ended with 3")
    assert one.failures == len(told)
    one.end()


def test_a_child_has_its_token_in_the_environment_and_ends_when_told(tmp_path: Path) -> None:
    one = child(tmp_path, "import os, time; print(os.environ['EVERSTEP_TOKEN'], flush=True); time.sleep(60)")
    one.keep(0.0)
    assert one.pid is not None
    assert b"secret" not in Path(f"/proc/{one.pid}/cmdline").read_bytes()
    deadline = time.monotonic() + 10
    while (tmp_path / "child.log").read_text() != "secret\n":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    one.end()
    assert not one.lives


def test_the_first_node_leads_at_once_and_a_spare_never(tmp_path: Path, cluster: Cluster) -> None:
    for rank, spare, at_once in ((0, False, True), (1, False, False), (0, True, False)):
        folder = tmp_path / f"{rank}{spare}"
        folder.mkdir()
        keeper = SlurmKeeper(settings(folder, rank=rank, spare=spare), say=lambda line: None)
        keeper.run_folder.make(wanted=4)
        now = time.monotonic()
        assert keeper._leads(now + 0.01) is at_once
        assert keeper._leads(now + 60) is not spare


def test_a_node_whose_agent_never_runs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    for name in ("TURN_S", "RESTART_FIRST_S", "RESTART_MOST_S"):
        monkeypatch.setattr(f"everstep.launch.slurm.slurm_keeper.{name}", 0.01)
    monkeypatch.setattr("everstep.launch.slurm.slurm_keeper.EVERSTEP", ("false", "", ""))
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    keeper = SlurmKeeper(settings(tmp_path, rank=1000), say=told.append)
    assert keeper.run() == 1
    assert "failed 8 times" in told[-1]


def test_a_spare_leaves_when_its_job_does_not_run_any_more(tmp_path: Path, cluster: Cluster) -> None:
    keeper = SlurmKeeper(settings(tmp_path, spare=True, node="n9"), say=lambda line: None)
    keeper.run_folder.make(wanted=4)
    now = time.monotonic()
    assert not keeper._is_left_alone(now + 20)
    cluster.job = SlurmJob(number="7", state="PENDING")
    assert not keeper._is_left_alone(now + 21), "it does not ask all the time"
    assert keeper._is_left_alone(now + 40)
    cluster.job = SlurmJob(number="7", state="RUNNING")
    assert not keeper._is_left_alone(now + 60)
    Run(tmp_path / "run", attempt=1).make(wanted=4)
    assert keeper._is_left_alone(now + 80), "the job runs, but it has begun again"


def test_outside_slurm_a_keeper_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from everstep.cli.launch import node_command

    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    with pytest.raises(UserError, match="not a step of a Slurm job"):
        node_command(job_file=tmp_path / "job.toml", run=tmp_path)
