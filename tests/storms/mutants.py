"""Planted bugs: production functions made slightly wrong. Storms that cannot see them are blind.

Here those of one task's recovery and its workers; `tests.storms.agent_mutants` has the cluster's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from everstep.core.agent.processes import NodeProcesses
from everstep.core.task import owed as owed_module
from everstep.core.task import ownership
from everstep.core.task import phases as phases_module
from everstep.core.task.groups import Groups
from everstep.core.task.phases import Phases
from everstep.core.task.places import Places
from everstep.core.task.recovery import Recovery
from everstep.core.task.states import Entering, Gathering
from everstep.core.worker.chunks import Chunks
from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.reduction import Reduction
from everstep.core.worker.slices import SliceCount
from everstep.core.worker.step_state import StepState, UpdateState
from everstep.core.worker.updates import Updates
from everstep.core.worker.worker_state import WorkerState
from everstep.protocol.events import LedgerReported
from everstep.protocol.messages import ShardEnded
from everstep.protocol.parcels import ParcelKind
from everstep.protocol.work import AssembleSum, Ledger, ReleaseGradients, Resume, SumChunk, Update
from tests.storms.agent_mutants import CANCEL_MUTANTS, CLUSTER_MUTANTS, MEMORY_MUTANTS, TIMER_MUTANTS, Patch


def outbox_dropped_too_early() -> list[Patch]:
    """Boundary tensors go when the own stage holds its sum, not when every stage has sealed."""
    right = Reduction.send_held

    def wrong(self: Reduction, state: StepState) -> None:
        right(self, state)
        self.mail.drop_sent(state.step)

    return [(Reduction, "send_held", wrong)]


def reduce_sealed_too_early() -> list[Patch]:
    """A worker that holds the sum seals at once, without asking whether its peers hold it."""
    return [(Reduction, "all_hold", lambda self, state: True)]


def reduce_sums_two_rounds() -> list[Patch]:
    """Parts of a reduce group that no longer exists are added up with those of the new one."""
    return [(Mailbox, "round", lambda self, step: 0)]


def stale_epoch_accepted() -> list[Patch]:
    """A ledger of an earlier epoch counts for this one."""
    right = Recovery.handle

    def wrong(self: Recovery, event: Any, now: float) -> list[Any]:
        phase = self.phase
        if isinstance(phase, Gathering) and isinstance(event, LedgerReported):
            event = replace(event, epoch=phase.epoch)
        return right(self, event, now)

    return [(Recovery, "handle", wrong)]


def ledger_without_done_before() -> list[Patch]:
    """A worker does not tell what it did in the step before, which may be open elsewhere."""
    right = WorkerState.interrupt

    def wrong(self: WorkerState, epoch: int) -> Ledger:
        return replace(right(self, epoch), done_before=())

    return [(WorkerState, "interrupt", wrong)]


def joiner_admitted_a_step_early() -> list[Patch]:
    """A joiner is let in at a step that others have entered already."""
    right = phases_module.what_is_owed

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        return replace(found, high=found.high - 1) if found.high > 1 else found

    return [(phases_module, "what_is_owed", wrong)]


def ghosts_dropped() -> list[Patch]:
    """What a dead worker's outbox held, and a neighbour will ask for, is not made again."""
    return [(owed_module._StepView, "ghosts", lambda self: {})]


def attempts_not_counted() -> list[Patch]:
    """After an undone update, parcels computed from the wrong weights are as good as new ones."""
    return [(Phases, "_void_from", lambda self, step: None)]


def undo_forgotten() -> list[Patch]:
    """An eager update that turned out invalid stays in the weights."""
    right = WorkerState._rewind

    def wrong(self: WorkerState, step: int) -> None:
        right(self, step)
        self._first.clear()

    return [(WorkerState, "_rewind", wrong)]


def mended_link_sends_nothing_again() -> list[Patch]:
    """A connection broke and is back; what was lost on it stays lost."""
    return [(WorkerState, "link_reopened", lambda self, peer: None)]


def group_kept_after_a_death() -> list[Patch]:
    """A stage with ops owed keeps its reduce group: a part sent before the death counts without them."""
    right = Groups.regroup

    def wrong(self: Groups, low: int, since: Any, *, restarting: frozenset[int], **rest: Any) -> None:
        before = self.members
        right(self, low, since, restarting=frozenset(), **rest)
        if before:
            self.members = tuple(replace(m, rounds=before[-1].rounds) for m in self.members)

    return [(Groups, "regroup", wrong)]


