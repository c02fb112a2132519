"""Planted bugs of the decisions about held ranks. Each must be seen by a storm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from everstep.core.held import machine as machine_module
from everstep.core.held import plan as plan_module
from everstep.core.held.ledger import Answer, GroupLedger, RankBook
from everstep.core.held.machine import Alive, Coming, Ending, Gone, HeldRun, Parking, Rebuilding
from everstep.protocol.held import CannotHold, Position, RankParked, RankRebuilt, Record

Patch = pytest.MonkeyPatch


def forgets_what_others_still_need(patch: Patch) -> None:
    real = GroupLedger.forget
    patch.setattr(GroupLedger, "forget", lambda self, interval: real(self, interval + 1))


def begins_at_the_last_record(patch: Patch) -> None:
    """Though a survivor is still before it."""

    def begins(situation: Any, groups: Any) -> Any:
        if any(not records for records in situation.records.values()):
            return real(situation, groups)
        return {rank: max(records, key=lambda r: r.interval) for rank, records in situation.records.items()}

    real = plan_module._begins
    patch.setattr(plan_module, "_begins", begins)


def any_mate_gives_its_state(patch: Patch) -> None:
    def steps(record: Record, donor: RankParked) -> int | None:
        return 0 if donor.gives and donor.interval >= record.interval else None

    patch.setattr(plan_module, "steps_since", steps)


def a_torn_state_is_given(patch: Patch) -> None:
    real = RankBook.parked

    def parked(self: RankBook) -> RankParked | None:
        section, self.section = self.section, ""
        said = real(self)
        self.section = section
        return said

    patch.setattr(RankBook, "parked", parked)


def an_arriving_rank_gives_its_state(patch: Patch) -> None:
    real = RankBook.arrive

    def arrive(self: RankBook, plan: Any) -> None:
        real(self, plan)
        self.kept = (plan.interval,)

    patch.setattr(RankBook, "arrive", arrive)


def the_first_member_answers(patch: Patch) -> None:
    patch.setattr(plan_module._Group, "best", property(lambda self: min(self.at)))


def stragglers_are_told_nothing(patch: Patch) -> None:
    real = plan_module.plan

    def without(situation: Any) -> Any:
        found = real(situation)
        if isinstance(found, CannotHold):
            return found
        return {
            rank: plan_module.RankPlan(
                asks=own.asks if rank in situation.records else (),
                interval=own.interval,
                updates=own.updates,
                donor=own.donor,
                donor_address=own.donor_address,
            )
            for rank, own in found.items()
        }

    patch.setattr(machine_module, "plan", without)


def one_rank_rebuilt_is_enough(patch: Patch) -> None:
    real = HeldRun._rebuilt

    def rebuilt(self: HeldRun, event: RankRebuilt, now: float) -> Any:
        if isinstance(self.phase, Rebuilding) and event.epoch == self.epoch:
            self.phase.awaited.intersection_update({event.rank})
        return real(self, event, now)

    patch.setattr(HeldRun, "_rebuilt", rebuilt)


def a_unit_is_replaced_in_parts(patch: Patch) -> None:
    real = HeldRun._absent

    def absent(self: HeldRun, ranks: set[int], because: str, now: float) -> Any:
        unit, self._book.unit = self._book.unit, 1
        found = real(self, ranks, because, now)
        self._book.unit = unit
        return found

    patch.setattr(HeldRun, "_absent", absent)


def a_death_during_a_heal_is_passed_over(patch: Patch) -> None:
    real = HeldRun._absent

    def absent(self: HeldRun, ranks: set[int], because: str, now: float) -> Any:
        if not isinstance(self.phase, Parking | Rebuilding):
            return real(self, ranks, because, now)
        return self._start_units(now, because)

    patch.setattr(HeldRun, "_absent", absent)


def a_held_rank_commits(patch: Patch) -> None:
    """What a communicator delivers after the rank has said where it is counts as finished."""
    real = GroupLedger.finish

    def finish(self: GroupLedger, position: Position, answer: Answer) -> bool:
        is_broken, self.is_broken = self.is_broken, False
        found = real(self, position, answer)
        self.is_broken = is_broken
        return found

    patch.setattr(GroupLedger, "finish", finish)


def held_ranks_update(patch: Patch) -> None:
    patch.setattr(RankBook, "may_change", property(lambda self: True))
    patch.setattr(RankBook, "enter", lambda self, section: setattr(self, "section", section))


def the_missing_are_forgotten(patch: Patch) -> None:
    """Of those that are being ended when another one dies."""
    patch.setattr(HeldRun, "_absentees", lambda self: tuple(_of(self, Gone, Coming)))


def _of(run: HeldRun, *kinds: type) -> list[int]:
    assert kinds
    return [rank for rank, place in sorted(run._book.places.items()) if isinstance(place.seat, kinds)]


def the_place_of_a_newcomer_counts(patch: Patch) -> None:
    """It is asked where it is before it has been resumed."""
    real = HeldRun._alive

    def alive(self: HeldRun) -> list[int]:
        return real(self) if not isinstance(self.phase, Parking) else _of(self, Alive, Coming)

    patch.setattr(HeldRun, "_alive", alive)
    assert Ending


MUTANTS: dict[str, Callable[[Patch], None]] = {
    mutant.__name__: mutant
    for mutant in (
        forgets_what_others_still_need,
        begins_at_the_last_record,
        any_mate_gives_its_state,
        a_torn_state_is_given,
        an_arriving_rank_gives_its_state,
        the_first_member_answers,
        stragglers_are_told_nothing,
        one_rank_rebuilt_is_enough,
        a_unit_is_replaced_in_parts,
        a_death_during_a_heal_is_passed_over,
        a_held_rank_commits,
        held_ranks_update,
        the_missing_are_forgotten,
        the_place_of_a_newcomer_counts,
    )
}
