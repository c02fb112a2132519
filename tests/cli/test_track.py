"""Tasks of a cluster in other trackers: each step once, in order, also when the coordinator is away."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.cli import main
from everstep.cli.client import Client
from everstep.cli.track import TaskNews, follow, last_step
from everstep.errors import PeerError, UserError


def document(*steps: int, state: str = "running", evaluations: tuple[int, ...] = ()) -> dict[str, Any]:
    rows = [{"step": step, "loss": 1.0 / step, "grad_norm": None, "seconds": 0.1} for step in steps]
    found = [{"step": step, "values": {"loss": 2.0}} for step in evaluations]
    return {"task": "t", "state": state, "steps": 9, "rows": rows, "evaluations": found}


class Tracker:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_step(self, row: dict[str, Any]) -> None:
        self.told.append(row["step"])
        assert None not in row.values()

    def on_eval(self, step: int, values: dict[str, float]) -> None:
        self.told.append(("eval", step))

    def on_incident(self, incident: dict[str, Any]) -> None:
        self.told.append(("incident", incident["number"]))

    def on_end(self, result: Any) -> None:
        self.told.append(("end", result))


def test_what_is_new_is_given_on_once_also_if_steps_are_done_again() -> None:
    tracker = Tracker()
    follower = TaskNews([tracker], after=1)
    mine, other = {"task": "t", "number": 3}, {"task": "u", "number": 4}
    follower.start(document())
    follower.take(document(1, 2, 3))
    follower.take(document(2, 3, 2, 3, 4, evaluations=(4,)), [other, mine])
    follower.take(document(3, 4, 5, evaluations=(4,)), [mine, other])
    follower.end("finished")
    assert tracker.told == [2, 3, 4, ("eval", 4), ("incident", 3), 5, ("end", "finished")]


def test_a_coordinator_that_restarts_is_waited_for() -> None:
    asked: list[str] = []
    answers = [document(1), PeerError("no answer"), PeerError("no answer"), document(1, 2, state="failed")]

    class Restarting:
        def get(self, path: str) -> Any:
            asked.append(path)
            if path.startswith("/v1/incidents"):
                return []
            found = answers.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

    tracker, client = Tracker(), Restarting()
    client_: Any = client
    assert follow(client_, "t", TaskNews([tracker], after=0), sleep=lambda seconds: None)["state"] == "failed"
    assert tracker.told == [1, 2]
    tasks = [path for path in asked if path.startswith("/v1/tasks")]
    assert tasks == ["/v1/tasks/t?after=0", *["/v1/tasks/t?after=1"] * 3], "only what is new is asked for"
    assert asked[1] == "/v1/incidents?after=0&task=t"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(self: Client, path: str) -> Any:
        return (
            [] if path.startswith("/v1/incidents") else document(1, 2, 3, state="finished", evaluations=(2,))
        )

    monkeypatch.setattr(Client, "get", get)


@pytest.mark.usefixtures("cluster")
def test_files_are_continued_after_their_last_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    losses, lines = tmp_path / "losses.csv", tmp_path / "lines.jsonl"
    for _ in range(2):
        assert main.run(["track", "t", "--csv", str(losses), "--jsonl", str(lines), "--json"]) == 0
        assert json.loads(capfd.readouterr().out) == {"task": "t", "state": "finished", "last": 3}
    with losses.open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3"]
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["step"] for row in written if row["kind"] == "step"] == [1, 2, 3]
    assert last_step(losses) == last_step(lines) == 3


@pytest.mark.usefixtures("cluster")
def test_weights_and_biases_and_mlflow_get_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, step=None: logged.append(("wandb", step)),
        finish=lambda exit_code: logged.append(("end", exit_code)),
    )
    wandb = SimpleNamespace(init=lambda **init: logged.append(init) or run)
    mlflow = SimpleNamespace(
        set_experiment=lambda name: logged.append(name),
        start_run=lambda **start: logged.append(start),
        log_metrics=lambda values, step: logged.append(("mlflow", step)),
        end_run=lambda status: logged.append(status),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    assert main.run(["track", "t", "--wandb", "llama", "--mlflow", "pre"]) == 0
    assert logged[0] == {"project": "llama", "name": "t", "id": "t", "resume": "allow"}
    assert [step for what, step in (one for one in logged if isinstance(one, tuple)) if what == "wandb"] == [
        1,
        2,
        3,
        None,
    ]
    assert [one[1] for one in logged if isinstance(one, tuple) and one[0] == "mlflow"] == [1, 2, 3, 2]
    assert logged[-2:] == [("end", 0), "FINISHED"]


def test_nowhere_to_log_is_said() -> None:
    from everstep.cli.track import track_command

    with pytest.raises(UserError, match="--wandb, --mlflow, --tensorboard, --csv or --jsonl"):
        track_command("t")
