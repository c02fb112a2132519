"""Who has stopped? Two detectors that look from outside, and never at the training path.

**Heartbeats** (coordinator). A node that says nothing for `patience_s` is *silent*, no more than that: a cut
between it and the coordinator looks the same as its death. It is given up only when others agree: its
workers' peers wait for them (see `Coordinator`), or for a long time no other node can speak for it.

**Progress** (agent). Each worker writes what it does into shared memory; the agent looks there a few times a
second. What an op should take comes from the worker's own reports. A worker can be

    working   its beacon moves on: whatever it is, it is not hung, only perhaps slow
    overdue   in one op for `overdue_factor` times its usual time: a suspicion. If its threads ran meanwhile,
              or stood in line for a CPU, it is slow or starved rather than hung, and gets ten times as long
    stopped   its beacon stands still and the kernel says at every look, for a second, that the process is
              stopped: evidence. Who looks at a worker with a debugger stops it for less
    waiting   for another worker, for longer than a usual step: never blamed, but a witness
    deaf      its beacon shows that it waits, and yet it takes no order: evidence

An agent that could not look for a while (a starved or frozen machine) has seen nothing: its workers could not
run either. What a pause between two looks is longer than `look_gap_s` counts for none of these times.

                     look: beacon moved ┌─────────┐
              ┌────────────────────────►│ working │◄──────────── moved again: WorkerMoved
              │                         └────┬────┘                        │
              │  stands still, busy, too long│ stands still, T for a second│   not busy, a step long
              │                         ┌────▼────┐   ┌─────────┐   ┌──────┴──┐
              └─────────────────────────┤ overdue │   │ stopped │   │ waiting │
                                        └─────────┘   └─────────┘   └─────────┘

**locate** (coordinator) joins what all agents of a task say. A hang needs two observations that agree: a
worker that is overdue by much, and a worker that waits; or many looks that find a worker stopped. A waiting
worker is never the culprit.
If all wait and none is busy, something was lost between them: that is no worker's fault.

Rejected: a limit on step time (Unicron's three iterations). It is blind to who, and at 100 s a step it is
blind for five minutes; an op of the same job lasts a second or two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from everstep.protocol.messages import AWAITS_STATE, LOADING, SAVING, OpOverdue, WorkerMoved
from everstep.protocol.ops import Worker
from everstep.protocol.work import Finished, Paused

# ------------------------------------------------------------------ heartbeats


class Heartbeats:
    """When was each node last heard?"""

    def __init__(self, *, patience_s: float) -> None:
        self.patience_s = patience_s
        self._heard: dict[str, float] = {}
        self._silent: set[str] = set()

    def heard(self, node: str, now: float) -> bool:
        """True: it was silent and is back."""
        self._heard[node] = now
        if node in self._silent:
            self._silent.discard(node)
            return True
        return False

    def keep_only(self, nodes: Collection[str]) -> None:
        """The others are not known any more."""
        self._heard = {node: at for node, at in self._heard.items() if node in nodes}
        self._silent.intersection_update(nodes)

    def fell_silent(self, now: float) -> list[tuple[str, float]]:
        """The nodes that have fallen silent since the last call, and for how long."""
        found = [
            (node, now - heard)
            for node, heard in self._heard.items()
            if now - heard > self.patience_s and node not in self._silent
        ]
        self._silent.update(node for node, _ in found)
        return found

    def excuse(self, now: float) -> None:
        """The listener itself was away, so no node is judged: each gets a new start."""
        for node in self._heard:
            if node not in self._silent:
                self._heard[node] = now

    def age_s(self, node: str, now: float) -> float | None:
        return now - self._heard[node] if node in self._heard else None


# ------------------------------------------------------------------ progress


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorLimits:
    overdue_factor: float = 4.0  # of an op's usual time: a suspicion
    overdue_floor_s: float = 0.15
    hang_factor: float = 12.0  # of an op's usual time: evidence, if another worker waits
    hang_floor_s: float = 1.0
    active_factor: float = 10.0  # times longer where the process was running, or starved of a CPU
    active_steps: float = 3.0  # or as long as so many usual steps, where another worker waits for it
    hang_alone_s: float = 60.0  # where no other worker could wait
    wait_factor: float = 1.0  # of a usual step
    wait_floor_s: float = 0.25
    stall_factor: float = 5.0  # of a usual step: everybody waits
    stall_floor_s: float = 3.0
    first_op_s: float = 120.0  # before an op's usual time is known
    begin_factor: float = 20.0  # of the longest time from an order to work to the first sign of it
    begin_floor_s: float = 20.0
    deaf_s: float = 5.0  # a worker that waits takes an order within milliseconds
    look_gap_s: float = 0.5  # between two looks; in a longer pause the observer itself did not run
    stopped_s: float = 1.0  # at every look its process is stopped: evidence
    gray_hour_s: float = 3600.0  # the hour in which rates of gray failures are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """One look at one worker. `moment` changes whenever it writes."""

    moment: int
    step: int
    busy: bool
    doing: str
    age_s: float  # since it last wrote


PASSES_OVER_S = 0.1
PAUSED = Paused.__name__
IDLE = (PAUSED, AWAITS_STATE)  # ordered to wait: no worker is at fault
FINISHED = Finished.__name__  # what a worker shows after its last step


class ProgressWatch:
    """One agent's view of its workers. `look` says what is worth a report; silence means all is well."""

    def __init__(self, limits: DetectorLimits) -> None:
        self.limits = limits
        self._seen: dict[tuple[str, Worker], _Seen] = {}

    def expects(self, task: str, worker: Worker, times: Mapping[str, float]) -> None:
        """A worker has reported how long ops take there."""
        self._of(task, worker).times = dict(times)

    def forget(self, task: str, worker: Worker) -> None:
        self._seen.pop((task, worker), None)

    def tell_again(self) -> None:
        """What was told may not have been heard."""
        for seen in self._seen.values():
            seen.reported_s, seen.reported_stopped, seen.reported_deaf_s = 0.0, False, 0.0

    def passes_over(self, glance: Glance) -> float:
        """For how long a worker that was seen so need not be looked at closely, if it keeps writing, stays in
        its step and is not stopped: nothing of that is worth a report.
        """
        quiet_s = min(PASSES_OVER_S, self.limits.overdue_floor_s, self.limits.wait_floor_s)
        return quiet_s if glance.age_s < quiet_s else 0.0

    def is_overdue(self, task: str, worker: Worker, glance: Glance) -> bool:
        """Is that worth a report, or one more?"""
        seen = self._of(task, worker)
        return self._is_longer(seen, glance.age_s, self._limit(seen, glance)[0])

    @staticmethod
    def _is_longer(seen: _Seen, age_s: float, limit_s: float) -> bool:
        return age_s > limit_s and age_s >= 2 * seen.reported_s  # again at twice the time

    def look(
        self,
        task: str,
        worker: Worker,
        incarnation: int,
        glance: Glance,
        *,
        stopped: bool,
        now: float,
        active_s: float = 0.0,
        unanswered_s: float = 0.0,
        shard: int | None = None,
    ) -> OpOverdue | WorkerMoved | None:
        seen = self._of(task, worker)
        moved = glance.moment != seen.moment
        stopped_s = seen.stopped_for(stopped, now, self.limits)
        unseen_s = seen.unseen_for(glance, now, self.limits)
        age_s = max(0.0, glance.age_s - unseen_s)
        seen.watch_step(glance, now)
        seen.moment = glance.moment
        if moved and not stopped:
            was, seen.reported_s, seen.reported_stopped = seen.reported_s > 0, 0.0, False
            seen.reported_deaf_s, seen.deaf_looks = 0.0, 0
            return WorkerMoved(task=task, worker=worker, incarnation=incarnation) if was else None
        limit, expected = self._limit(seen, glance)
        is_stopped = stopped_s >= self.limits.stopped_s
        news = is_stopped and not seen.reported_stopped
        waited_s = max(0.0, min(unanswered_s, glance.age_s) - unseen_s)
        deaf_s = seen.deaf_for(0.0 if glance.busy else waited_s, self.limits)
        if deaf_s > 2 * seen.reported_deaf_s:
            seen.reported_deaf_s, news = deaf_s, True
        if not news and not self._is_longer(seen, age_s, limit):
            return None
        seen.reported_s, seen.reported_stopped = max(age_s, 1e-3), is_stopped
        return OpOverdue(
            task=task,
            worker=worker,
            incarnation=incarnation,
            doing=glance.doing,
            busy=glance.busy,
            stopped=is_stopped,
            elapsed_s=age_s,
            expected_s=expected,
            step=glance.step,
            active_s=active_s,
            unanswered_s=deaf_s,
            shard=shard,
        )

    def _limit(self, seen: _Seen, glance: Glance) -> tuple[float, float]:
        """(overdue after, expected), in seconds."""
        limits = self.limits
        if glance.doing in (*IDLE, SAVING, LOADING):  # a slow disk is no hang
            return float("inf"), 0.0
        if not glance.busy:
            step = seen.step_s if seen.step_s is not None else limits.first_op_s
            return max(limits.wait_floor_s, limits.wait_factor * step), step
        expected = seen.times.get(_kind(glance.doing))
        if expected is None:
            return limits.first_op_s, limits.first_op_s
        return max(limits.overdue_floor_s, limits.overdue_factor * expected), expected

    def _of(self, task: str, worker: Worker) -> _Seen:
        return self._seen.setdefault((task, worker), _Seen({}))


