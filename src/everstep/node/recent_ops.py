"""The ops a worker has run in its last whole steps, from its recorder: for people who look."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from everstep.diagnose.flight import UnusableFileError
from everstep.diagnose.ring import KINDS, read_ring

STEPS = 3  # neighbours may be a step apart: the newest that all have is shown
_COMPUTE = KINDS.index("compute")


def last_steps(beacon: Path) -> dict[str, list[list[int]]]:
    """By step, the start and end of each op in nanoseconds of the wall clock, in the order they were run."""
    try:
        log = read_ring("", beacon.with_name(f"{beacon.name}.ring").read_bytes()).log
    except (OSError, UnusableFileError):
        return {}
    ops = log.kind == _COMPUTE
    if not ops.any():
        return {}
    now, found = int(log.seq[ops].max()), {}
    for step in range(max(1, now - STEPS), now):
        of_step = ops & (log.seq == step)
        begun, ended = log.enqueued_ns[of_step], log.ended_ns[of_step]
        order = np.argsort(begun, kind="stable")
        found[str(step)] = np.stack([begun[order], ended[order]], axis=1).tolist()
    return found
