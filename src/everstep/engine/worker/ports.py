"""What a worker's loop needs of the world outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from everstep.core.worker.control import StateDirections
from everstep.engine.stage.stage import Stage
from everstep.engine.state.sharded import ChunkSlice
from everstep.protocol.messages import WorkerReport

Groups = list[dict[str, Any]]  # of an optimizer


@dataclass(slots=True, kw_only=True)
class Ports:
    """What the loop needs of the world outside: who hears its reports, where states are kept, a clock.

    `save` and `copy_to_memory` get live tensors and copy them before they return; `load` gives None if the
    state is gone.
    """

    report: Callable[[WorkerReport], None]
    save: Callable[[int, int, tuple[int, int], Mapping[str, Tensor], Groups], None]  # step, attempt, share
    load: Callable[[int, list[str], StateDirections], Mapping[str, Tensor] | None]
    copy_to_memory: Callable[[int, int, bool, Mapping[str, Tensor], StateDirections], None] = lambda *copy: (
        None
    )
    save_chunks: Callable[[int, int, int, Mapping[int, Sequence[ChunkSlice]], Groups], None] = lambda *save: (
        None
    )  # sharded: step, attempt, number of chunks
    copy_chunks: Callable[
        [int, int, bool, int, Mapping[int, Sequence[ChunkSlice]], StateDirections], None
    ] = lambda *copy: None
    room: Callable[[Stage, int], float | None] = lambda stage, shared: None  # bytes there are for stashes
    clock_ns: Callable[[], int] = time.monotonic_ns
