"""Checkpoints on disk: which checkpoint a task starts from, and when the parts of a new one are a whole."""

from __future__ import annotations

from everstep.core.cluster.orders import Actions, Orders
from everstep.core.cluster.policy import CoordinatorPolicy
from everstep.core.cluster.task import Task, WrittenParts
from everstep.core.words import cluster_messages as msg
from everstep.core.words.moment import Moment


class Checkpoints:
    """Changes `task.checkpoints`, and nothing else of a task."""

    def __init__(self, *, orders: Orders, policy: CoordinatorPolicy) -> None:
        self._orders, self._policy = orders, policy

    def look(self, task: Task, because: str, now: Moment) -> Actions:
        """Each time on another node, where there are several: one may see what another does not."""
        known = task.checkpoints
        known.search_at = None
        known.search += 1
        nodes = sorted({seat.node for seat in task.seats.values()})
        order = msg.FindCheckpoint(task=task.name, job=task.job, known=known.newest, search=known.search)
        return self._orders.send(nodes[known.failed_searches % len(nodes)], order, because, now)

    def look_later(self, task: Task, now: Moment) -> float | None:
        """A search has failed: seconds until the next one, None if there were enough."""
        known, patience = task.checkpoints, self._policy.patience
        if known.failed_searches >= patience.checkpoint_retries:
            return None
        wait_s = min(patience.backoff_most_s, patience.backoff_s * 2.0**known.failed_searches)
        known.failed_searches += 1
        known.search_at = now.at + wait_s
        return wait_s

    def part_written(self, task: Task, event: msg.PartWritten, now: Moment) -> Actions:
        parts = task.checkpoints.parts
        if event.step not in parts or parts[event.step].attempt != event.attempt:
            parts[event.step] = WrittenParts(event.attempt)
        parts[event.step].add(event.stage, event.share, event.part)
        return self.commit(task, now)

    def commit(self, task: Task, now: Moment) -> Actions:
        """A checkpoint counts once all its parts are there and its step is on record."""
        actions: Actions = []
        recorded = task.recovery.recorded if task.recovery is not None else 0
        written = task.checkpoints.parts
        for step in sorted(step for step in written if step <= recorded):
            parts = written[step].whole(task.shape.stages)
            seats = [seat for seat in task.seats.values() if seat.incarnation]
            if parts is not None and seats:
                for older in [s for s in written if s <= step]:
                    del written[older]  # what is not whole by now never will be
                order = msg.CommitCheckpoint(task=task.name, step=step, parts=parts)
                because = f"every stage has written its part of step {step}"
                actions += self._orders.send(seats[0].node, order, because, now)
        return actions
