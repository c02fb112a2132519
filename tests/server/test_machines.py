"""The testbed itself: machines share the network and one folder, and nothing else. Needs root."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness.machines import absent

SCRIPT = """
import sys, time
from pathlib import Path
from harness.machines import Machines

ASK = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=1); print('reached')"
LISTEN = "import socket\\ns = socket.create_server(('0.0.0.0', 7000))\\nwhile True: s.accept()"


def reaches(machine, name):
    try:
        return "reached" in machine.run(sys.executable, "-c", ASK, name)
    except RuntimeError:
        return False


with Machines(Path(sys.argv[1]), ["a", "b"]) as machines:
    a, b = machines["a"], machines["b"]
    assert [m.run("hostname").strip() for m in (a, b)] == ["a", "b"]
    for folder in ("/dev/shm", "/tmp"):
        a.run("touch", f"{folder}/mine")
        assert "mine" not in b.run("ls", folder)
    a.run("touch", str(machines.shared / "ours"))
    assert "ours" in b.run("ls", str(machines.shared))
    assert len(a.run("sh", "-c", "ls -d /proc/[0-9]*").split()) < 10, "its own processes only"
    b.start([sys.executable, "-c", LISTEN], "listen.log")
    deadline = time.monotonic() + 20
    while not reaches(a, "b"):
        assert time.monotonic() < deadline
    machines.switch.into["b"].is_cut = True
    assert not reaches(a, "b")
    machines.switch.heal(["b"])
    assert reaches(a, "b")
    machines.switch_off("b")
    assert not reaches(a, "b")
    machines.switch_on("b")
    assert "mine" not in b.run("ls", "/tmp"), "it starts empty"
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(absent()), reason=absent() or "machines can be made here")
def test_machines_share_the_network_and_one_folder_and_nothing_else() -> None:
    root = str(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # every machine has its own /tmp
        done = subprocess.run(
            ["unshare", "-n", "-m", sys.executable, "-c", SCRIPT, folder],
            env={**os.environ, "PYTHONPATH": f"{root}/src:{root}"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
