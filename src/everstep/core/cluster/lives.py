"""How a script task heals: all its ranks end together and begin together, in lives.

The script is not ours. It reports no ops and keeps its own checkpoints, so the only remedy is torchrun's: end
every rank, start all of them again, on the nodes there are now. What is decided here is when, on which nodes,
whom to name, and when to stop. One place of the task is all the ranks of one node, started and watched by a
keeper there; it stays between lives, so a new life is one order per node.

    Awaiting ──enough nodes──► Living ──evidence──► Settling ──► Closing ──all idle──► Awaiting (next life)
                                 │ ▲                   ▲            ▲ │
                                 ├─┴─no progress─► Locating ────────┘ └──► Over
                                 └──all ranks ended with code 0──► Over

No innocent rank is named. A rank that is killed takes its peers' connections with it, and a peer's
"connection closed" may be heard before the kernel has buried the one that was killed. So hearsay is held for
`SETTLE_S`: if a better witness comes, it is the cause; if none does, the one that spoke first is.

No rank is called hung while a rank of any node enters a collective, writes output or reports a step. Where
none does, all are asked where they are: after half of `hang_after_s`, or `REPORT_S` if there is none, for
people to read (`suspicion`), and once more before anything is ended. A rank that uses a CPU is at work if it
is not in the same functions both times, and is left alone; an endless loop is where it was. Where all ranks
use a CPU and none is behind, they may be in one long call (an index of a large dataset is made): that gets
`ALL_BUSY` times as long. A node that is
lost, drained or new ends a life as well, but is no failure of the script: `max_restarts` is not touched. New
nodes are let in when the script has said that it can continue from where it is, or, if it never says so, once
`join_s` have passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from everstep.core.faults import arrivals, testimony
from everstep.core.faults.arrivals import SlowRanks
from everstep.core.faults.testimony import Witness
from everstep.core.held import machine as held
from everstep.core.held.machine import HeldEvent, HeldRun
from everstep.core.task.states import Absent, Lived, Member, Over, PlaceState, Started, Starting
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.actions import Action
from everstep.protocol.codec import decode, encode
from everstep.protocol.held import KeeperOrder
from everstep.protocol.incidents import IncidentLog, TaskIncidents
from everstep.protocol.messages import (
    KeptFile,
    KeptSnapshot,
    RankPace,
    RankPosition,
    RankRules,
    SnapshotFile,
)
from everstep.protocol.ops import Worker
from everstep.protocol.table import AnyMessage, Document, Handlers

SETTLE_S = 0.3
LOCATE_S = 10.0  # for keepers to say where their ranks are
REPORT_S = 60.0  # without progress, after which ranks that wait are reported, though nothing is to be ended
RELOOK_S = 2.0  # from one look to the next, at least
ALL_BUSY = 4  # times the limit, for ranks that all use a CPU in one place and of which none waits for another
CLOSE_S = 30.0  # after SIGKILL, for a keeper to say that its ranks are gone; then the keeper is ended
JUST_SAVED_S = 5.0  # little is done again by a life that begins now
GROW_PATIENCE_S = 600.0  # a script that has said once that its state is safe is waited for, so long
LONG_LIFE_S = 30.0  # after which a failure is one of many, not a start that fails again and again
BACKOFF_S, MOST_BACKOFF_S = 1.0, 30.0
KEPT_SNAPSHOTS = 2  # states in memory; nodes keep one more
MOST_KEEPERS_LOST = 3  # in a row, of one node, without a life that it took part in

# ------------------------------------------------------------------ what the task as a whole does


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaiting:
    """Nodes, or the end of a wait between lives."""

    since: float
    not_before: float
    because: str
    is_first: bool = False  # more nodes may be on their way


@dataclass(slots=True, kw_only=True)
class Living:
    members: tuple[Worker, ...]  # in the order of their group ranks
    began_at: float
    starting: set[Worker]
    finished: set[Worker] = field(default_factory=set)
    left: set[int] = field(default_factory=set)  # ranks whose script has ended without an error
    still: dict[Worker, float] = field(default_factory=dict)  # since when
    late_steps: set[Worker] = field(default_factory=set)  # of these, whose scripts tell steps, and are late
    look_after_s: float  # without progress, after which they are asked where they are
    look_at: float | None = None  # if nothing moves until then
    seen: dict[int, RankPosition] = field(default_factory=dict)  # where ranks were, by the last look
    witnesses: list[Witness] = field(default_factory=list)  # of the deaths that are being held
    grow_at: float | None = None  # nodes wait to be let in: at the latest then
    paces: dict[Worker, tuple[RankPace, ...]] = field(default_factory=dict)  # of the present look
    slow: SlowRanks = field(default_factory=SlowRanks)


@dataclass(slots=True, kw_only=True)
class Settling:
    life: Living
    until: float
    witnesses: list[Witness]


@dataclass(slots=True, kw_only=True)
class Locating:
    life: Living
    until: float
    still_since: float
    positions: dict[Worker, tuple[RankPosition, ...]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)  # ranks that have ended while others have not


@dataclass(slots=True, kw_only=True)
class Closing:
    awaited: set[Worker]
    until: float
    then: float  # the next life begins no sooner
    because: str
    over: str = ""  # why there is no next life; empty: there is one
    is_finished: bool = False


Phase = Awaiting | Living | Settling | Locating | Closing | Over


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeCause:
    """Why a life has ended, for the exit code."""

    rank: int | None
    code: int  # negative: a signal
    has_raised: bool


@dataclass(slots=True, kw_only=True)
class BookedSnapshot:
    """A state that the script has handed over: by node, its files; by node that has copies, of whom.

    One state at a time is copied. A script may hand over more than the nodes can copy: what waits is passed
    over when a newer one waits, too. Newer is what was handed over later, whatever its step: a script that
    cannot use the newest state begins with a lower one.
    """

    groups: int  # that take part
    life: int = 0  # in which it was handed over
    number: int = 0  # counted in the order in which they were handed over
    files: dict[Worker, Mapping[str, SnapshotFile]] = field(default_factory=dict)
    holders: dict[Worker, list[tuple[Worker, int]]] = field(
        default_factory=dict
    )  # of whose files; incarnation
    is_waiting: bool = False  # for the copies of another one
    copying: set[Worker] = field(default_factory=set)  # whose files are on their way to another node

    @property
    def is_handed_over(self) -> bool:
        return len(self.files) == self.groups

    @property
    def is_whole(self) -> bool:
        return self.is_handed_over and not self.is_waiting and not self.copying

    @property
    def is_on_two_nodes(self) -> bool:
        return all(len(self.holders[worker]) > 1 for worker, files in self.files.items() if files)


@dataclass(slots=True, kw_only=True)
class Draining:
    """A state on its way to disk: one at a time, so a slow disk gets every so manieth."""

    step: int
    files: Mapping[str, SnapshotFile]
    awaited: set[Worker]


@dataclass(slots=True, kw_only=True)
class LivesBook:
    """All of the state."""

    rules: RankRules
    phase: Phase
    granted: frozenset[Worker]
    places: dict[Worker, PlaceState]
    life: int = 0  # the number of the present or last one; from 1
    codes: dict[int, int] = field(default_factory=dict)  # of its ranks that have ended
    cause: LifeCause | None = None  # of its end, if it failed
    failures: int = 0  # lives that ended by a fault of their ranks
    backoffs: int = 0
    program_error: str = ""  # of the life before
    incarnation: int = 0  # the highest so far
    addresses: dict[Worker, tuple[str, int]] = field(default_factory=dict)
    order: dict[Worker, int] = field(default_factory=dict)  # of their nodes
    keepers_lost: dict[Worker, int] = field(default_factory=dict)
    step: int = 0  # the highest the script has told
    saved_step: int = 0
    saved_at: float = 0.0
    tokens: int = 0
    says_when_saved: bool = False
    memories: dict[Worker, tuple[str, int]] = field(default_factory=dict)
    snapshots: dict[int, BookedSnapshot] = field(default_factory=dict)  # by step
    suspicion: str = ""  # why there is no progress, while nothing is done about it
    can_hold: dict[Worker, bool] = field(default_factory=dict)  # as the script on its node asks
    draining: Draining | None = None  # to disk
    on_disk: tuple[int, Mapping[str, SnapshotFile]] | None = None  # the newest: its step and files


class Lives:
    """The state machine. `handle` is the only way it changes. What a task's recovery is asked for by the
    cluster it answers as well, in terms of nodes: a member is a node whose ranks take part.
    """

    on: ClassVar = Handlers[list[Action]](msg.RankReport)

    def __init__(
        self,
        task: str,
        rules: RankRules,
        *,
        workers: list[Worker],
        granted: frozenset[Worker],
        now: float,
        lived: Lived | None = None,
        log: TaskIncidents | None = None,
    ) -> None:
        lived = lived or Lived()
        self.task = task
        self.log = IncidentLog().of_task(task) if log is None else log
        self._held: HeldRun | None = None  # of the present life, if its ranks are held
        self._book = LivesBook(
            rules=rules,
            phase=Awaiting(since=now, not_before=now, because="the task begins", is_first=True),
            granted=granted,
            places={worker: Absent(0, "the task begins") for worker in workers},
            life=lived.epoch,
            incarnation=lived.incarnation,
        )

    # -------------------------------------------------------------- what others read

    @property
    def rules(self) -> RankRules:
        return self._book.rules

    @property
    def phase(self) -> Phase:
        return self._book.phase

    @property
    def places(self) -> Mapping[Worker, PlaceState]:
        return self._book.places

    @property
    def num_members(self) -> int:
        return sum(isinstance(place, Member) for place in self.places.values())

    @property
    def granted(self) -> frozenset[Worker]:
        return self._book.granted

    @property
    def epoch(self) -> int:
        return self._book.life

    @property
    def failures(self) -> int:
        return self._book.failures

    @property
    def recorded(self) -> int:
        return self._book.step

    @property
    def tokens(self) -> int:
        return self._book.tokens

    @property
    def checkpoint(self) -> int:
        """The newest step from which the script can continue, as far as it has said so."""
        return self._book.saved_step

    @property
    def members(self) -> tuple[Worker, ...]:
        """In the order of their group ranks."""
        life = self._living()
        return () if life is None else life.members

    @property
    def suspicion(self) -> str:
        """No rank makes progress: what is seen of them. Empty: all is well, or it is being mended."""
        return self._book.suspicion

    @property
    def exit_codes(self) -> Mapping[int, int]:
        """By rank, of those of the last life that have ended; negative: a signal."""
        return self._book.codes

    @property
    def exit_code(self) -> int:
        """As a shell writes it, of the rank that failed first; one that has raised ends by itself."""
        cause = self._book.cause
        if cause is None:
            return 0
        own = self._book.codes.get(cause.rank, 0) if cause.rank is not None and cause.has_raised else 0
        code = own if own > 0 else cause.code
        return 128 - code if code < 0 else code or 1

    def is_late(self, said: AnyMessage) -> bool:
        incarnation = getattr(said, "incarnation", None)
        return incarnation is not None and incarnation != self._incarnation(said.worker)

    def lived(self) -> Lived:
        return Lived(self._book.life, 0, self._book.incarnation)

    def due_at(self) -> float | None:
        match self._book.phase:
            case Awaiting() as phase:
                return self._begins_at(phase)
            case Settling(until=until) | Locating(until=until) | Closing(until=until):
                return until
            case Living(grow_at=grow_at, look_at=look_at):
                held_at = None if self._held is None else self._held.due_at()
                return min((at for at in (grow_at, look_at, held_at) if at is not None), default=None)
            case _:
                return None

    def validate(self) -> None:
        book = self._book
        life = self._living()
        if life is not None:
            for worker in life.members:
                place = book.places[worker]
                assert isinstance(place, Member) or worker in life.finished, f"{worker} has no ranks"
        else:
            assert not self.num_members, "ranks outlive their life"
        if isinstance(book.phase, Closing):
            assert book.phase.awaited, "no node is waited for"
        assert book.failures <= book.rules.max_restarts + 1
        if self._held is not None:
            assert life is not None, "ranks are held in no life"
            self._held.validate()

    def snapshot(self) -> Document:
        held = None if self._held is None else self._held.freeze()
        return {"lives": encode(self._book), "task": self.task, "held": held}

    @classmethod
    def from_snapshot(cls, data: Document, log: TaskIncidents) -> Lives:
        book: LivesBook = decode(LivesBook, data["lives"])
        lives = cls(data["task"], book.rules, workers=[], granted=book.granted, now=0.0, log=log)
        lives._book = book
        if data.get("held") is not None:
            lives._held = HeldRun.thaw(data["held"])
        return lives

    # -------------------------------------------------------------- events in, actions out

    def begin(self) -> list[Action]:
        """The first actions: a keeper on every node that is granted."""
        return self._start_keepers("the task begins")

    def handle(self, event: object, now: float) -> list[Action]:
        if isinstance(self.phase, Over):
            return []
        match event:
            case msg.RankReport():
                return [] if self.is_late(event) else self.on.handler(self, event)(event, now)
            case ev.PlacesGranted():
                return self._granted(event, now)
            case ev.WorkerExited():
                return [] if self.is_late(event) else self._keeper_gone(event, now)
            case ev.WorkersExited(exits=exits):
                return [action for one in exits for action in self.handle(one, now)]
            case ev.StopRequested():
                return self._stop(event, now)
            case msg.TimePassed():
                return self._time_passed(now)
            case _:
                return []  # about ops, states in memory and schedules: a script has none

    # -------------------------------------------------------------- nodes come and go

    def _granted(self, event: ev.PlacesGranted, now: float) -> list[Action]:
        self._book.granted = event.places
        for worker in event.clean:
            self._book.keepers_lost.pop(worker, None)
        life = self._living()
        actions = self._start_keepers("it has slots on this node")
        if life is not None and not event.places >= {w for w in life.members if w not in life.finished}:
            actions += self._close(now, now, "a node of it is to be emptied")
        return actions + self._begin_if_ready(now)

    def _start_keepers(self, because: str) -> list[Action]:
        book = self._book
        if isinstance(book.phase, Over):
            return []
        actions: list[Action] = []
        for worker in sorted(book.granted):
            if isinstance(book.places[worker], Absent):
                book.incarnation += 1
                book.places[worker] = Starting(book.incarnation)
                start = act.StartWorker(worker=worker, incarnation=book.incarnation, because=because)
                actions.append(start)
        return actions

    def _keeper_gone(self, event: ev.WorkerExited, now: float) -> list[Action]:
        """Its node is lost or drained, or its process has died; the ranks go with it."""
        book, worker = self._book, event.worker
        book.places[worker] = Absent(0, event.reason)
        book.addresses.pop(worker, None)
        book.memories.pop(worker, None)
        if book.draining is not None and worker in book.draining.awaited:
            book.draining = None
        over = ""
        if not event.planned:
            lost = book.keepers_lost[worker] = book.keepers_lost.get(worker, 0) + 1
            if lost > MOST_KEEPERS_LOST and worker in book.granted:
                over = f"the keeper of the ranks of {worker} has ended {lost} times: {event.reason}"
        life = self._living()
        actions: list[Action] = []
        if life is not None and worker in life.members and worker not in life.finished:
            why = f"its ranks of group {life.members.index(worker)} are gone: {event.reason}"
            if not event.planned:
                self.log.open(worker, event.reason, self.recorded, now, 0)
            actions += self._close(now, now, why, over=over)
        elif isinstance(book.phase, Closing):
            book.phase.over = book.phase.over or over
            actions += self._idle_in(book.phase, worker, now)
        elif over:
            actions += self._close(now, now, over, over=over)
        return actions + self._start_keepers("its keeper ended")

    @on
    def _idle(self, event: msg.RanksIdle, now: float) -> list[Action]:
        book, worker = self._book, event.worker
        book.places[worker] = Started(event.incarnation)
        book.addresses[worker], book.order[worker] = event.address, event.order
        if event.life == book.life:
            book.codes.update(event.codes)
        book.can_hold[worker] = event.can_hold
        if event.memory is not None:
            book.memories[worker] = event.memory
        life = self._living()
        if isinstance(book.phase, Closing):
            return self._idle_in(book.phase, worker, now)
        if life is not None and worker in life.members and event.life == book.life:
            life.finished.add(worker)
            life.still.pop(worker, None)
            if len(life.finished) < len(life.members):
                return []
            if isinstance(book.phase, Settling):
                return self._conclude(book.phase.witnesses, now)
            world = len(life.members) * book.rules.ranks
            because = f"all {world} ranks have ended with code 0" if world > 1 else "it ended with code 0"
            book.phase = Over(because)
            self._held = None
            return [act.FinishTask(because=because)]
        if isinstance(book.phase, Living):
            self._wait_to_grow(book.phase, now)
        return self._begin_if_ready(now)

    def _wait_to_grow(self, life: Living, now: float) -> None:
        rules = self.rules
        if life.grow_at is None and len(life.members) < rules.most:
            patience_s = GROW_PATIENCE_S if self._book.says_when_saved else rules.join_s
            life.grow_at = max(now, life.began_at + rules.join_s) + patience_s

    def _grow(self, now: float) -> list[Action]:
        life = self._book.phase
        assert isinstance(life, Living)
        new = [worker for worker in self._ready() if worker not in life.members]
        life.grow_at = None
        if not new or life.finished:
            return []
        nodes = "1 more node" if len(new) == 1 else f"{len(new)} more nodes"
        return self._close(now, now, f"{nodes} can take part")

    def _stop(self, event: ev.StopRequested, now: float) -> list[Action]:
        """To finish early, or to leave its slots to others: it begins again when it has some."""
        return self._close(now, now, event.because, is_finished=True)

    # -------------------------------------------------------------- a life begins

    def _begin_if_ready(self, now: float) -> list[Action]:
        phase = self._book.phase
        if not isinstance(phase, Awaiting) or (at := self._begins_at(phase)) is None or now < at:
            return []
        return self._begin(self._ready(), phase.because, now)

    def _begins_at(self, phase: Awaiting) -> float | None:
        """When the next life begins if nothing happens until then; None: there are too few nodes."""
        book, ready = self._book, len(self._ready())
        if ready < book.rules.least:
            return None
        expected = sum(isinstance(book.places[w], Starting | Started) for w in book.granted)
        may_join = phase.is_first and ready < book.rules.most
        if expected > ready or may_join:
            return max(phase.since, phase.not_before) + book.rules.join_s
        return phase.not_before

    def _ready(self) -> list[Worker]:
        book = self._book
        ready = (w for w in book.granted if isinstance(book.places[w], Started) and w in book.addresses)
        return sorted(ready, key=lambda worker: (book.order.get(worker, 0), worker))

    def _begin(self, members: list[Worker], because: str, now: float) -> list[Action]:
        book, rules = self._book, self.rules
        book.life += 1
        book.codes, book.cause = {}, None
        book.phase = Living(
            members=tuple(members),
            began_at=now,
            starting=set(members),
            look_after_s=self._first_look_s(),
        )
        self.log.planned(now, book.life)
        world = len(members) * rules.ranks
        unit = rules.unit or 1
        is_held = world > unit and world % unit == 0 and all(book.can_hold.get(w) for w in members)
        self._held = HeldRun(world=world, unit=unit) if is_held else None
        restore = self._newest_snapshot()
        actions: list[Action] = []
        for group, worker in enumerate(members):
            place = book.places[worker]
            assert isinstance(place, Started)
            book.places[worker] = Member(place.incarnation, self.recorded + 1)
            actions.append(
                msg.BeginLife(
                    task=self.task,
                    worker=worker,
                    incarnation=place.incarnation,
                    life=book.life,
                    group=group,
                    first_rank=group * rules.ranks,
                    num_groups=len(members),
                    world=world,
                    restarts=book.failures,
                    master=book.addresses[members[0]],
                    hosts_store=group == 0,
                    because=because,
                    restore=restore,
                    unit=unit if is_held else 0,
                )
            )
        return actions

    @on
    def _started(self, event: msg.RanksStarted, now: float) -> list[Action]:
        life = self._living()
        if life is None or event.life != self._book.life:
            return []
        self._book.keepers_lost.pop(event.worker, None)
        life.starting.discard(event.worker)
        if life.starting:
            return []
        because = f"the ranks of life {event.life} have started"
        return [act.CloseIncident(number=each.number, because=because) for each in self.log.resumed(now)]

    # -------------------------------------------------------------- evidence

    @on
    def _left(self, event: msg.RanksLeft, now: float) -> list[Action]:
        life = self._living()
        if life is not None and event.life == self._book.life:
            life.left.update(event.ranks)
        return []

    @on
    def _failed(self, event: msg.RankFailed, now: float) -> list[Action]:
        phase, life = self.phase, self._living()
        if life is None or event.life != self._book.life:
            return []
        if event.lost_snapshot is not None:
            self._book.snapshots.pop(event.lost_snapshot, None)
            if self._book.on_disk is not None and self._book.on_disk[0] == event.lost_snapshot:
                self._book.on_disk = None
        self._book.codes.update(dict.fromkeys(event.finished, 0))
        witness = testimony.of_report(event, now)
        if self._held is not None and isinstance(phase, Living):
            phase.witnesses.append(witness)
            if event.source == "exit":
                return []  # that it is gone is told apart
            return self._heal(held.RankCondemned(rank=event.rank, because=event.what), now)
        if isinstance(phase, Settling):
            phase.witnesses.append(witness)
            return [] if witness.is_hearsay else self._conclude(phase.witnesses, now)
        if witness.is_hearsay and len(life.members) * self.rules.ranks > 1:
            self._book.phase = Settling(life=life, until=now + SETTLE_S, witnesses=[witness])
            return []
        return self._conclude([witness], now)

    def _conclude(self, witnesses: list[Witness], now: float) -> list[Action]:
        """Name the cause, and end the life: is another one useful?"""
        book = self._book
        life = self._living()
        assert life is not None
        cause = testimony.cause_of(witnesses)
        others = [each for each in witnesses if each is not cause]
        early = tuple(sorted(life.left | {rank for rank, code in book.codes.items() if code == 0}))
        few_left = 2 * len(early) < len(life.members) * book.rules.ranks
        if early and (cause.is_hearsay or (cause.is_crash and few_left)):
            cause = testimony.left_early(cause, early, life.members[early[0] // book.rules.ranks])
        before, book.program_error = book.program_error, cause.program_error
        refusal = ""
        if cause.program_error and cause.program_error == before:
            refusal = "The same error twice at the same line: the script or its input is wrong"
            if len(life.members) < book.rules.most:
                had, least = len(life.members) * book.rules.ranks, book.rules.least
                refusal += f", or it needs more than the {had} ranks it had; MIN is {least}"
        elif book.failures >= book.rules.max_restarts:
            allowed = book.rules.max_restarts
            used_up = "The only restart is" if allowed == 1 else f"All {allowed} restarts are"
            refusal = f"{used_up} used up" if allowed else "No restarts are allowed"
        wait_s = 0.0
        if not refusal:
            wait_s = self._backoff_s(now - life.began_at)
            book.failures += 1
        remedy = f"restart all ranks, {book.failures} of {book.rules.max_restarts}" if not refusal else "stop"
        book.cause = LifeCause(rank=cause.rank, code=cause.code, has_raised=cause.source == "exception")
        evidence = [text for each in (cause, *others) for text in (each.what, *each.evidence)]
        if others and not cause.is_hearsay:
            victims = testimony.names(tuple(w.rank for w in others if w.rank is not None))
            evidence.append(f"{victims} only lost touch with it")
        failed = act.LifeFailed(
            life=book.life,
            worker=cause.worker,
            rank=cause.rank,
            what=cause.what,
            source=cause.source,
            text=cause.text,
            ago_s=max(0.0, now - cause.since),
            evidence=tuple(dict.fromkeys(evidence)),
            remedy=remedy,
            is_over=bool(refusal),
            because=refusal or cause.what,
            finding=cause.finding,
            traceback=cause.traceback,
        )
        over = f"{cause.what}. {refusal}." if refusal else ""
        return [failed, *self._close(now, now + wait_s, cause.what, over=over)]

    def _backoff_s(self, ran_s: float) -> float:
        """At once, unless lives are short: then longer and longer."""
        book = self._book
        if ran_s >= LONG_LIFE_S:
            book.backoffs = 0
        wait_s = BACKOFF_S * 2.0 ** (book.backoffs - 1) if book.backoffs else 0.0
        book.backoffs += 1
        return min(wait_s, MOST_BACKOFF_S)

    # -------------------------------------------------------------- held ranks

    @on
    def _said(self, event: msg.RanksSaid, now: float) -> list[Action]:
        actions: list[Action] = []
        for word in event.said if event.life == self._book.life else ():
            if self._worker_of(word.rank) == event.worker:
                actions += self._heal(word, now)
        return actions

    @on
    def _gone(self, event: msg.RankGone, now: float) -> list[Action]:
        if event.life != self._book.life or self._worker_of(event.rank) != event.worker:
            return []
        if event.code == 0:
            return self._heal(held.RankFinished(rank=event.rank), now)
        because = f"rank {event.rank} {event.reason}"
        died = held.RankDied(rank=event.rank, because=because, records=event.records)
        return self._heal(died, now)

    def _worker_of(self, rank: int) -> Worker | None:
        life, group = self._living(), rank // self.rules.ranks
        return life.members[group] if life is not None and 0 <= group < len(life.members) else None

    def _heal(self, event: HeldEvent, now: float) -> list[Action]:
        """What the machine decides, as orders: those of one node together, in their order."""
        life = self._living()
        if self._held is None or life is None:
            return []
        orders: dict[Worker, list[KeeperOrder]] = {}
        actions: list[Action] = []
        because = ""
        for action in self._held.handle(event, now):
            match action:
                case held.Healed():
                    actions += self._healed(life, action, now)
                case held.FallBack():
                    return self._fall_back(life, action, now)
                case _:
                    worker = life.members[action.rank // self.rules.ranks]
                    orders.setdefault(worker, []).append(action)
                    because = because or action.because
        told: list[Action] = [
            msg.OrderRanks(
                task=self.task,
                worker=worker,
                incarnation=self._incarnation(worker),
                life=self._book.life,
                orders=tuple(each),
                because=because,
            )
            for worker, each in orders.items()
        ]
        return [*told, *actions]

    def _healed(self, life: Living, healed: held.Healed, now: float) -> list[Action]:
        """An incident of its own, which stopped training for as long as ranks were held."""
        witnesses, life.witnesses = life.witnesses, []
        life.still.clear()
        life.look_at = None
        names = testimony.names(healed.replaced)
        went = (
            f"held {healed.held_s:.2f} s: parked {healed.parked_s:.2f} s, replaced {healed.ready_s:.2f} s, "
            f"connected in {healed.connect_s:.2f} s, state fetched in {healed.fetch_s:.2f} s"
        )
        cause = testimony.cause_of(witnesses) if witnesses else None
        evidence = [text for each in witnesses for text in (each.what, *each.evidence)]
        failed = act.LifeFailed(
            life=self._book.life,
            worker=None,
            rank=healed.replaced[0] if len(healed.replaced) == 1 else None,
            what=healed.because if cause is None else cause.what,
            source="exit" if cause is None else cause.source,
            text=healed.because if cause is None else cause.text,
            ago_s=healed.held_s,
            evidence=(*dict.fromkeys(evidence), went),
            remedy=f"replace {names}, hold the others",
            is_over=False,
            because=f"{names} continued in step interval {healed.again}; the other ranks repeated nothing",
            traceback="" if cause is None else cause.traceback,
            held_s=healed.held_s,
        )
        return [failed]

    def _fall_back(self, life: Living, fall: held.FallBack, now: float) -> list[Action]:
        """One rung down: all ranks start again."""
        self._held = None
        witnesses, life.witnesses = life.witnesses, []
        reason = fall.reason
        if not witnesses:
            witnesses = [testimony.of_held(reason.because, now)]
        witnesses[0] = replace(witnesses[0], evidence=(*witnesses[0].evidence, fall.because))
        return self._conclude(witnesses, now)

    # -------------------------------------------------------------- no progress

    @on
    def _still(self, event: msg.RanksStill, now: float) -> list[Action]:
        life = self.phase
        if not isinstance(life, Living) or event.life != self._book.life or event.worker not in life.members:
            return []
        if self._held is not None and self._held.is_healing:
            return []  # they wait, and that has a deadline of its own
        life.still[event.worker] = now - event.still_s
        if event.tells_steps:
            life.late_steps.add(event.worker)
        return self._look_if_due(life, now)

    @on
    def _moved(self, event: msg.RanksMoved, now: float) -> list[Action]:
        life = self._living()
        if life is not None and event.life == self._book.life:
            life.still.pop(event.worker, None)
            life.late_steps.discard(event.worker)
            life.look_at, life.look_after_s, life.seen = None, self._first_look_s(), {}
            self._book.suspicion = ""
        return []

    def _first_look_s(self) -> float:
        limit_s = self.rules.hang_after_s
        return REPORT_S if limit_s is None else limit_s / 2

    def _look_if_due(self, life: Living, now: float) -> list[Action]:
        """Ask all ranks where they are, if none of them has made progress for long enough."""
        working = [w for w in life.members if w not in life.finished]
        if not working or any(w not in life.still for w in working):
            life.look_at = None
            return []
        since = max(life.still[w] for w in working)
        due = since + life.look_after_s
        if now < due:
            life.look_at = due
            return []
        life.look_at = None
        because = f"no rank has made progress for {now - since:.1f} s; their stacks show which one waits"
        self._book.phase = Locating(life=life, until=now + LOCATE_S, still_since=since)
        return [
            msg.LocateRanks(
                task=self.task,
                worker=worker,
                incarnation=self._incarnation(worker),
                life=self._book.life,
                because=because,
            )
            for worker in working
        ]

    @on
    def _located(self, event: msg.RanksLocated, now: float) -> list[Action]:
        phase = self.phase
        if not isinstance(phase, Locating) or event.life != self._book.life:
            return []
        phase.positions[event.worker] = event.positions
        phase.finished.update(event.finished)
        working = {w for w in phase.life.members if w not in phase.life.finished}
        return self._judge_hang(phase, now) if working <= phase.positions.keys() else []

    def _judge_hang(self, phase: Locating, now: float) -> list[Action]:
        """Is it one? If not yet, people are told what is seen, and the ranks are looked at again later."""
        life, limit_s = phase.life, self.rules.hang_after_s
        if any(w not in life.still and w not in life.finished for w in life.members):
            self._book.phase = life  # one has moved meanwhile
            return []
        still_s = now - phase.still_since
        at = {position.rank: position for each in phase.positions.values() for position in each}
        is_late = limit_s is not None and still_s >= limit_s
        knows_steps = life.late_steps >= {w for w in life.members if w not in life.finished}
        busy = {} if knows_steps else {rank: p for rank, p in at.items() if p.is_busy}
        found = testimony.suspects_of_hang(list(at.values()), tuple(sorted(phase.finished)))
        if limit_s is not None and len(busy) == len(at) and not found.ranks:
            is_late = still_s >= ALL_BUSY * limit_s
        if is_late and not any(testimony.may_work(p, life.seen.get(rank)) for rank, p in busy.items()):
            return self._hung(phase, now)
        at_work = [r for r, p in busy.items() if r in life.seen and testimony.may_work(p, life.seen[r])]
        if len(at_work) < len(at):
            told = [found.because, *found.evidence]
            if at_work:
                told.append(f"{testimony.names(tuple(sorted(at_work)))} may be at work: its stack changes")
            self._book.suspicion = f"no rank has made progress for {still_s:.1f} s: {'; '.join(told)}"
        unseen = any(rank not in life.seen for rank in busy)
        later_s = max(2 * still_s, still_s + RELOOK_S)
        if limit_s is not None and still_s < limit_s:
            later_s = limit_s
        elif is_late and unseen:
            later_s = still_s + RELOOK_S
        life.look_after_s, life.seen = later_s, at
        life.look_at = phase.still_since + later_s
        self._book.phase = life
        return []

    def _hung(self, phase: Locating, now: float) -> list[Action]:
        ranks = self.rules.ranks
        members = phase.life.members
        finished = phase.finished | {
            rank
            for group, worker in enumerate(members)
            if worker in phase.life.finished
            for rank in range(group * ranks, (group + 1) * ranks)
        }
        found = testimony.suspects_of_hang(
            [position for each in phase.positions.values() for position in each], tuple(sorted(finished))
        )
        idle = f"no rank has made progress for {now - phase.still_since:.1f} s"
        named = f"hang at {testimony.names(found.ranks)}" if found.ranks else "hang"
        rank = found.ranks[0] if len(found.ranks) == 1 else None
        witness = testimony.of_hang(
            rank,
            f"{named}: {idle}",
            found,
            since=phase.still_since,
            worker=None if rank is None else members[rank // ranks],
        )
        if self._held is not None and rank is not None:
            self._book.phase = phase.life
            phase.life.witnesses.append(witness)
            return self._heal(held.RankCondemned(rank=rank, because=witness.what), now)
        return self._conclude([witness], now)

    # -------------------------------------------------------------- slow ranks

    @on
    def _paced(self, event: msg.RanksPaced, now: float) -> list[Action]:
        life = self.phase
        if not isinstance(life, Living) or event.life != self._book.life or event.worker not in life.members:
            return []
        life.paces[event.worker] = event.paces
        if life.finished or len(life.paces) < len(life.members):
            return []
        late = arrivals.slowest((p for each in life.paces.values() for p in each), self.rules.ranks)
        life.paces = {}
        before = life.slow.slow
        if not life.slow.see(late):
            return []
        ended = self._slow_ended(life, before, "it enters collectives together with the others again")
        return ended if late is None else [*ended, self._slow(life, late.ranks, str(late), late.factor)]

    def _slow_ended(self, life: Living, ranks: tuple[int, ...], because: str) -> list[Action]:
        return [self._slow(life, ranks, because, is_over=True)] if ranks else []

    def _slow(
        self,
        life: Living,
        ranks: tuple[int, ...],
        because: str,
        factor: float = 1.0,
        *,
        is_over: bool = False,
    ) -> Action:
        worker = life.members[ranks[0] // self.rules.ranks]
        what = f"{testimony.names(ranks)} {'is' if len(ranks) == 1 else 'are'} slow"
        return act.RanksSlow(
            worker=worker, ranks=ranks, what=what, because=because, is_over=is_over, factor=factor
        )

    def redone_s(self, now: float) -> float | None:
        """What a new life, begun now, would do again. None: the script says when it is saved, which it soon
        will be. A script that never says so may have saved nothing.
        """
        book, life = self._book, self._living()
        if life is None:
            return None
        if not book.says_when_saved:
            return now - life.began_at
        since_s = now - max(life.began_at, book.saved_at)
        return since_s if since_s < JUST_SAVED_S or since_s > GROW_PATIENCE_S else None

    # -------------------------------------------------------------- what the script tells

    @on
    def _progressed(self, event: msg.RankProgressed, now: float) -> list[Action]:
        book, life = self._book, self._living()
        if life is None or event.life != book.life:
            return []
        book.step = max(event.step, book.step) if event.step > book.saved_step else event.step
        book.tokens = max(book.tokens, event.tokens or 0)
        if not event.is_saved:
            return []
        return self._saved(event.step, now)

    def _saved(self, step: int, now: float) -> list[Action]:
        book = self._book
        book.says_when_saved, book.saved_step, book.saved_at = True, step, now
        book.step = max(book.step, step)
        if isinstance(book.phase, Living) and book.phase.grow_at is not None:
            return self._grow(now)
        return []

    @on
    def _snapshot_taken(self, event: msg.SnapshotTaken, now: float) -> list[Action]:
        """The files of one node."""
        book, life, worker = self._book, self._living(), event.worker
        if life is None or event.life != book.life:
            return []
        kept = book.snapshots.get(event.step)
        if kept is None or kept.life != event.life or worker in kept.files:
            number = 1 + max((each.number for each in book.snapshots.values()), default=0)
            kept = BookedSnapshot(groups=len(life.members), life=event.life, number=number, is_waiting=True)
            book.snapshots[event.step] = kept
        kept.files[worker] = event.files
        kept.holders[worker] = [(worker, event.incarnation)]
        return self._copy_next(now)

    def _copy_next(self, now: float) -> list[Action]:
        """Of the states that wait the newest, if no copies are on their way. Older ones are passed over."""
        book, life = self._book, self._living()
        waiting = [step for step in self._by_age() if book.snapshots[step].is_waiting]
        ready = [step for step in waiting if book.snapshots[step].is_handed_over]
        if life is None or not ready:
            return []
        step = ready[-1]
        for old in waiting[: waiting.index(step)]:  # nodes hand over in one order: the others stay unfinished
            del book.snapshots[old]
        if any(each.copying for each in book.snapshots.values()):
            return []
        kept = book.snapshots[step]
        kept.is_waiting = False
        orders: list[Action] = []
        for worker, files in kept.files.items():
            partner = life.members[(life.members.index(worker) + 1) % len(life.members)]
            if not files or partner == worker or worker not in book.memories:
                continue
            kept.copying.add(worker)
            holders = (book.memories[worker],)
            orders.append(
                msg.CopySnapshot(
                    task=self.task,
                    worker=partner,
                    incarnation=self._incarnation(partner),
                    life=book.life,
                    step=step,
                    owner=worker,
                    files=tuple(KeptFile(name=n, file=file, holders=holders) for n, file in files.items()),
                    because="two nodes keep it",
                )
            )
        return orders or self._snapshot_grown(step, now)

    def _by_age(self) -> list[int]:
        """The steps of the states, that of the newest state last."""
        return sorted(self._book.snapshots, key=lambda step: (self._book.snapshots[step].number, step))

    @on
    def _snapshot_copied(self, event: msg.SnapshotCopied, now: float) -> list[Action]:
        kept = self._book.snapshots.get(event.step)
        if kept is None or kept.life != event.life or event.owner not in kept.copying:
            return []
        kept.copying.discard(event.owner)
        if not event.failed:
            kept.holders[event.owner].append((event.worker, event.incarnation))
        return self._snapshot_grown(event.step, now)

    def _snapshot_grown(self, step: int, now: float) -> list[Action]:
        book = self._book
        if not book.snapshots[step].is_whole:
            return []
        for is_safe in (True, False):  # a state whose copies failed takes the place of no other one
            kept = ((each, book.snapshots[each]) for each in self._by_age())
            alike = [each for each, one in kept if one.is_whole and one.is_on_two_nodes is is_safe]
            for old in alike[:-KEPT_SNAPSHOTS]:
                del book.snapshots[old]
        return [*self._drain(step), *self._saved(step, now), *self._copy_next(now)]

    def _drain(self, step: int) -> list[Action]:
        """To disk, by the nodes whose files they are, if none is on its way."""
        book, kept = self._book, self._book.snapshots[step]
        if not book.rules.snapshots or book.draining is not None:
            return []
        owners = [worker for worker, files in sorted(kept.files.items()) if files]
        files = {name: file for worker in owners for name, file in kept.files[worker].items()}
        book.draining = Draining(step=step, files=files, awaited=set(owners))
        return [
            msg.DrainSnapshot(
                task=self.task,
                worker=worker,
                incarnation=self._incarnation(worker),
                life=book.life,
                step=step,
                names=tuple(sorted(kept.files[worker])),
                because="it outlives its nodes there",
            )
            for worker in owners
        ]

    @on
    def _snapshot_drained(self, event: msg.SnapshotDrained, now: float) -> list[Action]:
        book, draining = self._book, self._book.draining
        if draining is None or draining.step != event.step:
            return []
        draining.awaited.discard(event.worker)
        if event.failed:
            book.draining = None  # the next state is tried
        elif not draining.awaited:
            book.draining, book.on_disk = None, (draining.step, draining.files)
        return []

    def _newest_snapshot(self) -> KeptSnapshot | None:
        """The newest state of which every file is in the memory of a node that is there, else on disk."""
        book = self._book
        for step, kept in list(book.snapshots.items()):
            kept.copying.clear()  # the life in which they were on their way is over
            kept.is_waiting = False
            if not kept.is_handed_over:
                del book.snapshots[step]
        for step in reversed(self._by_age()):
            kept = book.snapshots[step]
            found = []
            for owner, files in kept.files.items():
                there = tuple(
                    book.memories[worker]
                    for worker, incarnation in kept.holders[owner]
                    if self._incarnation(worker) == incarnation and worker in book.memories
                )
                found += [KeptFile(name=n, file=f, holders=there) for n, f in sorted(files.items())]
            if found and all(each.holders for each in found):
                return KeptSnapshot(step=step, files=tuple(found))
            del book.snapshots[step]  # lost with its nodes
        if book.on_disk is None:
            return None
        step, files = book.on_disk
        written = tuple(KeptFile(name=n, file=f, holders=()) for n, f in sorted(files.items()))
        return KeptSnapshot(step=step, files=written)

    # -------------------------------------------------------------- a life ends

    def _close(
        self, now: float, then: float, because: str, *, over: str = "", is_finished: bool = False
    ) -> list[Action]:
        book = self._book
        awaited = {worker for worker, place in book.places.items() if isinstance(place, Member)}
        life = self._living()
        ended = [] if life is None else self._slow_ended(life, life.slow.slow, "its life ends")
        self._held = None
        phase = Closing(
            awaited=awaited,
            until=now + self.rules.grace_s + CLOSE_S,
            then=then,
            because=because,
            over=over,
            is_finished=is_finished,
        )
        if isinstance(book.phase, Closing):  # it is closing already
            book.phase.over = book.phase.over or over
            book.phase.is_finished |= is_finished
            return []
        book.phase, book.suspicion = phase, ""
        for worker in awaited:  # no member: a node that is lost now is not waited for as one that trains
            book.places[worker] = Started(self._incarnation(worker))
        if not awaited:
            return [*ended, *self._closed(phase, now)]
        return [
            *ended,
            *(
                msg.EndLife(
                    task=self.task,
                    worker=worker,
                    incarnation=self._incarnation(worker),
                    life=book.life,
                    grace_s=self.rules.grace_s,
                    because=because,
                )
                for worker in sorted(awaited)
            ),
        ]

    def _idle_in(self, phase: Closing, worker: Worker, now: float) -> list[Action]:
        phase.awaited.discard(worker)
        return [] if phase.awaited else self._closed(phase, now)

    def _closed(self, phase: Closing, now: float) -> list[Action]:
        book = self._book
        if phase.is_finished:
            book.phase = Over(phase.because)
            return [act.FinishShape(step=self.recorded, because=phase.because)]
        if phase.over:
            book.phase = Over(phase.over)
            return [act.FailTask(because=phase.over)]
        book.phase = Awaiting(since=now, not_before=max(now, phase.then), because=phase.because)
        return self._start_keepers("it lost its keeper")  # due now: a spare may get its slots first

    def _time_passed(self, now: float) -> list[Action]:
        due = self.due_at()
        if due is None or now < due:
            return []
        match self.phase:
            case Settling(witnesses=witnesses):
                return self._conclude(witnesses, now)
            case Locating() as phase:
                return self._judge_hang(phase, now)
            case Living() if self._held is not None and now >= (self._held.due_at() or now + 1.0):
                return self._heal(held.TimePassed(), now)
            case Living(grow_at=grow_at) as life:
                is_to_grow = grow_at is not None and now >= grow_at
                return self._grow(now) if is_to_grow else self._look_if_due(life, now)
            case Closing() as phase:
                phase.until = now + CLOSE_S
                late = f"its ranks have not ended {CLOSE_S:g} s after SIGKILL"
                return [act.StopWorker(worker=w, because=late) for w in sorted(phase.awaited)]
            case _:
                return self._begin_if_ready(now)

    # -------------------------------------------------------------- details

    def _living(self) -> Living | None:
        match self.phase:
            case Living() as life:
                return life
            case Settling(life=life) | Locating(life=life):
                return life
            case _:
                return None

    def _incarnation(self, worker: Worker) -> int:
        return getattr(self._book.places.get(worker), "incarnation", 0)
