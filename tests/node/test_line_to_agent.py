"""A worker ends with its agent, however the agent went."""

import queue
import socket
from typing import Any

import pytest

from everstep.node.line_to_agent import AgentLine
from everstep.protocol.messages import EndWorker, WorkerHello
from everstep.protocol.ops import Worker

HELLO = WorkerHello(task="gpt", worker=Worker(0, 0), incarnation=1, pid=1)


@pytest.mark.parametrize("says", [b"", b"\xff" * 64], ids=["nothing", "no message of ours"])
@pytest.mark.parametrize("unread", [0, 1], ids=["all read", "a report unread"])
def test_a_worker_is_told_to_end_when_its_agent_is_gone(unread: int, says: bytes) -> None:
    agent, worker = socket.socketpair()
    line, inbox = AgentLine(worker), queue.SimpleQueue[Any]()
    for _ in range(unread):
        line.say(HELLO)  # closing a line with something unread resets it
    agent.sendall(says)
    line.listen(inbox)
    agent.close()
    assert inbox.get(timeout=20) == EndWorker(gently=False)
