"""A slow or dead path becomes moves: watches what each flow gets, says which flows shall go where.

What a flow is worth is its rate while it had something to send: bytes acknowledged over the time the socket
was busy, both from the kernel, so a trainer that computes for a while is not slow. The measure is what the
plan (max-min) promises it, times what flows reach of their promises here at their best, in the median: a file
that says 400 Gbit/s where TCP makes 40 of it accuses no link.

    healthy ── rate < slow_below × expected, `confirm` windows in a row ──► slow ──┐
            ── busy, nothing acknowledged for dead_after_s ───────────────► dead ──┴─► suspect links ─► moves

Which link? Of the slow flow's path, those that no healthy flow of the same window used: a link that serves
somebody well is not to blame. If none is left, or only a host link, the fabric is not at fault or there is
no other way; that is said, and nothing is moved. Suspects get the capacity that was measured, and
`reallocate` moves what it must. A link stays suspect for `retry_after_s`; then it counts as healthy again,
and if it is not, that shows in a window or two: the price of finding out without extra traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from everstep.errors import UserError
from everstep_fabric.allocate import reallocate
from everstep_fabric.routing import Routing
from everstep_fabric.topology import Path, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """When a flow counts as slow or dead, and how long a verdict lasts."""

    slow_below: float = 0.5
    confirm: int = 2
    min_busy_s: float = 0.1  # a window with less to send says nothing
    dead_after_s: float = 0.75
    settle_s: float = 0.75  # after a move, before the flow is judged again
    retry_after_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowMeasured:
    """One look at a flow's socket: totals since it was opened."""

    flow: str
    acked_bytes: int
    busy_s: float
    waiting: bool  # has it bytes out that are not acknowledged?


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFlow:
    flow: str
    before: Path
    after: Path
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotMove:
    flow: str
    because: str


Action = MoveFlow | CannotMove


@dataclass(slots=True)
class _Seen:
    promised_gbps: float
    best: float | None = None  # of its promise, in any window
    acked: int = 0
    busy_s: float = 0.0
    progressed_s: float = 0.0  # when bytes were last acknowledged, or nothing was waiting
    rate_gbps: float | None = None  # of the last window that said something
    slow_windows: int = 0
    dead: bool = False
    judged_from_s: float = 0.0
    reported: bool = False


