"""Connections to live peers that broke: when to send again what may be lost, and when that has worked.

    broke ──► wait, longer after each break ──► send again ──► opened ──► held for a while ──► mended
                          ▲                         │             │
                          └───────── broke ─────────┴─────────────┘

One attempt at a time per address. The other end may be dead, and then every attempt breaks again: without the
wait two survivors of a death would open thousands of connections, and say so each time. Silence proves
nothing either: to a machine without power a connection neither opens nor breaks for a long time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from everstep.protocol.work import PeerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class MendLimits:
    after_s: float = 0.5
    most_s: float = 8.0


@dataclass(slots=True)
class _Broken:
    since: float
    breaks: int  # since the connection last held
    send_at: float | None  # None: sent again, if there was anything to send
    is_open: bool = False  # the peer has answered on a new connection
    held_at: float | None = None  # when that will have held long enough
    is_told: bool = False  # that it could not be opened again
    error: str = ""  # with which it broke first


class LinkMending:
    def __init__(self, limits: MendLimits | None = None) -> None:
        self.limits = limits or MendLimits()
        self._broken: dict[PeerAddress, _Broken] = {}

    def broke(self, address: PeerAddress, now: float, error: str = "") -> float | None:
        """Seconds for which the peer was out of reach, once, if an attempt to open it again has failed."""
        found = self._broken.setdefault(address, _Broken(now, 0, None, error=error))
        is_news = found.breaks > 0 and found.send_at is None and not (found.is_open or found.is_told)
        found.is_told = found.is_told or is_news
        found.breaks += 1
        found.is_open, found.held_at = False, None
        if found.send_at is None:
            wait_s = self.limits.after_s * 2 ** min(found.breaks - 1, 30)
            found.send_at = now + min(wait_s, self.limits.most_s)
        return now - found.since if is_news else None

    def opened(self, address: PeerAddress, now: float) -> None:
        """The peer has answered on a new connection."""
        found = self._broken.get(address)
        if found is not None:
            found.is_open = True
            if found.send_at is None:
                found.held_at = now + self.limits.after_s

    def due_at(self) -> float | None:
        """When `due` has something to say next."""
        times = (b.held_at if b.send_at is None else b.send_at for b in self._broken.values())
        return min((time for time in times if time is not None), default=None)

    def due(self, now: float) -> tuple[list[PeerAddress], dict[PeerAddress, str]]:
        """The addresses to send to again now, and those whose connections have held since, with the error by
        which they broke.
        """
        send, held = [], dict[PeerAddress, str]()
        for address, found in list(self._broken.items()):
            if found.held_at is not None and found.held_at <= now:
                del self._broken[address]
                held[address] = found.error
            elif found.send_at is not None and found.send_at <= now:
                found.send_at = None
                if found.is_open:  # some other message has opened it meanwhile
                    found.held_at = now + self.limits.after_s
                send.append(address)
        return send, held

    def keep(self, addresses: Collection[PeerAddress]) -> None:
        """Peers at other addresses are gone."""
        self._broken = {a: found for a, found in self._broken.items() if a in addresses}
