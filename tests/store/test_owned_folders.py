"""A folder whose owner was killed is removed by the next of its kind; one in use is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from everstep.errors import UserError
from everstep.store import owned_folders
from everstep.store.owned_folders import one_run_at_a_time, temporary_folder

_OWNER = """
import os, signal, sys
from everstep.errors import UserError
from everstep.store.owned_folders import one_run_at_a_time, temporary_folder
with temporary_folder("everstep-run-") as folder:
    (folder / "beacon").write_text("1")
    print(folder, flush=True)
    sys.stdin.read() if sys.argv[1] == "lives" else os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folders_of_killed_owners_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def owner(fate: str) -> tuple[subprocess.Popen[str], Path]:
        command = [sys.executable, "-c", _OWNER, fate]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    living, used = owner("lives")
    dead, left = owner("dies")
    dead.wait()
    assert left.exists()
    last, own = owner("lives")
    assert not left.exists()
    assert used.exists()
    for process in (living, last):
        process.communicate()
    assert not used.exists()
    assert not own.exists()


def test_a_folder_goes_with_its_owner() -> None:
    with temporary_folder("everstep-run-") as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_two_runs_do_not_write_into_one_checkpoint_folder(tmp_path: Path) -> None:
    """Both ended with exit code 0, and the folder held checkpoints of one over bytes of the other."""
    with one_run_at_a_time(tmp_path / "new", "checkpoint.folder"):
        with (
            pytest.raises(UserError, match=r"checkpoint\.folder '.*new' is in use by another run; give"),
            one_run_at_a_time(tmp_path / "new", "checkpoint.folder"),
        ):
            pass
        with one_run_at_a_time(tmp_path / "other", "checkpoint.folder"):
            pass
    with one_run_at_a_time(tmp_path / "new", "checkpoint.folder"):
        pass


def test_a_folder_that_cannot_be_made_is_for_the_saves_to_say(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with one_run_at_a_time(tmp_path / "file", "checkpoint.folder"):
        pass


def test_beacons_live_in_memory_where_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk an op waits in page_mkwrite while the disk is busy."""
    with owned_folders.temporary_folder("everstep-run-", in_memory=True) as folder:
        assert folder.parent == Path("/dev/shm")
    monkeypatch.setattr(owned_folders, "LEAST_ROOM", 1 << 60)
    with owned_folders.temporary_folder("everstep-run-", in_memory=True) as folder:
        assert folder.parent == Path(tempfile.gettempdir())