def feed_ends_a_step_early() -> list[Patch]:
    """A joiner is fed up to the step before the one it needs."""
    right = WorkerState.resume

    def wrong(self: WorkerState, order: Resume) -> None:
        feeds = {k: None if last is None else last - 1 for k, last in order.feeds.items()}
        right(self, replace(order, feeds=feeds))

    return [(WorkerState, "resume", wrong)]


def copy_counts_without_a_source() -> list[Patch]:
    """A joiner counts as copied though the peer that feeds it has died."""
    right = Places.settle_entering

    def wrong(self: Places, ledgers: Any) -> Any:
        for worker, place in self.states.items():
            if isinstance(place, Entering) and worker in ledgers:
                ledgers = {**ledgers, worker: replace(ledgers[worker], step=place.enter_at)}
        return right(self, ledgers)

    return [(Places, "settle_entering", wrong)]


def commit_forgotten() -> list[Patch]:
    """An eager update that turned out valid never reaches the optimizer's state."""
    right = StepState.validated

    def wrong(self: StepState) -> None:
        right(self)
        self.committed()

    return [(StepState, "validated", wrong)]


def gradients_released_when_sent() -> list[Patch]:
    """A worker's own gradients go when its parts are sent, not when it holds the sum."""
    summed, assembled = Reduction.summed, Reduction.assembled

    def early(self: Reduction, state: StepState, task: Any, squares: tuple[float, ...]) -> None:
        summed(self, state, task, squares)
        self.mail.commands.append(ReleaseGradients(state.step))

    def late(self: Reduction, state: StepState, task: Any, squares: float | None) -> None:
        has_summed = state.own_chunk_squares is not None
        assembled(self, state, task, squares)
        if has_summed:
            self.mail.commands.remove(ReleaseGradients(state.step))

    return [(Reduction, "summed", early), (Reduction, "assembled", late)]


def sum_released_before_its_seal() -> list[Patch]:
    """The buffer of the last step's sum is used again while a peer may still lack that sum."""

    def wrong(self: WorkerState) -> Any:
        item = self.reduction.next(self.now)
        if self.steps.before is not None and isinstance(item, SumChunk | AssembleSum):
            self.steps.release_sum(self.steps.before)
        return item

    return [(WorkerState, "_next_of_reduce", wrong)]


def lost_chunk_unnoticed() -> list[Patch]:
    """Sharded: training goes on though no live worker has the state of a chunk."""
    return [(Groups, "lost_chunk", lambda self, ledgers: None)]


def guard_makes_no_update() -> list[Patch]:
    """Sharded: only owners update their chunks."""
    right = Chunks.next

    def wrong(self: Chunks, now: StepState, scale: float | None) -> Any:
        item = right(self, now, scale)
        if isinstance(item, Update):
            return replace(item, chunks=tuple(c for c in item.chunks if c in self.owned(now.step)))
        return item

    return [(Chunks, "next", wrong)]


def one_holder_of_a_sum_is_enough() -> list[Patch]:
    """Sharded: a stage counts as reduced as soon as one worker has its chunks."""
    view = owed_module._StepView
    return [(view, "is_complete", lambda self, stage: bool(self.holders[stage]))]


def sharded_update_before_its_seal() -> list[Patch]:
    """Sharded: a worker updates when the norm is known, though a peer may lack its sums."""
    right = Updates.next

    def wrong(self: Updates) -> Any:
        now = self.steps.now
        if now.update is UpdateState.PENDING and (norm := self.norm(now)) is not None:
            return self.chunks.next(now, self.rules.scale(norm))
        return right(self)

    return [(Updates, "next", wrong)]


def held_counts_in_every_round() -> list[Patch]:
    """Sharded: that a peer held a sum counts, though the reduce has started over since."""

    def wrong(self: Reduction, step: int, sender: int) -> Any:
        return self.mail.name(ParcelKind.HELD, step, self.me.stage, sender=sender)

    return [(Reduction, "_held", wrong)]


def fill_sent_a_step_early() -> list[Patch]:
    """Sharded: a new holder is given a state that lacks a step whose sum it was not given."""
    right = Chunks.obey

    def wrong(self: Chunks, order: Resume) -> None:
        right(self, replace(order, fills=tuple((c, k, first - 1) for c, k, first in order.fills)))

    return [(Chunks, "obey", wrong)]


def new_map_for_a_step_that_is_summed() -> list[Patch]:
    """Sharded: the map of a new epoch counts for a step that was reduced by the map before."""
    right = Groups.regroup

    def wrong(self: Groups, low: int, since: Any, *, settled: Any = None, **rest: Any) -> None:
        earlier = None if settled is None else dict.fromkeys(settled, low - 1)
        right(self, low, since, settled=earlier, **rest)

    return [(Groups, "regroup", wrong)]


