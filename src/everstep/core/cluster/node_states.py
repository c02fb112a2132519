"""Two things are known of a node: what operators and remedies want with it, and whether it is heard.

    admin       up ◄──► checking, draining, isolated, lemon    decided here; lasts through deaths and reboots
    liveness    heard ◄──► silent ──► gone; left               observed; says nothing about what is wanted

They change independently: a node that is drained can die, and one that is dead can be readmitted, which
does not bring it back. What is shown is one word, derived from both: the worse news first.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class NodeAdmin(StrEnum):
    UP = "up"  # may get workers
    CHECKING = "checking"  # gets no workers until its network is checked
    DRAINING = "draining"  # gets no new workers, and loses those it has
    ISOLATED = "isolated"  # kept out for a time after a severe fault
    LEMON = "lemon"  # isolated too often: kept out until an operator readmits it


class NodeLiveness(StrEnum):
    HEARD = "heard"  # its reports arrive
    SILENT = "silent"  # not heard for a while; its workers may be training
    GONE = "gone"  # given up: its workers count as dead
    LEFT = "left"  # ended in good order


class NodeState(StrEnum):
    """What is shown of a node."""

    UP = "up"
    SILENT = "silent"
    GONE = "gone"
    LEFT = "left"
    CHECKING = "checking"
    DRAINING = "draining"
    ISOLATED = "isolated"
    LEMON = "lemon"


ADMIN: Mapping[NodeAdmin, frozenset[NodeAdmin]] = {
    NodeAdmin.UP: frozenset({NodeAdmin.CHECKING, NodeAdmin.DRAINING, NodeAdmin.ISOLATED, NodeAdmin.LEMON}),
    NodeAdmin.CHECKING: frozenset(NodeAdmin),
    NodeAdmin.DRAINING: frozenset({NodeAdmin.UP}),  # a remedy does not undo an operator's word
    NodeAdmin.ISOLATED: frozenset(NodeAdmin),
    NodeAdmin.LEMON: frozenset({NodeAdmin.UP, NodeAdmin.DRAINING, NodeAdmin.LEMON}),
}
LIVENESS: Mapping[NodeLiveness, frozenset[NodeLiveness]] = {
    NodeLiveness.HEARD: frozenset({NodeLiveness.SILENT, NodeLiveness.GONE, NodeLiveness.LEFT}),
    NodeLiveness.SILENT: frozenset({NodeLiveness.HEARD, NodeLiveness.GONE, NodeLiveness.LEFT}),
    NodeLiveness.GONE: frozenset({NodeLiveness.HEARD}),
    NodeLiveness.LEFT: frozenset({NodeLiveness.HEARD}),
}


def shown(admin: NodeAdmin, liveness: NodeLiveness) -> NodeState:
    return NodeState(admin if liveness is NodeLiveness.HEARD else liveness)
