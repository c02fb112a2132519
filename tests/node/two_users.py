"""Workers of two owners as two Unix users, and a process of one that tries to read or harm the other's.

    python -m tests.node.two_users FOLDER                each owner has a user: nothing may work
    python -m tests.node.two_users FOLDER --together     the agent and all workers have one: everything works

Prints JSON: by attempt, why it failed; empty if it worked. Needs root, and two users that every system has.
It runs in a mount namespace of its own, in which they can reach this Python.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from everstep.procfs import parent_of
from everstep.store.unix_users import UnixUser, found
from harness.cluster import Cluster, small_job
from tests.support.processes import until

WITHIN_S = 240.0
_MARK = "EVERSTEP_TWO_USERS"
_OPEN = """mount --make-rprivate / && mkdir -p "$1" && mount --bind "$3" "$1" &&
mount -t tmpfs -o mode=755 tmpfs "$2" && mkdir -p "$3" && mount --bind "$1" "$3" && shift 3 && exec "$@"
"""

ATTEMPTS = """
import ctypes, glob, json, os, signal, socket, sys
from pathlib import Path
from everstep.node.worker_lines import PROTOCOL
from everstep.protocol.codec import pack
from everstep.protocol.messages import WorkerHello
from everstep.protocol.ops import parse_worker

at = json.loads(sys.argv[1])
pid, libc = at["pid"], ctypes.CDLL(None, use_errno=True)

def read(path):
    Path(path).read_bytes()

def secret():
    assert at["task"] in Path(at["state"], "record").read_text()

def checkpoint():
    read(max(glob.glob(at["checkpoints"] + "/*/*.safetensors")))

def memory_copy():
    read(max(glob.glob(at["memory"] + "/*/*.safetensors")))

def ptrace():
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    assert libc.ptrace(16, pid, None, None) == 0
    os.waitpid(pid, 0x40000000)
    libc.ptrace(17, pid, None, None)

def its_memory():
    start = int(Path(f"/proc/{pid}/maps").read_text().split("-")[0], 16)
    with open(f"/proc/{pid}/mem", "rb") as memory:
        memory.seek(start)
        assert len(memory.read(4)) == 4

def agent_socket():
    line = socket.socket(socket.AF_UNIX)
    line.connect(at["state"] + "/agent")
    hello = WorkerHello(task=at["task"], worker=parse_worker(at["worker"]), incarnation=1, pid=pid)
    line.sendall(pack(hello))
    line.settimeout(20)
    assert line.recv(1 << 10), "the agent has hung up"

def keeper_socket():
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(at["keeper"])

def journal():
    read(at["journal"])

def beacon():
    open(at["beacon"], "r+b").close()

tried = {
    "read the task's secret": secret,
    "read its log": lambda: read(at["log"]),
    "read its checkpoint": checkpoint,
    "read its copy in memory": memory_copy,
    "ptrace a worker": ptrace,
    "read a worker's memory": its_memory,
    "read a worker's environment": lambda: read(f"/proc/{pid}/environ"),
    "signal a worker": lambda: os.kill(pid, 0),
    "speak for a worker at the agent's socket": agent_socket,
    "call the fork server": keeper_socket,
    "write to a beacon": beacon,
    "read the packed code": lambda: read(at["code"]),
    "read the journal": journal,
}
told = {}
for name, attempt in tried.items():
    try:
        attempt()
    except (OSError, AssertionError, ValueError) as error:
        told[name] = f"{type(error).__name__}: {error}"
    else:
        told[name] = ""