def stale_chunk_counts_as_held() -> list[Patch]:
    """Sharded: a worker that is no holder of a chunk any more still reports its state."""
    return [(Chunks, "entered", lambda self, step: None)]


def unfilled_holder_owns() -> list[Patch]:
    """Sharded: a new holder is made the owner before it has the chunk's state."""
    right = ownership.reassigned

    def wrong(holders: Any, live: Any, filled: Any) -> Any:
        return tuple(row[::-1] for row in right(holders, live, filled))

    return [(ownership, "reassigned", wrong)]


def counts_without_every_slice() -> list[Patch]:
    """Shards: a parcel counts once the first shard has its slice."""

    def take(self: SliceCount, parcel: Any) -> Any:
        self._have.pop(parcel, None)
        return self._parcels.pop(parcel)

    return [
        (SliceCount, "_is_whole", lambda self, parcel: parcel in self._parcels),
        (SliceCount, "take", take),
    ]


def state_counts_without_every_slice() -> list[Patch]:
    """Shards: a joiner's state counts once its first shard has its part of it."""
    return [(SliceCount, "_has_state", lambda self, transfer: transfer in self._states)]


def slices_of_a_later_attempt_forgotten() -> list[Patch]:
    """Shards: slices of a step that is done again are dropped if they come before the order."""
    right = SliceCount.forget_before

    def wrong(self: SliceCount, step: int, attempt: Any) -> None:
        right(self, step, lambda step: 1 << 30)

    return [(SliceCount, "forget_before", wrong)]


def slices_never_forgotten() -> list[Patch]:
    """Shards: slices whose sender has died before the others came are kept for ever."""
    return [(SliceCount, "forget_before", lambda self, step, attempt: None)]


def end_of_a_shard_is_not_named() -> list[Patch]:
    """Shards: an agent does not pass on which shard it was that ended its worker."""
    right = NodeProcesses._spoke

    def wrong(self: NodeProcesses, event: Any) -> list[Any]:
        return [] if isinstance(event.report, ShardEnded) else right(self, event)

    return [(NodeProcesses, "_spoke", wrong)]


GROUP_MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    make.__name__: make
    for make in (
        counts_without_every_slice,
        state_counts_without_every_slice,
        slices_of_a_later_attempt_forgotten,
        slices_never_forgotten,
        end_of_a_shard_is_not_named,
    )
}
SHARD_MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    make.__name__: make
    for make in (
        lost_chunk_unnoticed,
        guard_makes_no_update,
        one_holder_of_a_sum_is_enough,
        sharded_update_before_its_seal,
        held_counts_in_every_round,
        fill_sent_a_step_early,
        new_map_for_a_step_that_is_summed,
        stale_chunk_counts_as_held,
        unfilled_holder_owns,
    )
}


def part_of_a_node_counts_for_two_rounds() -> list[Patch]:
    """What was added up on a node before a death is not added up again."""
    right = StepState.restart_reduce

    def wrong(self: StepState, round: int) -> None:
        gathered = dict(self.gathered)
        right(self, round)
        self.gathered.update(gathered)

    return [(StepState, "restart_reduce", wrong)]


NODE_MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    make.__name__: make for make in (part_of_a_node_counts_for_two_rounds,)
}
MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    make.__name__: make
    for make in (
        outbox_dropped_too_early,
        reduce_sealed_too_early,
        reduce_sums_two_rounds,
        stale_epoch_accepted,
        ledger_without_done_before,
        joiner_admitted_a_step_early,
        ghosts_dropped,
        attempts_not_counted,
        undo_forgotten,
        commit_forgotten,
        gradients_released_when_sent,
        sum_released_before_its_seal,
        mended_link_sends_nothing_again,
        group_kept_after_a_death,
        feed_ends_a_step_early,
        copy_counts_without_a_source,
    )
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Production code with one bug, until the block ends."""
    of_clusters = CLUSTER_MUTANTS | MEMORY_MUTANTS | TIMER_MUTANTS | CANCEL_MUTANTS
    all_of_them = MUTANTS | NODE_MUTANTS | SHARD_MUTANTS | GROUP_MUTANTS | of_clusters
    patches = all_of_them[name]()
    kept = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in patches]
    for owner, attribute, wrong in patches:
        setattr(owner, attribute, wrong)
    try:
        yield
    finally:
        for owner, attribute, right in kept:
            setattr(owner, attribute, right)
