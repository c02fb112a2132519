"""What a member does between two ops, while its state is final: snapshots, checkpoints, copies in memory."""

from __future__ import annotations

from everstep.core.words.worker_messages import SaveCheckpoint, StoreCopy, WorkItem
from everstep.core.worker.joining import Feeder
from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.open_steps import OpenSteps
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import StepState


def next_chore(steps: OpenSteps, feeder: Feeder, mail: Mailbox, rules: TaskRules) -> WorkItem | None:
    if not steps.is_trusted:
        return None
    before = steps.before
    if (before is None or before.is_sealed) and (snapshot := feeder.next(steps.now.step - 1)) is not None:
        return snapshot
    return None if before is None else _save(before, mail, rules) or _store(before, mail, rules)


def _save(before: StepState, mail: Mailbox, rules: TaskRules) -> WorkItem | None:
    """This worker's share of the checkpoint, every few steps and after the last one. If a peer has died
    since, the shares are different ones.
    """
    every = rules.checkpoint_every
    if not every or (before.step % every and before.step != rules.steps):
        return None
    peers = mail.peers(before.step)
    if before.saved_among == peers:
        return None
    attempt = mail.order.attempt(before.step)
    return SaveCheckpoint(before.step, attempt, peers.index(mail.me.replica), len(peers))


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
