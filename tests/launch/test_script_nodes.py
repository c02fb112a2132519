"""A machine of a script that waits for the rendezvous endpoint."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from everstep.cli import torchrun
from everstep.errors import UserError
from everstep.launch import script_nodes
from everstep.launch.client import Client
from everstep.launch.script_nodes import NodeRun, RunOnNodes, token_of_run
from harness.etcd import free_ports


def waiting(join_timeout_s: float) -> RunOnNodes:
    return RunOnNodes(
        NodeRun(
            run_id="waiting",
            endpoint=("127.0.0.1", free_ports(1)[0]),
            is_endpoint=False,
            order=None,
            host="",
            token="",
            ranks={"ranks": 1},
            output=io.BytesIO(),
            join_timeout_s=join_timeout_s,
        )
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("EVERSTEP_TOKEN", raising=False)
    return tmp_path / "everstep" / "token"


@pytest.mark.parametrize("host", ["head", "10.0.0.1", "0.0.0.0", "127.0.1.1"])
def test_beyond_loopback_the_token_is_never_one_that_a_command_line_shows(host: str, home: Path) -> None:
    """It was the hash of the run's id and the endpoint, and EVERSTEP_TOKEN was not even read: whoever reached
    the port could submit code.
    """
    with pytest.raises(UserError, match=r"need a secret.*EVERSTEP_TOKEN.*openssl rand"):
        token_of_run((host, 29400))
    assert not home.exists()
    assert token_of_run((host, 29400), "given") == "given"
    home.parent.mkdir()
    home.write_text("of this user")
    home.chmod(0o600)
    assert token_of_run((host, 29400)) == "of this user"


def test_on_one_machine_it_is_a_file_of_this_user(home: Path) -> None:
    first, second = token_of_run(("127.0.0.1", 29400)), token_of_run(("localhost", 29401))
    assert first == second == home.read_text().strip()
    assert len(first) > 20
    assert home.stat().st_mode & 0o077 == 0


def test_the_command_reads_it_from_its_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Seen(RunOnNodes):
        async def go(self) -> int:
            seen.append(self.run.token)
            return 0

    monkeypatch.setattr(script_nodes, "RunOnNodes", Seen)
    script = home.parents[1] / "train.py"
    script.write_text("")
    options = [
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master-addr",
        "head",
        "--master-port",
        "4",
        str(script),
    ]
    with pytest.raises(UserError, match="need a secret"):
        torchrun.run(torchrun.parse(options))
    monkeypatch.setenv("EVERSTEP_TOKEN", "of the run")
    assert torchrun.run(torchrun.parse(options)) == 0
    assert seen == ["of the run"]


def test_a_coordinator_that_never_leads_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Client, "get", lambda self, path: {"leads": False})
    with pytest.raises(UserError, match=r"after 0\.2 s: the coordinator at .* does not lead$"):
        asyncio.run(asyncio.wait_for(waiting(0.2).go(), 20))


def test_a_machine_that_waits_for_its_endpoint_leaves_when_told() -> None:
    here = waiting(600.0)

    async def told() -> int:
        going = asyncio.create_task(here.go())
        await asyncio.sleep(0.1)
        here.leave("SIGTERM")
        return await asyncio.wait_for(going, 20)

    assert asyncio.run(told()) == 143
