"""What commands say: whole tables where they are piped, what will happen, where a worker runs."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from everstep.cli import cluster, demo, main, render, worker_output
from everstep.cli.client import Client
from everstep.cli.run import misplaced
from everstep.cli.train import describe
from everstep.job.job import Job
from everstep.launch.local import script_run
from everstep.launch.local.plain_lines import PlainLines
from everstep.launch.local.report import times
from everstep.node.agent import _plain
from everstep.protocol import actions as act
from everstep.protocol.incidents import Incident
from everstep.protocol.ops import Worker

TASK: dict[str, Any] = {
    "task": "three",
    "state": "running",
    "because": "started at step 636 " + "and trained for a long time " * 4,
    "workers": 4,
    "places": 4,
    "asked": 4,
    "shape": {"replicas": 2, "stages": 2, "shards": 1, "microbatches": 4},
    "step": 1345,
    "steps": 400_000,
    "saved": {"protected": 1300, "failing": ""},
    "loss": 2.065123,
    "step_seconds": 0.25,
    "evaluation": {"step": 1300, "values": {"loss": 2.0, "accuracy": 0.75}},
    "seats": [{"worker": "0:1", "node": "b", "slot": 3}],
    "rows": [
        {"step": 1344, "loss": 2.1, "grad_norm": 0.5, "seconds": 0.25},
        {"step": 1345, "loss": None, "grad_norm": None, "seconds": 0.0},
    ],
    "evaluations": [{"step": 1300, "values": {"loss": 2.0}}, {"step": 1344, "values": {"loss": 1.9}}],
}
STATUS = {"nodes": [], "tasks": [TASK], "incidents": {"open": [], "total": 1}}


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What a command asks a coordinator for; it answers with one task."""
    asked: list[tuple[str, Any]] = []

    def post(client: Client, path: str, body: Any = None) -> Any:
        asked.append((path, body))
        return TASK | ({"state": "cancelled"} if path.endswith("cancel") else {})

    monkeypatch.setattr(Client, "post", post)
    monkeypatch.setattr(Client, "get", lambda client, path: STATUS if path == "/v1/status" else TASK)
    return asked


@pytest.mark.usefixtures("posted")
def test_the_status_of_a_cluster_is_not_cut_where_it_is_piped(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main.run(["status"]) == 0
    out = capfd.readouterr().out
    for whole in ("1345/400000", "2.06512", "loss 2, accuracy 0.75 (step 1300)", TASK["because"].rstrip()):
        assert whole in out
    assert "…" not in out
    assert "1 incident, 0 open (everstep explain lists them)" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["resize", "three", "--shape", "1x4"],
            "task three takes the shape 1 x 4 at the end of the step it is in, 1346 or 1347",
        ),
        (["resize", "three", "--shape", "2x2"], "task three has the shape 2 x 2 already"),
        (["resize", "three", "1"], "task three uses at most 1 worker from now on; it has 4 of 4"),
        (["cancel", "three"], "task three is cancelled; its checkpoint of step 1300 is kept"),
        (
            ["pause", "three"],
            "task three completes the step after 1345, saves it and frees its slots; everstep resume three "
            "continues it",
        ),
        (["resume", "three"], "task three is running, at step 1345 of 400000"),
        (["resize", "three", "--release"], "the planner chooses the size and shape of task three again"),
    ],
)
@pytest.mark.usefixtures("posted")
def test_a_command_answers_what_will_happen(
    arguments: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 0
    assert capfd.readouterr().err.strip() == sentence


def test_logs_say_where_a_worker_runs_and_what_its_task_recorded() -> None:
    assert worker_output.place(TASK, "0:1") == (
        "everstep: worker 0:1 of three (replica 0 of 2, stage 1 of 2, counted from 0) is on node b, slot 3"
    )
    assert "runs nowhere now; the task is running" in worker_output.place(TASK, "1:1")
    assert worker_output.lines(TASK, after=0, evaluated=0) == [
        "step   1344/400000  loss 2.100000  grad norm 0.5000     250 ms",
        "evaluation after step 1344: loss 1.9",
        "step   1345/400000  loss nan  grad norm nan          -",
    ]
    assert worker_output.lines(TASK, after=1345, evaluated=1344) == []


def test_a_number_agrees_with_its_noun() -> None:
    assert [render.count(number, "worker") for number in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]
    model = {"preset": "gpt-tiny"}
    job = Job.from_dict({"model": model, "replicas": 2, "stages": 1, "microbatches": 1, "steps": 3})
    said = "gpt-tiny: 2 replicas × 1 stage, 1 microbatch per replica, 3 steps, fp32 on cpu"
    assert describe(job) == said, "it said 1 stages"
    assert "2 microbatches per" in describe(replace(job, microbatches=2))


def test_an_error_of_the_users_script_is_shown_from_the_script_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("def load():\n    return {}['rows']\n\nload()\n")
    assert main.run(["run", str(script)]) == 1
    err = capfd.readouterr().err
    assert err.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 4, in <module>',
    ]
    assert err.count("  File ") == 2
    assert err.rstrip().endswith("KeyError: 'rows'")


