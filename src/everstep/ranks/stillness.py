"""Which ranks move, judged from outside: CPU time, output, and the state the kernel gives them.

A rank moves when it writes, or when it has used more than `idle_share` of a core since it last moved. The
share is taken over all that time, not from look to look: a watchdog thread that wakes up ten times a second
never adds up to movement, and a rank that works in bursts does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.ranks.words import Look

_SHORTEST_S = 1.0  # CPU time comes in ticks of 10 ms; over less than this a tick would look like work


@dataclass(slots=True, kw_only=True)
class Stillness:
    idle_share: float
    moved_at: float  # when some rank last moved
    stopped: dict[int, float] = field(default_factory=dict)  # rank → since when
    _moves: dict[int, tuple[float, Look]] = field(default_factory=dict)

    def see(self, looks: Mapping[int, Look], now: float) -> tuple[list[int], list[tuple[int, float]]]:
        """Who has been stopped since the last look, and who goes on after how many seconds."""
        for rank, look in looks.items():
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

    def _has_moved(self, rank: int, look: Look, now: float) -> bool:
        if rank not in self._moves:
            return True
        at, before = self._moves[rank]
        if look.output_bytes != before.output_bytes:
            return True
        return look.cpu_s - before.cpu_s > self.idle_share * max(now - at, _SHORTEST_S)
