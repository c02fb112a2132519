"""The places of a task: which process fills each one, and how far it has come.

Owns every place's state, the slots that the cluster has granted, and the count of starts. It starts processes
and finds sources for those that join; which step a joiner enters is decided by `core.task.recovery`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
from everstep.protocol.lifecycle import become
from everstep.protocol.ops import Worker
from everstep.protocol.work import Ledger


@dataclass(slots=True, kw_only=True)
class Places:
    policy: RecoveryPolicy
    states: dict[Worker, PlaceState]
    granted: frozenset[Worker]  # the places that have a slot; only these are started
    incarnations: dict[Worker, int]
    restarts: dict[Worker, int]  # on the machine it has now, none of which has helped for long
    transfers: int = 0  # how many copies of a state were ordered

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
        self.states[worker] = become(PLACE, self.states[worker], state, f"worker {worker}")

    # -------------------------------------------------------------- processes

    def start(self, worker: Worker, because: str) -> Action:
        self.restarts[worker] += 1
        self.incarnations[worker] += 1
        incarnation = self.incarnations[worker]
        self.to(worker, Starting(incarnation))
        return StartWorker(worker=worker, incarnation=incarnation, because=because)

    def start_due(self, recorded: int) -> list[Action]:
        """Start the absent places that may be filled again now that step `recorded` is recorded."""
        return [
            self.start(
                worker,
                f"worker {worker} was lost ({place.because}); start number {self.restarts[worker] + 1}",
            )
            for worker, place in self.states.items()
            if isinstance(place, Absent) and place.due_step <= recorded and self._may_start(worker)
        ]

    def start_all(self) -> list[Action]:
        """Start every absent place that may be filled again: training waits for them."""
        return [
            self.start(worker, f"stage {worker.stage} needs a worker ({place.because})")
            for worker, place in self.states.items()
            if isinstance(place, Absent) and self._may_start(worker)
        ]

    def exhausted(self) -> str | None:
        """Why the task cannot continue, if a stage has slots, but no process and no restart left."""
        for stage in sorted({worker.stage for worker in self.granted}):  # one without a slot waits for one
            places = [place for worker, place in self.states.items() if worker.stage == stage]
            absent = [place for place in places if isinstance(place, Absent)]
            if len(absent) == len(places):
                return (
                    f"stage {stage} has no worker left and its restarts are used up "
                    f"({self.policy.max_restarts} in a row per place); the last one: {absent[0].because}"
                )
        return None

    def is_running(self, worker: Worker, incarnation: int) -> bool:
        """Is this the process that fills the place? A report of an earlier one does not count."""
        place = self.states[worker]
        return not isinstance(place, Absent) and place.incarnation == incarnation

    def _may_start(self, worker: Worker) -> bool:
        return worker in self.granted and self.restarts[worker] <= self.policy.max_restarts

    # -------------------------------------------------------------- joiners

    def feed_joiners(self) -> list[Action]:
        """Every joiner without a live source gets one: the member of its stage that feeds the fewest."""
        actions: list[Action] = []
        sources = [place.source for place in self.states.values() if isinstance(place, Fed)]
        for joiner, place in self.joiners().items():
            if self._is_fed(place):
                continue
            peers = [w for w in self.members() if w.stage == joiner.stage]
            if not peers:
                continue
            source = min(peers, key=lambda w: (sources.count(w), w))
            sources.append(source)
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
        return [w for w, place in self.states.items() if isinstance(place, Copied) and self._is_fed(place)]

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
        for worker, place in self.states.items():
            if isinstance(place, Member) and recorded - place.since >= self.policy.forgiven_after_steps:
                self.restarts[worker] = min(1, self.restarts[worker])

    def promote_entered(self, recorded: int) -> None:
        """An entering joiner whose part is in a recorded sum is a member."""
        for worker, place in self.joiners().items():
            if isinstance(place, Entering) and place.enter_at <= recorded:
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
        return {worker: place for worker, place in self.states.items() if isinstance(place, Joining)}

    def entering(self) -> dict[Worker, int]:
        """Joiners that are let in, and the step at which each enters."""
        return {w: place.enter_at for w, place in self.states.items() if isinstance(place, Entering)}

    def since(self) -> dict[Worker, int]:
        """The first step of every member, and of every joiner that is let in."""
        own = {w: place.since for w, place in self.states.items() if isinstance(place, Member)}
        return own | self.entering()

    def are_starting(self) -> bool:
        return any(isinstance(place, Starting) for place in self.states.values())

    def fed_by(self, source: Worker) -> dict[int, int | None]:
        """The replicas that `source` feeds, each with the last step it needs (None: not known yet)."""
        return {
            joiner.replica: place.enter_at - 1 if isinstance(place, Entering) else None
            for joiner, place in self.states.items()
            if isinstance(place, Fed) and place.source == source
        }
