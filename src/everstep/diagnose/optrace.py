"""Tables of operations (one row an op: who, which step, what, when, how long) as roles and messages.

The columns are those of ByteDance's straggler traces: dp_rank, stage, rank, step, optype, start_ts, duration,
seq_id, in seconds. Compute ops (`forward-compute`, `backward-compute`) are recorded, so own time needs no
inference, and a role is a stage: the same stage of every replica does the same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.diagnose.flight import UnusableFileError
from everstep.diagnose.pace import Role

NEEDED = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration")


def roles_of_table(columns: Mapping[str, NDArray[Any]]) -> list[Role]:
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise UnusableFileError(f"no table of operations: column {missing[0]} is missing")
    kind = columns["optype"].astype(str)
    compute = np.char.endswith(kind, "compute")
    if not compute.any():
        raise UnusableFileError("its table holds no compute operations")
    replica, stage, step = (columns[name].astype(np.int64) for name in ("dp_rank", "stage", "step"))
    begin, length = columns["start_ts"].astype(float), columns["duration"].astype(float)
    steps, row = np.unique(step, return_inverse=True)
    ends = np.zeros(len(steps))
    np.maximum.at(ends, row, begin + length)
    starts = np.full(len(steps), np.inf)
    np.minimum.at(starts, row, begin)
    step_s = float(np.median(ends - starts))
    roles = []
    for one in np.unique(stage).tolist():
        replicas = np.unique(replica[stage == one]).tolist()
        own = np.zeros((len(steps), len(replicas)))
        use = compute & (stage == one)
        np.add.at(own, (row[use], np.searchsorted(replicas, replica[use])), length[use])
        ranks = [int(columns["rank"][(stage == one) & (replica == r)].min()) for r in replicas]
        roles.append(
            Role(
                name=f"stage {one}",
                ranks=tuple(ranks),
                steps=tuple(steps.tolist()),
                own_s=own,
                step_s=step_s,
                labels=tuple(f"replica {r}, stage {one}" for r in replicas),
            )
        )
    return roles
