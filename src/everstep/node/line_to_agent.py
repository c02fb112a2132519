"""A worker's line to its agent. Torch-free: the keeper of a script's ranks has one too.

An agent may be replaced under its workers (`node.agent_record`). Then a worker keeps what it says, calls
until the next agent answers, and both say how many reports and orders they have had:

    worker ──► WorkerHello(heard=7)      agent ──► ReportsHeard(31), the orders from 8 on
           ──► its reports from 32 on          ──► ReportsHeard(40), later: what is on the agent's record
           ──► OrdersHeard(9)

A worker that finds no agent within `alone_s` ends.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from everstep.errors import PeerError
from everstep.job.worker_spec import WorkerSpec
from everstep.log import say, warn
from everstep.protocol.codec import Unpacker, pack
from everstep.protocol.messages import (
    EndWorker,
    FromWorker,
    LineWord,
    OrdersHeard,
    RankOrder,
    ReportsHeard,
    WorkerHello,
    WorkerOrder,
)

CALL_EVERY_S = 0.1
ANSWER_S = 10.0  # for an agent that has been called


class Listener(Protocol):
    def put(self, order: Any) -> None: ...


def call_agent(spec: WorkerSpec) -> AgentLine:
    task, worker, incarnation = spec.sender

    def call(heard: int) -> socket.socket:
        agent = socket.socket(socket.AF_UNIX)
        try:
            agent.settimeout(ANSWER_S)
            agent.connect(spec.agent)
            hello = WorkerHello(
                task=task, worker=worker, incarnation=incarnation, pid=os.getpid(), heard=heard
            )
            agent.sendall(pack(hello))
        except OSError:
            agent.close()
            raise
        return agent

    until = time.monotonic() + spec.alone_s
    while True:
        try:
            agent = call(0)
            break
        except OSError:
            if time.monotonic() >= until:
                raise
            time.sleep(CALL_EVERY_S)
    agent.settimeout(None)
    return AgentLine(agent, call=call, alone_s=spec.alone_s)


class AgentLine:
    """A worker's line to its agent. `call`: open another one, given how many orders were heard."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        call: Callable[[int], socket.socket] | None = None,
        alone_s: float = 0.0,
    ) -> None:
        assert call is not None or not alone_s, "nothing to call the next agent with"
        self._first = sock
        self._socket: socket.socket | None = sock  # None: no agent has answered yet
        self._call, self._alone_s = call, alone_s
        self._changed = threading.Condition()
        self._kept: deque[bytes] = deque()  # reports that are not on an agent's record
        self._num_kept_before = 0  # and how many are
        self._num_heard = 0  # orders
        self._listens = self._ends = False
        self.where: Callable[[], str] = lambda: "starting"
        self.over = False  # the worker is leaving, and so are its shards

    def say(self, message: FromWorker) -> None:
        data = pack(message)
        with self._changed:
            if self._alone_s:
                self._kept.append(data)
            self._send(data)

    def listen(self, inbox: Listener) -> None:
        self._listens = True
        threading.Thread(target=self._listen, args=(inbox,), name="agent", daemon=True).start()

    def finish(self) -> None:
        """Before the process ends: what it has said is on an agent's record. One may have to come first."""
        if not self._alone_s:
            return
        if not self._listens:
            self.listen(_Nobody())
        with self._changed:
            self._ends = True
            self._end_of_words()
            self._changed.wait_for(lambda: not self._kept, timeout=self._alone_s)

    # -------------------------------------------------------------- in and out, and another agent

    def _send(self, data: bytes) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(data)
        except OSError:
            if not self._alone_s:
                raise
            self._socket = None  # who listens has noticed too, and calls the next agent

    def _end_of_words(self) -> None:
        """The agent answers an end with how many reports it has."""
        if self._socket is not None and self._ends:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                self._socket = None

    def _listen(self, inbox: Listener) -> None:
        line: socket.socket | None = self._first
        while line is not None:
            unpacker = Unpacker(WorkerOrder | RankOrder | LineWord)
            try:
                while data := line.recv(1 << 16):
                    for order in unpacker.feed(data):
                        if isinstance(order, ReportsHeard):
                            self._on_record(line, order.number)
                        else:
                            self._num_heard += 1
                            inbox.put(order)
            except (OSError, PeerError) as error:  # reset: the agent has left a report unread
                if not self._alone_s:
                    warn(f"the line to the agent: {error}")
            line.close()
            line = self._next_agent()
        inbox.put(EndWorker(gently=False))  # the agent is gone, and so must its worker be

    def _next_agent(self) -> socket.socket | None:
        """None: nobody answers, or this process has said everything."""
        with self._changed:
            self._socket = None
        began = time.monotonic()
        while time.monotonic() - began < self._alone_s and not (self._ends and not self._kept):
            assert self._call is not None
            try:
                line = self._call(self._num_heard)  # it is spoken to once it has answered
                line.settimeout(None)
                say(f"another agent answers, after {time.monotonic() - began:.1f} s")
                return line
            except OSError:
                time.sleep(CALL_EVERY_S)
        if self._alone_s and not self._ends:
            warn(f"no agent has answered for {self._alone_s:g} s: this process ends")
        return None

    def _on_record(self, line: socket.socket, number: int) -> None:
        with self._changed:
            while self._kept and self._num_kept_before < number:
                self._kept.popleft()
                self._num_kept_before += 1
            if self._socket is not line:  # the first word of another agent: it has not heard the rest
                self._socket = line
                self._send(b"".join(self._kept))
                self._end_of_words()
            elif not self._ends:
                self._send(pack(OrdersHeard(number=self._num_heard)))
            self._changed.notify_all()


class _Nobody:
    """The inbox of a process that takes no orders any more."""

    def put(self, order: Any) -> None: ...
