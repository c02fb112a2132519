"""Ctrl-C and SIGTERM of a run on this machine: it finishes its step, saves its state, and says so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from everstep.errors import EverstepError
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec
from everstep.launch.local import api
from everstep.launch.local.outcome import Outcome
from everstep.launch.local.report import stopped_line
from everstep.node.fork_server import ForkServer
from everstep.store.folder import complete_steps
from harness.cluster import descendants


def job_in(folder: Path | None) -> Job:
    return Job(
        model=ModelSpec(preset="gpt-tiny", options={"depth": 2}),
        data=DataSpec(kind="synthetic", rows=1, sequence=16),
        checkpoint=None if folder is None else CheckpointSpec(folder=str(folder), interval=1000),
        steps=100_000,
        replicas=2,
        stages=1,
        microbatches=2,
    )


def at_step(step: int, number: int, times: int = 1) -> Callable[[str, Any], None]:
    """Sends the signal to this process when that step is complete, and again after a while."""
    sent: list[float] = []

    def watch(kind: str, what: Any) -> None:
        due = bool(sent) and time.monotonic() > sent[-1] + 1.5 * api.SAME_SIGNAL_S
        if (kind == "step" and what.step == step and not sent) or (due and len(sent) < times):
            sent.append(time.monotonic())
            os.kill(os.getpid(), number)

    return watch


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_step_it_is_in_is_saved(
    fork_server: ForkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """Up to `interval - 1` steps were thrown away, and SIGTERM said nothing at all."""
    with pytest.raises((KeyboardInterrupt, SystemExit)) as ended:
        api.run_job(job_in(tmp_path), watch=at_step(3, number), fork_server=fork_server)
    if number == signal.SIGTERM:
        assert isinstance(ended.value, SystemExit)
        assert ended.value.code == 143
    else:
        assert isinstance(ended.value, KeyboardInterrupt)
    (saved,) = complete_steps(tmp_path)
    assert 3 <= saved < 1000
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{signal.Signals(number).name}: stops after this step and saves its state")
    assert last == f"stopped after step {saved}, whose state is saved; the next start goes on from there"


def test_a_sigterm_to_all_processes_of_a_run_is_heard_by_its_launcher_alone(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """As `scancel` and systemd send it: the workers ended at once, and steps since the last checkpoint were
    lost.
    """
    told = at_step(3, signal.SIGTERM)

    def watch(kind: str, what: Any) -> None:
        if kind == "step" and what.step == 3:
            server = fork_server.pid
            for pid in (server, *descendants(server)):
                os.kill(pid, signal.SIGTERM)
        told(kind, what)

    job = replace(job_in(tmp_path), shards=2)
    with pytest.raises(SystemExit):
        api.run_job(job, watch=watch, fork_server=fork_server)
    (saved,) = complete_steps(tmp_path)
    assert 3 <= saved < 1000


def test_a_state_that_is_not_saved_within_the_grace_is_given_up_in_words(
    fork_server: ForkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        api.run_job(job_in(tmp_path), watch=at_step(3, signal.SIGTERM), fork_server=fork_server, grace_s=0.0)
    assert complete_steps(tmp_path) == []
    last = capsys.readouterr().err.splitlines()[-1]
    assert "are not saved, and the next start begins at step 1" in last
    assert last.startswith("stopped after step")


def test_without_checkpoints_it_stops_at_once_and_says_that_nothing_is_saved(
    fork_server: ForkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        api.run_job(job_in(None), watch=at_step(2, signal.SIGINT), fork_server=fork_server)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("nothing is saved, for the job has no [checkpoint]")


def test_a_second_signal_stops_it_at_once(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.LocalTask, "finish_early", lambda task, because: None)  # a step without end
    with pytest.raises(KeyboardInterrupt):
        api.run_job(job_in(tmp_path), watch=at_step(2, signal.SIGINT, times=2), fork_server=fork_server)
    assert complete_steps(tmp_path) == []


def test_a_run_that_has_completed_no_step_has_saved_none(tmp_path: Path) -> None:
    """It was "stopped after step 0, whose state is saved", and there was no checkpoint."""
    for folder in (tmp_path, None):
        assert stopped_line(Outcome(), 0, job_in(folder)) == (
            "stopped before a step was complete; the next start begins where this one did"
        )


class FailsWhileItStops:
    """A task that gets Ctrl-C and then loses what it needs to stop in good order."""

    last_step = 3

    def __init__(self, job: Job, *, raises: bool, **ports: Any) -> None:
        self.outcome, self._raises = Outcome(), raises

    def run(self) -> Outcome:
        os.kill(os.getpid(), signal.SIGINT)
        if self._raises:
            raise EverstepError("the fork server is gone")
        self.outcome.failure = "the fork server is gone"
        return self.outcome


@pytest.mark.parametrize("raises", [True, False])
def test_what_fails_while_a_run_stops_is_said_and_the_exit_code_is_still_that_of_the_signal(
    raises: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, on a busy machine, `everstep train` ended with 1 after Ctrl-C."""
    monkeypatch.setattr(api, "LocalTask", partial(FailsWhileItStops, raises=raises))
    with pytest.raises(KeyboardInterrupt):
        api.run_job(job_in(None), fork_server=cast(ForkServer, object()))  # None would start one
    assert capsys.readouterr().err.splitlines()[-1] == "while it stopped: the fork server is gone"