@dataclass(slots=True)
class _Seen:
    times: dict[str, float]
    moment: int = -1
    reported_s: float = 0.0
    reported_stopped: bool = False
    stopped_since: float | None = None  # it was stopped at every look
    reported_deaf_s: float = 0.0
    deaf_looks: int = 0  # in a row
    step: int = 0
    step_at: float = 0.0
    step_s: float | None = None  # a usual step, smoothed
    looked_at: float | None = None
    unseen_s: float = 0.0  # since its beacon last moved: the time in which the agent could not look

    def unseen_for(self, glance: Glance, now: float, limits: DetectorLimits) -> float:
        """How much of the glance's age the agent has not seen. To be asked before `moment` is taken over."""
        gap_s = 0.0 if self.looked_at is None else now - self.looked_at
        missed_s = max(0.0, gap_s - limits.look_gap_s)
        self.looked_at = now
        before_s = self.unseen_s if glance.moment == self.moment else 0.0
        self.unseen_s = min(glance.age_s, before_s + missed_s)
        return self.unseen_s

    def stopped_for(self, stopped: bool, now: float, limits: DetectorLimits) -> float:
        """To be asked before `unseen_for`: what was between two looks that are far apart nobody knows."""
        is_seen = self.looked_at is not None and now - self.looked_at <= limits.look_gap_s
        if not stopped:
            self.stopped_since = None
        elif self.stopped_since is None or not is_seen:
            self.stopped_since = now
        return 0.0 if self.stopped_since is None else now - self.stopped_since

    def watch_step(self, glance: Glance, now: float) -> None:
        if glance.step == self.step + 1 and self.step > 0:
            took = now - self.step_at
            self.step_s = took if self.step_s is None else 0.7 * self.step_s + 0.3 * took
        if glance.step != self.step:
            self.step, self.step_at = glance.step, now

    def deaf_for(self, unanswered_s: float, limits: DetectorLimits) -> float:
        """Two looks in a row: after a pause of the agent itself, its first look can come before it has read
        that the order was taken.
        """
        self.deaf_looks = self.deaf_looks + 1 if unanswered_s > limits.deaf_s else 0
        return unanswered_s if self.deaf_looks >= 2 else 0.0


