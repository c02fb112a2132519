"""The orders with which workers resume in a new epoch, from what is owed and the schedule of it."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.core.task.groups import Groups
from everstep.core.task.owed import Owed
from everstep.core.task.places import Places
from everstep.core.task.states import Planning, Restoring
from everstep.core.task.step_book import StepBook
from everstep.protocol.actions import Action, ResumeStep
from everstep.protocol.events import PlanComputed
from everstep.protocol.ops import Kind, Op, Worker
from everstep.protocol.work import Ledger, Resume


def restore_orders(
    plan: PlanComputed, phase: Restoring, places: Places, groups: Groups, book: StepBook
) -> list[Action]:
    """Every member loads a kept state and begins with the step after it."""
    return [
        ResumeStep(
            worker=worker,
            because=phase.because,
            order=Resume(
                epoch=plan.epoch,
                attempts=groups.attempts,
                step=phase.restore + 1,
                steady=plan.steady[worker],
                steady_hosts=plan.steady_hosts,
                members=groups.members,
                restore=phase.restore,
                until=book.until,
                saves=book.saves,
            ),
        )
        for worker in places.members()
    ]


def resume_orders(
    plan: PlanComputed, phase: Planning, places: Places, groups: Groups, book: StepBook
) -> list[Action]:
    """Every member gets the rest of the steps that are broken, every joiner that is let in its first ones."""
    owed, rewind = phase.owed, phase.rewind
    entering, feeds, shares = places.entering(), places.feeds(), book.all_shares()
    awaited = {} if groups.shape.chunks else _awaited(owed, rewind)
    fills = _fills(phase, groups)
    actions: list[Action] = []
    for worker in sorted({*phase.ledgers, *entering}):
        ledger = phase.ledgers.get(worker)
        at = entering[worker] if ledger is None else ledger.step
        if rewind is not None and ledger is not None:
            at = min(at, rewind)
        order = Resume(
            epoch=phase.epoch,
            attempts=groups.attempts,
            step=at,
            lists=_lists(plan, phase, worker, at=at, steps=book.steps),
            steady=plan.steady[worker],
            hosts=plan.hosts,
            steady_hosts=plan.steady_hosts,
            members=groups.members,
            ghosts=frozenset(
                (step, microbatch)
                for step, microbatch in owed.ghosts.get(worker, ())
                if rewind is None or step <= rewind  # what is done after it is done again, for its sum
            ),
            give=_up_to(rewind, owed.give.get(worker, {})),
            rewind=rewind,
            until=book.until,
            saves=book.saves,
            awaits=frozenset(awaited.get(worker, ())),
            fills=fills.get(worker, ()),
            shares=shares,
            recorded=book.recorded,
            feeds=feeds.get(worker, {}),
        )
        actions.append(ResumeStep(worker=worker, order=order, because=phase.because))
    return actions


def _lists(
    plan: PlanComputed, phase: Planning, worker: Worker, *, at: int, steps: int
) -> dict[int, tuple[Op, ...]]:
    """The worker's ops in every broken step from `at` on."""
    ledger, rewind = phase.ledgers.get(worker), phase.rewind
    counts_up_to = steps if rewind is None else rewind  # nothing done after this step counts
    lists = {
        step: ops[worker]
        if ledger is None or step > counts_up_to
        else _without_reduce(ops[worker], ledger, step, phase.owed.settled.get(worker.stage))
        for step, ops in plan.lists.items()
        if step >= at and worker in ops
    }
    if rewind is not None and rewind < phase.owed.low:
        lists[rewind] = (Op(Kind.U, None, worker.stage),)
    return lists


def _without_reduce(ops: tuple[Op, ...], ledger: Ledger, step: int, settled: int | None) -> tuple[Op, ...]:
    """A worker that holds a step's sum has no reduce left in it; sharded: if its peers hold theirs, too."""
    if settled is not None and step > settled:
        return ops
    if ledger.step > step or (ledger.step == step and ledger.has_sum):
        return tuple(op for op in ops if op.kind is not Kind.R)
    return ops


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
