"""The fork server, when its owner is killed in the middle of a request."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from everstep.errors import UserError
from everstep.forked import adopt_orphans
from everstep.node import fork_server as module


def test_a_fork_server_whose_owner_is_gone_ends_its_children_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_live", lambda spec, output: (time.sleep(60), os._exit(0)))
    owner, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    started: list[int] = []
    fork = os.fork

    def counted() -> int:
        if pid := fork():
            started.append(pid)
        return pid

    monkeypatch.setattr(module.os, "fork", counted)
    owner.send(json.dumps({"spawn": {}, "output": ""}).encode())
    owner.close()  # killed before it had the answer
    module.serve(server.detach(), [], [])
    (pid,) = started
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 9


def test_a_ping_that_nobody_waits_for_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner.send(b'{"ping": 1}')
    owner.close()
    module.serve(server.detach(), [], [])


def test_what_a_worker_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loaders and uploads of four workers were alive after the cluster's end, with their GPU memory."""

    def live(spec: object, output: str) -> None:
        os.setsid()
        if (grandchild := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        Path(output).write_text(str(grandchild))
        os._exit(0)

    monkeypatch.setattr(module, "_live", live)
    owner, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    serving = threading.Thread(target=module.serve, args=(server.detach(), [], []))
    serving.start()
    owner.send(json.dumps({"spawn": {}, "output": str(tmp_path / "pid")}).encode())
    answer, fds, _, _ = socket.recv_fds(owner, 1000, 1)
    select.select(fds, [], [])
    started = os.pidfd_open(int((tmp_path / "pid").read_text()))
    assert select.select([started], [], [], 0.0)[0] == [], "it lives"
    owner.send(json.dumps({"reap": json.loads(answer)["pid"]}).encode())
    owner.close()
    serving.join()
    assert select.select([started], [], [], 60.0)[0] == [started], "it has ended"
    for fd in (*fds, started):
        os.close(fd)


def test_a_spec_that_no_packet_holds_reaches_the_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Above 208 KB the fork server was taken for dead, and replaced again and again."""

    def live(spec: dict[str, str], output: str) -> None:
        Path(output).write_text(str(len(spec["note"])))
        os._exit(0)

    monkeypatch.setattr(module, "_live", live)
    monkeypatch.setattr(module, "born", lambda pid: 0)
    owner, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    serving = threading.Thread(target=module.serve, args=(server.detach(), [], []))
    serving.start()
    asks = module.ForkServer()
    asks._socket, asks.warm = owner, True
    for size in (100, 300_000, 8_000_000):
        output = tmp_path / str(size)
        child = asks.spawn({"note": "n" * size}, output=output)
        select.select([child.pidfd], [], [])
        assert output.read_text() == str(size)
        owner.send(json.dumps({"reap": child.pid}).encode())
        os.close(child.pidfd)
    with pytest.raises(UserError, match=r"80 MiB of job.*the most is 64 MiB"):
        asks.spawn({"note": "n" * (80 << 20)}, output=output)
    owner.close()
    serving.join()


@pytest.mark.parametrize("end", ["reap", "close"])
def test_a_daemon_of_a_worker_ends_with_the_last_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str
) -> None:
    """Two processes lived on after `everstep train`: they had left the worker's session."""

    def live(spec: object, output: str) -> None:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path(output + ".new").write_text(str(os.getpid()))
                os.rename(output + ".new", output)
                time.sleep(600)
            os._exit(0)
        time.sleep(600 if end == "close" else 0)
        os._exit(0)

    monkeypatch.setattr(module, "_live", live)
    owner, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (serving := os.fork()) == 0:
        owner.close()
        adopt_orphans()
        module.serve(server.detach(), [], [])
        os._exit(0)
    server.close()
    owner.send(json.dumps({"spawn": {}, "output": str(tmp_path / "pid")}).encode())
    answer, fds, _, _ = socket.recv_fds(owner, 1000, 1)
    while not (tmp_path / "pid").exists():
        time.sleep(0.01)
    daemon = os.pidfd_open(int((tmp_path / "pid").read_text()))
    if end == "reap":
        select.select(fds, [], [])
        assert select.select([daemon], [], [], 0.0)[0] == [], "it lives"
        owner.send(json.dumps({"reap": json.loads(answer)["pid"]}).encode())
        assert select.select([daemon], [], [], 20.0)[0] == [daemon]
    owner.close()
    os.waitpid(serving, 0)
    assert select.select([daemon], [], [], 20.0)[0] == [daemon]
    for fd in (*fds, daemon):
        os.close(fd)


def test_a_worker_is_ended_before_its_agent_when_memory_runs_out(tmp_path: Path) -> None:
    """With systemd's or the kernel's choice one worker's leak could cost the agent, and so the node."""
    score = tmp_path / "oom_score_adj"
    score.write_text("-900\n")
    module.go_first(score)
    assert score.read_text() == str(module.OOM_SCORE)
    score.write_text("1000\n")
    module.go_first(score)
    assert score.read_text() == "1000\n", "never lower than it is"
    module.go_first(tmp_path / "not there")
    assert "OOMPolicy=continue" in (Path(__file__).parents[2] / "deploy/everstep-agent.service").read_text()


_OWNER = """
import os, signal, sys
from pathlib import Path
from everstep.node.fork_server import ForkServer, Lasting
from everstep.store import owned_folders
from everstep.store.memory_server import MemoryStore
with owned_folders.temporary_folder("everstep-beacons-", in_memory=True) as beacons:
    store = MemoryStore()
    lasts = None
    if sys.argv[1] != "0":
        owned_folders.share(store.lock)
        lasts = Lasting(folder=Path(sys.argv[2]), alone_s=float(sys.argv[1]), keep=(store.lock,))
    server = ForkServer(trains=False, lasts=lasts).start()
    server.warm_up()
    print(server.pid, store.folder, beacons, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("alone_s", ["0", "0.5"])
def test_what_a_killed_owner_has_left_in_memory_goes_with_its_fork_server(
    tmp_path: Path, alone_s: str
) -> None:
    """Gigabytes of copies stayed in memory until an agent was started on this machine again."""
    command = [sys.executable, "-c", _OWNER, alone_s, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    pid, *folders = done.stdout.split()
    with contextlib.suppress(ProcessLookupError):
        server = os.pidfd_open(int(pid))
        assert select.select([server], [], [], 60.0)[0] == [server]
        os.close(server)
    assert not [folder for folder in folders if Path(folder).exists()]


def test_a_process_that_leaves_sigterm_to_its_owner_lives_on_and_what_it_forks_does_not() -> None:
    """`scancel` sends SIGTERM to all processes of a job: workers ended before their agent had drained."""
    said, says = os.pipe()
    if (pid := os.fork()) == 0:
        module.leave_to_owner()
        if (child := os.fork()) == 0:
            os.write(says, b"forked ")
            time.sleep(60)
            os._exit(0)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        os.write(says, b"lives")
        os._exit(7)
    os.close(says)  # if it ends, the next read does too
    assert os.read(said, 100) == b"forked "
    os.kill(pid, signal.SIGTERM)
    (child,) = (int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    os.kill(child, signal.SIGTERM)
    assert os.read(said, 100) == b"lives"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_what_is_preloaded_may_ask_whether_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of a worker whose fork server had loaded transformers: "CUDA error: initialization error"."""
    given: dict[str, str] = {}

    def started(command: object, *, env: dict[str, str], **more: object) -> None:
        given.update(env)
        raise OSError(0, "enough is known")

    monkeypatch.setattr(module.subprocess, "Popen", started)
    with pytest.raises(UserError):
        module.ForkServer().start()
    assert given["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
