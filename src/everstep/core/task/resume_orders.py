"""The orders with which workers resume in a new epoch, from what is owed and the schedule of it."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.core.task.groups import Groups
from everstep.core.task.owed import Owed
from everstep.core.task.places import Places
from everstep.core.task.states import Planning, Restoring
from everstep.core.task.step_book import StepBook
from everstep.protocol.actions import ResumeWorkers
from everstep.protocol.events import PlanComputed
from everstep.protocol.ops import Kind, Microbatch, Op, Worker
from everstep.protocol.work import EpochFacts, Ledger, OwnOrders


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
    feeds, fills = places.feeds(), _fills(phase, groups)
    awaited = {} if groups.shape.chunks else _awaited(phase.owed, rewind)
    orders: dict[Worker, OwnOrders] = {}
    for worker in sorted({*phase.ledgers, *entering}):
        ledger = phase.ledgers.get(worker)
        at = entering[worker] if ledger is None else ledger.step
        if rewind is not None and ledger is not None:
            at = min(at, rewind)
        steady = plan.steady.text(worker)
        orders[worker] = OwnOrders(
            step=at,
            lists=_lists(plan, phase, worker, at=at, steps=book.steps, steady=steady),
            steady=steady,
            ghosts=_ghosts(phase, worker),
            give=_up_to(rewind, phase.owed.give.get(worker, {})),
            awaits=frozenset(awaited.get(worker, ())),
            fills=fills.get(worker, ()),
            feeds=feeds.get(worker, {}),
        )
    return ResumeWorkers(facts=facts, orders=orders, because=phase.because)


def _votes_from(phase: Planning, book: StepBook) -> int:
    """In a step that an epoch breaks there are no votes; one that is computed again begins from nothing."""
    is_replay = book.suspect is not None and phase.rewind == book.suspect.step - 1
    return phase.owed.high + 1 if phase.rewind is None or not is_replay else phase.rewind + 1


def _lists(
    plan: PlanComputed, phase: Planning, worker: Worker, *, at: int, steps: int, steady: str
) -> dict[int, str]:
    """The worker's ops in every broken step from `at` on, where they are not the steady ones."""
    ledger, rewind = phase.ledgers.get(worker), phase.rewind
    counts_up_to = steps if rewind is None else rewind  # nothing done after this step counts
    lists: dict[int, str] = {}
    for step, broken in plan.lists.items():
        if step < at or worker not in broken:
            continue
        ops = broken.text(worker)
        if ledger is not None and step <= counts_up_to:
            ops = _without_reduce(ops, ledger, step, worker.stage, phase.owed.settled.get(worker.stage))
        if ops != steady:
            lists[step] = ops
    if rewind is not None and rewind < phase.owed.low:
        lists[rewind] = str(Op(Kind.U, None, worker.stage))
    return lists


def _without_reduce(ops: str, ledger: Ledger, step: int, stage: int, settled: int | None) -> str:
    """A worker that holds a step's sum has no reduce left in it; sharded: if its peers hold theirs, too."""
    if settled is not None and step > settled:
        return ops
    if ledger.step > step or (ledger.step == step and ledger.has_sum):
        reduce = str(Op(Kind.R, None, stage))
        return " ".join(op for op in ops.split() if op != reduce)
    return ops


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
