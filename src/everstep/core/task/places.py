"""The places of a task: which process fills each one, and how far it has come.

Owns every place's state, the slots that the cluster has granted, and the count of starts. It starts processes
and finds sources for those that join; which step a joiner enters is decided by `core.task.recovery`.

There may be 16,384 places and most of them are members. So those that are not are kept in lists of their own,
by state, and no report of a worker makes this walk over all places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from operator import itemgetter
from typing import TypeVar

from everstep.core.task.states import (
    PLACE,
    Absent,
    Copied,
    Copying,
    Entering,
    Fed,
    Joining,
    Member,
    PlaceState,
    RecoveryPolicy,
    Started,
    Starting,
)
from everstep.protocol.actions import Action, CopyState, StartWorker
from everstep.protocol.events import UsesKernels
from everstep.protocol.lifecycle import become
from everstep.protocol.ops import Worker
from everstep.protocol.work import Ledger

P = TypeVar("P")
_worker = itemgetter(0)


@dataclass(slots=True, kw_only=True)
class Places:
    policy: RecoveryPolicy
    states: dict[Worker, PlaceState]
    granted: frozenset[Worker]  # the places that have a slot; only these are started
    incarnations: dict[Worker, int]
    restarts: dict[Worker, int]  # on the machine it has now, none of which has helped for long
    transfers: int = 0  # how many copies of a state were ordered
    sums: dict[int, str] = field(default_factory=dict)  # by stage: how its processes sum gradients
    kernels: dict[Worker, UsesKernels] = field(default_factory=dict)
    # By stage and device: what those of its processes do not use that have started.
    without: dict[tuple[int, str], tuple[str, ...]] = field(default_factory=dict)
    _others: dict[type[PlaceState], set[Worker]] = field(init=False)  # by state: all but the members
    _there: Counter[tuple[type[PlaceState], int]] = field(init=False)  # by state and stage: how many
    _started_again: set[Worker] = field(init=False)  # more than one restart

    def __post_init__(self) -> None:
        self._others = {kind: set() for kind in PLACE if kind is not Member}
        self._there = Counter()
        self._started_again = {worker for worker, count in self.restarts.items() if count > 1}
        for worker, place in self.states.items():
            self._count(worker, place, +1)

    @classmethod
    def all_absent(
        cls, workers: list[Worker], *, policy: RecoveryPolicy, granted: frozenset[Worker], incarnation: int
    ) -> Places:
        """`incarnation`: the highest that an earlier run of the task has used."""
        return cls(
            policy=policy,
            states=dict.fromkeys(workers, Absent(0, "not started yet")),
            granted=granted,
            incarnations=dict.fromkeys(workers, incarnation),
            restarts=dict.fromkeys(workers, 0),
        )

    def to(self, worker: Worker, state: PlaceState) -> None:
        """The only way a place changes its state."""
        before = self.states[worker]
        if type(state) not in PLACE[type(before)]:  # thousands of workers change theirs in one event
            become(PLACE, before, state, f"worker {worker}")
        self.states[worker] = state
        self._count(worker, before, -1)
        self._count(worker, state, +1)

    def _count(self, worker: Worker, place: PlaceState, number: int) -> None:
        kind = type(place)
        self._there[kind, worker.stage] += number
        if kind is not Member:
            (self._others[kind].add if number > 0 else self._others[kind].remove)(worker)

    def _all(self, kind: type[P]) -> list[tuple[Worker, P]]:
        """The places in this state, which is not a member's, in the order of workers."""
        return [(worker, self.states[worker]) for worker in sorted(self._others[kind])]  # type: ignore[index,misc]

    def _fed(self) -> list[tuple[Worker, Fed]]:
        return sorted([*self._all(Copying), *self._all(Copied), *self._all(Entering)], key=_worker)

    # -------------------------------------------------------------- processes

    def start(self, worker: Worker, because: str) -> Action:
        self.restarts[worker] += 1
        if self.restarts[worker] > 1:
            self._started_again.add(worker)
        self.incarnations[worker] += 1
        incarnation = self.incarnations[worker]
        self.to(worker, Starting(incarnation))
        return StartWorker(worker=worker, incarnation=incarnation, because=because)

    def started(self, worker: Worker, incarnation: int, *, sums: str, kernels: UsesKernels) -> None:
        self.to(worker, Started(incarnation))
        self.sums[worker.stage], self.kernels[worker] = sums, kernels
        self.without[worker.stage, kernels.device] = kernels.without

    def sums_differ(self, worker: Worker, sums: str) -> Worker | None:
        """A peer that is up and sums gradients in another way: together they would train with wrong ones."""
        same = self.sums.get(worker.stage, "") == sums
        return None if same else next(self._up_beside(worker), None)

    def kernels_differ(self, worker: Worker, kernels: UsesKernels) -> Worker | None:
        """A peer that is up and uses other kernels on such a device. Those of other devices have other bits
        anyway.
        """
        if self.without.get((worker.stage, kernels.device), kernels.without) == kernels.without:
            return None
        for peer in self._up_beside(worker):
            theirs = self.kernels.get(peer, kernels)
            if theirs.device == kernels.device and theirs.without != kernels.without:
                return peer
        return None

    def _up_beside(self, worker: Worker) -> Iterator[Worker]:
        up = (w for w, place in self.states.items() if not isinstance(place, Absent | Starting))
        return (w for w in up if w.stage == worker.stage)

    def clear_restarts(self, worker: Worker) -> None:
        """It has another machine: what happened on the last one does not count."""
        self.restarts[worker] = 0
        self._started_again.discard(worker)

    def start_due(self, recorded: int) -> list[Action]:
        """Start the absent places that may be filled again now that step `recorded` is recorded."""
        return [
            self.start(
                worker,
                f"worker {worker} was lost ({place.because}); restart {self.restarts[worker] + 1}",
            )
            for worker, place in self._all(Absent)
            if place.due_step <= recorded and self._may_start(worker)
        ]

    def start_all(self) -> list[Action]:
        """Start every absent place that may be filled again: training waits for them."""
        return [
            self.start(worker, f"stage {worker.stage} needs a worker ({place.because})")
            for worker, place in self._all(Absent)
            if self._may_start(worker)
        ]

    def exhausted(self) -> str | None:
        """Why the task cannot continue, if a stage has slots, but no process and no restart left."""
        absent: dict[int, list[Worker]] = {}
        for worker, _ in self._all(Absent):
            absent.setdefault(worker.stage, []).append(worker)
        for stage in sorted(stage for stage in absent if not self._is_filled(stage)):
            if any(worker in self.granted for worker in absent[stage]):  # one without a slot waits for one
                first = self.states[absent[stage][0]]
                assert isinstance(first, Absent)
                return (
                    f"stage {stage} has no worker left and its restarts are used up "
                    f"({self.policy.max_restarts} in a row per place); the last one: {first.because}"
                )
        return None

    def _is_filled(self, stage: int) -> bool:
        return any(self._there[kind, stage] for kind in PLACE if kind is not Absent)

    def is_running(self, worker: Worker, incarnation: int) -> bool:
        """Is this the process that fills the place? A report of an earlier one does not count."""
        place = self.states[worker]
        return not isinstance(place, Absent) and place.incarnation == incarnation

    def _may_start(self, worker: Worker) -> bool:
        return worker in self.granted and self.restarts[worker] <= self.policy.max_restarts

    # -------------------------------------------------------------- joiners

    def feed_joiners(self) -> list[Action]:
        """Every joiner without a live source gets one: the member of its stage that feeds the fewest."""
        waiting = [(worker, place) for worker, place in self.joiners().items() if not self._is_fed(place)]
        if not waiting:
            return []
        actions: list[Action] = []
        feeds = Counter(place.source for _, place in self._fed())
        stages = {joiner.stage for joiner, _ in waiting}
        peers: dict[int, list[tuple[int, Worker]]] = {stage: [] for stage in stages}
        for worker in self.members():
            if worker.stage in stages:
                peers[worker.stage].append((feeds[worker], worker))
        for few in peers.values():
            heapify(few)
        for joiner, place in waiting:
            if not peers[joiner.stage]:
                continue
            num_fed, source = peers[joiner.stage][0]
            heapreplace(peers[joiner.stage], (num_fed + 1, source))
            self.transfers += 1
            self.to(joiner, Copying(place.incarnation, source, self.transfers))
            actions.append(
                CopyState(
                    source=source,
                    joiner=joiner,
                    incarnation=place.incarnation,
                    transfer=self.transfers,
                    because=f"worker {joiner} copies its state from worker {source} while training continues",
                )
            )
        return actions

    def ready(self) -> list[Worker]:
        """The joiners that can be let in. One whose source is dead must copy again first."""
        return [worker for worker, place in self._all(Copied) if self._is_fed(place)]

    def let_in(self, step: int) -> None:
        """Every joiner that is ready enters at `step`, which no worker has begun. So does one that was let in
        for a later step: the work on the steps between is lost or undone, and the plans from `step` on count
        on every joiner that is let in.
        """
        for worker, place in self.joiners().items():
            is_late = isinstance(place, Entering) and place.enter_at > step
            if is_late or (isinstance(place, Copied) and self._is_fed(place)):
                assert isinstance(place, Fed)
                self.to(worker, Entering(place.incarnation, place.source, step))

    def settle_entering(self, ledgers: Mapping[Worker, Ledger]) -> dict[Worker, Ledger]:
        """The ledgers of members. An entering joiner is one as soon as it has the state it enters with; if
        its source died before that, it copies again.
        """
        members: dict[Worker, Ledger] = {}
        for worker, ledger in ledgers.items():
            place = self.states[worker]
            if not isinstance(place, Entering):
                members[worker] = ledger
            elif not ledger.joining or ledger.step == place.enter_at:
                self.to(worker, Member(place.incarnation, place.enter_at))
                members[worker] = ledger
            elif not self._is_fed(place):
                self.to(worker, Started(place.incarnation))
        return members

    def forgive(self, recorded: int) -> None:
        """A place whose process has worked for long enough may be filled again as often as a new one."""
        for worker in list(self._started_again):
            place = self.states[worker]
            if isinstance(place, Member) and recorded - place.since >= self.policy.forgiven_after_steps:
                self.restarts[worker] = 1
                self._started_again.discard(worker)

    def promote_entered(self, recorded: int) -> None:
        """An entering joiner whose part is in a recorded sum is a member."""
        for worker, place in self._all(Entering):
            if place.enter_at <= recorded:
                self.to(worker, Member(place.incarnation, place.enter_at))

    def _is_fed(self, place: Joining) -> bool:
        return isinstance(place, Fed) and isinstance(self.states[place.source], Member)

    # -------------------------------------------------------------- going back to a kept state

    def send_all_back(self) -> None:
        """Every process is without a state: a kept one will be loaded."""
        for worker, place in self.states.items():
            if isinstance(place, Member | Fed):
                self.to(worker, Started(place.incarnation))

    def all_enter(self, step: int) -> None:
        """Every process is a member from `step` on."""
        for worker, place in self.joiners().items():
            self.to(worker, Member(place.incarnation, step))

    # -------------------------------------------------------------- lookups

    def members(self) -> list[Worker]:
        return [worker for worker, place in self.states.items() if isinstance(place, Member)]

    def members_and_entering(self) -> list[Worker]:
        return [worker for worker, place in self.states.items() if isinstance(place, Member | Entering)]

    def joiners(self) -> dict[Worker, Joining]:
        return dict(sorted([*self._all(Started), *self._fed()], key=_worker))

    def entering(self) -> dict[Worker, int]:
        """Joiners that are let in, and the step at which each enters."""
        return {worker: place.enter_at for worker, place in self._all(Entering)}

    def since(self) -> dict[Worker, int]:
        """The first step of every member, and of every joiner that is let in."""
        own = {w: place.since for w, place in self.states.items() if isinstance(place, Member)}
        return own | self.entering()

    def are_starting(self) -> bool:
        return bool(self._others[Starting])

    def num_members(self) -> int:
        return len(self.states) - sum(map(len, self._others.values()))

    def stages_joining(self) -> set[int]:
        """The stages of which a process is up and no member."""
        return {
            stage
            for (kind, stage), number in self._there.items()
            if number and kind in (Started, Copying, Copied, Entering)
        }

    def feeds(self) -> dict[Worker, dict[int, int | None]]:
        """By source: the replicas that it feeds, each with the last step it needs (None: not known yet)."""
        found: dict[Worker, dict[int, int | None]] = {}
        for joiner, place in self._fed():
            last = place.enter_at - 1 if isinstance(place, Entering) else None
            found.setdefault(place.source, {})[joiner.replica] = last
        return found

    def validate(self) -> None:
        for kind, workers in self._others.items():
            assert workers == {w for w, place in self.states.items() if type(place) is kind}
        assert +self._there == Counter((type(place), w.stage) for w, place in self.states.items())
        assert self._started_again == {w for w, count in self.restarts.items() if count > 1}
