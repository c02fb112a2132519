"""What a worker's loop needs of the world outside: who hears its reports, where states are kept, a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from everstep.engine.stage.stage import Stage
from everstep.engine.state.sharded import StateSlice
from everstep.protocol.messages import WorkerReport
from everstep.protocol.work import SaveCheckpoint, StateDirections, StoreCopy

State = Mapping[str, Tensor]
Groups = list[dict[str, Any]]  # of an optimizer


@dataclass(frozen=True, slots=True)
class StateParts:
    """A stage's state is cut into `count` parts: by tensors, or where states are sharded into chunks. These
    are this worker's, by number.
    """

    count: int
    slices: Mapping[int, Sequence[StateSlice]]


class StateStore(Protocol):
    """Where states go and come from. What is saved or copied are live tensors, which must not change before
    `settle` has returned.
    """

    def save(self, task: SaveCheckpoint, parts: StateParts, groups: Groups) -> None:
        """This worker's share of a checkpoint."""
        ...

    def takes(self, task: StoreCopy, directions: StateDirections) -> bool:
        """Is this copy to be made?"""
        ...

    def copy(self, task: StoreCopy, parts: StateParts, directions: StateDirections) -> None:
        """To the memory of nodes."""
        ...

    def settle(self, waiting: Callable[[], None]) -> None:
        """Before the state changes. `waiting` is called if it takes a while."""
        ...

    def bubble(self, *, begins: bool) -> None:
        """The worker waits for others, or does no longer: what is under way may use the time."""
        ...

    def load(
        self,
        step: int,
        names: list[str],
        directions: StateDirections,
        take: Callable[[State], None],
    ) -> bool:
        """Give `take` the tensors of these parameters, which are read as it asks for them. False: they cannot
        be read; what it has taken then is of no use.
        """
        ...


@dataclass(slots=True, kw_only=True)
class Ports:
    report: Callable[[WorkerReport], None]
    states: StateStore
    room: Callable[[Stage, int], float | None] = lambda stage, shared: None  # bytes there are for stashes
    clock_ns: Callable[[], int] = time.monotonic_ns
