"""A worker's line to the agent that started it."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from everstep.errors import PeerError
from everstep.log import warn
from everstep.protocol.codec import Unpacker, pack
from everstep.protocol.messages import EndWorker, FromWorker, WorkerOrder


class AgentLine:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self.where: Callable[[], str] = lambda: "starting"
        self.over = False  # the worker is leaving, and so are its shards

    def say(self, message: FromWorker) -> None:
        data = pack(message)
        with self._lock:
            self._socket.sendall(data)

    def listen(self, inbox: queue.SimpleQueue[Any]) -> None:
        threading.Thread(target=self._listen, args=(inbox,), name="agent", daemon=True).start()

    def _listen(self, inbox: queue.SimpleQueue[Any]) -> None:
        unpacker = Unpacker(WorkerOrder)
        try:
            while data := self._socket.recv(1 << 16):
                for order in unpacker.feed(data):
                    inbox.put(order)
        except (OSError, PeerError) as error:  # reset: the agent has left a report unread
            warn(f"the line to the agent: {error}")
        inbox.put(EndWorker(gently=False))  # the agent is gone, and so must its worker be
