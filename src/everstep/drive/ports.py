"""The ports of a cluster's driver: who carries out what a coordinator decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from everstep.drive.driver import Driver, Handled
from everstep.protocol import messages as msg
from everstep.protocol.messages import ClusterAction, ClusterEvent

ClusterDriver = Driver[ClusterEvent, ClusterAction]
HandledEvent = Handled[ClusterEvent, ClusterAction]


class Transport(Protocol):
    """The lines to nodes."""

    def send(self, action: msg.Dispatch) -> None:
        """To a node that is connected. For another one the order stays pending: it gets it when it comes."""

    def received(self, node: str, number: int) -> None:
        """Its report of this number is durable."""


class Thinkers(Protocol):
    """Slow questions. The answer comes back to the driver as an event."""

    def think(self, action: msg.Think) -> None: ...

    def choose(self, action: msg.ChooseAssignment) -> None: ...


class Records(Protocol):
    """What people and programs are shown: derived from the journal, so what is replayed comes here too."""

    def handled(self, one: HandledEvent) -> None: ...


@dataclass(frozen=True, slots=True)
class ClusterPorts:
    transport: Transport
    thinkers: Thinkers
    records: Records

    def take(self, one: HandledEvent) -> None:
        self.records.handled(one)
        if one.replayed:
            return
        for action in one.actions:
            match action:
                case msg.Dispatch():
                    self.transport.send(action)
                case msg.Think():
                    self.thinkers.think(action)
                case msg.ChooseAssignment():
                    self.thinkers.choose(action)
        match one.event:
            case msg.FromNode(node=node, number=number) | msg.EventSetAside(node=node, report=number) if node:
                self.transport.received(node, number)
            case msg.ReportUnknown(node=node, report=number):
                self.transport.received(node, number)
