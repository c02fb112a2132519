"""What a change costs: D_transition, in seconds of the throughput the task had before.

    keep        nothing
    re-route    a moment to agree, then the dead workers' ops of the broken step on peers; no state moves.
                A task that was hurt pays this whatever it does next, for changes happen between two steps
    drop        workers fewer, same cut: a new epoch between two steps; no state moves
    grow, fill  workers more, same cut: they start and copy the state of a live peer *while training goes on*,
                and enter at a step boundary; the task loses what it would have gained in that time
    reshape     another cut: the task stands still while every worker fetches its new part
    restore     no live replica of some stage is left: the state comes from the memory of other hosts, or
                from disk, and the work since then is lost

The nearest state wins: live replica, then memory, then disk. With ZeRO-1 a live replica does not hold the
dead one's part of the optimizer, so the first source is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from everstep_lab.plan.task_shape import Floats


class StateSource(StrEnum):
    LIVE = "a live replica"
    MEMORY = "the memory of other hosts"
    DISK = "the checkpoint on disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Times and bandwidths of a change; one number for all of it, as in Unicron, is `transition_s`."""

    transition_s: float | None = None
    reroute_s: float = 1.0  # stop after the op in hand, tell the ledger, take the new lists
    join_s: float = 1.0  # a new epoch of the same cut: NCCL needs 0.1 s for a group of four more (H200)
    groups_s: float = 5.0  # forming all groups of another cut, however few
    groups_per_worker_s: float = 0.002  # and for every worker in them: 17 s at 16k GPUs, 200 s at 98k
    network_bandwidth: float = 20e9  # bytes/s a worker receives from another node
    disk_bandwidth: float = 20e9  # bytes/s of the shared storage, all readers together
    memory_copies: bool = False  # hosts keep each other's state in memory
    memory_every_steps: float = 1.0
    checkpoint_every_s: float = 1800.0

    def groups(self, workers: Floats) -> Floats:
        return self.groups_s + self.groups_per_worker_s * workers

    def epoch(self, workers: Floats) -> Floats:
        """Workers more or fewer of the same cut: only the groups that they touch are formed again."""
        return self.join_s + self.groups_per_worker_s * workers

    def lost_work_s(self, source: StateSource, step_s: float) -> float:
        """Seconds of work done again because it is in no state that is left."""
        match source:
            case StateSource.LIVE:
                return 0.0
            case StateSource.MEMORY:
                return (0.5 + 0.5 * self.memory_every_steps) * step_s
            case StateSource.DISK:
                return 0.5 * self.checkpoint_every_s + 0.5 * step_s

    def fetch_s(self, source: StateSource, state_bytes: float, parts: Floats) -> Floats:
        """Until every worker holds its part; from disk the whole state is read once, then passed on."""
        part = state_bytes / np.maximum(parts, 1.0) / self.network_bandwidth
        return part + (state_bytes / self.disk_bandwidth if source is StateSource.DISK else 0.0)

    def reshape_s(self, source: StateSource, state_bytes: float, workers: Floats, parts: Floats) -> Floats:
        """Another cut, or a restart: all workers pause."""
        return self.groups(workers) + self.fetch_s(source, state_bytes, parts)

    def grow_s(self, state_bytes: float, workers: Floats, parts: float, gain: Floats) -> Floats:
        """`gain`: how much of today's throughput the new workers will add, as a fraction of it."""
        copying = self.fetch_s(StateSource.LIVE, state_bytes, np.array(parts))
        return self.epoch(workers) + copying * np.maximum(gain, 0.0)

    def interrupted_s(self, step_s: float, dead_share: float) -> float:
        """A death in mid-step: the dead workers' ops of that step are run again by their peers, whatever
        comes after it."""
        return self.reroute_s + step_s * min(1.0, dead_share)

    def stop_s(self, state_bytes: float) -> float:
        """A last checkpoint."""
        return state_bytes / self.disk_bandwidth
