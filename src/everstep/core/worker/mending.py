"""Connections to live peers that broke: when to send again what may be lost, and when that has worked.

    broke ──► wait, longer after each break ──► send again ──► held for a while ──► mended, and said
                          ▲                         │
                          └───────── broke ─────────┘

One attempt at a time per address. The other end may be dead, and then every attempt breaks again: without the
wait two survivors of a death would open thousands of connections, and say so each time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

PeerAddress = tuple[str, int]  # host, port


@dataclass(frozen=True, slots=True, kw_only=True)
class MendLimits:
    after_s: float = 0.5
    most_s: float = 8.0


@dataclass(slots=True)
class _Broken:
    breaks: int  # since the connection last held
    send_at: float | None  # None: sent again, and it holds so far
    held_at: float = 0.0


class LinkMending:
    def __init__(self, limits: MendLimits | None = None) -> None:
        self.limits = limits or MendLimits()
        self._broken: dict[PeerAddress, _Broken] = {}

    def broke(self, address: PeerAddress, now: float) -> None:
        found = self._broken.setdefault(address, _Broken(0, None))
        found.breaks += 1
        if found.send_at is None:
            wait_s = self.limits.after_s * 2 ** min(found.breaks - 1, 30)
            found.send_at = now + min(wait_s, self.limits.most_s)

    def due_at(self) -> float | None:
        """When `due` has something to say next."""
        times = (b.held_at if b.send_at is None else b.send_at for b in self._broken.values())
        return min(times, default=None)

    def due(self, now: float) -> tuple[list[PeerAddress], list[PeerAddress]]:
        """The addresses to send to again now, and those whose connections have held since."""
        send, held = [], []
        for address, found in list(self._broken.items()):
            if found.send_at is None and found.held_at <= now:
                del self._broken[address]
                held.append(address)
            elif found.send_at is not None and found.send_at <= now:
                found.send_at, found.held_at = None, now + self.limits.after_s
                send.append(address)
        return send, held

    def keep(self, addresses: Collection[PeerAddress]) -> None:
        """Peers at other addresses are gone."""
        self._broken = {a: found for a, found in self._broken.items() if a in addresses}
