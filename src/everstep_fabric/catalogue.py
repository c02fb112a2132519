"""Which source port takes which path: what probing has found out, for as long as it holds.

A hash maps a connection's addresses and ports to a path; it cannot be computed from outside, so ports are
tried. The answer is for one tuple (protocol, source, target, target port); UDP's answers say nothing about
TCP's. A path is named by the addresses where its links arrive, as probes that die there tell them. An entry
is good until it is older than `fresh_s`, or a link of its path has been reported: switches re-hash when
links come and go, so any report makes everything through that fabric worth a second look, and the dead
link's entries are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Hops = tuple[str, ...]  # where each link of the fabric arrives: spine, far leaf


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Tuple4:
    """A connection but for its source port."""

    protocol: str
    source: str
    target: str
    target_port: int

    def __str__(self) -> str:
        return f"{self.protocol} {self.source} > {self.target}:{self.target_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    hops: Hops
    seen_s: float


@dataclass(slots=True)
class Catalogue:
    fresh_s: float = 300.0
    _entries: dict[Tuple4, dict[int, CatalogueEntry]] = field(default_factory=dict)

    def learn(self, key: Tuple4, found: Mapping[int, Hops], now_s: float) -> None:
        table = self._entries.setdefault(key, {})
        for port, hops in found.items():
            table[port] = CatalogueEntry(hops=hops, seen_s=now_s)

    def ports(self, key: Tuple4, now_s: float) -> dict[Hops, list[int]]:
        """Fresh ports by the path they take."""
        found: dict[Hops, list[int]] = {}
        for port, entry in sorted(self._entries.get(key, {}).items()):
            if now_s - entry.seen_s <= self.fresh_s:
                found.setdefault(entry.hops, []).append(port)
        return found

    def take(self, key: Tuple4, hops: Hops, now_s: float, *, avoid: Iterable[int] = ()) -> int | None:
        """A port whose path has these hops (a prefix is enough); it is then not given out again."""
        table = self._entries.get(key, {})
        busy = set(avoid)
        for port, entry in sorted(table.items()):
            if entry.hops[: len(hops)] == hops and now_s - entry.seen_s <= self.fresh_s and port not in busy:
                del table[port]
                return port
        return None

    def forget_all(self) -> None:
        """Routes have changed: hashes map differently."""
        self._entries.clear()