@dataclass(slots=True)
class PathWatch:
    """`handle(looks, now)`: looks at flows in, moves out."""

    topology: Topology  # as described; suspicion is kept apart
    routing: Routing
    limits: WatchLimits = field(default_factory=WatchLimits)
    max_moves: int | None = None
    _flows: dict[str, _Seen] = field(default_factory=dict)
    _suspects: dict[str, tuple[float, float]] = field(default_factory=dict)  # link -> fraction, until

    def __post_init__(self) -> None:
        self._expect(0.0)

    def handle(self, looks: list[FlowMeasured], now_s: float) -> list[Action]:
        for look in looks:
            if look.flow not in self._flows:
                raise UserError(f"flow {look.flow!r} is not in the plan; plan it before it is watched.")
            self._look(self._flows[look.flow], look, now_s)
        self._suspects = {link: s for link, s in self._suspects.items() if s[1] > now_s}
        ill = [name for name, seen in self._flows.items() if self._is_ill(seen, now_s)]
        return self._treat(ill, now_s) if ill else []

    def adopt(self, routing: Routing, now_s: float) -> list[Action]:
        """Another plan, of other flows. Suspected links stay suspected, whatever the plan says of them."""
        self.topology, self.routing = routing.topology, routing
        here = {flow.name for flow in routing.flows}
        self._flows = {name: seen for name, seen in self._flows.items() if name in here}
        self._suspects = {
            link: s for link, s in self._suspects.items() if s[1] > now_s and link in self.topology.index
        }
        self._expect(now_s)
        avoid = {self.topology.index[link] for link in self._suspects}
        touched = {name: path for name, path in routing.by_name.items() if avoid & set(path)}
        return self._reroute({name: f"{name} was planned over a suspect" for name in touched}, now_s)

    def snapshot(self) -> Mapping[str, object]:
        return {
            "suspects": {link: fraction for link, (fraction, _) in self._suspects.items()},
            "rates_gbps": {name: seen.rate_gbps for name, seen in self._flows.items()},
        }

    def validate(self) -> None:
        assert set(self._flows) == {flow.name for flow in self.routing.flows}
        assert all(0 <= fraction <= 1 for fraction, _ in self._suspects.values())

    # ------------------------------------------------------------------ one flow

    def _look(self, seen: _Seen, look: FlowMeasured, now_s: float) -> None:
        acked, busy = look.acked_bytes - seen.acked, look.busy_s - seen.busy_s
        if acked < 0 or busy < 0:  # another socket: the flow was moved
            seen.acked, seen.busy_s = look.acked_bytes, look.busy_s
            seen.progressed_s = now_s
            return
        if acked > 0 or not look.waiting:
            seen.progressed_s = now_s
            seen.dead = False
        elif now_s - seen.progressed_s >= self.limits.dead_after_s:
            seen.dead, seen.rate_gbps = True, 0.0
        if busy < self.limits.min_busy_s:
            return
        seen.acked, seen.busy_s = look.acked_bytes, look.busy_s
        seen.rate_gbps = acked * 8 / busy / 1e9
        if now_s < seen.judged_from_s:
            return
        if seen.promised_gbps > 0:
            seen.best = max(seen.best or 0.0, min(1.0, seen.rate_gbps / seen.promised_gbps))
        slow = seen.rate_gbps < self.limits.slow_below * self._expected(seen)
        seen.slow_windows = seen.slow_windows + 1 if slow else 0
        seen.reported = seen.reported and slow

    def _expected(self, seen: _Seen) -> float:
        reached = [other.best for other in self._flows.values() if other.best is not None]
        return seen.promised_gbps * (median(reached) if reached else 1.0)

    def _is_ill(self, seen: _Seen, now_s: float) -> bool:
        return now_s >= seen.judged_from_s and (seen.dead or seen.slow_windows >= self.limits.confirm)

    def _is_well(self, seen: _Seen) -> bool:
        return not seen.dead and seen.slow_windows == 0 and bool(seen.rate_gbps)

    # ------------------------------------------------------------------ all of them

    def _treat(self, ill: list[str], now_s: float) -> list[Action]:
        actions: list[Action] = []
        paths = self.routing.by_name
        blameless = {
            link for name, seen in self._flows.items() if self._is_well(seen) for link in paths[name]
        }
        fabric = {self.topology.index[link.name] for link in self.topology.fabric_links}
        reasons: dict[str, str] = {}
        for name in ill:
            seen = self._flows[name]
            suspects = [link for link in paths[name] if link in fabric and link not in blameless]
            if not suspects:
                actions += self._give_up(name, seen)
                continue
            expected = self._expected(seen)
            fraction = 0.0 if seen.dead else min(1.0, (seen.rate_gbps or 0.0) / expected)
            for link in suspects:
                known = self._suspects.get(self.topology.links[link].name, (1.0, 0.0))[0]
                until = now_s + self.limits.retry_after_s
                self._suspects[self.topology.links[link].name] = min(known, fraction), until
            where = " or ".join(self.topology.links[link].name for link in suspects)
            reasons[name] = (
                f"{name} had no acknowledgement for {now_s - seen.progressed_s:.2g} s: dead is {where}"
                if seen.dead
                else f"{name} gets {seen.rate_gbps:.3g} of {expected:.3g} Gbit/s over {where}"
            )
        return actions + self._reroute(reasons, now_s)

    def _reroute(self, reasons: Mapping[str, str], now_s: float) -> list[Action]:
        if not reasons:
            return []
        now = self.topology.with_condition({link: f for link, (f, _) in self._suspects.items()})
        before = self.routing.by_name
        try:
            after = reallocate(now, self.routing, self.routing.flows, max_moves=self.max_moves)
        except UserError as error:  # no way around
            return [CannotMove(flow=name, because=str(error)) for name in reasons]
        self.routing = replace(after, topology=now)
        why = "; ".join(reasons.values())
        moves: list[Action] = [
            MoveFlow(flow=name, before=before[name], after=after.by_name[name], because=why)
            for name in after.moved
        ]
        for name in {*after.moved, *reasons}:
            self._flows[name].judged_from_s = now_s + self.limits.settle_s
        self._expect(now_s)
        return moves or [
            CannotMove(flow=name, because=f"{why}; no other path is better") for name in sorted(reasons)
        ]

    def _expect(self, now_s: float) -> None:
        """What each flow should get on its path, as far as is known."""
        for flow, rate in zip(self.routing.flows, self.routing.rates, strict=True):
            seen = self._flows.get(flow.name)
            if seen is None:
                self._flows[flow.name] = _Seen(promised_gbps=float(rate), progressed_s=now_s)
                continue
            seen.promised_gbps = float(rate)
            seen.slow_windows, seen.dead = 0, False
            seen.progressed_s = max(seen.progressed_s, now_s)

    def _give_up(self, name: str, seen: _Seen) -> list[Action]:
        if seen.reported:
            return []
        seen.reported = True
        return [
            CannotMove(
                flow=name,
                because=f"{name} is slow, and every link of its path serves another flow well.",
            )
        ]
