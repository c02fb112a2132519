"""Which ranks move, judged from outside: CPU time, output, and the state the kernel gives them.

A rank moves when it writes, when it enters a collective, or when it has used more than `idle_share` of a core
since it last moved. The share is taken over all that time, not from look to look: a watchdog thread that
wakes up ten times a second never adds up to movement, and a rank that works in bursts does.

CPU time proves little where collectives are counted: a rank in an endless loop uses a CPU, and so does one
that polls a GPU. So it counts for `COUNTED_S` after the last collective, and no longer. Ranks that compute
for minutes without one stand still by this rule; whether they work is then seen from their stacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.ranks.words import Look

COUNTED_S = 2.0
_SHORTEST_S = 1.0  # CPU time comes in ticks of 10 ms; over less than this a tick would look like work


@dataclass(slots=True, kw_only=True)
class Stillness:
    idle_share: float
    moved_at: float  # when some rank last moved
    stopped: dict[int, float] = field(default_factory=dict)  # rank → since when
    _moves: dict[int, tuple[float, Look]] = field(default_factory=dict)
    _entered: dict[int, tuple[float, Look]] = field(default_factory=dict)  # its last collective
    _last: dict[int, tuple[float, Look]] = field(default_factory=dict)

    def see(self, looks: Mapping[int, Look], now: float) -> tuple[list[int], list[tuple[int, float]]]:
        """Who has been stopped since the last look, and who goes on after how many seconds."""
        for rank, look in looks.items():
            self._last[rank] = (now, look)
            if rank not in self._entered or self._entered[rank][1].entered != look.entered:
                self._entered[rank] = (now, look)
            if self._has_moved(rank, look, now):
                self._moves[rank] = (now, look)
                self.moved_at = now
        # State t, in small, is a debugger's doing: it is being debugged, and must stay alive.
        states = {rank: look.state == "T" for rank, look in sorted(looks.items())}
        if any(look.state == "t" for look in looks.values()):
            self.moved_at = now
        stopped = [rank for rank, is_stopped in states.items() if is_stopped and rank not in self.stopped]
        resumed = [rank for rank, is_stopped in states.items() if not is_stopped and rank in self.stopped]
        self.stopped.update(dict.fromkeys(stopped, now))
        self.moved_at = now if resumed else self.moved_at
        return stopped, [(rank, now - self.stopped.pop(rank)) for rank in resumed]

    def forget(self, rank: int) -> None:
        """It has ended."""
        self.stopped.pop(rank, None)

    def is_busy(self, rank: int) -> bool:
        """Has it used a CPU since it last moved?"""
        if rank not in self._last or rank not in self._moves:
            return False
        (now, look), (at, before) = self._last[rank], self._moves[rank]
        return look.cpu_s - before.cpu_s > self.idle_share * max(now - at, _SHORTEST_S)

    def _has_moved(self, rank: int, look: Look, now: float) -> bool:
        if rank not in self._moves:
            return True
        at, before = self._moves[rank]
        if look.output_bytes != before.output_bytes or look.entered != before.entered:
            return True
        if look.entered is not None and now - self._entered[rank][0] >= COUNTED_S:
            return False
        return look.cpu_s - before.cpu_s > self.idle_share * max(now - at, _SHORTEST_S)