def test_an_option_behind_the_script_is_said_to_be_the_scripts(tmp_path: Path) -> None:
    """`everstep run train.py --kill ...` gave --kill to the script, which ignored it, and killed nobody."""
    script = tmp_path / "train.py"
    script.write_text('parser.add_argument("--batch")\n')
    given = ["--kill", "stage=1", "--batch", "3", "--replicas=2", "--nproc", "2", "--lr", "-m"]
    assert misplaced(script, given, any_script=False) == ["--kill", "--replicas", "--nproc"]
    assert misplaced(script, ["--kill", "x", "--max-restarts", "3"], any_script=True) == ["--max-restarts"]
    script.write_text("def main(max_restarts): ...\n")
    assert misplaced(script, ["--max-restarts", "3"], any_script=True) == []


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--epochs", "No such option: --epochs; options of the script follow its name: train.py --epochs."),
        ("--replica", "No such option: --replica (Possible options: --preload, --replicas)."),
    ],
)
def test_an_option_of_the_script_before_its_name_is_told_where_it_belongs(
    option: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was answered by "Possible options: --nproc, --replicas"."""
    assert main.run(["run", option, "3", "train.py"]) == 2
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("kill", "everstep cancel ends a task"),
        ("tasks", "everstep status lists nodes and tasks"),
        ("readmit", "everstep drain NODE --readmit undoes a drain"),
    ],
)
def test_a_command_of_other_systems_is_answered_by_ours(
    typed: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.run([typed, "x"]) == 2
    assert (
        capfd.readouterr().err.strip() == f"everstep: No such command {typed!r}; {said}. Try everstep --help."
    )


def test_commands_of_other_systems_do_not_hide_ours() -> None:
    assert not set(main._USUAL_COMMANDS) & set(main._COMMANDS)


def test_an_empty_cluster_says_what_to_do_next(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was two lines of headings."""
    nothing = {"nodes": [], "tasks": [], "incidents": {"open": [], "total": 0}}
    monkeypatch.setattr(Client, "get", lambda self, path: nothing)
    assert main.run(["status"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        cluster.NO_NODES,
        "",
        cluster.NO_TASKS,
        "",
        "0 incidents, 0 open",
    ]


@pytest.mark.parametrize("named", [["small"], []])
def test_a_report_is_of_a_task_by_its_name_and_not_cut_where_it_is_piped(
    named: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lost = {"fault": 43.9, "slow": 32.3, "paused": 31.3, "wait": 30.1}
    row = {"owner": "an operator", "state": "cancelled", "wall_s": 250.0, "goodput": 0.522, "lost_s": lost}
    row |= {"productive_s": 130.0}
    isolated = {"node": "a", "isolations": 1, "state": "isolated", "because": "it was slow"}
    document: dict[str, Any] = {"tasks": [{"task": name, **row} for name in ("big", "small")], "total": row}
    document |= {"incidents": [], "nodes": [isolated], "hours": []}
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Client, "get", lambda self, path: document)
    assert main.run(["report", *named]) == 0
    out = capfd.readouterr().out
    assert "fault 43.9 s, slow 32.3 s, paused 31.3 s, wait 30.1 s" in out
    assert "…" not in out
    assert "node a is isolated, isolated 1 time: it was slow" in out
    assert ("big" in out) == (not named)


def test_the_demos_own_kills_end_where_a_person_hurts_a_worker() -> None:
    """On its page both were mixed."""
    script = demo.Script(
        kills=((Worker(0, 1), 5), (Worker(1, 0), 9), (Worker(0, 0), 12)), rejoin_after_steps=2
    )
    killed: list[Worker] = []

    class Run:
        step = 5

        def readings(self) -> dict[Worker, Any]:
            reading = SimpleNamespace(step=self.step, done=4, num_ops=4)
            return dict.fromkeys((Worker(0, 1), Worker(1, 0), Worker(0, 0)), reading)

        def kill(self, worker: Worker) -> None:
            killed.append(worker)

    watch, run = demo.Killer(script, lambda kind, what: None), Run()
    watch("tick", run)
    watch("incident", SimpleNamespace(workers=[Worker(0, 1)]))  # its own
    run.step = 9
    watch("tick", run)
    assert killed == [Worker(0, 1), Worker(1, 0)]
    watch("incident", SimpleNamespace(workers=[Worker(1, 1)]))  # a click
    run.step = 12
    watch("tick", run)
    assert killed == [Worker(0, 1), Worker(1, 0)]


def test_small_adapters_have_parameters() -> None:
    assert render.parameters(4_608) == "4.61 k parameters", "it was 0.00 M"
    assert render.parameters(250_000) == "0.25 M parameters"


def test_commands_point_to_each_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "hello.py"
    script.write_text("value: int = 1\n")
    assert main.run(["run", str(script)]) == 2
    assert "a script for torchrun is started by everstep run --nproc N." in capfd.readouterr().err
    assert main.run(["train", str(script)]) == 2
    assert capfd.readouterr().err.rstrip().endswith("; everstep run runs scripts.")
    job = tmp_path / "job.toml"
    job.write_text('basee = "x"\n[model]\npreset = "gpt-tiny"\n')
    assert main.run(["train", str(job)]) == 2
    assert "base," not in capfd.readouterr().err, "a key that users do not set is not offered"
    with contextlib.suppress(SystemExit):
        assert main.run(["drain"]) == 2
    assert "Try everstep drain --help." in capfd.readouterr().err


def test_an_agent_without_a_coordinator_says_why_in_plain_words() -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 7391)")
    key = aiohttp.client_reqrep.ConnectionKey("127.0.0.1", 7391, False, True, None, None, None)
    assert _plain(aiohttp.ClientConnectorError(key, refused)) == "connection refused"
    assert _plain(TimeoutError()) == "TimeoutError"


def test_the_last_line_of_a_script_counts_in_good_english() -> None:
    launch = SimpleNamespace(logs=Path("runs/a"))
    lines = [
        script_run.summary(launch, SimpleNamespace(seconds=55.3, restarts=n, incidents=[None] * n))  # type: ignore[arg-type]
        for n in (1, 2)
    ]
    assert lines == [
        "everstep: 55.3 s, 1 restart, 1 incident; logs in runs/a",
        "everstep: 55.3 s, 2 restarts, 2 incidents; logs in runs/a",
    ]


@pytest.mark.parametrize(
    ("kept", "says"), [(0, "3 ops to replay"), (2, "3 ops to replay (2 of its outputs kept)")]
)
def test_what_is_done_again_is_the_last_part_of_a_recovery(kept: int, says: str) -> None:
    """The live view takes the last part for its first line: it said "1 output of it kept" there."""
    incident = Incident(number=1, workers=[Worker(0, 1)], what="killed by SIGKILL", step=2, evidence_at=1.0)
    incident.planned_at, incident.resumed_at = 1.01, 1.02
    incident.replayed_ops, incident.kept_outputs = 3, kept
    assert times(incident)[-1] == says


def test_a_start_is_told_after_the_incident_that_it_follows_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "starting 1:0 again: …" stood above "incident 1 in step 2: worker 1:0 killed by SIGKILL"."""
    said: list[str] = []
    now = [0.0]
    monkeypatch.setattr("everstep.launch.local.plain_lines.time.monotonic", lambda: now[0])
    lines = PlainLines(demo.demo_job(2, 2, 50), say=lambda line, **more: said.append(line))
    incident = Incident(number=1, workers=[Worker(1, 0)], what="killed", step=2, evidence_at=1.0)
    lines("action", act.StartWorker(worker=Worker(1, 0), incarnation=2, because="it was lost"))
    lines("incident", incident)
    assert [line[:12] for line in said] == ["incident 1 i", "starting 1:0"]
    lines("action", act.StartWorker(worker=Worker(1, 1), incarnation=2, because="it was lost"))
    lines("tick", None)
    assert len(said) == 2
    now[0] = 3.0  # its stage has no other worker: training does not go on before it is back
    lines("tick", None)
    assert said[2].startswith("starting 1:1 again")


def test_decisions_are_told_in_words() -> None:
    """They were told by the names of classes: "InterruptWorkers 0:0 1:0"."""
    said: list[str] = []
    lines = PlainLines(demo.demo_job(2, 2, 50), decisions=True, say=lambda line, **more: said.append(line))
    lines("action", act.StartWorker(worker=Worker(0, 1), incarnation=1, because="the task begins"))
    lines(
        "action", act.InterruptWorkers(workers=(Worker(0, 0), Worker(1, 0)), epoch=2, because="0:1 is gone")
    )
    assert [line.split(" s  ")[1].split() for line in said] == [
        ["start", "worker", "0:1", "the", "task", "begins"],
        ["pause", "and", "report", "the", "ledger,", "epoch", "2:", "0:0", "1:0", "0:1", "is", "gone"],
    ]
