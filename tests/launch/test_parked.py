"""A process that waits to be a replacement becomes the next one, once; if it has died, another is forked."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.ranks.fork_server import ForkingStarter, RankProcess, RankStart


@pytest.fixture
def starter() -> Iterator[ForkingStarter]:
    starter = ForkingStarter(["json"], dict(os.environ)).open()
    starter.warm_up()
    yield starter
    starter.close()


def begin(starter: ForkingStarter, folder: Path, *, is_replacement: bool) -> RankProcess:
    """A rank that writes its pid."""
    script = folder / "script.py"
    script.write_text("import os\nprint(os.getpid(), os.environ['WHO'], flush=True)\n")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(folder / "said", "a") as said:
        process = starter.start(
            RankStart(
                command=[str(script)],
                environment={**os.environ, "WHO": "rank"},
                stdout=said.fileno(),
                stderr=said.fileno(),
                line=theirs.fileno(),
                folder=str(folder),
                is_replacement=is_replacement,
            )
        )
        select.select([process.pidfd], [], [])
        assert process.exit_code() == 0, (folder / "said").read_text()
    assert (folder / "said").read_text().splitlines()[-1] == f"{process.pid} rank"
    process.reap()
    return process


def test_a_parked_process_becomes_the_next_replacement_and_no_other_rank(
    starter: ForkingStarter, tmp_path: Path
) -> None:
    starter.park()
    starter.park()  # one is enough
    assert starter._parked is not None
    parked = starter._parked.process.pid
    assert begin(starter, tmp_path, is_replacement=False).pid != parked
    assert begin(starter, tmp_path, is_replacement=True).pid == parked
    assert begin(starter, tmp_path, is_replacement=True).pid != parked


def test_a_parked_process_that_has_died_is_no_loss(starter: ForkingStarter, tmp_path: Path) -> None:
    starter.park()
    assert starter._parked is not None
    parked = starter._parked.process
    os.kill(parked.pid, signal.SIGKILL)
    select.select([parked.pidfd], [], [])
    assert begin(starter, tmp_path, is_replacement=True).pid != parked.pid
