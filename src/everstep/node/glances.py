"""One look at a worker: its beacon, and where that stands still, what the kernel says of its processes.

A worker with shards is several processes. The marks of its shards say which one the others wait for; it is
that one which the kernel is asked about, and which the report names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everstep.core.agent import messages as ag
from everstep.core.agent.processes import Curiosity
from everstep.core.faults.detector import Glance
from everstep.core.faults.lagging_shard import ShardProgress, hung_shard
from everstep.engine.shards.marks import read_marks
from everstep.engine.telemetry.beacon import Beacon
from everstep.node.process_facts import active_s, is_stopped
from everstep.protocol.messages import Sender


@dataclass(frozen=True, slots=True)
class SuspectedProcess:
    shard: int | None  # None: the worker, which is one process or has not said more
    pid: int


@dataclass(slots=True)
class Glances:
    """At one worker."""

    sender: Sender
    pid: int
    beacon: Beacon
    shards: int = 1
    _active_since: tuple[int, float] | None = None  # pid, and what `active_s` said when the beacon stopped

    def look(self, curious: Callable[[Sender, Glance], Curiosity], now: float) -> ag.Glanced | None:
        reading = self.beacon.read()
        if reading is None:
            return None
        glance = Glance(
            moment=reading.at_ns,
            step=reading.step,
            busy=reading.busy,
            doing=reading.doing,
            age_s=max(0.0, now - reading.at_ns / 1e9),
        )
        ask = curious(self.sender, glance)
        active, suspect = 0.0, SuspectedProcess(None, self.pid)
        if ask.stopped or ask.active:
            suspect = suspected(self.beacon.path, self.shards, self.pid)
        if ask.active:
            total = active_s(suspect.pid)
            if self._active_since is None or self._active_since[0] != suspect.pid:
                self._active_since = suspect.pid, total
            active = total - self._active_since[1]
        elif not ask.stopped:
            self._active_since = None
        stopped = ask.stopped and is_stopped(suspect.pid)
        return ag.Glanced(self.sender, glance, stopped=stopped, active_s=active, shard=suspect.shard)


def suspected(beacon: Path, shards: int, pid: int) -> SuspectedProcess:
    """Which of a worker's processes do the others wait for?"""
    marks = read_marks(beacon, shards) if shards > 1 else None
    if marks is None:
        return SuspectedProcess(None, pid)
    shard = hung_shard(
        [
            ShardProgress(
                entered=mark.entered, is_inside=mark.entered > mark.left, stopped=is_stopped(mark.pid)
            )
            for mark in marks
        ]
    )
    return SuspectedProcess(None, pid) if shard is None else SuspectedProcess(shard, marks[shard].pid)
