"""The orders with which workers resume in a new epoch, from what is owed and the schedule of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.core.task.groups import Groups
from everstep.core.task.owed import Owed
from everstep.core.task.places import Places
from everstep.core.task.states import Planning, Restoring
from everstep.core.task.step_book import StepBook
from everstep.protocol.actions import ResumeWorkers
from everstep.protocol.events import PlanComputed
from everstep.protocol.ops import OWN, Kind, Microbatch, Op, Worker
from everstep.protocol.work import EpochFacts, Ledger, OwnOrders

NONE: frozenset[Any] = frozenset()


def restore_orders(
    plan: PlanComputed, phase: Restoring, places: Places, groups: Groups, book: StepBook
) -> ResumeWorkers:
    """Every member loads a kept state and begins with the step after it."""
    facts = EpochFacts(
        epoch=plan.epoch,
        attempts=groups.attempts,
        steady_hosts=plan.steady_hosts,
        members=groups.members,
        restore=phase.restore,
        until=book.until,
        saves=book.saves,
        votes_from=phase.restore + 1 if book.votes else None,
        suspect=book.suspect,
    )
    first = phase.restore + 1
    orders = {w: OwnOrders(step=first, steady=plan.steady.text(w)) for w in places.members()}
    return ResumeWorkers(facts=facts, orders=orders, because=phase.because)


def resume_orders(
    plan: PlanComputed, phase: Planning, places: Places, groups: Groups, book: StepBook
) -> ResumeWorkers:
    """Every member gets the rest of the steps that are broken, every joiner that is let in its first ones."""
    rewind, entering = phase.rewind, places.entering()
    facts = EpochFacts(
        epoch=phase.epoch,
        attempts=groups.attempts,
        hosts={step: hosts for step, hosts in plan.hosts.items() if hosts != plan.steady_hosts},
        steady_hosts=plan.steady_hosts,
        members=groups.members,
        rewind=rewind,
        until=book.until,
        saves=book.saves,
        shares=book.all_shares(),
        recorded=book.recorded,
        votes_from=_votes_from(phase, book) if book.votes else None,
        suspect=book.suspect,
    )
    feeds, fills, give = places.feeds(), _fills(phase, groups), phase.owed.give
    awaited = {} if groups.shape.chunks else _awaited(phase.owed, rewind)
    lists = _Lists(plan, phase, steps=book.steps)
    orders: dict[Worker, OwnOrders] = {}
    for worker in sorted({*phase.ledgers, *entering}):  # thousands, with little of their own
        ledger = phase.ledgers.get(worker)
        at = entering[worker] if ledger is None else ledger.step
        if rewind is not None and ledger is not None:
            at = min(at, rewind)
        orders[worker] = OwnOrders(
            step=at,
            lists=lists.of(worker, at),
            steady=plan.steady.text(worker),
            ghosts=_ghosts(phase, worker) if phase.owed.ghosts else NONE,
            give=_up_to(rewind, give[worker]) if worker in give else {},
            awaits=frozenset(awaited[worker]) if worker in awaited else NONE,
            fills=fills.get(worker, ()),
            feeds=feeds.get(worker, {}),
        )
    return ResumeWorkers(facts=facts, orders=orders, because=phase.because)


def _votes_from(phase: Planning, book: StepBook) -> int:
    """In a step that an epoch breaks there are no votes; one that is computed again begins from nothing."""
    is_replay = book.suspect is not None and phase.rewind == book.suspect.step - 1
    return phase.owed.high + 1 if phase.rewind is None or not is_replay else phase.rewind + 1


class _Lists:
    """A worker's ops in every broken step, where they are not the steady ones. Found by pattern: most workers
    of a stage have the same.
    """

    def __init__(self, plan: PlanComputed, phase: Planning, *, steps: int) -> None:
        self._plan, self._phase = plan, phase
        self._counts_up_to = steps if phase.rewind is None else phase.rewind  # later work does not count
        self._reduced: dict[tuple[str, int], str] = {}  # by pattern and stage: without its reduce

    def of(self, worker: Worker, at: int) -> dict[int, str]:
        """From step `at` on."""
        phase, (replica, stage) = self._phase, worker
        ledger, steady = phase.ledgers.get(worker), self._plan.steady.pattern(worker)
        lists: dict[int, str] = {}
        for step, broken in self._plan.lists.items():
            if step < at or (ops := broken.find(worker)) is None:
                continue
            if ledger is not None and step <= self._counts_up_to and self._has_sum(ledger, step, stage):
                ops = self._without_reduce(ops, stage)
            if ops != steady:
                lists[step] = ops.replace(OWN, str(replica))
        if phase.rewind is not None and phase.rewind < phase.owed.low:
            lists[phase.rewind] = str(Op(Kind.U, None, stage))
        return lists

    def _has_sum(self, ledger: Ledger, step: int, stage: int) -> bool:
        """A worker that holds a step's sum has no reduce left in it; sharded: if its peers do, too."""
        settled = self._phase.owed.settled.get(stage)
        if settled is not None and step > settled:
            return False
        return ledger.step > step or (ledger.step == step and ledger.has_sum)

    def _without_reduce(self, pattern: str, stage: int) -> str:
        if (pattern, stage) not in self._reduced:
            reduce = str(Op(Kind.R, None, stage))
            self._reduced[pattern, stage] = " ".join(op for op in pattern.split() if op != reduce)
        return self._reduced[pattern, stage]


def _ghosts(phase: Planning, worker: Worker) -> frozenset[tuple[int, Microbatch]]:
    """What is done after an update that is taken back is done again, for its sum."""
    ghosts = phase.owed.ghosts.get(worker)
    if not ghosts:
        return frozenset()
    return frozenset(ghost for ghost in ghosts if phase.rewind is None or ghost[0] <= phase.rewind)


def _fills(phase: Planning, groups: Groups) -> dict[Worker, tuple[tuple[int, int, int], ...]]:
    """Sharded, by owner: the chunks whose state another holder lacks, with the first step that the holder is
    to update. In a step that is reduced already it has the sums of its chunks and waits for their states:
    they must not wait for an update that the owner makes after its own fill has come.
    """
    if not groups.shape.chunks:
        return {}
    found: dict[Worker, dict[tuple[int, int], int]] = {}
    for stage, owned in enumerate(groups.members[-1].holders):
        ledgers = {worker.replica: led for worker, led in phase.ledgers.items() if worker.stage == stage}
        for members in groups.members:
            for chunk, holders in enumerate(members.holders[stage]):
                owner = owned[chunk][0]
                for replica in holders:
                    ledger = ledgers.get(replica)
                    if replica != owner and (ledger is None or chunk not in ledger.chunks):
                        first = members.from_step if ledger is None else max(members.from_step, ledger.step)
                        found.setdefault(Worker(owner, stage), {}).setdefault((chunk, replica), first)
    return {
        worker: tuple((chunk, replica, first) for (chunk, replica), first in fills.items())
        for worker, fills in found.items()
    }


def _awaited(owed: Owed, rewind: int | None) -> dict[Worker, set[int]]:
    """By worker: the steps whose sum a peer gives to it."""
    found: dict[Worker, set[int]] = {}
    for giver, steps in owed.give.items():
        for step, peers in _up_to(rewind, steps).items():
            for replica in peers:
                found.setdefault(Worker(replica, giver.stage), set()).add(step)
    return found


def _up_to(rewind: int | None, steps: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """What is done after an update that is taken back is of no use."""
    return {step: peers for step, peers in steps.items() if rewind is None or step <= rewind}
