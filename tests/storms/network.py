"""Connections that keep their order and nothing else.

A link delivers what it was given, in order, each after its own delay. It can be held (a partition: TCP keeps
trying, so everything comes later), cut (the connection breaks: a random tail of what was under way is lost)
or closed (its receiver is gone). Between links there is no order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from everstep.core.worker.mending import MendLimits
from everstep_lab.draw import Draw
from tests.storms.agenda import Agenda

MENDING = MendLimits(after_s=0.004, most_s=0.064)  # an op takes a millisecond here


class VirtualLink:
    __slots__ = ("due", "holds", "last_us", "node", "queue", "receive")

    def __init__(self, receive: Callable[[Any], None], node: int = 0) -> None:
        """`node`: where its receiver is."""
        self.node = node
        self.receive: Callable[[Any], None] | None = receive
        self.queue: deque[Any] = deque()
        self.last_us = 0
        self.holds = 0
        self.due = 0  # deliveries whose moment passed while the link was held

    def close(self) -> None:
        self.receive = None
        self.queue.clear()


class Network:
    def __init__(self, agenda: Agenda, draw: Draw) -> None:
        self.agenda, self.draw = agenda, draw

    def send(self, link: VirtualLink, item: Any, typical_us: int) -> None:
        if link.receive is None:
            return
        agenda = self.agenda
        at = agenda.now_us + self.draw.spread(typical_us)
        if at < link.last_us:
            at = link.last_us
        link.last_us = at
        link.queue.append(item)
        agenda.at(at, self._deliver, link)

    def _deliver(self, link: VirtualLink) -> None:
        if link.holds:
            link.due += 1
        elif link.queue and link.receive is not None:
            link.receive(link.queue.popleft())

    def hold(self, link: VirtualLink) -> None:
        link.holds += 1

    def release(self, link: VirtualLink) -> None:
        link.holds -= 1
        if link.holds == 0:
            for _ in range(link.due):
                self.agenda.after(1, self._deliver, link)
            link.due = 0

    def lose_tail(self, link: VirtualLink) -> int:
        """Some of what was sent last never arrives. How many."""
        lost = self.draw.below(len(link.queue) + 1)
        for _ in range(lost):
            link.queue.pop()
        return lost
