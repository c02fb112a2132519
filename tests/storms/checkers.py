"""What must hold, looked at from outside: nothing here is used by the system that is checked. Whether these
checks would see a bug is tried with mutants: decisions with a bug planted (`harness`).

exactly once     every sealed sum holds each microbatch once, computed from the right weights
one epoch        no two members work in different epochs
one owner        no place has two processes that the coordinator believes in
the right state  checkpoints, restored states and final states are those of a run without faults
in order         steps are recorded one after the other; after a restore from the restored one on
nothing twice    no op is run again on a worker that lives
no leak          what a worker keeps is bounded by the steps that can be open; of a chunk of optimizer states
                 two replicas keep a copy, and a third one only until it is filled
incidents close  once a worker runs an op of an epoch, the incidents before it are over
no false alarm   without a fault there is no incident and no restart; epochs begin with an update undone, or
                 with a worker whose node has joined late
no wrong sum     a wrong contribution is sealed only until the next step on which its machine was voted; then
                 the machine is named, no other is, and the steps since are done again
journal          replayed, it gives the state that the crash destroyed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.core.task.recovery import Recovery
from everstep.core.task.states import Running
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.worker_state import WorkerState
from everstep.protocol.actions import RecordStep
from everstep.protocol.ops import Worker
from everstep.protocol.work import Resume
from tests.storms.spec import Flip
from tests.storms.truth import Bag, Truth, VirtualState

MOST_STEPS_OF_THREE = 2


class Violation(Exception):
    """A storm has found a bug; one sentence says which invariant broke."""


class Checkers:
    def __init__(self, truth: Truth, rules: TaskRules, *, calm: bool) -> None:
        self.truth, self.rules, self.calm = truth, rules, calm
        self.recorded = 0
        self.last_attempt = 0
        self.num_sums = 0
        self._everyone = tuple(m for m, _ in truth.whole_sum)
        self.undone: set[int] = set()  # epochs that began with an eager update undone
        self._joined: dict[Worker, int] = {}  # the epoch of each one's first order to resume
        self._third_holders: dict[tuple[int, int, int], int] = {}  # epoch, stage, chunk -> recorded steps
        self.resumed_in_epoch = 0  # the last epoch in which a worker is known to have run an op
        total = rules.total_microbatches
        self.bad: Flip | None = None  # a machine that computes wrong numbers
        self.bad_at: tuple[int, frozenset[int]] | None = None  # its node and slots
        self.bad_ended = False  # its process is gone
        self.was_alone = False  # in its stage: its steps could not be voted on, nor their states
        self.spoiled: set[int] = set()  # steps that were sealed with a wrong contribution, as they are now
        self.most_payloads = 8 * total + 8 * rules.replicas + 8 * rules.stages + 16

    def sum_used(self, worker: Worker, step: int, bag: Bag) -> None:
        self.num_sums += 1
        if self.bad is not None:
            self.sum_is_whole(worker, step, bag)
            if bag != self.truth.whole_sum:
                self.spoiled.add(step)
            else:
                self.spoiled.discard(step)
            return
        if bag != self.truth.whole_sum:
            raise Violation(
                f"exactly once: the sum of step {step} at {worker} holds {_count(bag)}, "
                f"not each of {len(self.truth.whole_sum)} microbatches once from the right weights"
            )

    def sum_is_whole(self, worker: Worker, step: int, bag: Bag) -> None:
        """Each microbatch once; whether from the right weights is not known yet."""
        if tuple(m for m, _ in bag) != self._everyone:
            raise Violation(f"exactly once: the sum of step {step} at {worker} holds {_count(bag)}")

    def gradients_used(self, worker: Worker, step: int, released: int) -> None:
        if step == released:
            raise Violation(f"ownership: {worker} uses its gradients of step {step}, which are released")

    def sum_is_as_reduced(self, worker: Worker, step: int, combined: bool) -> None:
        """What peers send each other before a step is sealed is the sum as it was reduced."""
        if combined:
            raise Violation(
                f"ownership: the sum of step {step} changed on its way to {worker}: it is combined"
            )

    def sum_is_combined(self, worker: Worker, step: int, combined: bool) -> None:
        if combined != self.rules.is_tied(worker.stage):
            raise Violation(
                f"ownership: {worker} applies step {step} {'with' if combined else 'without'} a half"
            )

    def divisor(self, worker: Worker, step: int, weight: float) -> None:
        if weight != self.truth.weight(step):
            raise Violation(f"exactly once: {worker} divides the sum of step {step} by another weight")

    def sums_agree(self, worker: Worker, step: int, one: Bag, other: Bag) -> None:
        if one != other:
            raise Violation(f"exactly once: two owners of step {step} at {worker} summed different things")

    def state_saved(self, worker: Worker, step: int, state: VirtualState) -> None:
        if self.bad is None and state != self.truth.states[step]:
            raise Violation(f"the right state: {worker} saves another state of step {step}")

    def state_restored(self, worker: Worker, step: int, state: VirtualState | None) -> None:
        if self.bad is None and state != self.truth.states[step]:
            raise Violation(f"the right state: {worker} restores a checkpoint of step {step} that is not it")

    def ordered(self, worker: Worker, resume: Resume) -> None:
        self._joined.setdefault(worker, resume.epoch)

    def resumed(self, me: Worker, resume: Resume, others: Iterable[tuple[Worker, WorkerState]]) -> None:
        epoch = resume.epoch
        if resume.rewind is not None:
            self.undone.add(epoch)
        for worker, other in others:
            if not other.paused and not other.joining and other.epoch != epoch:
                raise Violation(
                    f"one epoch: {me} goes on in epoch {epoch} while {worker} works in {other.epoch}"
                )

    def kept(self, worker: Worker, num_payloads: int, num_stashes: int) -> None:
        """What a worker keeps as it closes a step; `num_stashes`: of that step and earlier ones."""
        if num_stashes:
            raise Violation(f"no leak: {worker} keeps {num_stashes} stashes of a step that is closed")
        if num_payloads > self.most_payloads:
            raise Violation(f"no leak: {worker} keeps {num_payloads} payloads")

    def step_recorded(self, action: RecordStep) -> None:
        total = self.rules.total_microbatches
        if action.microbatches_committed != total:
            raise Violation(f"exactly once: step {action.step} counts {action.microbatches_committed}")
        if action.replayed_elsewhere:
            raise Violation(f"nothing twice: step {action.step} ran {action.replayed_elsewhere} ops again")
        if action.step != self.recorded + 1 and action.attempt <= self.last_attempt:
            raise Violation(f"in order: step {action.step} is recorded after step {self.recorded}")
        self.recorded, self.last_attempt = action.step, action.attempt

    def voters_counted(self, recovery: Recovery) -> None:
        """At a recorded step."""
        if self.bad is not None and recovery.members:
            self.was_alone |= any(len(row.live[self.bad.worker.stage]) < 2 for row in recovery.members)

    def chunks_held(self, recovery: Recovery, workers: Mapping[Worker, WorkerState]) -> None:
        """At a recorded step. Letting a third holder go takes a report and a new epoch; while one begins, the
        workers go on, for as many steps as messages take.
        """
        for stage, rows in enumerate(recovery.members[-1].holders if recovery.members else ()):
            for chunk, row in enumerate(rows):
                if len(row) > 3:
                    raise Violation(f"no leak: chunk {chunk} of stage {stage} has {len(row)} holders")
                here = [workers.get(Worker(replica, stage)) for replica in row]
                filled = len(row) == 3 and all(w is not None and chunk in w.chunks.kept for w in here)
                place = (recovery.epoch, stage, chunk)
                stays = filled and isinstance(recovery.phase, Running)
                self._third_holders[place] = self._third_holders.get(place, 0) + 1 if stays else 0
                if self._third_holders[place] > MOST_STEPS_OF_THREE:
                    raise Violation(f"no leak: chunk {chunk} of stage {stage} keeps its three holders {row}")

    def journal_replayed(self, before: str, after: str) -> None:
        if before != after:
            raise Violation(f"journal: replay gives another state\n  was {before}\n  is  {after}")

    def at_the_end(
        self, recovery: Recovery, workers: Mapping[Worker, tuple[WorkerState, VirtualState]]
    ) -> None:
        steps = self.rules.steps
        if self.recorded != steps:
            raise Violation(f"in order: the task ends with step {self.recorded} on record, not {steps}")
        if self.bad is not None:
            self._was_noticed(recovery, self.bad)
        for worker, (worker_state, state) in workers.items():
            at_the_end = not worker_state.joining and worker_state.now.step == steps + 1
            if at_the_end and state != self.truth.states[steps]:
                raise Violation(f"the right state: {worker} ends with another state")
        for incident in recovery.incidents:
            if incident.resumed_at is None and self.resumed_in_epoch == recovery.epoch:
                raise Violation(f"incidents close: number {incident.number} ({incident.what}) is open")
        if self.calm and (recovery.incidents or max(recovery.restarts.values()) > 1):
            raise Violation(f"no false alarm: {recovery.incidents} in a calm run")
        explained = self.undone | {epoch for epoch in self._joined.values() if epoch > 1}
        if self.calm and recovery.epoch != 1 + len(explained):
            raise Violation(
                f"no false alarm: epoch {recovery.epoch}, of which {len(explained)} are explained"
            )

    def _was_noticed(self, recovery: Recovery, bad: Flip) -> None:
        """Was the bad machine named, and are the steps that it had spoiled done again? If it was not named:
        it spoiled nothing, its process ended before a vote on it was complete, or none was since. Where a
        stage had one worker, states were kept that no peer could check.
        """
        named = [i for i in recovery.incidents if any(e.source == "votes" for e in i.evidence)]
        for incident in named:
            if len(incident.workers) == 1 and incident.workers != [bad.worker]:
                raise Violation(f"the right machine: {incident.workers[0]} is named, {bad.worker} is wrong")
        told = any(len(incident.workers) > 1 for incident in named)  # two replicas are left: it is undecided
        if told or not self.spoiled or self.was_alone:
            return
        first = min(self.spoiled)
        if named:
            raise Violation(f"no wrong sum: {bad.worker} was named, and step {first} holds what it made")
        if not self.bad_ended and recovery.verified > first:
            raise Violation(
                f"no wrong sum: {bad.worker} has spoiled step {first}, and {recovery.verified} is verified"
            )


def _count(bag: Bag) -> str:
    wrong = sum(1 for _, right in bag if not right)
    return f"{len(bag)} ({len({m for m, _ in bag})} distinct, {wrong} from wrong weights)"
