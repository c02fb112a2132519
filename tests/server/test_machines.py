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


CUT_OFF = """
import sys, time
from pathlib import Path
from bench.machines import Scene
from harness.cluster import paced_job
from harness.machines import Machines

NODES = ("n1", "n2", "n3")


def rows(scene):
    return {row["step"]: row for row in scene.task()["rows"]}


with Machines(Path(sys.argv[1]), ["c1", *NODES]) as machines:
    scene = Scene(machines, ["c1"])
    scene.start_coordinator("c1")
    scene.until(lambda: scene.client, "a coordinator leads")
    for name in NODES:
        scene.start_agent(name, slots=1)
    scene.until(lambda: len(scene.client.get("/v1/status")["nodes"]) == len(NODES), "all agents joined")
    job = paced_job(machines.shared, steps=100_000, stages=1, microbatches=1, rest_s=0.3, memory_interval=0)
    scene.client.post("/v1/tasks", {"name": "job", "job": job})
    scene.until(lambda: scene.task()["step"] >= 3, "training has begun")
    workers = {seat["worker"]: (seat["node"], seat["incarnation"]) for seat in scene.task()["seats"]}
    assert len(workers) == 2
    before, switch = scene.task()["step"], machines.switch
    switch.out["c1"].is_cut = switch.into["c1"].is_cut = True
    time.sleep(35.0)
    switch.heal(["c1"])
    scene.until(lambda: scene.task()["step"] >= before + 20, "what was trained in the cut is on record")
    task = scene.task()
    assert {s["worker"]: (s["node"], s["incarnation"]) for s in task["seats"]} == workers, "they train on"
    found = rows(scene)
    assert sorted(found) == list(range(1, max(found) + 1)), "every step has its row"
    assert {row["attempt"] for row in found.values()} == {found[1]["attempt"]}, "none was done again"
    assert not scene.client.get("/v1/incidents")
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(absent()), reason=absent() or "machines can be made here")
def test_a_coordinator_whose_own_network_was_away_adopts_who_has_trained_on() -> None:
    """After 35 s all nodes were given up, all workers ended, and the task began at its first step."""
    root = str(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        done = subprocess.run(
            ["unshare", "-n", "-m", sys.executable, "-c", CUT_OFF, folder],
            env={**os.environ, "PYTHONPATH": f"{root}/src:{root}"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
