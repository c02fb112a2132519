"""The folder that the keepers of one job share, and what leads there."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.errors import UserError
from everstep.launch.client import Client
from everstep.launch.slurm import sbatch as slurm
from everstep.launch.slurm import shell as slurm_shell
from everstep.launch.slurm.run import Run
from everstep.launch.slurm.sbatch import SlurmLaunch, newest
from everstep.launch.slurm.shell import SCRIPT
from everstep.launch.slurm.slurm_text import SlurmJob


def test_the_token_is_made_once_and_read_by_its_owner_only(tmp_path: Path) -> None:
    first, second = Run(tmp_path / "run"), Run(tmp_path / "run", attempt=1)
    first.make(wanted=4)
    second.make(wanted=3)
    assert first.token == second.token
    assert len(first.token) >= 32
    assert stat.S_IMODE((tmp_path / "run" / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert second.wanted == 4, "a job that was shrunk still wants its nodes"


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.make(wanted=1, token="given")
    assert run.token == "given"
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        _ = run.token


def test_one_process_leads_and_its_death_is_the_next_ones_chance(tmp_path: Path) -> None:
    Run(tmp_path).make(wanted=2)
    hold = (
        "import sys, pathlib\n"
        "from everstep.launch.slurm.run import Run\n"
        "run = Run(pathlib.Path(sys.argv[1]))\n"
        "print(run.try_to_lead() and run.keep('n1'), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"True\n"
        run = Run(tmp_path)
        assert not run.try_to_lead()
        assert not run.keep("n1"), "a node has one keeper"
        assert run.keep("n2")
        other.kill()
        other.wait()
        assert run.keep("n1")
        assert run.try_to_lead()
        assert run.leads


def test_an_earlier_life_is_not_met_in_a_later_one(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.make(wanted=2)
    first.publish("http://n1:7077")
    first.remember_drained(frozenset({"n2"}))
    first.end(1)
    assert (first.exit_code, first.drained) == (1, {"n2"})
    second = Run(tmp_path, attempt=1)
    second.make(wanted=2)
    assert (second.exit_code, second.drained) == (None, frozenset())
    with pytest.raises(UserError, match="has written its address"):
        Client(address=second.place).get("/v1/health")
    assert newest(tmp_path).attempt == 1


def test_the_command_submits_the_script_that_people_may_submit() -> None:
    example = Path(__file__).parents[2] / "examples" / "everstep.sbatch"
    assert example.read_text() == SCRIPT.read_text()
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_script_ends_with_what_the_leader_wrote(tmp_path: Path) -> None:
    """`srun` is played by a command that fails, as the real one does when a node was lost."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\necho "$@" > "$EVERSTEP_RUN/called"\nexit 9\n')
    srun.chmod(0o755)
    run = Run(tmp_path / "run", attempt=2)
    run.make(wanted=2)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "EVERSTEP_RUN": str(run.folder),
        "SLURM_RESTART_COUNT": "2",
    }
    script = ["bash", str(SCRIPT), "job.toml", "--slots", "2"]
    assert subprocess.run(script, env=environment).returncode == 1, "nobody said how it ended"
    run.end(0)
    assert subprocess.run(script, env=environment).returncode == 0
    called = (run.folder / "called").read_text()
    assert "--no-kill" in called
    assert called.endswith(f"everstep launch node --run {run.folder} job.toml --slots 2\n")


def test_the_script_does_not_wait_for_ever_for_an_srun_that_does(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/bash\nexec sleep 600\n")
    srun.chmod(0o755)
    run = Run(tmp_path / "run")
    run.make(wanted=2)
    run.end(0)
    script = tmp_path / "short.sbatch"
    script.write_text(SCRIPT.read_text().replace("{1..30}", "{1..1}"))
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "EVERSTEP_RUN": str(run.folder),
        "SLURM_RESTART_COUNT": "0",
    }
    with subprocess.Popen(["bash", str(script), "job.toml"], env=environment, start_new_session=True) as job:
        try:
            assert job.wait(30) == 0
        finally:
            os.killpg(job.pid, signal.SIGKILL)  # as Slurm does with all of a job's steps


def test_no_token_is_on_the_command_line_of_a_launch(tmp_path: Path) -> None:
    launch = SlurmLaunch(file=tmp_path / "job.toml", run=tmp_path, nodes=4, sbatch=("--partition=gpu",))
    Run(tmp_path).make(wanted=4, token="secret-token")
    assert launch.options() == ["--nodes=4", f"--output={tmp_path / 'keepers.out'}", "--partition=gpu"]
    assert "secret-token" not in " ".join([*launch.options(), *launch.arguments()])


@pytest.mark.parametrize(
    ("last_state", "written", "code"),
    [("COMPLETED", 0, 0), ("CANCELLED", 0, 0), ("FAILED", 1, 1), ("TIMEOUT", None, 1), (None, 0, 0)],
)
def test_waiting_ends_with_the_tasks_own_end_whatever_slurm_calls_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last_state: str | None,
    written: int | None,
    code: int,
) -> None:
    run = Run(tmp_path)
    run.make(wanted=2)
    states = ["PENDING", "RUNNING", "away", "REQUEUED", "PENDING", "RUNNING", "COMPLETING", last_state]
    told: list[str] = []

    def job(number: str) -> SlurmJob | None:
        state = states.pop(0)
        if state == "away":
            raise slurm_shell.SlurmFailed("squeue: Unable to contact slurm controller")
        if state == "REQUEUED":
            Run(tmp_path, attempt=1).make(wanted=2)
        if state == "COMPLETING" and written is not None:
            Run(tmp_path, attempt=1).end(written)
        return None if state is None else SlurmJob(number=number, state=state)

    monkeypatch.setattr(slurm_shell, "job", job)
    monkeypatch.setattr(slurm, "LOOK_EVERY_S", 0.0)
    assert slurm.wait("7", tmp_path, told.append) == code
    assert told[:2] == ["job is pending", "job is running"]
    assert "Unable to contact" in told[2]
    assert not states
