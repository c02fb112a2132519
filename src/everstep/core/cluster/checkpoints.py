"""Checkpoints on disk: the one that a task starts from, when the parts of a new one are a whole, and what
follows when one cannot be saved.

    part written by every stage ──► CommitCheckpoint ──► committed
    a part, or the commit, fails ──► DiscardPartial, an incident; training goes on
                                     closed by the next state that is saved

A task that ends waits for the commit that is under way: "finished" means that its last state is saved, or
that an incident says why it is not.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.core.cluster.context import ClusterContext
from everstep.core.cluster.node import Node
from everstep.core.cluster.orders import Actions
from everstep.core.cluster.task import Task
from everstep.core.faults.severity import ErrorKind, Judgement, judge, known
from everstep.protocol import messages as msg
from everstep.protocol.incidents import SavesFail
from everstep.protocol.moment import Moment
from everstep.protocol.work import WrittenParts

NOT_SAVED = "its checkpoint cannot be saved"  # what an incident says
UNSAVED = "its last state is not saved"  # what a task that is over says
NOT_COPIED = "its state cannot be copied to memory"
MOST_FAILED_LOADS = 2  # of checkpoints that pass every check
MOST_BROKEN = 64  # steps whose late parts are still recognised
_KINDS = {
    msg.Unsaved.STORAGE_IS_SILENT: ErrorKind.REMOTE_STORAGE,
    msg.Unsaved.NO_MEMORY: ErrorKind.HOST_OUT_OF_MEMORY,
}


class Checkpoints:
    """Changes `task.checkpoints`, and nothing else of a task."""

    def __init__(self, context: ClusterContext) -> None:
        self._orders, self._incidents = context.orders, context.incidents
        self._policy, self._later = context.policy, context.later

    # -------------------------------------------------------------- where to start

    def look(self, task: Task, because: str, now: Moment, *, live: bool = False) -> Actions:
        """Each time on another node, where there are several: one may see what another does not. `live`: the
        task goes back, and does not wait for the answer without end.
        """
        known = task.checkpoints
        known.search_at = now.at + self._policy.patience.look_s if live else None
        known.searched_at = None if live else now.at
        known.search += 1
        nodes = sorted({seat.node for seat in task.seats.values()})
        known.searcher = nodes[known.failed_searches % len(nodes)]
        order = msg.FindCheckpoint(
            task=task.name,
            needs=task.request.needs,
            known=known.newest,
            search=known.search,
            verify=known.failed_loads > 0,
            run=msg.run_of(task.request.secret),
            live=live,
            owner=task.request.owner,
        )
        return self._orders.send(known.searcher, order, because, now)

    def look_later(self, task: Task, now: Moment) -> float | None:
        """A search has failed: seconds until the next one, None if there were enough."""
        known, patience = task.checkpoints, self._policy.patience
        if known.failed_searches >= patience.checkpoint_retries:
            return None
        wait_s = min(patience.backoff_most_s, patience.backoff_s * 2.0**known.failed_searches)
        known.failed_searches += 1
        known.search_at = now.at + wait_s
        return wait_s

    def load_failed(self, task: Task) -> bool:
        """A worker could not read the checkpoint that all were to load. The next search reads all its bytes,
        and takes an older one if they are damaged. False: that did not help before.
        """
        task.checkpoints.failed_loads += 1
        return task.checkpoints.failed_loads <= MOST_FAILED_LOADS

    # -------------------------------------------------------------- saving

    def part_written(self, task: Task, event: msg.PartWritten, node: str, now: Moment) -> Actions:
        known = task.checkpoints
        if known.broken.get(event.step) == event.attempt:  # a peer failed: this part is of no use
            return self._discard(task, event.step, node, now)
        if event.step not in known.parts or known.parts[event.step].attempt != event.attempt:
            known.parts[event.step] = WrittenParts(event.attempt)
        known.parts[event.step].add(event.stage, event.share, event.part)
        return self.commit(task, now)

    def commit(self, task: Task, now: Moment) -> Actions:
        """A checkpoint counts once all its parts are there and its step is on record; where peers vote, once
        they have compared the states that it was written from.
        """
        actions: Actions = []
        written, recorded, recovery = task.checkpoints.parts, _recorded(task), task.managed
        for step in sorted(step for step in written if step <= recorded):
            if recovery is not None and not recovery.is_state_verified(step):
                continue
            parts = written[step].whole(task.shape.stages)
            seats = [seat for seat in task.seats.values() if seat.incarnation]
            if parts is not None and seats:
                attempt = written[step].attempt
                for older in [s for s in written if s <= step]:
                    del written[older]  # what is not whole by now never will be
                loss = task.progress.losses.get(step)
                held = task.progress.held
                order = msg.CommitCheckpoint(
                    task=task.name,
                    step=step,
                    parts=parts,
                    attempt=attempt,
                    loss=loss,
                    last=step == task.steps or (held is not None and held.step == step),
                )
                because = f"every stage has written its part of step {step}"
                task.checkpoints.committing[step] = seats[0].node
                task.checkpoints.commit_asked_at[step] = now.at
                actions += self._orders.send(seats[0].node, order, because, now)
        return actions

    def committed(self, task: Task, step: int, now: Moment) -> Actions:
        """It is a checkpoint now; unless the task went back behind it while it was committed."""
        known = task.checkpoints
        for old in [*(s for s in known.committing if s < step), step]:  # also without an order
            self._answered(task, old)
        if step > _recorded(task):
            known.ahead = max(known.ahead, step)
            return []
        for old in [s for s in known.parts if s <= step]:
            del known.parts[old]
        known.newest, known.failed_loads = max(known.newest, step), 0
        for old in [s for s in known.broken if s <= step]:
            del known.broken[old]
        if known.broken:
            return []  # it was late: a newer one has failed meanwhile
        known.failing = ""
        return self._over(task, SavesFail(in_memory=False), f"the checkpoint of step {step} is saved", now)

    def copied(self, task: Task, step: int, now: Moment) -> Actions:
        """A whole copy of this step is in the memory of nodes."""
        if step <= task.checkpoints.uncopied:
            return []  # it was late: a newer one has failed meanwhile
        return self._over(
            task, SavesFail(in_memory=True), f"a copy of the state of step {step} is in memory", now
        )

    # -------------------------------------------------------------- what could not be saved

    def failed(self, task: Task, report: msg.SaveFailed, node: str, now: Moment) -> Actions:
        """Training goes on; what was written makes room, and the next save may succeed."""
        known = task.checkpoints
        known.num_failed += 1
        self._tell(task, report, now)
        if report.memory_of is not None:
            known.uncopied, known.uncopied_because = report.step, report.because
            return []
        if report.step >= max(known.broken, default=0):
            known.failing = report.because
        self._answered(task, report.step)
        known.parts.pop(report.step, None)
        known.broken.pop(report.step, None)
        known.broken[report.step] = report.attempt
        while len(known.broken) > MOST_BROKEN:
            del known.broken[next(iter(known.broken))]  # the oldest: a task may have gone back
        return self._discard(task, report.step, node, now)

    def doubt(self, task: Task, because: str, now: Moment) -> Actions:
        """A worker had wrong numbers: what is written and not committed may hold them."""
        known, actions = task.checkpoints, list[msg.ClusterAction]()
        for step, written in list(known.parts.items()):
            known.broken[step] = written.attempt
            del known.parts[step]
            node = min((seat.node for seat in task.seats.values()), default=None)
            if node is not None:
                actions += self._discard(task, step, node, now)
        return actions

    def node_lost(self, task: Task, node: str, now: Moment) -> None:
        """The commits it had in hand have no answer."""
        for step in [s for s, where in task.checkpoints.committing.items() if where == node]:
            self._commit_lost(
                task, step, f"node {node} was lost while it committed the checkpoint of step {step}", now
            )

    def time_passed(self, task: Task, now: Moment) -> None:
        """Storage that hangs costs a save, not the end of the task. If the node commits it after all, it
        counts then.
        """
        known, limit_s = task.checkpoints, self._policy.patience.disk_answer_s
        for step in [s for s, asked_at in known.commit_asked_at.items() if asked_at + limit_s <= now.at]:
            node = known.committing[step]
            because = f"node {node} has not committed step {step} within {limit_s:.0f} s"
            self._commit_lost(task, step, because, now, reason=msg.Unsaved.STORAGE_IS_SILENT)

    def _commit_lost(
        self,
        task: Task,
        step: int,
        because: str,
        now: Moment,
        *,
        reason: msg.Unsaved = msg.Unsaved.UNKNOWN,
    ) -> None:
        self._answered(task, step)
        task.checkpoints.num_failed += 1
        task.checkpoints.failing = because
        task.checkpoints.broken.setdefault(step, -1)
        failed = msg.SaveFailed(task=task.name, step=step, attempt=0, because=because, reason=reason)
        self._tell(task, failed, now)

    def _answered(self, task: Task, step: int) -> None:
        """No node commits this step: a task that ends need not wait for it."""
        task.checkpoints.committing.pop(step, None)
        task.checkpoints.commit_asked_at.pop(step, None)
        self._later.vacated.append(task)

    def clean(self, task: Task, nodes: Iterable[Node], now: Moment) -> Actions:
        """The task is over: nothing that is half written will be complete."""
        there = [node.name for node in nodes if task.name in node.opened and node.reachable]
        if not task.request.has_checkpoints or not there:
            return []
        order = msg.DiscardPartial(task=task.name, step=task.steps + 1)
        return self._orders.send(min(there), order, "the task is over", now)

    def _discard(self, task: Task, step: int, node: str, now: Moment) -> Actions:
        known = task.checkpoints
        order = msg.DiscardPartial(task=task.name, step=step, keep=(*known.parts, *known.committing))
        return self._orders.send(node, order, f"the checkpoint of step {step} will not be complete", now)

    def _tell(self, task: Task, report: msg.SaveFailed, now: Moment) -> None:
        """One incident for a disk that stays full, however many saves fail."""
        subject = SavesFail(in_memory=report.memory_of is not None)
        incident = self._incidents.about(task, subject)
        if incident is None:
            what = NOT_COPIED if subject.in_memory else NOT_SAVED
            incident = self._incidents.new(task=task, what=what, now=now, step=report.step)
            incident.stops_training, incident.subject = False, subject
        where = "disk" if report.memory_of is None else f"the memory of node {report.memory_of}"
        text = f"step {report.step}, {where}: {report.because}"
        if len(incident.evidence) < MOST_BROKEN:
            self._incidents.tell(incident, "exception", (text,), now)
        if incident.verdict is None:
            self._incidents.judge(incident, _judgement(report), now)
            because = f"training continues; protected up to step {task.protected}"
            self._incidents.treat(incident, "remove the incomplete files, save again later", because, now)

    def _over(self, task: Task, subject: SavesFail, outcome: str, now: Moment) -> Actions:
        incident = self._incidents.about(task, subject)
        return [] if incident is None else self._incidents.close(incident, outcome, now)


def _judgement(report: msg.SaveFailed) -> Judgement:
    """By its reason where there is one, else by the text of a disk, a store or a library."""
    if (kind := _KINDS.get(report.reason)) is not None:
        return known(kind, report.because)
    found = judge("exception", report.because)
    guessed = found.kind is ErrorKind.USER_CODE  # it is not the user's code that saves
    return known(ErrorKind.OTHER, report.because) if guessed else found


def _recorded(task: Task) -> int:
    """The last step on record; of a task that went back, the last that still counts."""
    return task.recovery.recorded if task.recovery is not None else task.progress.recorded
