"""How much of the cluster each owner may ask for."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from everstep.cli import main
from everstep.cli.client import Client
from everstep.errors import UserError
from everstep.server.access import CredentialsFile, Role
from everstep.server.quotas import read_quotas
from tests.server.served import served
from tests.server.test_api import JOB, call


def test_a_submission_beyond_the_quota_is_refused_until_there_is_room(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, quotas = CredentialsFile(tmp_path / "credentials"), tmp_path / "quotas.toml"
    token = file.add(Role.SUBMITTER, "alice")
    file.write(time.time())
    quotas.write_text("[default]\nworkers = 4\ntasks = 1\nweight = 1.0\n")
    job = JOB | {"replicas": 2, "stages": 2, "shards": 1}
    with served(tmp_path / "s", token="one", credentials=file.path, quotas=quotas) as address:
        alice = Client(address=address, token=token)
        with pytest.raises(UserError, match="weight is 2, and the most that alice may give is 1"):
            alice.post("/v1/tasks", {"name": "a", "job": job, "weight": 2})
        with pytest.raises(UserError, match="alice would have 6 workers in 1 tasks, and the quota is 4"):
            alice.post("/v1/tasks", {"name": "a", "job": job | {"replicas": 3}})
        with pytest.raises(UserError, match="alice would have 6 workers in 1 tasks, and the quota is 4"):
            alice.post("/v1/tasks", {"name": "a", "job": job | {"max_replicas": 3}})
        alice.post("/v1/tasks", {"name": "a", "job": job})
        quotas.write_text("[default]\nworkers = 8\ntasks = 1\n")
        with pytest.raises(UserError, match="would have 2 unfinished tasks"):
            alice.post("/v1/tasks", {"name": "b", "job": job})
        Client(address=address, token="one").post("/v1/tasks", {"name": "c", "job": job, "weight": 9})
        assert main.run(["access", "owners", "--address", address, "--token", token, "--json"]) == 0
        rows = json.loads(capfd.readouterr().out)["owners"]
        assert rows[0] == {"owner": "alice", "workers": 4, "tasks": 1, "most_workers": 8, "most_tasks": 1}
        assert rows[1]["most_workers"] is None
        assert [task["owner"] for task in alice.get("/v1/status")["tasks"]] == ["alice", "an operator"]
        alice.post("/v1/tasks/a/cancel")
        alice.post("/v1/tasks", {"name": "b", "job": job})
        assert main.run(["status", "--address", address, "--token", token]) == 0
        assert "alice" in capfd.readouterr().out
        assert call(address, "/v1/ready")[0] == 200


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[default]\nworkers = -1", "workers is -1"),
        ("[default]\nworker = 1", "worker"),
        ("[default]\nsteps = 4", "steps is not a key of .default.; its keys: tasks, weight, workers"),
        ("[owner.eve]\ntasks = 'many'", "owner.eve.tasks"),
        ("[people]\nx = 1", "tables only"),
        ("[", "cannot be read"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "quotas.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=why):
        read_quotas(path)