def _kind(doing: str) -> str:
    """'1F0.3' is an F."""
    return next((letter for letter in doing if letter.isalpha()), "")


# ------------------------------------------------------------------ who is it?


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    worker: Worker
    because: str
    waiting: tuple[Worker, ...]  # ruled out: they wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    because: str


@dataclass(slots=True, eq=False)
class OverdueReports(Mapping[Worker, OpOverdue]):
    """The last report of each worker of a task that is overdue or waits. When a pipeline stands still all its
    workers say so, so what `locate` asks for is counted as reports come and go.
    """

    reports: dict[Worker, OpOverdue] = field(default_factory=dict)
    heard_at: dict[Worker, float] = field(default_factory=dict)
    num_waiting: int = field(init=False, default=0)
    stopped: dict[Worker, OpOverdue] = field(init=False, default_factory=dict)
    unanswered: dict[Worker, OpOverdue] = field(init=False, default_factory=dict)
    _busy: list[tuple[float, int, Worker]] = field(init=False, default_factory=list)  # a heap
    _came: dict[Worker, int] = field(init=False, default_factory=dict)
    _num_came: int = field(init=False, default=0)
    _not_stalled: tuple[OpOverdue, OpOverdue] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        known, self.reports = self.reports, {}
        for worker, report in known.items():
            self.put(report, self.heard_at.get(worker, 0.0))

    def __getitem__(self, worker: Worker) -> OpOverdue:
        return self.reports[worker]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.reports)

    def __len__(self) -> int:
        return len(self.reports)

    def put(self, report: OpOverdue, now: float) -> None:
        worker = report.worker
        if worker in self.reports:
            self._uncount(worker)
        else:
            self._num_came += 1
            self._came[worker] = self._num_came
        self.reports[worker], self.heard_at[worker] = report, now
        self.num_waiting += _waits(report)
        if report.stopped:
            self.stopped[worker] = report
        if report.unanswered_s > 0:
            self.unanswered[worker] = report
        if report.busy:
            heappush(self._busy, (-_times_usual(report), self._came[worker], worker))
        if len(self._busy) > 2 * len(self.reports) + 64:  # most of it is out of date
            self._busy = [(-_times_usual(r), self._came[w], w) for w, r in self.reports.items() if r.busy]
            heapify(self._busy)

    def drop(self, worker: Worker) -> None:
        if worker in self.reports:
            self._uncount(worker)
            del self.reports[worker], self.heard_at[worker], self._came[worker]

    def clear(self) -> None:
        for worker in list(self.reports):
            self.drop(worker)

    def _uncount(self, worker: Worker) -> None:
        self.num_waiting -= _waits(self.reports[worker])
        self.stopped.pop(worker, None)
        self.unanswered.pop(worker, None)

    def waiting(self) -> tuple[Worker, ...]:
        return tuple(sorted(worker for worker, report in self.reports.items() if _waits(report)))

    def busiest(self) -> OpOverdue | None:
        """The one that has been in its op the most times as long as usual."""
        while self._busy:
            times, came, worker = self._busy[0]
            report = self.reports.get(worker)
            if (
                report is not None
                and report.busy
                and (-_times_usual(report), self._came[worker])
                == (
                    times,
                    came,
                )
            ):
                return report
            heappop(self._busy)
        return None

    def all_wait_too_long(
        self, is_member: Callable[[Worker], bool], members: int, limits: DetectorLimits
    ) -> bool:
        """Do all members wait, and each longer than any of them should? Two reports that say no are kept: as
        long as they stand, the others need not be looked at.
        """
        if not members or len(self.reports) < members:
            return False
        if self._not_stalled is not None and all(
            self.reports.get(one.worker) is one and is_member(one.worker) for one in self._not_stalled
        ):
            return False
        theirs = [report for worker, report in self.reports.items() if is_member(worker)]
        if len(theirs) < members:
            return False
        shortest = min(theirs, key=lambda report: report.elapsed_s)
        patient = max(theirs, key=lambda report: _stall_after(report, limits))
        stalled = shortest.elapsed_s >= _stall_after(patient, limits)
        self._not_stalled = None if stalled else (shortest, patient)
        return stalled


