"""Evidence about workers and nodes becomes a verdict (`faults.severity`) and a remedy (`faults.remedies`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from everstep.core.cluster.context import ClusterContext
from everstep.core.cluster.followups import FollowUps
from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeAdmin, NodeState
from everstep.core.cluster.nodes import Nodes
from everstep.core.cluster.orders import Actions
from everstep.core.cluster.staffing import Staffing
from everstep.core.cluster.task import BadLink, Seat, Task, TaskState
from everstep.core.cluster.training import Training
from everstep.core.faults import detector, gray, remedies, testimony
from everstep.core.faults.kinds import CORRECTED, DEATHS_OF_NODES, NEVER_OF_THE_INPUT, OF_HARDWARE
from everstep.core.faults.reachability import MANY, Pair, cut_off, pair_of
from everstep.core.faults.remedies import Effect
from everstep.core.faults.severity import ErrorKind, Judgement, Severity, Source, judge, known
from everstep.core.faults.symptoms import BUSY
from everstep.core.faults.testimony import HEARSAY
from everstep.core.faults.votes import Replay, VoteEnd, VoteVerdict, judge_replay, judge_votes
from everstep.core.task.states import Copying, Member
from everstep.errors import InternalError, clipped
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.incidents import Incident, OddNumbers, WorkerWaits, usual_sender
from everstep.protocol.moment import Moment
from everstep.protocol.ops import Worker

SHOWN_WITNESSES = 8
MOST_BAD_LINKS = 4096  # of a task; what is beyond says nothing new
MOST_PROBES = 3  # nodes that try a broken link from outside
PROBE_SETTLES = 3  # times as long as links have to settle, for nodes that try each other
MOST_STALLED = 8  # nodes that try each other, where all workers of a task wait
ALL_WORKERS = "all workers"  # what is retried when they all wait
AFTER_REPLAY = {  # what is done after a step that was the same again, and its outcome
    "skip": ("skip the batch", "step {step} changes no weight"),
    "pause": ("pause the task", "the task pauses after step {step}; an operator resumes it"),
}
# What is retried when no third worker can say which is right, and how often votes are.
STATES_DIFFER, UNDECIDED, MOST_UNDECIDED = "states differ", "undecided votes", 8


class Failures:
    """Changes `task.failures`."""

    def __init__(
        self, context: ClusterContext, *, training: Training, staffing: Staffing, nodes: Nodes
    ) -> None:
        self._roster, self._incidents, self._policy = context.roster, context.incidents, context.policy
        self._orders, self._later = context.orders, context.later
        self._training, self._staffing, self._nodes = training, staffing, nodes

    # -------------------------------------------------------------- a process is gone

    def raised(self, task: Task, event: ev.WorkerRaised, now: Moment) -> Actions:
        """Its exit follows; then it is judged. What two workers raise at one op fails the task as the input's
        fault, unless machines cause such an error: those workers are restarted or moved as after any fault.
        """
        task.failures.raised[event.worker] = replace(event, traceback="")
        if task.state is TaskState.RUNNING:
            self._incidents.suspect(task, event.worker, "exception", event.error, now)
        kind = self._judge_raised(task, event).kind
        if kind in NEVER_OF_THE_INPUT or BUSY.search(event.error):
            return []
        return self._training.inform(task, event, now)

    def unfit(self, task: Task, event: ev.WorkerStarted, error: str, now: Moment) -> Actions:
        """It has started and must not take part: as if it had said so itself, and ended."""
        worker, incarnation = event.worker, event.incarnation
        task.failures.unfit[worker] = incarnation
        raised = ev.WorkerRaised(worker=worker, incarnation=incarnation, error=error, where="", traceback="")
        return [*self.raised(task, raised, now), *self._staffing.kill(task, worker, error, now)]

    def exited(self, task: Task, event: ev.WorkerExited, now: Moment) -> Actions:
        worker, seat = event.worker, task.seats[event.worker]
        task.failures.overdue.drop(worker)
        lived_s = task.starts.lived_s(worker, now.at)
        task.starts.forget(worker)
        if event.stuck:
            return self._slot_lost(task, event, seat, now)
        is_over = task.recovery is None or task.state is not TaskState.RUNNING or bool(seat.leaving)
        if is_over:
            self._roster.unseat(task, worker)
            return self._staffing.gone(task, [(worker, seat, seat.leaving or event.reason)], now)
        raised = task.failures.raised.get(worker)
        said = raised is not None and raised.incarnation == event.incarnation
        incident, judgement = self._judge_exit(task, event, now)
        # Where all were ended, no place is known to be at fault: it says nothing about this one's node.
        is_its_own = task.failures.ended.pop(worker, 0) != event.incarnation
        if is_its_own:
            incident.node = seat.node
        only_words = said and not self._is_confirmed(task, self._roster.nodes[seat.node], judgement, now)
        times, patience = task.failures.times, self._policy.patience
        times[worker] = remedies.recent(times.get(worker, []), now.at, patience)
        short_lives = task.failures.short_lives
        if is_its_own:
            times[worker].append(now.at)
            short_lives[worker] = 0 if lived_s >= patience.long_life_s else short_lives.get(worker, 0) + 1
        noted = is_its_own and judgement.kind in DEATHS_OF_NODES
        first = is_its_own and len(times[worker]) == 1
        actions = self._staffing.grant(task, now, clean=frozenset({worker})) if first else []
        seat.incarnation, seat.address = 0, None
        situation = self._situation(
            task,
            worker,
            judgement,
            failures=max(1, len(times[worker])),
            short_lives=short_lives.get(worker, 0),
        )
        if only_words:
            has_spare = self._roster.has_spare(len(seat.slots))  # else it is better off where it is
            situation = replace(situation, only_words=True, slots=seat.slots, can_leave_slots=has_spare)
        actions += self._treat(task, worker, incident, situation, now)
        actions += self._training.inform(task, event, now)
        return actions + (self.noted(self._roster.nodes[seat.node], gray.DEATH, now) if noted else [])

    def _slot_lost(self, task: Task, event: ev.WorkerExited, seat: Seat, now: Moment) -> Actions:
        """Its process cannot be ended, so its slots cannot be used: the worker goes to others."""
        node = self._roster.nodes[seat.node]
        node.lost_slots.update(seat.slots)
        self._roster.node_changed(node)
        incident = self._incidents.lost_slots(node.name, seat.slots, now)
        text = f"worker {event.worker} of {task.name}: {event.reason}"
        self._incidents.tell(incident, "exit", (text,), now)
        self._incidents.judge(incident, known(ErrorKind.UNKILLABLE, event.reason), now)
        because = "it can be used again when the process ends; a reboot of the node ends it"
        self._incidents.treat(incident, "use other slots", because, now)
        self._roster.unseat(task, event.worker)
        return self._staffing.gone(task, [(event.worker, seat, event.reason)], now)

    def slot_freed(self, node: Node, slot: int, now: Moment) -> Actions:
        """The process that held it has ended after all."""
        if slot not in node.lost_slots:
            return []
        node.lost_slots.discard(slot)
        self._roster.node_changed(node)
        self._later.slots_changed(f"slot {slot} of node {node.name} is free again")
        return self._incidents.slots_back(node, "the process has ended", now)

    def _judge_exit(self, task: Task, event: ev.WorkerExited, now: Moment) -> tuple[Incident, Judgement]:
        """What it raised, or what it was killed for, says more than how it ended."""
        worker = event.worker
        raised = task.failures.raised.pop(worker, None)
        if raised is not None and raised.incarnation == event.incarnation:
            incident = self._incidents.of_task(task.name).suspected(worker, raised.error, 0, now.at)
            judgement = self._judge_raised(task, raised)
        else:
            incident = self._incidents.suspect(task, worker, "exit", event.reason, now)
            judgement = judge("exit", event.reason)
        verdict, treated = incident.verdict, incident.remedies
        if verdict is None or not treated:
            self._incidents.judge(incident, judgement, now)
        elif self._was_ended_for(incident, worker):
            judgement = known(ErrorKind(verdict.kind), verdict.because)
        return incident, judgement

    def _judge_raised(self, task: Task, event: ev.WorkerRaised) -> Judgement:
        """What it raised; or why it was not let in. Sentences of our own are not read."""
        if task.failures.unfit.get(event.worker) == event.incarnation:
            return known(ErrorKind.MIXED_VERSIONS, event.error)
        if event.raised_for is ev.RaisedFor.DEVICE:
            return known(ErrorKind.CUDA, event.error)
        return judge("exception", event.error)

    def _is_confirmed(self, task: Task, node: Node, judgement: Judgement, now: Moment) -> bool:
        """A program speaks of broken hardware. Its words alone must not take a node from others: one bad job
        could take all of them. Two tasks that say so of one node are believed; so are the kernel and checks,
        which are reported on their own.
        """
        if judgement.kind not in OF_HARDWARE:
            return False
        accused, patience = node.accused, self._policy.patience
        for other in [name for name, at in accused.items() if not remedies.recent([at], now.at, patience)]:
            del accused[other]
        accused[task.name] = now.at
        return len(accused) > 1

    def _was_ended_for(self, incident: Incident, worker: Worker) -> bool:
        """Was this process ended to cure the incident? Not one that came after its node was lost."""
        restarted = incident.remedies[-1].what == remedies.name_of(Effect.RESTART)
        lost = incident.verdict is not None and incident.verdict.kind == ErrorKind.LOST_CONNECTION
        return restarted and incident.workers == [worker] and not lost

    # -------------------------------------------------------------- no progress

    def overdue(self, task: Task, report: msg.OpOverdue, now: Moment) -> Actions:
        if task.state is not TaskState.RUNNING:
            return []
        task.failures.overdue.put(report, now.at)
        if task.progress.held is not None and report.doing == detector.FINISHED and not report.unanswered_s:
            return []  # it holds a state until it is safe, and has nothing to do
        actions = self._nodes.witnessed(task, report.worker, now)
        places = task.recovery.places if task.recovery is not None else {}
        found = detector.locate(
            task.failures.overdue,
            is_member=lambda worker: isinstance(places.get(worker), Member),
            num_members=0 if task.recovery is None else task.recovery.num_members,
            limits=self._policy.limits,
        )
        match found:
            case detector.Hung():
                return actions + self._hung(task, found, now)
            case detector.Stalled():
                return actions + self._stalled(task, found.because, now)
            case None:
                return actions

    def _hung(self, task: Task, found: detector.Hung, now: Moment) -> Actions:
        worker, seat = found.worker, task.seats[found.worker]
        if not self._roster.is_heard(seat.node):
            return []  # the node is in doubt already
        incident = self._incidents.suspect(task, worker, "progress", found.because, now)
        incident.node = seat.node
        for witness in found.waiting[:SHOWN_WITNESSES]:
            report = task.failures.overdue[witness]
            what = f"worker {witness} has waited for {report.doing} for {report.elapsed_s:.2f} s"
            waits = WorkerWaits(
                worker=witness,
                awaits=report.doing,
                sender=usual_sender(report.doing),
                seconds=report.elapsed_s,
            )
            self._incidents.clear(incident, "progress", what, now, waits)
        judgement = known(ErrorKind.TASK_HANG, found.because)
        self._incidents.judge(incident, judgement, now)
        task.failures.overdue.clear()
        recent = remedies.recent(task.failures.times.get(worker, []), now.at, self._policy.patience)
        situation = self._situation(task, worker, judgement, is_alive=True, failures=len(recent) + 1)
        return self._treat(task, worker, incident, situation, now)

    def starts_late(self, task: Task, now: Moment) -> Actions:
        """Processes that hang before they report: in an import, in building layers, in opening a device."""
        actions: Actions = []
        starts = task.starts
        for worker in starts.late(now.at, self._policy.patience):
            waited_s = now.at - starts.under_way[worker]
            starts.ordered(worker, now.at)  # to be looked at again, whatever comes of it
            seat = task.seats.get(worker)
            # Processes that keep the ranks of a script do not say that they have started.
            reports = task.state is TaskState.RUNNING and task.managed is not None
            if seat is None or not seat.incarnation or not reports:
                del starts.under_way[worker]
            elif self._roster.is_heard(seat.node):  # else the node is in doubt already
                usual = f"; other workers of {task.name} took at most {starts.longest_s:.0f} s"
                because = f"worker {worker} has not started after {waited_s:.0f} s"
                actions += self._start_hung(task, worker, because + (usual if starts.longest_s else ""), now)
        return actions

    def copies_late(self, task: Task, now: Moment) -> Actions:
        """New workers that do not get the state of a peer: the link between them, or one of both, hangs."""
        actions: Actions = []
        starts = task.starts
        for worker in starts.late_copies(now.at, self._policy.patience):
            waited_s = now.at - starts.copying[worker]
            starts.copies(worker, now.at)  # to be looked at again, whatever comes of it
            place = None if task.managed is None else task.managed.places.get(worker)
            if not isinstance(place, Copying) or worker not in task.seats:
                del starts.copying[worker]
            elif self._roster.is_heard(task.seats[worker].node):  # else the node is in doubt already
                because = f"worker {worker} has not got the state of {place.source} after {waited_s:.0f} s"
                actions += self._start_hung(task, worker, because, now)
        return actions

    def _start_hung(self, task: Task, worker: Worker, because: str, now: Moment) -> Actions:
        incident = self._incidents.suspect(task, worker, "progress", because, now)
        incident.node = task.seats[worker].node
        judgement = known(ErrorKind.TASK_HANG, because)
        self._incidents.judge(incident, judgement, now)
        recent = remedies.recent(task.failures.times.get(worker, []), now.at, self._policy.patience)
        situation = self._situation(task, worker, judgement, is_alive=True, failures=len(recent) + 1)
        return self._treat(task, worker, incident, situation, now)

    def _stalled(self, task: Task, because: str, now: Moment) -> Actions:
        """What may be lost is sent again, and meanwhile nodes try to reach each other: a connection over a
        dead network ends after 10 s only, and not at all if it is opened again before that.
        """
        actions = self._probe_stalled(task, now)
        task.failures.overdue.clear()
        incident = self._incidents.new(task=task, what="all workers wait", now=now, step=task.next_step)
        self._incidents.tell(incident, "progress", (because,), now)
        judgement = known(ErrorKind.OTHER_NETWORK, because)
        self._incidents.judge(incident, judgement, now)
        retries = self._count_retry(task, ALL_WORKERS, now)
        situation = remedies.Situation(judgement=judgement, is_alive=True, retries=retries)
        return actions + self._treat(task, None, incident, situation, now)

    def _probe_stalled(self, task: Task, now: Moment) -> Actions:
        """The nodes of those that have waited longest, and of those that they wait for: who reaches whom?"""
        bad, seats, overdue = task.failures.links, task.seats, task.failures.overdue
        nodes: dict[str, None] = {}
        for report in sorted(overdue.values(), key=lambda one: (-one.elapsed_s, one.worker)):
            for worker in (report.worker, usual_sender(report.doing)):
                seat = None if worker is None else seats.get(worker)
                if seat is not None and self._roster.is_heard(seat.node):
                    nodes[seat.node] = None
        concerned = tuple(nodes)[:MOST_STALLED]
        if len(concerned) < 2:
            return []
        bad.forget_probes()
        bad.concerned = concerned
        bad.probed_until = bad.judge_at = now.at + PROBE_SETTLES * self._policy.patience.links_settle_s
        because = "all workers wait: can these nodes reach each other?"
        return self._ask_probes(task, concerned, [*concerned, *self._others(concerned)], because, now)

    # -------------------------------------------------------------- wrong numbers

    def differed(self, task: Task, event: ev.VoteDiffered, now: Moment) -> Actions:
        """Two workers have computed different bits; the checker waits for what is done about it."""
        recovery = task.managed
        if task.state is not TaskState.RUNNING or recovery is None or recovery.is_late(event):
            return []
        verdict = judge_votes(event)
        match verdict.finding:
            case VoteEnd.WRONG_NUMBERS:
                return self._wrong(task, event, verdict, ErrorKind.WRONG_NUMBERS, now)
            case VoteEnd.DAMAGED_INPUT if verdict.worker == event.host:
                return self._wrong(task, event, verdict, ErrorKind.DAMAGED_TENSOR, now)
            case VoteEnd.NOT_DETERMINISTIC:
                kind = ErrorKind.NOT_DETERMINISTIC
            case VoteEnd.DAMAGED_INPUT:
                kind = ErrorKind.DAMAGED_TENSOR
            case VoteEnd.UNDECIDED:
                kind = ErrorKind.WRONG_NUMBERS
        return self._nobody_goes(task, event, verdict, kind, now)

    def _wrong(
        self, task: Task, event: ev.VoteDiffered, verdict: VoteVerdict, kind: ErrorKind, now: Moment
    ) -> Actions:
        """This worker goes; its state is taken from the others. Recorded steps since the last vote may hold
        what it had computed: they are done again.
        """
        worker, recovery = verdict.worker, task.managed
        assert worker is not None
        assert recovery is not None
        seat = task.seats.get(worker)
        process = next(run.incarnation for run in event.runs if run.worker == worker)
        if seat is None or seat.incarnation != process:  # it is gone since, and its slot is another worker's
            return self._training.inform(task, ev.VotesSettled(because=verdict.because, go_on=True), now)
        incident = self._incidents.suspect(task, worker, "votes", verdict.because, now)
        incident.node, incident.step = seat.node, event.step
        self._write_votes(incident, event, verdict, now)
        doubtful = recovery.recorded - recovery.verified
        spread = task.shape.stages > 1 and verdict.has_spread
        judgement = known(kind, verdict.because)
        self._incidents.judge(incident, judgement, now)
        recent = remedies.recent(task.failures.times.get(worker, []), now.at, self._policy.patience)
        facts = {"is_alive": True, "failures": len(recent) + 1, "slots": seat.slots}
        can_leave = self._roster.can_do_without(seat.node, seat.slots)
        situation = self._situation(task, worker, judgement, can_leave_slots=can_leave, **facts)
        actions = self._treat(task, worker, incident, situation, now)
        used = "its contribution to this step is not used"
        if doubtful:
            first, last = recovery.verified + 1, recovery.recorded
            steps = f"step {last}" if first == last else f"steps {first} to {last}"
            used += f"; {steps} used others of it that no peer computed again, and are done again"
        if spread:
            used += "; other stages have used its outputs, so all go back to a kept state"
        self._incidents.tell(incident, "votes", (used,), now)
        return actions + self._training.doubted(task, verdict.because, now, back=bool(doubtful) or spread)

    def _nobody_goes(
        self, task: Task, event: ev.VoteDiffered, verdict: VoteVerdict, kind: ErrorKind, now: Moment
    ) -> Actions:
        """Nondeterministic code, or two workers of which neither can be said to be wrong."""
        what = f"{verdict.finding}: workers {event.host} and {event.worker} differ"
        incident = self._incidents.new(task=task, what=what, now=now, step=event.step)
        incident.workers = [event.host, event.worker]
        incident.stops_training = False
        self._incidents.tell(incident, "votes", (verdict.because,), now)
        self._write_votes(incident, event, verdict, now)
        self._incidents.judge(incident, known(kind, verdict.because), now)
        states_differ = event.microbatch is None and verdict.finding is VoteEnd.UNDECIDED
        if states_differ and self._count_retry(task, STATES_DIFFER, now) == 1:
            because = f"one of two states is wrong, and none tells which; {self._check_both(task, event)}"
            self._incidents.treat(incident, "go back to a kept state", because, now)
            actions = self._training.doubted(task, verdict.because, now, back=True)
            return actions + self._incidents.close(incident, "the task goes back to a kept state", now)
        if verdict.finding is VoteEnd.DAMAGED_INPUT:
            self._incidents.treat(incident, "none needed", "it was used for a check only", now)
            actions = self._incidents.close(incident, "the check is not repeated", now)
            return actions + self._training.inform(
                task, ev.VotesSettled(because=verdict.because, go_on=True), now
            )
        if verdict.finding is VoteEnd.NOT_DETERMINISTIC:
            parts = ", ".join(verdict.parts[:3])
            because = (
                f"make the code of {parts or 'the model'} give the same bits twice; then submit it again"
            )
            self._incidents.treat(incident, "stop the votes and continue", because, now)
        else:
            if task.shape.replicas > 2 and self._count_retry(task, UNDECIDED, now) <= MOST_UNDECIDED:
                self._incidents.treat(incident, "vote again", "a third worker may be there by then", now)
                actions = self._incidents.close(incident, "the next vote may tell", now)
                settled = ev.VotesSettled(because=verdict.because, go_on=True)
                return actions + self._training.inform(task, settled, now)
            because = f"{self._check_both(task, event)}; the votes stop"
            self._incidents.treat(incident, "none: an operator can help", because, now)
        return self._training.inform(task, ev.VotesSettled(because=verdict.because, go_on=False), now)

    def _check_both(self, task: Task, event: ev.VoteDiffered) -> str:
        nodes = sorted({task.seats[w].node for w in (event.host, event.worker) if w in task.seats})
        return f"it is one of {' and '.join(nodes)}: run `everstep check` on both"

    def _write_votes(
        self, incident: Incident, event: ev.VoteDiffered, verdict: VoteVerdict, now: Moment
    ) -> None:
        """The numbers: who computed what, in order."""
        found: dict[Worker, list[str]] = {}
        for run in event.runs:
            found.setdefault(run.worker, []).append(run.whole)
        texts = [f"worker {worker} found {', '.join(runs)}" for worker, runs in found.items()]
        if verdict.parts:
            texts.append(f"parts that differ: {', '.join(verdict.parts)}")
        self._incidents.tell(incident, "votes", texts, now)

    def suspected(self, task: Task, event: ev.StepSuspected, now: Moment) -> Actions:
        """A NaN, or a loss far above those before it: the step is computed again, then `_replayed` judges."""
        recovery = task.managed
        if task.state is not TaskState.RUNNING or recovery is None or recovery.is_late(event):
            return []
        actions: Actions = []
        for other in self._incidents.open_ones(task.name):
            if isinstance(other.subject, OddNumbers):  # its record is on its way, behind this report
                actions += self._incidents.close(other, "another step was suspected", now)
        step = event.found.step
        incident = self._incidents.new(task=task, what=f"the numbers of step {step}", now=now, step=step)
        incident.stops_training, incident.subject = False, OddNumbers(step=step)
        self._incidents.tell(incident, "numbers", (event.because,), now)
        worst = ", ".join(f"{microbatch} {loss:.4g}" for microbatch, loss in event.found.losses)
        if worst:
            self._incidents.tell(incident, "numbers", (f"largest losses by microbatch: {worst}",), now)
        again = "the step is computed again: the same bits, or others, tell the cause"
        self._incidents.tell(incident, "numbers", (again,), now)
        skips = not event.found.is_nan and task.request.on_spike == "skip"
        found = replace(event.found, skips=skips)
        return actions + self._training.inform(task, replace(event, found=found), now)

    def judge_replays(self, later: FollowUps, now: Moment) -> Actions:
        actions: Actions = []
        while later.replayed:
            task, record = later.replayed.pop(0)
            actions += self._replayed(task, record, later, now)
        return actions

    def _replayed(self, task: Task, record: act.RecordStep, later: FollowUps, now: Moment) -> Actions:
        """A suspected step is recorded: did it have the same numbers as the first time?"""
        suspect, recovery = record.suspect, task.managed
        incident = self._incidents.about(task, OddNumbers(step=record.step))
        if suspect is None or recovery is None or incident is None:
            return []  # it has been judged: the task went back, and it was skipped this time
        if judge_replay(record) is Replay.OTHER:
            because = f"step {record.step} has other numbers when it is computed again: {Replay.OTHER}"
            self._incidents.judge(incident, known(ErrorKind.WRONG_NUMBERS, because), now)
            nodes = sorted({seat.node for seat in task.seats.values()})[:SHOWN_WITNESSES]
            told = f"run `everstep check` on {', '.join(nodes)}; verify.votes finds who it is"
            self._incidents.treat(incident, "none: an operator can help", told, now)
            return self._incidents.close(incident, "the second run counts", now)
        kind = ErrorKind.NOT_FINITE if suspect.is_nan else ErrorKind.LOSS_SPIKE
        voted = "a second worker agrees" if recovery.verified >= record.step else "on the same workers"
        because = (
            f"step {record.step} has the same numbers when it is computed again ({voted}): {Replay.SAME}"
        )
        self._incidents.judge(incident, known(kind, because), now)
        rule = task.request.on_nan if suspect.is_nan else task.request.on_spike
        name = "verify.nan" if suspect.is_nan else "verify.spike"
        said = f'{name} = "{rule}"'
        what, outcome = AFTER_REPLAY[rule]
        self._incidents.treat(incident, what, said, now)
        quiet = ev.ReplayJudged(step=record.step)
        actions = self._incidents.close(incident, outcome.format(step=record.step), now)
        actions += self._training.inform(task, quiet, now)
        if rule == "pause":
            later.pauses.append((task, said))
        return actions

    # -------------------------------------------------------------- ranks of a script

    def ranks(
        self, task: Task, report: msg.RankFailed | msg.RanksStill | msg.RanksMoved, now: Moment
    ) -> Actions:
        """Ranks that fail or wait are witnesses against a node that is silent and has others of them."""
        actions: Actions = []
        if isinstance(report, msg.RanksMoved):
            task.failures.overdue.drop(report.worker)
        elif task.state is TaskState.RUNNING and not _is_cause(report):
            task.failures.overdue.put(_waiting(report), now.at)
            actions += self._nodes.witnessed(task, report.worker, now)
        return actions + self._training.inform(task, report, now)

    def judge_lives(self, later: FollowUps, now: Moment) -> Actions:
        """What ended a life of a script: its incident, and what follows for the node of the rank."""
        actions: Actions = []
        while later.failed_lives:
            task, failed = later.failed_lives.pop(0)
            actions += self._life_failed(task, failed, now)
        return actions

    def _life_failed(self, task: Task, failed: act.LifeFailed, now: Moment) -> Actions:
        worker, seat = failed.worker, None
        if worker is None:
            incident = self._incidents.new(task=task, what=failed.what, now=now, step=task.next_step)
        else:
            log, seat = self._incidents.of_task(task.name), task.seats.get(worker)
            incident = log.suspected(worker, failed.what, task.next_step, now.at)
        incident.what = failed.what
        incident.evidence_at = min(incident.evidence_at, now.at - failed.ago_s)
        self._incidents.tell(incident, failed.source, failed.evidence, now)
        source: Source = failed.source if failed.source in ("exception", "exit", "progress") else "log"  # type: ignore[assignment]
        judgement = judge(source, failed.text)
        if failed.finding:
            judgement = replace(judgement, because=failed.finding)
        incident.rank, incident.traceback = failed.rank, failed.traceback
        if judgement.kind not in HEARSAY:  # else the node that is the cause may not have fallen silent yet
            task.failures.overdue.clear()
        self._incidents.judge(incident, judgement, now)
        if failed.held_s is not None:
            incident.stops_training = True
            self._incidents.treat(incident, failed.remedy, failed.because, now)
            incident.plan(now.at, failed.life + 1)
            outcome = f"the replacement continues in the step; the others were held {failed.held_s:.2f} s"
            return self._incidents.close(incident, outcome, now, because=failed.because)
        if worker is None or seat is None or failed.is_over:
            self._incidents.treat(incident, failed.remedy, failed.because, now)
            return []
        incident.node = seat.node
        times, patience = task.failures.times, self._policy.patience
        times[worker] = [*remedies.recent(times.get(worker, []), now.at, patience), now.at]
        node = self._roster.nodes[seat.node]
        confirmed = self._is_confirmed(task, node, judgement, now)
        situation = self._situation(
            task, worker, judgement, failures=len(times[worker]), only_words=not confirmed
        )
        choice = remedies.choose(situation, patience)
        if choice.effect is Effect.ISOLATE:
            self._incidents.treat(incident, choice.what, choice.because, now)
            return self._nodes.isolate(node, judgement.because, now)
        self._incidents.treat(incident, failed.remedy, "the ranks of a script begin together", now)
        return self._nodes.ask_check(node, judgement.because, now) if judgement.kind in OF_HARDWARE else []

    # -------------------------------------------------------------- links and nodes

    def mended(self, task: Task, event: msg.LinkMended, now: Moment) -> Actions:
        """A connection between two live workers broke and was opened again."""
        if task.state is not TaskState.RUNNING or event.worker not in task.seats:
            return []
        link = f"{event.worker} - {event.peer}"
        bad = task.failures.links
        bad.links = [one for one in bad.links if (one.worker, one.peer) != (event.worker, event.peer)]
        retries = self._count_retry(task, link, now)
        why = f": {clipped(event.error)}" if event.error else ""
        text = f"connection reset between {event.worker} and {event.peer}{why}"
        incident = self._incidents.suspect(task, event.worker, "link", text, now)
        judgement = known(ErrorKind.CONNECTION_RESET, text)
        self._incidents.judge(incident, judgement, now)
        situation = self._situation(task, event.worker, judgement, is_alive=True, retries=retries)
        choice = remedies.choose(situation, self._policy.patience)
        if choice.effect is not Effect.RESEND:
            del task.failures.retries[link]
            return self._treat(task, event.worker, incident, situation, now)
        self._incidents.treat(incident, choice.what, choice.because, now)
        incident.stops_training = False
        outcome = "the link was opened again and what may be lost was sent again"
        actions = self._incidents.close(incident, outcome, now, because="the link works again")
        ends = {task.seats[w].node for w in (event.worker, event.peer) if w in task.seats}
        for name in sorted(ends) if len(ends) > 1 else ():
            actions += self.noted(self._roster.nodes[name], gray.MENDED, now)
        return actions

    def link_down(self, task: Task, event: msg.LinkDown, now: Moment) -> Actions:
        """A worker cannot reach another one. What several of them have in common is judged a little later:
        the first one to notice may be the one that is cut off, or not.
        """
        bad, seat, peer = task.failures.links, task.seats[event.worker], task.seats.get(event.peer)
        if task.state is not TaskState.RUNNING or peer is None or peer.address != event.address:
            return []
        one = BadLink(
            worker=event.worker,
            incarnation=seat.incarnation,
            peer=event.peer,
            peer_incarnation=peer.incarnation,
            error=event.error,
        )
        if one not in bad.links and len(bad.links) < MOST_BAD_LINKS:
            bad.links.append(one)
            bad.judge_at = bad.judge_at or now.at + self._policy.patience.links_settle_s
        return []

    def links_probed(self, node: Node, task: Task, report: msg.LinksProbed, now: Moment) -> Actions:
        bad, places = task.failures.links, {seat.node for seat in task.seats.values()}
        bad.probed[node.name] = tuple(name for name in report.unreached if name in places)
        bad.awaited.discard(node.name)
        settle_s = self._policy.patience.links_settle_s if bad.awaited else 0.0
        bad.judge_at = min(bad.judge_at or now.at + settle_s, now.at + settle_s)
        return []

    def links_due(self, task: Task, now: Moment) -> Actions:
        """Which node is cut off?"""
        bad = task.failures.links
        if bad.judge_at is None or bad.judge_at > now.at:
            return []
        bad.judge_at = None
        bad.links = [one for one in bad.links if self._still_counts(task, one)]
        pairs = self._bad_pairs(task)
        if not pairs:
            bad.forget_probes()
            bad.told.clear()
            return []
        actions: Actions = []
        mute: set[str] = set()
        for name in cut_off(pairs):
            others, spoken = _others_of(name, pairs), self._spoken(task)
            if len(others & spoken) >= MANY:
                actions += self._cut_off(task, name, pairs, now)
            else:
                mute |= others - spoken
        if mute:
            actions += self._ask_mute(task, mute, pairs, now)
        if bad.judge_at is not None:  # the mute ones have time to answer
            return actions
        if bad.concerned and bad.awaited and now.at < bad.probed_until:
            bad.judge_at = bad.probed_until
        elif bad.concerned:
            bad.forget_probes()
        elif len(pairs) == 1 and not bad.probed:
            actions += self._probe(task, pairs[0], now)
        return actions

    def _still_counts(self, task: Task, one: BadLink) -> bool:
        """Are both processes in their places, on nodes that are heard? Silent ones are judged as such. Those
        that were asked to go end their connections.
        """
        ends = ((one.worker, one.incarnation), (one.peer, one.peer_incarnation))
        seats = [task.seats.get(worker) for worker, _ in ends]
        return task.state is TaskState.RUNNING and all(
            seat is not None
            and seat.incarnation == incarnation
            and not seat.leaving
            and self._roster.is_heard(seat.node)
            for seat, (_, incarnation) in zip(seats, ends, strict=True)
        )

    def _bad_pairs(self, task: Task) -> list[Pair]:
        bad, seats = task.failures.links, task.seats
        found = {pair_of(seats[one.worker].node, seats[one.peer].node) for one in bad.links}
        concerned = {node for pair in found for node in pair} | set(bad.concerned)
        found |= {pair_of(node, other) for node, not_reached in bad.probed.items() for other in not_reached}
        return sorted(
            pair
            for pair in found
            if pair[0] != pair[1] and concerned & set(pair) and all(map(self._roster.is_heard, pair))
        )

    def _spoken(self, task: Task) -> set[str]:
        """The nodes that were heard after links broke: they report broken ones too, or have answered."""
        bad = task.failures.links
        return {task.seats[one.worker].node for one in bad.links} | (bad.probed.keys() - bad.awaited)

    def _ask_mute(self, task: Task, mute: set[str], pairs: list[Pair], now: Moment) -> Actions:
        """Only one end of these pairs speaks. If several nodes lose power at once, all that their broken
        links have in common is a healthy node, until their silence is noticed. So no node is accused before
        enough of those that it cannot reach were heard. One that does not answer is no witness.
        """
        bad, settle_s = task.failures.links, self._policy.patience.links_settle_s
        if asked := sorted(mute - bad.probed.keys()):
            bad.probed_until = now.at + PROBE_SETTLES * settle_s
        if now.at < bad.probed_until:
            bad.judge_at = now.at + settle_s
        concerned = sorted({node for pair in pairs if mute & set(pair) for node in pair})
        because = f"{_listed(asked)} cannot be reached: do they still answer?"
        return self._ask_probes(task, concerned, asked, because, now)

    def _cut_off(self, task: Task, name: str, pairs: list[Pair], now: Moment) -> Actions:
        node, bad = self._roster.nodes[name], task.failures.links
        if node.admin is not NodeAdmin.UP or name in bad.told:
            return []
        others = sorted(_others_of(name, pairs))
        because = f"{_listed(others)} cannot reach {name} on the data network, though its agent is heard"
        incident = self._incidents.new(
            task=task, what=f"node {name} is cut off from the data network", now=now, step=task.next_step
        )
        incident.node, incident.stops_training = name, False
        for one in bad.links[:SHOWN_WITNESSES]:
            ends = (task.seats[one.worker].node, task.seats[one.peer].node)
            if name in ends:
                error = f": {one.error}" if one.error else ""
                text = f"worker {one.worker} on {ends[0]} cannot reach {one.peer} on {ends[1]}{error}"
                self._incidents.tell(incident, "link", (text,), now)
        asked = [node for node, unreached in bad.probed.items() if name in unreached]
        for node_name in asked[:SHOWN_WITNESSES]:
            self._incidents.tell(incident, "link", (f"node {node_name} cannot connect to {name}",), now)
        judgement = known(ErrorKind.NIC, because)
        self._incidents.judge(incident, judgement, now)
        situation = remedies.Situation(
            judgement=judgement, node=name, can_leave_node=self._roster.can_do_without(name)
        )
        choice = remedies.choose(situation, self._policy.patience)
        if choice.effect is not Effect.ISOLATE:
            bad.told.add(name)
            advice = "repair its data network, or add a node that can take its workers"
            self._incidents.treat(incident, "none: an operator can help", advice, now)
            return self._incidents.close(incident, "no other node can take its workers", now)
        self._incidents.treat(incident, choice.what, choice.because, now)
        actions = self._nodes.isolate(node, because, now)
        return actions + self._incidents.close(incident, "the node is isolated, its workers move", now)

    def _probe(self, task: Task, pair: Pair, now: Moment) -> Actions:
        """Other nodes try the addresses of both ends; without others it stays open which end it is."""
        because = f"{pair[0]} and {pair[1]} cannot reach each other: which of them is it?"
        return self._ask_probes(task, pair, self._others(pair), because, now)

    def _others(self, concerned: Sequence[str]) -> list[str]:
        """One that is drained can answer, too: workers may just have moved from it to one that is cut off."""
        nodes = [n for n in self._roster.nodes.values() if n.name not in concerned]
        up = [n.name for n in nodes if n.state is NodeState.UP]
        return [*up, *(n.name for n in nodes if n.state is NodeState.DRAINING)][:MOST_PROBES]

    def _ask_probes(
        self, task: Task, concerned: Sequence[str], probers: Sequence[str], because: str, now: Moment
    ) -> Actions:
        """These nodes try to connect to workers on those that are concerned."""
        addresses = {
            seat.node: seat.address
            for seat in task.seats.values()
            if seat.node in concerned and seat.address is not None
        }
        bad = task.failures.links
        actions: Actions = []
        for name in probers:
            bad.probed[name] = ()
            bad.awaited.add(name)
            there = {node: address for node, address in addresses.items() if node != name}
            order = msg.ProbeLinks(task=task.name, addresses=there)
            actions += self._orders.send(name, order, because, now)
        return actions

    def kernel_spoke(self, node: Node, text: str, slots: tuple[int, ...], now: Moment) -> Actions:
        judgement = judge("kernel", text)
        if judgement.kind in CORRECTED:
            return self.noted(node, gray.CORRECTED, now)
        if judgement.severity is not Severity.SEV1 or node.admin is not NodeAdmin.UP:
            return []
        incident = self._incidents.new(task=None, what=f"node {node.name}: {text}", now=now)
        incident.node, incident.stops_training = node.name, False
        self._incidents.tell(incident, "kernel", (text, *self._roster.at_slots(node.name, slots)), now)
        self._incidents.judge(incident, judgement, now)
        situation = remedies.Situation(
            judgement=judgement,
            node=node.name,
            can_leave_node=self._roster.can_do_without(node.name),
            slots=slots,
            can_leave_slots=self._roster.can_do_without(node.name, slots),
        )
        choice = remedies.choose(situation, self._policy.patience)
        if choice.effect is Effect.ISOLATE_SLOT:
            self._incidents.treat(incident, choice.what, choice.because, now)
            actions = self._nodes.isolate_slots(node, slots, judgement.because, now)
            return actions + self._incidents.close(incident, "the slot is isolated", now)
        if choice.effect is Effect.ISOLATE:
            self._incidents.treat(incident, choice.what, choice.because, now)
            actions = self._nodes.isolate(node, judgement.because, now)
            return actions + self._incidents.close(incident, "the node is isolated", now)
        return self._incidents.close(incident, "no other node can take its workers: nothing is done", now)

    def noted(self, node: Node, kind: str, now: Moment) -> Actions:
        """What every node does now and then. One that does it more often than its peers is kept out."""
        lemon = self._nodes.noted(node, kind, now)
        if lemon is None or node.admin is not NodeAdmin.UP:
            return []
        what = f"node {node.name} fails more often than its peers"
        incident = self._incidents.new(task=None, what=what, now=now)
        incident.node, incident.stops_training = node.name, False
        self._incidents.tell(incident, "rates", (lemon.because,), now)
        self._incidents.judge(incident, known(ErrorKind.GRAY_FAILURE, lemon.because), now)
        if not self._roster.can_do_without(node.name):
            because = "no other node can take its workers"
            self._incidents.treat(incident, "none: an operator can help", because, now)
            return self._incidents.close(incident, because, now)
        because = f"fewer than {gray.FALSE_ALARMS:g} healthy nodes per week look like this"
        self._incidents.treat(incident, remedies.name_of(Effect.ISOLATE), because, now)
        actions = self._nodes.keep_out(node, lemon, now)
        return actions + self._incidents.close(incident, "the node is kept out until it is readmitted", now)

    def _count_retry(self, task: Task, what: str, now: Moment) -> int:
        retries = task.failures.retries
        retries[what] = [*remedies.recent(retries.get(what, []), now.at, self._policy.patience), now.at]
        return len(retries[what])

    # -------------------------------------------------------------- remedies

    def _situation(
        self, task: Task, worker: Worker, judgement: Judgement, **facts: Any
    ) -> remedies.Situation:
        seat = task.seats[worker]
        return remedies.Situation(
            judgement=judgement,
            node=seat.node,
            can_leave_node=self._roster.can_do_without(seat.node),
            **facts,
        )

    def _treat(
        self,
        task: Task,
        worker: Worker | None,
        incident: Incident,
        situation: remedies.Situation,
        now: Moment,
    ) -> Actions:
        """Choose a remedy and carry it out."""
        choice = remedies.choose(situation, self._policy.patience)
        last = incident.remedies[-1] if incident.remedies else None
        if last is None or last.outcome or not remedies.includes(last.what, choice):
            self._incidents.treat(incident, choice.what, choice.because, now)
        match choice.effect:
            case Effect.RESEND:
                stalled = ev.TrainingStalled(because=situation.judgement.because)
                return self._training.inform(task, stalled, now)
            case Effect.RESTART_ALL:
                return self._restart_all(task, incident, choice.because, now)
            case Effect.RESTART if worker is not None:
                return self._restart(task, worker, situation, choice, now)
            case Effect.ISOLATE | Effect.ISOLATE_SLOT if worker is not None:
                return self._isolate(task, worker, situation, choice, now)
        raise InternalError(f"{choice.what} is no remedy for {situation.judgement.kind}")

    def _restart(
        self,
        task: Task,
        worker: Worker,
        situation: remedies.Situation,
        choice: remedies.RemedyChoice,
        now: Moment,
    ) -> Actions:
        """Of a live process the end is ordered here; the start follows from its exit."""
        if situation.is_alive:
            return self._staffing.kill(task, worker, situation.judgement.because, now)
        if choice.wait_s:
            task.starts.not_before[worker] = now.at + choice.wait_s
        return []

    def _restart_all(self, task: Task, incident: Incident, because: str, now: Moment) -> Actions:
        """One incident for all their exits."""
        del task.failures.retries[ALL_WORKERS]
        actions: Actions = []
        for worker in [w for w, seat in task.seats.items() if seat.incarnation]:
            incident.workers.append(worker)
            task.failures.ended[worker] = task.seats[worker].incarnation
            actions += self._staffing.kill(task, worker, because, now)
        return actions

    def _isolate(
        self,
        task: Task,
        worker: Worker,
        situation: remedies.Situation,
        choice: remedies.RemedyChoice,
        now: Moment,
    ) -> Actions:
        actions: Actions = []
        if not situation.is_alive:
            self._roster.unseat(task, worker)
            actions += self._staffing.grant(task, now)
        because = "; ".join(filter(None, (situation.judgement.because, choice.refusals)))
        if choice.effect is Effect.ISOLATE_SLOT:
            node, only_words = self._roster.nodes[situation.node], situation.only_words
            if only_words:
                actions += self._nodes.ask_check(node, because, now)
            return actions + self._nodes.isolate_slots(
                node, situation.slots, because, now, counts=not only_words
            )
        return actions + self._nodes.isolate(self._roster.nodes[situation.node], because, now)


def _others_of(name: str, pairs: list[Pair]) -> set[str]:
    return {other for pair in pairs if name in pair for other in pair} - {name}


def _listed(names: list[str]) -> str:
    few = ", ".join(names[:SHOWN_WITNESSES])
    return few if len(names) <= SHOWN_WITNESSES else f"{few} and {len(names) - SHOWN_WITNESSES} others"


def _is_cause(report: msg.RankFailed | msg.RanksStill) -> bool:
    """It has failed by itself, and is no witness against another."""
    return isinstance(report, msg.RankFailed) and not testimony.of_report(report, 0.0).is_hearsay


def _waiting(report: msg.RankFailed | msg.RanksStill) -> msg.OpOverdue:
    """As the report of a worker that waits for another one; which one is not known."""
    return msg.OpOverdue(
        task=report.task,
        worker=report.worker,
        incarnation=report.incarnation,
        doing="ranks",
        busy=False,
        stopped=False,
        elapsed_s=report.still_s if isinstance(report, msg.RanksStill) else 0.0,
        expected_s=0.0,
        step=0,
    )