print(json.dumps(told))
"""


def two_users() -> tuple[UnixUser, UnixUser]:
    known = [entry.pw_name for entry in pwd.getpwall() if 0 < entry.pw_uid < 65000]
    return found(known[0]), found(known[1])


def tried_by_the_other(folder: Path, alice: UnixUser, bob: UnixUser, *, apart: bool) -> dict[str, str]:
    """By attempt: why it failed; empty: it worked. `apart` off: the agent runs as `bob`, and so do all."""
    home = alice.make_folder(folder / "alice") if apart else bob.make_folder(folder / "alice")
    (home / "mine.py").write_text("weights = 1\n")
    os.chown(home / "mine.py", home.stat().st_uid, -1)
    state = folder / "agent"
    table = folder / "users.toml"
    table.write_text(f'"*" = "{alice.name}"\n')
    checkpoint = {"folder": "checkpoints", "interval": 2}
    job = small_job(home, steps=1_000_000, log="logs", checkpoint=checkpoint, memory_interval=2)
    code = home / ".everstep/code/hash/mine.py"
    with Cluster(folder) as cluster:
        address = cluster.start_coordinator()
        if not apart:
            bob.make_folder(folder / "state-first")
            for path in (folder / "state-first").rglob("*"):
                os.chown(path, bob.uid, bob.gid)
            bob.make_folder(state)
        command = [sys.executable, "-m", "everstep.cli.main", "agent", "--node", "a", "--slots", "2"]
        command += ["--coordinator", address, "--no-check", "--grace", "2", "--state", str(state)]
        as_whom: dict[str, Any] = {"user": bob.uid, "group": bob.gid, "extra_groups": bob.groups}
        as_whom |= {
            "env": os.environ | {"HOME": "/", "TMPDIR": "/tmp", "EVERSTEP_TOKEN": cluster.token},
            "cwd": "/",
        }
        client = cluster.client
        as_agent = {"env": as_whom["env"]} if apart else as_whom
        with (folder / "agent.log").open("wb") as log:
            command += ["--users", str(table)] if apart else []
            started = subprocess.Popen(command, stdout=log, stderr=log, **as_agent)
        try:
            until(lambda: client.get("/v1/status")["nodes"], "the node is there")
            client.post("/v1/tasks", {"name": "hers", "job": job | {"replicas": 2, "stages": 1}})
            seen = lambda: client.get("/v1/tasks/hers")  # noqa: E731
            until(lambda: seen()["step"] >= 6 or seen()["state"] == "failed", "it trains")
            assert seen()["state"] == "running", seen()["because"]
            until(lambda: any(home.glob("checkpoints/*/*.safetensors")), "it has saved")
            row = client.get("/v1/tasks/hers/readings")["workers"][0]
            kept = json.loads((state / "record").read_text().partition("\n")[0])["memory"]
            until(lambda: any(Path(kept, "hers").glob("*/*.safetensors")), "its state is in memory")
            code.parent.mkdir(parents=True)
            shutil.copy(home / "mine.py", code)
            at = {
                "pid": row["pid"],
                "worker": row["worker"],
                "task": "hers",
                "state": str(state),
                "log": str(home / "logs" / "worker-0-0.log"),
                "checkpoints": str(home / "checkpoints"),
                "memory": str(Path(kept, "hers")),
                "keeper": str(next(state.glob(f"fork-{alice.name}-*" if apart else "fork-*"))),
                "beacon": str(next(state.glob("of-*/beacon-*" if apart else "beacon-*"))),
                "journal": str(folder / "state-first" / "journal.sqlite"),
                "code": str(code),
            }
            assert os.stat(f"/proc/{row['pid']}").st_uid == (alice if apart else bob).uid
            assert os.stat(f"/proc/{parent_of(row['pid'])}").st_uid == (alice if apart else bob).uid
            done = subprocess.run(
                [sys.executable, "-c", ATTEMPTS, json.dumps(at)],
                stdout=subprocess.PIPE,
                check=True,
                timeout=WITHIN_S,
                **as_whom,
            )
            before = seen()["step"]
            until(lambda: seen()["step"] > before + 2, "it trains on")
            told: dict[str, str] = json.loads(done.stdout)
            return told
        finally:
            started.terminate()
            started.wait(60)


def closed() -> Path | None:
    """The folder above this Python that other users may not enter, if there is one."""
    above = reversed(Path(sys.base_prefix).resolve().parents)
    return next((folder for folder in above if not folder.stat().st_mode & 0o001), None)


def inside(folder: Path, arguments: list[str]) -> None:
    """Go on where other users can start this Python."""
    shut = closed()
    if shut is not None and os.environ.get(_MARK) != "1":
        os.environ[_MARK] = "1"
        prefix = str(Path(sys.base_prefix).resolve())
        places = [str(folder / "python"), str(shut), prefix]
        os.execvp("unshare", ["unshare", "-m", "sh", "-c", _OPEN, "sh", *places, sys.executable, *arguments])


if __name__ == "__main__":
    inside(Path(sys.argv[1]), ["-m", "tests.node.two_users", *sys.argv[1:]])
    told = tried_by_the_other(Path(sys.argv[1]), *two_users(), apart="--together" not in sys.argv)
    print(json.dumps(told))