def _waits(report: OpOverdue) -> bool:
    return not report.busy and not report.stopped


def _times_usual(report: OpOverdue) -> float:
    return report.elapsed_s / max(report.expected_s, 1e-6)


def locate(
    overdue: OverdueReports,
    *,
    is_member: Callable[[Worker], bool],
    num_members: int,
    limits: DetectorLimits,
) -> Hung | Stalled | None:
    """What the overdue reports of one task add up to. Members are the workers that train. A joiner waits for
    a state, so how long it waits says nothing about them.
    """
    if overdue.stopped:
        worst, waiting = max(overdue.stopped.values(), key=lambda r: r.elapsed_s), overdue.waiting()
        return Hung(
            worker=worst.worker,
            because=f"the process of {_subject(worst)} is stopped, {_duration(worst.elapsed_s)} in "
            f"{worst.doing}{_and_waiting(waiting)}",
            waiting=waiting,
        )
    deaf = [report for report in overdue.unanswered.values() if report.unanswered_s > limits.deaf_s]
    if deaf:
        worst = max(deaf, key=lambda report: report.unanswered_s)
        return Hung(
            worker=worst.worker,
            because=f"worker {worst.worker} has not taken an order for {worst.unanswered_s:.2f} s, "
            f"though it only waits for {worst.doing}",
            waiting=tuple(worker for worker in overdue.waiting() if worker != worst.worker),
        )
    busy = overdue.busiest()
    if busy is not None:
        worst = busy
        is_first = worst.expected_s >= limits.first_op_s  # no usual time is known: that is its limit already
        factor = 1.0 if is_first else limits.hang_factor
        patience = max(limits.hang_floor_s, factor * worst.expected_s)
        if not overdue.num_waiting:
            patience = max(patience, limits.hang_alone_s)
        if worst.elapsed_s < patience:
            return None
        waiting = overdue.waiting()
        if worst.active_s > 0.5 * worst.elapsed_s:
            longer = patience * limits.active_factor
            if waiting:  # an op that takes several steps is no slow op
                step_s = max(overdue[worker].expected_s for worker in waiting)
                floor_s = limits.hang_floor_s * limits.active_factor
                longer = min(longer, max(patience, floor_s, limits.active_steps * step_s))
            if worst.elapsed_s < longer:
                return None
        return Hung(
            worker=worst.worker,
            because=f"{_subject(worst)} hung in {worst.doing} for {_duration(worst.elapsed_s)} "
            f"(usual {_duration(worst.expected_s)}){_and_waiting(waiting)}",
            waiting=waiting,
        )
    if overdue.all_wait_too_long(is_member, num_members, limits):
        because = f"all {num_members} workers wait and none is busy: a message between them is lost"
        return Stalled(because=because)
    return None


def _stall_after(report: OpOverdue, limits: DetectorLimits) -> float:
    return max(limits.stall_floor_s, limits.stall_factor * report.expected_s)


def _and_waiting(waiting: tuple[Worker, ...]) -> str:
    if not waiting:
        return ""
    if len(waiting) == 1:
        return f"; worker {waiting[0]} waits for it"
    few = ", ".join(map(str, waiting[:4])) + (" and others" if len(waiting) > 4 else "")
    return f"; workers {few} wait for it"


def _subject(report: OpOverdue) -> str:
    return (
        f"worker {report.worker}"
        if report.shard is None
        else f"shard {report.shard} of worker {report.worker}"
    )


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
