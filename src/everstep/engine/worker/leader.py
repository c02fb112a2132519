"""The leader's side of a worker's shards: what is here on all of them, and what is sent to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from everstep.core.worker.slices import SliceCount
from everstep.protocol import shard_messages as sh
from everstep.protocol.messages import PartWritten, WorkerReport


@dataclass(frozen=True, slots=True)
class FollowerSays:
    shard: int
    message: sh.FromShard


@dataclass(frozen=True, slots=True)
class Contents:
    """Of a parcel: what the worker state knows of it, tensors, and the facts that go with them."""

    value: Any
    tensors: tuple[Tensor, ...] = ()
    beside: Any = None


class ShardLeader:
    """`tell` reaches every follower. `report` reaches the agent."""

    def __init__(
        self, count: int, tell: Callable[[sh.ToShard], None], report: Callable[[WorkerReport], None]
    ) -> None:
        self.count, self.tell, self._report = count, tell, report
        self.slices = SliceCount(count)
        self._lock = threading.Lock()  # reports come from several threads
        # step, attempt, node, number of the chunk -> part per shard
        self._copies: dict[tuple[int, int, str, int], dict[int, Any]] = {}

    def report(self, shard: int, report: WorkerReport) -> None:
        """Copies in memory are one copy of the worker once every shard has its own."""
        if not isinstance(report, PartWritten) or report.memory_of is None:
            self._report(report)
            return
        with self._lock:
            node, number = report.memory_of, report.share[0]
            parts = self._copies.setdefault((report.step, report.attempt, node, number), {})
            parts[shard] = report.part
            if len(parts) < self.count:
                return
            for key in [key for key in self._copies if key[2:] == (node, number) and key[0] <= report.step]:
                del self._copies[key]
        self._report(replace(report, part={"shards": [parts[i] for i in range(self.count)]}))
