"""The command line in this process, and one fork server for all its runs: torch is loaded once."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everstep.cli import main
from everstep.launch.local import fork_servers
from everstep.node.fork_server import ForkServer


@dataclass
class Ran:
    code: int
    out: str
    err: str

    def document(self) -> dict[str, Any]:
        """Stdout is one JSON document and nothing else."""
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture
def everstep(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Run a command line with real workers."""

    @contextlib.contextmanager
    def shared(threads: int, preload: tuple[str, ...] = ()) -> Iterator[ForkServer]:
        yield fork_server

    monkeypatch.setattr(fork_servers, "open_server", shared)
    return lambda *arguments: _run(arguments, capfd)


@pytest.fixture
def idle_everstep(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run a command line that must not start anything."""

    def refuse(threads: int, preload: tuple[str, ...] = ()) -> Any:
        raise AssertionError("something was started")

    monkeypatch.setattr(fork_servers, "open_server", refuse)
    return lambda *arguments: _run(arguments, capfd)


def _run(arguments: tuple[Any, ...], capfd: pytest.CaptureFixture[str]) -> Ran:
    code = main.run([str(argument) for argument in arguments])
    told = capfd.readouterr()
    return Ran(code, told.out, told.err)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A job of two steps a second, with a log and checkpoints."""
    path = tmp_path / "job.toml"
    path.write_text("""
steps = 6
replicas = 2
stages = 2
microbatches = 2
log = "log"
[model]
preset = "gpt-tiny"
depth = 2
[data]
kind = "synthetic"
rows = 1
sequence = 16
[checkpoint]
folder = "checkpoints"
interval = 2
""")
    return path
