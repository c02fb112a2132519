"""What one event leaves to do once it is handled: tasks that end, slots to give.

Who handles an event notes it here instead of doing it in the middle of something else; `Tasks.settle` does it
before `handle` returns. Between two events there is nothing here, so it is in no snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.core.cluster.task import Ending, Task
from everstep.protocol.actions import LifeFailed, RanksSlow, RecordStep


@dataclass(slots=True)
class FollowUps:
    endings: list[tuple[Task, Ending]] = field(default_factory=list)  # their recovery says so
    failed_lives: list[tuple[Task, LifeFailed]] = field(default_factory=list)  # to be judged
    slow_ranks: list[tuple[Task, RanksSlow]] = field(default_factory=list)  # to be written down
    networks: list[str] = field(default_factory=list)  # nodes whose networks were measured
    replayed: list[tuple[Task, RecordStep]] = field(default_factory=list)  # suspected steps, to be judged
    pauses: list[tuple[Task, str]] = field(default_factory=list)  # tasks to pause, and by what rule
    vacated: list[Task] = field(default_factory=list)  # a worker of theirs is gone
    vacancy: str = ""  # why slots, or who wants them, have changed
    keep_plan: bool = False  # the planner has just answered: it is not asked again

    def slots_changed(self, because: str) -> None:
        self.vacancy = because

    def clear(self) -> bool:
        waits = self.endings or self.pauses or self.vacated
        return not waits and not self.vacancy

    def nothing_to_judge(self) -> bool:
        return not (self.failed_lives or self.slow_ranks or self.networks or self.replayed)
