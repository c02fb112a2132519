"""The processes of a worker with shards, with real forks: any end is noticed, and is the end of all."""

import fcntl
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from everstep.node.shard_group import ShardGroup, fork, neighbouring_ports
from everstep.protocol import shard_messages as sh
from everstep.protocol.parcels import StateTransfer

HOST = "127.0.0.1"


def led(folder: Path, follower: Callable[[ShardGroup], None]) -> ShardGroup:
    """This process leads; the other one does what it is told, and ends."""
    group = fork(2, HOST, folder)
    if group.index:
        try:
            follower(group)
        finally:
            os._exit(3)
    return group


def watched(group: ShardGroup) -> tuple[list[sh.FromShard], list[tuple[int, str]]]:
    heard: list[sh.FromShard] = []
    ended: list[tuple[int, str]] = []
    over = threading.Event()

    def end(shard: int, how: str) -> None:
        ended.append((shard, how))
        over.set()

    group.watch(lambda shard, message: heard.append(message), end)
    assert over.wait(30), "the end of a shard is not noticed"
    return heard, ended


def test_what_a_follower_says_is_heard_and_its_end_is_told(tmp_path: Path) -> None:
    here = sh.StateIsHere(transfer=StateTransfer(1, 2, 3, 4))
    group = led(tmp_path, lambda group: group.tell(here))
    heard, ended = watched(group)
    assert heard == [here]
    assert ended == [(1, "exited with code 3")]
    group.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_follower_is_named_with_its_signal(tmp_path: Path) -> None:
    group = led(tmp_path, lambda group: os.kill(os.getpid(), signal.SIGKILL))
    assert group.first_dead(30) == 1
    assert group.first_dead(0.0, but=1) is None
    assert watched(group)[1] == [(1, "killed by SIGKILL")]


def kill_a_group(folder: Path) -> None:
    """With a leader of its own; the pipe closes when its follower is gone too."""
    read, write = os.pipe()
    leader = os.fork()
    if leader == 0:
        try:
            group = fork(2, HOST, folder)
            os.write(write, b"L" if group.index == 0 else b"F")
            threading.Event().wait()
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb", buffering=0) as pipe:
        assert {pipe.read(1), pipe.read(1)} == {b"L", b"F"}
        os.kill(leader, signal.SIGKILL)
        assert pipe.read() == b"", "the follower has outlived its leader"
    os.waitpid(leader, 0)


def test_followers_end_with_their_leader(tmp_path: Path) -> None:
    kill_a_group(tmp_path)


def test_the_folder_of_a_killed_group_goes_with_the_next_one_and_that_of_a_living_one_stays(
    tmp_path: Path,
) -> None:
    """They stayed until the machine was started again, where no agent removed them."""
    kill_a_group(tmp_path)
    (left,) = tmp_path.iterdir()
    lock = os.open(left, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # a process that ends closes its files one after the other
    os.close(lock)
    ended = threading.Event()
    first = led(tmp_path, lambda group: group.lines[0].recv(1))  # type: ignore[arg-type,return-value]
    assert not left.exists()
    (living,) = tmp_path.iterdir()
    second = led(tmp_path, lambda group: None)
    assert living.exists()
    for group in (second, first):
        for line in group.lines:
            line.shutdown(socket.SHUT_RDWR)
        group.watch(lambda shard, message: None, lambda shard, how: ended.set())
        group.wait()
    assert ended.is_set()
    assert list(tmp_path.iterdir()) == []


def test_shards_listen_on_neighbouring_ports() -> None:
    sockets = neighbouring_ports(HOST, 4)
    ports = [one.getsockname()[1] for one in sockets]
    assert ports == list(range(ports[0], ports[0] + 4))
    for one in sockets:
        one.close()
