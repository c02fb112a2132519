"""What nodes keep in memory: gone with their power, and sometimes not to be read.

nearest state   a worker that cannot load a state has asked every node that could have given it
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.core.cluster.copy_placement import MOST_ASKED
from everstep.core.cluster.task import Task
from everstep.core.worker.copy_holders import CopyHolders
from everstep.protocol.messages import FailedRead, Order, ResumeTask
from everstep.protocol.ops import Worker
from everstep.protocol.work import EpochFacts, StateDirections
from tests.storms.checkers import Violation
from tests.storms.truth import VirtualState


class VirtualMemory:
    def __init__(self) -> None:
        self._states: dict[tuple[str, int, int], VirtualState] = {}  # node, step, stage
        self._mute: dict[str, int] = {}  # nodes whose copies cannot be read, and how many faults say so
        self._known: dict[tuple[Worker, int], tuple[str, ...]] = {}  # of an order, by worker and epoch

    def put(self, node: str, step: int, stage: int, state: VirtualState) -> None:
        self._states[node, step, stage] = state

    def drop(self, node: str, before: int | None = None) -> None:
        """All that is older; everything, if the node loses power."""
        for key in [k for k in self._states if k[0] == node and (before is None or k[1] < before)]:
            del self._states[key]

    def mute(self, node: str) -> None:
        self._mute[node] = self._mute.get(node, 0) + 1

    def unmute(self, node: str) -> None:
        self._mute[node] = max(0, self._mute.get(node, 0) - 1)

    def unmute_all(self) -> None:
        self._mute.clear()

    def ordered(self, order: Order, tasks: Mapping[str, Task]) -> None:
        """A worker is to load a state: where the coordinator knows copies of its part to be."""
        match order:
            case ResumeTask(facts=EpochFacts(restore=int(step), epoch=epoch)):
                kept = tasks[order.task].copies.states.get(step)
                for worker, _, states in order.workers:
                    if states.copies:
                        holders = () if kept is None else tuple(kept.copies.get(worker.stage, ()))
                        self._known.setdefault((worker, epoch), holders)

    def load(
        self, me: Worker, epoch: int, step: int, directions: StateDirections
    ) -> tuple[VirtualState | None, tuple[FailedRead, ...]]:
        """As `store.state_keeper`: the holders of its part one after the other."""
        holders = CopyHolders(directions)
        while True:
            address, _ = holders.chosen()[me.stage]
            state = self._read(address.node, step, me.stage)
            if state is not None:
                return state, holders.failed()
            if not holders.read_failed(me.stage, "planted", reached=False):
                self._check(me, epoch, step)
                return None, holders.failed()

    def _read(self, node: str, step: int, stage: int) -> VirtualState | None:
        return None if self._mute.get(node) else self._states.get((node, step, stage))

    def _check(self, me: Worker, epoch: int, step: int) -> None:
        known = self._known.get((me, epoch), ())
        readable = [name for name in known if self._read(name, step, me.stage) is not None]
        if readable and len(known) <= MOST_ASKED:
            raise Violation(
                f"nearest state: {me} cannot load its state of step {step}, and {readable[0]} would give it"
            )
