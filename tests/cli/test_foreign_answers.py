"""Another program listens at the address of the coordinator: every command says so in one sentence."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.cli import main

COMMANDS = {
    "audit": [],
    "cancel": ["t"],
    "collect": ["-o", "FOLDER/out"],
    "drain": ["n"],
    "explain": ["1"],
    "history": ["x"],
    "logs": ["t"],
    "notice": ["n", "2min"],
    "pause": ["t"],
    "queue": [],
    "report": [],
    "resize": ["t", "2"],
    "resume": ["t"],
    "stacks": ["t"],
    "status": [],
    "submit": ["FOLDER/job.toml"],
    "trace": ["t", "-o", "FOLDER/out"],
    "track": ["t", "--csv", "FOLDER/out"],
    "update": ["t", "FOLDER/job.toml"],
}
ANSWERS = [
    (200, b"{}"),
    (200, b"[]"),
    (200, b"null"),
    (200, b"<html>a router</html>"),
    (404, b"{}"),
    (401, b""),
]


def commands() -> Iterator[str]:
    """Those that take --address; that of `launch ray` is Ray's."""
    pending: list[tuple[str, Any]] = [("", main.command_tree())]
    while pending:
        name, command = pending.pop()
        pending += [(f"{name} {sub}".strip(), one) for sub, one in getattr(command, "commands", {}).items()]
        if name != "launch ray" and any("--address" in one.opts for one in command.params):
            yield name


@pytest.fixture(scope="module")
def another() -> Iterator[Any]:
    """`said`: which of the answers it gives."""

    class Another(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = ANSWERS[server.said]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *words: Any) -> None: ...

    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Another)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_each_command_that_asks_a_coordinator_is_tried() -> None:
    assert sorted(commands()) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_foreign_answer_is_one_sentence(
    command: str, another: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`everstep status` ended in KeyError: 'incidents'."""
    (tmp_path / "job.toml").write_text('[model]\npreset = "gpt-tiny"\n')
    address = f"http://127.0.0.1:{another.server_port}"
    arguments = [one.replace("FOLDER", str(tmp_path)) for one in COMMANDS[command]]
    for said in range(len(ANSWERS)):
        another.said = said
        assert main.run([*command.split(), *arguments, "--address", address, "--token", "x"]) == 2
        err = capfd.readouterr().err
        assert err.count("\n") == 1, err
        assert f"{address} is not the address of a coordinator (" in err
        assert "; give --address." in err
