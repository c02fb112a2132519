"""A folder whose owner was killed is removed by the next of its kind; one in use is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from everstep.store.owned_folders import temporary_folder

_OWNER = """
import os, signal, sys
from everstep.store.owned_folders import temporary_folder
with temporary_folder("everstep-test-") as folder:
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
    with temporary_folder("everstep-test-") as folder:
        assert folder.is_dir()
    assert not folder.exists()
