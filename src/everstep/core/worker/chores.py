"""What a member does between two ops, while its state is final: snapshots, checkpoints, copies in memory."""

from __future__ import annotations

from everstep.core.worker.chunks import Chunks
from everstep.core.worker.joining import Feeder
from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.open_steps import OpenSteps
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import StepState
from everstep.protocol.work import SaveCheckpoint, StoreCopy, WorkItem


def next_chore(
    steps: OpenSteps, feeder: Feeder, mail: Mailbox, rules: TaskRules, chunks: Chunks
) -> WorkItem | None:
    if not steps.is_trusted:
        return None
    before = steps.before
    if (before is None or before.is_sealed) and (snapshot := feeder.next(steps.now.step - 1)) is not None:
        return snapshot
    if rules.chunks and before is not None:
        return _save_chunks(before, mail, rules, chunks) or _store_chunks(before, mail, rules, chunks)
    return None if before is None else _save(before, mail, rules) or _store(before, mail, rules)


def _save(before: StepState, mail: Mailbox, rules: TaskRules) -> WorkItem | None:
    """This worker's share of the checkpoint, every few steps and after the last one, also where
    a task ends early. If a peer has died since, the shares are different ones.
    """
    last = _last_saved(mail, rules)
    if not _is_saved(before.step, last, rules):
        return None
    peers = mail.peers(before.step)
    if before.saved_among == peers:
        return None
    attempt, is_last = mail.order.attempt(before.step), before.step == last
    return SaveCheckpoint(before.step, attempt, peers.index(mail.me.replica), len(peers), last=is_last)


def _last_saved(mail: Mailbox, rules: TaskRules) -> int:
    """The last step whose state is a checkpoint."""
    return mail.order.until if mail.order.saves and mail.order.until else rules.steps - rules.closes


def _is_saved(step: int, last: int, rules: TaskRules) -> bool:
    """Is the state after this step a checkpoint?"""
    every = rules.checkpoint_every
    return bool(every) and step <= last and (step % every == 0 or step == last)


def _save_chunks(before: StepState, mail: Mailbox, rules: TaskRules, chunks: Chunks) -> SaveCheckpoint | None:
    """Sharded: the chunks that it owns. A new owner writes what the old one may not have written."""
    last = _last_saved(mail, rules)
    if not _is_saved(before.step, last, rules):
        return None
    due = _due(before, chunks, before.saved_chunks)
    attempt, is_last = mail.order.attempt(before.step), before.step == last
    return SaveCheckpoint(before.step, attempt, count=rules.chunks, chunks=due, last=is_last) if due else None


def _store_chunks(before: StepState, mail: Mailbox, rules: TaskRules, chunks: Chunks) -> StoreCopy | None:
    leaving, every = before.step == mail.order.until, rules.copy_every
    if not leaving and not (every and before.step % every == 0):
        return None
    due = _due(before, chunks, before.stored_chunks)
    return StoreCopy(before.step, mail.order.attempt(before.step), leaving, due) if due else None


def _due(before: StepState, chunks: Chunks, done: set[int]) -> tuple[int, ...]:
    owned = chunks.owned(before.step + 1)
    return tuple(c for c in owned if c not in done and chunks.kept.get(c) == before.step)


def _store(before: StepState, mail: Mailbox, rules: TaskRules) -> WorkItem | None:
    """A copy in memory that outlives this worker: from one worker per stage every few steps, and from every
    worker after the last step of a shape.
    """
    leaving = before.step == mail.order.until
    every = rules.copy_every
    due = leaving or (every and before.step % every == 0 and mail.is_first_peer(before.step))
    if not due or before.is_stored:
        return None
    return StoreCopy(before.step, mail.order.attempt(before.step), leaving)
