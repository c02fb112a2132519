"""Connections between workers, as a worker hears of them."""

from __future__ import annotations

from dataclasses import dataclass

PeerAddress = tuple[str, int]  # host, port


@dataclass(frozen=True, slots=True)
class LinkBroke:
    """A connection to or from this address broke."""

    address: PeerAddress


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """The peer at this address has answered on a new connection."""

    address: PeerAddress
