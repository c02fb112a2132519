"""A worker's line to the agent that started it. Torch-free: the keeper of a script's ranks has one too."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol

from everstep.errors import PeerError
from everstep.job.worker_spec import WorkerSpec
from everstep.log import warn
from everstep.protocol.codec import Unpacker, pack
from everstep.protocol.messages import EndWorker, FromWorker, RankOrder, WorkerHello, WorkerOrder


class Inbox(Protocol):
    def put(self, order: Any) -> None: ...


def call_agent(spec: WorkerSpec) -> AgentLine:
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(spec.agent)
    line = AgentLine(agent)
    task, worker, incarnation = spec.sender
    line.say(WorkerHello(task=task, worker=worker, incarnation=incarnation, pid=os.getpid()))
    return line


class AgentLine:
    """A worker's line to the agent that started it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self.where: Callable[[], str] = lambda: "starting"
        self.over = False  # the worker is leaving, and so are its shards

    def say(self, message: FromWorker) -> None:
        data = pack(message)
        with self._lock:
            self._socket.sendall(data)

    def listen(self, inbox: Inbox) -> None:
        threading.Thread(target=self._listen, args=(inbox,), name="agent", daemon=True).start()

    def _listen(self, inbox: Inbox) -> None:
        unpacker = Unpacker(WorkerOrder | RankOrder)
        try:
            while data := self._socket.recv(1 << 16):
                for order in unpacker.feed(data):
                    inbox.put(order)
        except (OSError, PeerError) as error:  # reset: the agent has left a report unread
            warn(f"the line to the agent: {error}")
        inbox.put(EndWorker(gently=False))  # the agent is gone, and so must its worker be
