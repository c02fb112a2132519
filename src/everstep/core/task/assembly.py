"""Back to a kept state: when every stage has a worker, everyone loads the newest state that is kept.

A task begins like this, and continues like this after a stage has lost its last worker. Owns what is known of
the states that outlive workers, on disk and in the memory of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from everstep.core.task.groups import Groups
from everstep.core.task.places import Places
from everstep.core.task.states import Assembling, Restoring
from everstep.protocol.actions import ComputePlan, LookForCheckpoint


class CheckpointSearch(StrEnum):
    """At the checkpoint folder, before everyone loads a state: while a coordinator is away, checkpoints are
    committed without it, and reports of them can be lost with their node.
    """

    WANTED = "wanted"
    ASKED = "asked"
    DONE = "done"


@dataclass(slots=True, kw_only=True)
class Assembly:
    on_disk: int  # the step of the newest checkpoint; 0: none, the task starts from its seed
    in_memory: int | None  # the newest step whose whole state is in the memory of nodes
    ordered_in: int = 0  # the last epoch in which everyone was ordered to load a state
    look: CheckpointSearch = CheckpointSearch.DONE  # for a checkpoint that no report told of
    is_doubted: bool = False  # what the workers have may be wrong: once they pause, a kept state is loaded
    trusted: int | None = None  # until then: states of later steps do not count
    last: int | None = None  # the task's last state, which is to be on disk: nobody would write it again

    def nearest(self) -> tuple[int, str]:
        """The newest step whose state is kept, and where."""
        if self.in_memory is not None and self.on_disk <= self.in_memory != self.last:
            return self.in_memory, "the memory of nodes"
        return self.on_disk, "the checkpoint on disk" if self.on_disk else "the seed"

    def doubt_after(self, step: int) -> None:
        """What was computed after this step may be wrong, and so may be states that are kept of it. One that
        is on disk was verified before it was committed, where that was possible.
        """
        self.is_doubted, self.trusted = True, step
        self.kept_in_memory(self.in_memory)

    def kept_in_memory(self, step: int | None) -> None:
        self.in_memory = step if step is not None and self._is_trusted(step) else None

    def committed(self, step: int) -> None:
        if self._is_trusted(step):
            self.on_disk = max(self.on_disk, step)

    def loaded(self) -> None:
        """All have a state that counts."""
        self.trusted = None

    def _is_trusted(self, step: int) -> bool:
        return self.trusted is None or step <= self.trusted

    def restore(
        self, phase: Assembling, places: Places, groups: Groups, *, is_first: bool
    ) -> tuple[Restoring, ComputePlan] | LookForCheckpoint | None:
        """Every process becomes a member, if there are enough of them. `is_first`: the task begins."""
        every_stage = frozenset(range(groups.shape.stages))
        if phase.wait_for_all and places.are_starting():
            return None
        if places.stages_joining() != every_stage or self.look is CheckpointSearch.ASKED:
            return None
        if self.look is CheckpointSearch.WANTED:
            self.look = CheckpointSearch.ASKED
            return LookForCheckpoint(
                because=f"every stage has a worker again; {self.nearest()[1]} may be old"
            )
        epoch = groups.next_epoch()
        places.all_enter(phase.restore + 1)
        first = phase.restore + 1
        groups.regroup(first, places.since(), restarting=every_stage)
        _, where = self.nearest()
        because = "every worker is up"
        if not is_first:
            because = (
                f"every stage has a worker again; the nearest state is that of step {phase.restore}, "
                f"in {where}"
            )
        question = ComputePlan(epoch=epoch, broken={}, dead=groups.without(), because=because)
        return Restoring(epoch, phase.restore, because), question
