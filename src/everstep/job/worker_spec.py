"""What an agent tells a worker's process when it starts: JSON through the fork server, decoded once.

The job travels as the table that was checked when it was submitted; the worker reads it (`Job.from_dict`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from everstep.protocol.codec import decode, encode
from everstep.protocol.messages import RankRules, Sender


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    sender: Sender  # which worker of which task, and which of its processes
    job: Mapping[str, Any]
    secret: str  # of the task: its workers know each other by it
    node: str
    host: str  # where peers reach this node's workers
    bind: str = ""  # where they listen, if that is another address
    slots: tuple[int, ...]  # of this worker: one for each of its shards
    slots_on_node: int  # to know whether slots share devices
    devices: tuple[tuple[str, str, str], ...] = ()  # of the node, as `node.slot_devices` has them
    agent: str  # the path of its socket
    alone_s: float = 0.0  # so long it continues without an agent; 0: it ends with the one that started it
    memory: str  # the folder of this node's copies of states
    beacon: str | None = None  # None: nobody looks
    faults: tuple[str, ...] = ()  # scripted ones, for demonstrations
    script: tuple[str, ...] = ()  # the user's, with its arguments; empty: the job names model and data
    traffic: Mapping[str, Any] | None = None  # for `everstep.traffic`: the paths that its connections take
    ranks: RankRules | None = None  # of a script task: this process keeps its ranks
    order: int = 0  # of this node among those of a script task
    logs: str = ""  # of a script task: the folder for files per rank

    @property
    def beacon_path(self) -> Path | None:
        return None if self.beacon is None else Path(self.beacon)

    @property
    def lifeline(self) -> Path | None:
        return None if self.beacon is None else lifeline_beside(Path(self.beacon))

    def to_dict(self) -> dict[str, Any]:
        """JSON, with an exact inverse."""
        found: dict[str, Any] = encode(self)
        return found

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """PeerError names what is missing or wrong."""
        found: Self = decode(cls, table)
        return found


def lifeline_beside(beacon: Path) -> Path:
    """Not `with_suffix`: a task's name may have a dot, and its workers would share one."""
    return beacon.with_name(f"{beacon.name}.life")
