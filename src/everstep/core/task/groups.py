"""Which workers make up each stage from which step on, in which epoch, and which attempt at a step counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.core.task import ownership
from everstep.core.task.ownership import Holders, without_dead
from everstep.protocol.ops import Replicas, Worker
from everstep.protocol.shape import Shape
from everstep.protocol.work import Ledger, Members


@dataclass(slots=True, kw_only=True)
class Groups:
    shape: Shape
    epoch: int
    attempts: tuple[tuple[int, int], ...]  # (from this step on, attempt), ascending
    members: tuple[Members, ...] = ()

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def lost_chunk(self, ledgers: Mapping[Worker, Ledger]) -> tuple[int, int] | None:
        """Sharded: a stage and a chunk of it whose optimizer state no live worker has."""
        if not self.shape.chunks or not self.members:
            return None
        filled = _filled(ledgers)
        for stage, holders in enumerate(self.members[-1].holders):
            if (chunk := ownership.lost_chunk(holders, filled.get(stage, {}))) is not None:
                return stage, chunk
        return None

    def lost(
        self, ledgers: Mapping[Worker, Ledger], low: int, high: int, since: Mapping[Worker, int]
    ) -> set[Worker]:
        """Who was a member in a step from `low` to `high`, and reports no ledger any more. A worker that is
        to enter at a step is a member of it in these rows already: it has done nothing yet.
        """
        rows = [row for row in self.members if row.from_step <= high]
        rows = [row for row, later in zip(rows, [*rows[1:], None], strict=False) if not _is_over(later, low)]
        return {
            worker
            for row in rows
            for stage, live in enumerate(row.live)
            for worker in (Worker(replica, stage) for replica in live)
            if worker not in ledgers and row.from_step < since.get(worker, high + 1)
        }

    def regroup(
        self,
        low: int,
        since: Mapping[Worker, int],
        *,
        restarting: frozenset[int],
        settled: Mapping[int, int] | None = None,
        ledgers: Mapping[Worker, Ledger] | None = None,
    ) -> None:
        """Form the groups from the step before `low` on, which may not be sealed everywhere yet.

        `since` has the first step of every member. A stage that still owes ops (`restarting`) forms a new
        group even with the same members: the new plan may give an op to a worker that has contributed
        already, and its part must not count without that op.

        Sharded: `settled` has of every stage the last step whose sums its workers hold by the map of before;
        the new map is for later steps. Without ledgers, everyone loads a kept state.
        """
        table = []
        stages: list[list[tuple[int, int]]] = [
            [] for _ in range(self.shape.stages)
        ]  # replica, its first step
        for worker, step in since.items():
            stages[worker.stage].append((worker.replica, step))
        firsts = {low - 1, *(step for step in since.values() if step >= low)}
        holders: list[Holders] = []
        if self.shape.chunks:
            filled = None if ledgers is None else _filled(ledgers)
            holders = [self._new_holders(stage, here, filled) for stage, here in enumerate(stages)]
            firsts |= set(range(low, max((settled or {}).values(), default=low) + 2))  # each by its own map
        for first in sorted(firsts):
            live = tuple(Replicas(sorted(k for k, step in here if step <= first)) for here in stages)
            if not all(live) and not (self.shape.chunks and first >= low):
                continue  # sharded: a stage whose workers all came later does not take the others' map away
            rounds = tuple(
                self.epoch if stage in restarting else self._round(stage, first, live[stage])
                for stage in range(self.shape.stages)
            )
            maps = tuple(
                without_dead(
                    self._holders_at(stage, first) if _is_settled(settled, stage, first) else new, here
                )
                for stage, (new, here) in enumerate(zip(holders, live, strict=False))
            )
            table.append(Members(first, live, rounds, maps))
        self.members = tuple(table)

    def _new_holders(
        self, stage: int, here: list[tuple[int, int]], filled: Mapping[int, ownership.Filled] | None
    ) -> Holders:
        live = sorted(replica for replica, _ in here)
        if filled is None:
            return ownership.first_holders(self.shape.chunks, live)
        return ownership.reassigned(self.members[-1].holders[stage], live, filled.get(stage, {}))

    def at(self, step: int) -> Members:
        """Who takes part in a step."""
        fitting = [m for m in self.members if m.from_step <= step] or self.members[:1]
        return fitting[-1]

    def alone_at(self, step: int) -> frozenset[int]:
        """The stages that have one worker in it: nobody can check what it computes."""
        live = self.at(step).live if self.members else ()
        return frozenset(stage for stage, here in enumerate(live) if len(here) == 1)

    def _holders_at(self, stage: int, step: int) -> Holders:
        return self.at(step).holders[stage]

    def _round(self, stage: int, step: int, live: tuple[int, ...]) -> int:
        fitting = [m for m in self.members if m.from_step <= step]
        if fitting and fitting[-1].live[stage] == live:
            return fitting[-1].rounds[stage]
        return self.epoch

    def without(self) -> frozenset[Worker]:
        """The places that take no part once every joiner that is let in has entered."""
        live = [set(replicas) for replicas in self.members[-1].live]
        return frozenset(w for w in self.shape.workers() if w.replica not in live[w.stage])

    @property
    def voided_from(self) -> int:
        """The first step of the newest attempt: all went back to the one before it, and have made its update
        again with what was known of its norm by then.
        """
        return self.attempts[-1][0]

    def attempt_of(self, step: int) -> int:
        """The attempt at a step that counts; exact for steps that are not recorded yet."""
        return [attempt for first, attempt in self.attempts if first <= step][-1]

    def void_from(self, step: int, *, recorded: int) -> None:
        """What was computed of this step and later ones does not count: they get a new attempt."""
        attempt = self.attempts[-1][1] + 1
        earlier = [(first, number) for first, number in self.attempts if first < step]
        settled = [number for first, number in earlier if first <= recorded][-1:]
        unrecorded = [(first, number) for first, number in earlier if first > recorded]
        self.attempts = ((0, settled[0] if settled else 0), *unrecorded, (step, attempt))


def _filled(ledgers: Mapping[Worker, Ledger]) -> dict[int, dict[int, frozenset[int]]]:
    """By stage and replica, the chunks whose state it has."""
    found: dict[int, dict[int, frozenset[int]]] = {}
    for worker, ledger in ledgers.items():
        found.setdefault(worker.stage, {})[worker.replica] = frozenset(ledger.chunks)
    return found


def _is_settled(settled: Mapping[int, int] | None, stage: int, step: int) -> bool:
    return settled is not None and step <= settled[stage]


def _is_over(later: Members | None, step: int) -> bool:
    """Has the next row begun by this step?"""
    return later is not None and later.from_step <= step
