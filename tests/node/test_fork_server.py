"""The fork server, when its owner is killed in the middle of a request."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest

from everstep.node import fork_server as module


def test_a_fork_server_whose_owner_is_gone_ends_its_children_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_ALWAYS", ())
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
    module.serve(server.detach(), [])
    (pid,) = started
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 9


def test_a_ping_that_nobody_waits_for_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ALWAYS", ())
    owner, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner.send(b'{"ping": 1}')
    owner.close()
    module.serve(server.detach(), [])
