"""What one rank knows of its own run: where it is, and what its collectives gave. The ranks' side of a heal,
as a value: `everstep.hold` and the storms use the same.

`RankBook` answers three questions at any moment. May the rank go on (into an update, into the next interval)?
Where is it, so that a plan can be made? Which answers does it have for others?

A rank *parks* the moment neither its parameters nor its place in a broken group can change: at once, unless
it is inside a section (an update, a snapshot). It need not come to a standstill for that: what it may still
do is compute. A section that waits inside a collective counts as parked as well, but gives no state: it may
have changed half of it.

Nothing here locks: the caller does, and the commit of a collective (`finish`) and the report (`parked`) under
one lock. A collective that is done but not committed when the rank is held was never done: its result is
thrown away, and it is issued again or answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.errors import InternalError
from everstep.protocol.held import (
    PRELUDE,
    GroupAt,
    Position,
    RankParked,
    RankPlan,
    before,
    runs_of,
)

NOTHING = before(PRELUDE)


class AnswerError(Exception):
    """This heal cannot be finished: what a rank issues is not what was answered, or cannot be answered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a collective gave. `shape`: its kind, and what it was about. `outputs` None: not kept, or each
    member's are its own.
    """

    shape: str
    outputs: Any


@dataclass(slots=True, kw_only=True)
class GroupLedger:
    name: str
    members: frozenset[int]
    synchronizes_all: bool = False  # every rank of the run is a member
    next_number: int = 0
    done: Position = NOTHING  # all up to this are finished
    is_broken: bool = False
    since: int = PRELUDE  # the log is whole from this interval on
    queue: deque[Position] = field(default_factory=deque)  # issued, and not finished
    log: dict[Position, Answer] = field(default_factory=dict)
    told: dict[Position, Answer] = field(default_factory=dict)  # by peers, and not used yet
    awaited: dict[Position, str] = field(default_factory=dict)  # what peers have issued, and wait for

    def place(self, interval: int) -> Position:
        """Of the collective that is issued now."""
        position = Position(interval, self.next_number)
        self.next_number += 1
        self.queue.append(position)
        return position

    def answer(self, position: Position, shape: str) -> Answer | None:
        """From a peer, if it was finished before; None: it is to be issued."""
        found = self.told.get(position)
        expected = self.awaited.get(position, shape) if found is None else found.shape
        if expected != shape:
            raise AnswerError(
                f"collective {position} of group {self.name} was {expected} before, and is {shape} now: "
                "the script does not repeat itself"
            )
        if found is None:
            return None
        if found.outputs is None:
            raise AnswerError(
                f"collective {position} of group {self.name} ({shape}) was finished by other ranks, and what "
                "it gave this one is not known to them"
            )
        return found

    def finish(self, position: Position, answer: Answer) -> bool:
        """The first of the queue is done, and others may be told of it. False: the group is broken, so this
        rank may have said that it is not; the result is to be thrown away.
        """
        if self.is_broken:
            return False
        if not self.queue or self.queue[0] != position:
            raise InternalError(f"collective {position} of group {self.name} is finished out of order")
        self.queue.popleft()
        self.told.pop(position, None)
        self.awaited.pop(position, None)
        self.done = position
        self.log[position] = answer
        return True

    def answers(self, after: Position) -> dict[Position, Answer]:
        return {at: what for at, what in (self.log | self.told).items() if at > after}

    def learn(self, answers: Mapping[Position, Answer]) -> None:
        self.told.update({at: what for at, what in answers.items() if at > self.done})

    def forget(self, interval: int) -> list[Answer]:
        """No rank will ask for what was before this interval. What is given up."""
        old = [at for at in self.log if PRELUDE < at.interval < interval]
        self.since = max(self.since, interval)
        return [self.log.pop(at) for at in old]


@dataclass(slots=True, kw_only=True)
class RankBook:
    rank: int
    world: int
    unit: int
    epoch: int = 0
    is_held: bool = False
    absent: frozenset[int] = frozenset()  # in this epoch
    interval: int = PRELUDE
    updates: list[int] = field(default_factory=list)  # by optimizer
    kept: tuple[
        int, ...
    ] = ()  # intervals of which it has the beginning: this one and the last, if it was there
    groups: dict[str, GroupLedger] = field(default_factory=dict)
    is_new: bool = False  # a newcomer that was not resumed yet
    arrives: RankPlan | None = None  # a newcomer between its resumption and its first snapshot
    section: str = ""  # update or snapshot: it changes what is told
    waits_inside: bool = False  # the section waits in a collective
    is_parked: bool = False  # and told so

    # -------------------------------------------------------------- groups

    def open_group(self, name: str, members: Iterable[int]) -> GroupLedger:
        found = frozenset(members)
        group = GroupLedger(name=name, members=found, synchronizes_all=len(found) == self.world)
        group.is_broken = bool(found & self.absent)
        self.groups[name] = group
        return group

    def spans_units(self, members: Iterable[int]) -> bool:
        """Else its members live and die together: nothing of it is kept."""
        return len({rank // self.unit for rank in members}) > 1

    # -------------------------------------------------------------- may it go on?

    @property
    def may_change(self) -> bool:
        """Enter or leave an update or a snapshot."""
        return not self.is_held

    def enter(self, section: str) -> None:
        assert self.may_change, "a held rank changes nothing"
        assert not self.section, f"a {section} inside a {self.section}"
        self.section = section

    def leave(self) -> None:
        self.section = ""

    def updated(self, optimizer: int) -> None:
        """Its step is made, at the end of its section."""
        while len(self.updates) <= optimizer:
            self.updates.append(0)
        self.updates[optimizer] += 1

    def begin(self, interval: int) -> None:
        """In the section of a snapshot, with no collective in the air."""
        assert all(not group.queue for group in self.groups.values()), "a collective crosses a snapshot"
        self.kept = (*(each for each in self.kept if each == interval - 1), interval)
        self.interval = interval
        for group in self.groups.values():
            group.next_number, group.done = 0, max(group.done, before(interval))
        if self.arrives is not None:
            assert interval == self.arrives.interval, "a newcomer begins where its plan says"
            self.arrives = None

    # -------------------------------------------------------------- a heal

    def hold(self, epoch: int, absent: Iterable[int]) -> bool:
        """Whether it is news."""
        if epoch <= self.epoch:
            return False
        self.epoch, self.is_held, self.is_parked = epoch, True, False
        self.absent = frozenset(absent)
        for group in self.groups.values():
            group.is_broken = group.is_broken or bool(group.members & self.absent)
        return True

    def parked(self) -> RankParked | None:
        """What to tell, once; None: not yet, or told already."""
        stands_still = not self.section or self.waits_inside
        if not self.is_held or self.is_new or self.is_parked or not stands_still:
            return None
        self.is_parked = True
        arrives = self.arrives
        return RankParked(
            rank=self.rank,
            epoch=self.epoch,
            interval=self.interval if arrives is None else arrives.interval,
            updates=tuple(self.updates if arrives is None else arrives.updates),
            groups={
                name: GroupAt(
                    members=runs_of(group.members),
                    done=group.done if arrives is None else max(group.done, before(arrives.interval)),
                    since=group.since if arrives is None else arrives.interval,
                )
                for name, group in self.groups.items()
                if group.is_broken
            },
            gives=() if self.section else self.kept,
        )

    def arrive(self, plan: RankPlan) -> None:
        """A newcomer has what its plan told it to fetch, and waits to be resumed."""
        assert self.is_new, "only a newcomer is given a place"
        self.arrives = plan
        self.updates = list(plan.updates)
        for group in self.groups.values():
            group.since = plan.interval

    def resume(self, epoch: int) -> bool:
        """Whether it counts: an older epoch does not."""
        if epoch != self.epoch or not self.is_held:
            return False
        self.is_held = self.is_parked = self.is_new = False
        self.absent = frozenset()
        for group in self.groups.values():
            group.is_broken = False
        return True

    # -------------------------------------------------------------- the log

    def entered_by_all(self, group: GroupLedger, position: Position) -> list[Answer]:
        """A collective in which all members wait for all is finished: each of them has entered its interval.
        In a group of all ranks, nobody will ask for what was before; in another one a partner's partner may
        still be an interval behind. What is given up.
        """
        if group.synchronizes_all:
            return [old for each in self.groups.values() for old in each.forget(position.interval)]
        return group.forget(position.interval - 1)
