"""How a script heals without a restart: one machine per run of it.

    Running ──death──► Parking ──all parked, all newcomers ready──► Rebuilding ──all rebuilt──► Running
                         ▲  │                                          │
                         └──┴──────────────── death ───────────────────┘
       every phase ──what cannot be held──► Fallen: all ranks start again, for the reason it has

A rank dies. Its unit (the ranks that compute together: one under DDP, a shard group under HSDP) ends whole,
and replacements are started once it is gone. The others are held: they abandon the collectives in which an
absent rank takes part, and wait. When all of them have said where they are, and the newcomers have come to
`everstep.restore`, `plan` says what everybody fetches; when all have fetched it, they go on.

A death at any moment of this raises the epoch: all is asked anew, and what belongs to an earlier epoch does
not count. A newcomer stays one until it has been resumed: until then nothing depends on it.

Rejected: a newcomer that joins while the others train on (they would compute without its share), and a step
that is dropped by all when one rank dies (its losses are not those of a failure-free run).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from everstep.core.held.plan import Situation, plan
from everstep.protocol.codec import decode, encode
from everstep.protocol.held import (
    PRELUDE,
    Address,
    Bye,
    CannotHold,
    EndRank,
    Hold,
    RankEnded,
    RankOpened,
    RankParked,
    RankReady,
    RankRebuilt,
    RankRefused,
    RankUnheld,
    RankUnit,
    RankWord,
    Rebuild,
    Record,
    Resume,
    Rung,
    StartRank,
    TellRank,
)
from everstep.protocol.table import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRules:
    park_s: float = 20.0  # for a survivor to say that it waits; then it is ended and replaced, too
    ready_s: float = 300.0  # for a newcomer to come to `restore`: it imports, and builds its model
    rebuild_s: float = 60.0  # to connect and to fetch the state
    held_s: float = 600.0  # from a death until all go on
    most_strikes: int = 3  # deaths of one rank in a row without a step between them
    most_per_hour: int = 240  # replacements of one rank


# ------------------------------------------------------------------ events, beside what ranks say


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDied:
    """Its process is gone. `records`: what it, or its predecessor in this run, wrote down at snapshots."""

    rank: int
    because: str
    records: tuple[Record, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCondemned:
    """It is stopped or hung, and is to be replaced."""

    rank: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinished:
    """Its process has ended with code 0."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    pass


HeldEvent = RankWord | RankDied | RankCondemned | RankFinished | TimePassed

# ------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    """For people: who died, and how long the others were held."""

    epoch: int
    replaced: tuple[int, ...]
    held_s: float
    parked_s: float  # of these, until all survivors waited
    ready_s: float  # until all newcomers were there
    connect_s: float  # then, of the slowest rank
    fetch_s: float
    again: int  # newcomers begin that interval of the script again
    answered: int  # groups of which they were given answers
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FallBack:
    """Not held: all ranks are to start again."""

    reason: CannotHold
    because: str


HeldAction = TellRank | StartRank | EndRank | Healed | FallBack

# ------------------------------------------------------------------ state


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    pass


@dataclass(slots=True, kw_only=True)
class Heal:
    """What is known of the present one. `began_at`: the first death of it."""

    began_at: float
    first: str  # what began it
    epoch_at: float  # when the present epoch began
    parked: dict[int, RankParked] = field(default_factory=dict)
    parked_at: float = 0.0
    ready_at: float = 0.0


@dataclass(slots=True, kw_only=True)
class Parking:
    heal: Heal


@dataclass(slots=True, kw_only=True)
class Rebuilding:
    heal: Heal
    since: float
    begins: int  # the interval in which newcomers begin
    answered: int
    awaited: set[int]
    connect_s: float = 0.0
    fetch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallen:
    reason: CannotHold


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismissed:
    """All scripts have come to their end; the processes may end."""


Phase = Running | Parking | Rebuilding | Fallen | Dismissed


@dataclass(slots=True, kw_only=True)
class Alive:
    """It takes part, or waits at the end of its script."""

    has_ended: bool = False


@dataclass(slots=True, kw_only=True)
class Ending:
    """SIGKILL is on its way to it."""

    since: float


@dataclass(slots=True, kw_only=True)
class Gone:
    """Its replacement waits for the rest of its unit to be gone."""


@dataclass(slots=True, kw_only=True)
class Coming:
    """A newcomer that has not been resumed."""

    since: float
    is_ready: bool = False


@dataclass(slots=True, kw_only=True)
class Finished:
    """Its process has ended by itself, with code 0."""


Seat = Alive | Ending | Gone | Coming | Finished


@dataclass(slots=True, kw_only=True)
class Place:
    """Of one rank, whichever process fills it."""

    seat: Seat
    address: Address | None = None
    records: tuple[Record, ...] = ()
    began: int = -2  # the interval in which its process began; a death in a later one forgives those before
    strikes: int = 0
    replaced_at: list[float] = field(default_factory=list)  # within the last hour


@dataclass(slots=True, kw_only=True)
class HeldBook:
    """All of the state."""

    unit: int
    rules: HeldRules
    places: dict[int, Place]
    phase: Phase = field(default_factory=Running)
    epoch: int = 0
    refusal: str = ""


HOUR_S = 3600.0


class HeldRun:
    """The state machine. `handle` is the only way it changes."""

    def __init__(self, *, world: int, unit: int, rules: HeldRules | None = None) -> None:
        assert 0 < unit <= world, "no rank, or no unit"
        assert world % unit == 0, "units are of one size"
        places = {rank: Place(seat=Alive()) for rank in range(world)}
        self._book = HeldBook(unit=unit, rules=rules or HeldRules(), places=places)

    # -------------------------------------------------------------- what others read

    @property
    def phase(self) -> Phase:
        return self._book.phase

    @property
    def epoch(self) -> int:
        return self._book.epoch

    @property
    def refusal(self) -> str:
        return self._book.refusal

    @property
    def is_healing(self) -> bool:
        return isinstance(self._book.phase, Parking | Rebuilding)

    def is_expected_to_end(self, rank: int) -> bool:
        """It has been given up: its end is no news."""
        return isinstance(self._book.places[rank].seat, Ending)

    def due_at(self) -> float | None:
        book, rules = self._book, self._book.rules
        match book.phase:
            case Parking(heal=heal):
                dues = [heal.began_at + rules.held_s]
                if self._unparked(heal):
                    dues.append(heal.epoch_at + rules.park_s)
                dues += [s.since + rules.ready_s for s in self._coming if not s.is_ready]
                return min(dues)
            case Rebuilding(heal=heal, since=since):
                return min(since + rules.rebuild_s, heal.began_at + rules.held_s)
            case _:
                return None

    def freeze(self) -> Document:
        return {"held": encode(self._book)}

    @classmethod
    def thaw(cls, data: Document) -> HeldRun:
        book: HeldBook = decode(HeldBook, data["held"])
        run = cls(world=len(book.places), unit=book.unit)
        run._book = book
        return run

    def validate(self) -> None:
        book = self._book
        absent = [
            rank for rank, place in book.places.items() if isinstance(place.seat, Ending | Gone | Coming)
        ]
        match book.phase:
            case Running():
                assert not absent, f"ranks {absent} are absent, and nothing is done about it"
            case Parking(heal=heal):
                assert absent, "a heal without an absent rank"
                assert set(heal.parked) <= set(self._alive()), "an absent rank counts as parked"
                assert all(said.epoch == book.epoch for said in heal.parked.values()), (
                    "parked in another epoch"
                )
            case Rebuilding(heal=heal, awaited=awaited):
                assert awaited, "nobody is waited for"
                assert set(heal.parked) == set(self._alive()), "a rank was planned for that had not parked"
                assert not self._are_leaving, "a plan without all newcomers"
                assert all(seat.is_ready for seat in self._coming), "a newcomer was not ready"
        assert self.due_at() is not None or not self.is_healing, "a heal without a deadline"

    # -------------------------------------------------------------- events in, actions out

    def handle(self, event: HeldEvent, now: float) -> list[HeldAction]:
        if isinstance(self._book.phase, Fallen):
            return []
        match event:
            case RankOpened():
                return self._opened(event)
            case RankParked():
                return self._parked(event, now)
            case RankReady():
                return self._ready(event, now)
            case RankRebuilt():
                return self._rebuilt(event, now)
            case RankUnheld():
                return self._unheld(event)
            case RankRefused():
                return self._refused(event)
            case RankUnit():
                return self._told_unit(event)
            case RankEnded():
                return self._ended(event)
            case RankDied():
                return self._died(event, now)
            case RankCondemned():
                return self._condemned(event, now)
            case RankFinished():
                return self._finished(event)
            case TimePassed():
                return self._time_passed(now)

    # -------------------------------------------------------------- deaths

    def _died(self, event: RankDied, now: float) -> list[HeldAction]:
        place = self._book.places[event.rank]
        was, place.seat, place.address = place.seat, Gone(), None
        if isinstance(was, Gone | Finished):
            place.seat = was
            return []
        if event.records:
            place.records = event.records
        if reason := self._unheld_because(event.rank, event.because, now):
            return self._fall(reason)
        if isinstance(was, Ending):  # this epoch counts it as absent already
            return self._start_units(now, event.because)
        return self._absent({event.rank}, event.because, now)

    def _condemned(self, event: RankCondemned, now: float) -> list[HeldAction]:
        if not isinstance(self._book.places[event.rank].seat, Alive | Coming):
            return []
        return self._absent({event.rank}, event.because, now)

    def _absent(self, ranks: set[int], because: str, now: float) -> list[HeldAction]:
        """These are gone or have to go, and their units with them. The epoch rises: all are asked anew."""
        book = self._book
        if isinstance(book.phase, Dismissed):
            return self._fall(
                CannotHold(rung=Rung.FINISHED, because=f"{because}, after the script had ended")
            )
        units = {rank // book.unit for rank in ranks}
        actions: list[HeldAction] = []
        for rank, place in sorted(book.places.items()):
            if rank // book.unit in units and isinstance(place.seat, Alive | Coming):
                end = because if rank in ranks else f"{because}; its unit ends together"
                place.seat = Ending(since=now)
                actions.append(EndRank(rank=rank, because=end))
        if finished := [rank for rank, place in book.places.items() if isinstance(place.seat, Finished)]:
            named = f"rank {finished[0]} has ended already"
            return self._fall(CannotHold(rung=Rung.FINISHED, because=f"{because}, and {named}"))
        if not self._alive():
            return self._fall(CannotHold(rung=Rung.NO_REPLICA, because=f"{because}, and no unit is left"))
        book.epoch += 1
        began_at, first = now, because
        if isinstance(book.phase, Parking | Rebuilding):
            began_at, first = book.phase.heal.began_at, book.phase.heal.first
        book.phase = Parking(heal=Heal(began_at=began_at, first=first, epoch_at=now))
        hold = Hold(epoch=book.epoch, absent=self._absentees(), because=because)
        told = [rank for rank, place in sorted(book.places.items()) if isinstance(place.seat, Alive | Coming)]
        actions += [TellRank(rank=rank, order=hold, because=because) for rank in told]
        return actions + self._start_units(now, because)

    def _start_units(self, now: float, because: str) -> list[HeldAction]:
        """Replacements for units of which every rank is gone: they begin together."""
        book = self._book
        gone = [rank for rank, place in sorted(book.places.items()) if isinstance(place.seat, Gone)]
        whole = [rank for rank in gone if all(mate in gone for mate in self._unit_of(rank))]
        for rank in whole:
            book.places[rank].seat = Coming(since=now)
        peers = {rank: at for rank in self._alive() if (at := book.places[rank].address) is not None}
        absent = self._absentees()
        return [
            StartRank(
                rank=rank, epoch=book.epoch, unit=book.unit, absent=absent, peers=peers, because=because
            )
            for rank in whole
        ]

    def _unheld_because(self, rank: int, because: str, now: float) -> CannotHold | None:
        """What is known at once when it dies."""
        book, place = self._book, self._book.places[rank]
        if book.refusal:
            return CannotHold(rung=Rung.REFUSED, because=book.refusal)
        if not place.records:
            return CannotHold(rung=Rung.PRELUDE, because=f"{because} before its first snapshot")
        last = max(record.interval for record in place.records)
        place.strikes = 1 if last > place.began else place.strikes + 1
        place.began = last
        place.replaced_at = [at for at in place.replaced_at if now - at < HOUR_S] + [now]
        if place.strikes > book.rules.most_strikes:
            often = f"rank {rank} has died {place.strikes} times in a row without a step in between"
            return CannotHold(rung=Rung.REPLACEMENTS, because=often)
        if len(place.replaced_at) > book.rules.most_per_hour:
            often = f"rank {rank} has died more than {book.rules.most_per_hour} times within an hour"
            return CannotHold(rung=Rung.REPLACEMENTS, because=often)
        return None

    # -------------------------------------------------------------- the heal

    def _opened(self, event: RankOpened) -> list[HeldAction]:
        place = self._book.places[event.rank]
        if isinstance(place.seat, Alive | Coming):
            place.address = event.address
        return []

    def _parked(self, event: RankParked, now: float) -> list[HeldAction]:
        book, place = self._book, self._book.places[event.rank]
        if (
            not isinstance(book.phase, Parking)
            or event.epoch != book.epoch
            or not isinstance(place.seat, Alive)
        ):
            return []
        book.phase.heal.parked[event.rank] = event
        return self._plan_if_complete(book.phase.heal, now)

    def _ready(self, event: RankReady, now: float) -> list[HeldAction]:
        phase, seat = self._book.phase, self._book.places[event.rank].seat
        if not isinstance(seat, Coming):
            return []
        seat.is_ready = True
        return self._plan_if_complete(phase.heal, now) if isinstance(phase, Parking) else []

    def _plan_if_complete(self, heal: Heal, now: float) -> list[HeldAction]:
        book = self._book
        is_parked = not self._unparked(heal)
        are_ready = not self._are_leaving and all(seat.is_ready for seat in self._coming)
        if is_parked and not heal.parked_at:
            heal.parked_at = now
        if are_ready and not heal.ready_at:
            heal.ready_at = now
        if not is_parked or not are_ready:
            return []
        if early := [rank for rank, said in heal.parked.items() if said.interval == PRELUDE]:
            because = f"{heal.first}, and rank {early[0]} has not come to its first snapshot"
            return self._fall(CannotHold(rung=Rung.PRELUDE, because=because))
        new = [rank for rank, place in book.places.items() if isinstance(place.seat, Coming)]
        addresses = {rank: at for rank, place in book.places.items() if (at := place.address) is not None}
        assert set(heal.parked) <= addresses.keys(), "a rank that parks has told its address"
        found = plan(
            Situation(
                unit=book.unit,
                parked=heal.parked,
                records={rank: book.places[rank].records for rank in new},
                addresses=addresses,
            )
        )
        if isinstance(found, CannotHold):
            return self._fall(replace(found, because=f"{heal.first}: {found.because}"))
        begins = min(found[rank].interval for rank in new)
        book.phase = Rebuilding(
            heal=heal,
            since=now,
            begins=begins,
            answered=len({ask.group for rank in new for ask in found[rank].asks}),
            awaited=set(found),
        )
        because = f"{_named(new)} begin{'s' * (len(new) == 1)} interval {begins} again"
        return [
            TellRank(rank=rank, order=Rebuild(epoch=book.epoch, plan=own, because=because), because=because)
            for rank, own in sorted(found.items())
        ]

    def _rebuilt(self, event: RankRebuilt, now: float) -> list[HeldAction]:
        book, phase = self._book, self._book.phase
        if not isinstance(phase, Rebuilding) or event.epoch != book.epoch:
            return []
        phase.awaited.discard(event.rank)
        phase.connect_s = max(phase.connect_s, event.connect_s)
        phase.fetch_s = max(phase.fetch_s, event.fetch_s)
        if phase.awaited:
            return []
        heal = phase.heal
        new = sorted(rank for rank, place in book.places.items() if isinstance(place.seat, Coming))
        for rank in new:
            book.places[rank].seat = Alive()
        book.phase = Running()
        healed = Healed(
            epoch=book.epoch,
            replaced=tuple(new),
            held_s=now - heal.began_at,
            parked_s=heal.parked_at - heal.began_at,
            ready_s=heal.ready_at - heal.began_at,
            connect_s=phase.connect_s,
            fetch_s=phase.fetch_s,
            again=phase.begins,
            answered=phase.answered,
            because=heal.first,
        )
        because = "all ranks are connected and have what they need"
        resume = Resume(epoch=book.epoch, because=because)
        ranks = sorted(book.places)
        return [*(TellRank(rank=rank, order=resume, because=because) for rank in ranks), healed]

    def _unheld(self, event: RankUnheld) -> list[HeldAction]:
        """Also when all go on already: a newcomer sees what it was answered only as it issues it again."""
        if event.epoch != self._book.epoch:
            return []
        return self._fall(CannotHold(rung=Rung.UNHELD, because=f"rank {event.rank}: {event.because}"))

    def _refused(self, event: RankRefused) -> list[HeldAction]:
        """Nothing has happened yet, unless a heal is under way."""
        book = self._book
        book.refusal = book.refusal or f"rank {event.rank}: {event.because}"
        return self._fall(CannotHold(rung=Rung.REFUSED, because=book.refusal)) if self.is_healing else []

    def _told_unit(self, event: RankUnit) -> list[HeldAction]:
        """By the first snapshot; a newcomer says it again."""
        book = self._book
        if event.unit == book.unit:
            return []
        if book.epoch or len(book.places) % event.unit:
            said = f"rank {event.rank} says that {event.unit} ranks hold one replica, and it was {book.unit}"
            return self._refused(RankRefused(rank=event.rank, because=said))
        book.unit = event.unit
        return []

    # -------------------------------------------------------------- the end

    def _ended(self, event: RankEnded) -> list[HeldAction]:
        seat = self._book.places[event.rank].seat
        if not isinstance(seat, Alive):
            return []
        seat.has_ended = True
        return self._dismiss()

    def _dismiss(self) -> list[HeldAction]:
        book = self._book
        seats = [place.seat for place in book.places.values()]
        if not isinstance(book.phase, Running) or not all(
            isinstance(seat, Finished) or (isinstance(seat, Alive) and seat.has_ended) for seat in seats
        ):
            return []
        book.phase = Dismissed()
        because = "every script has come to its end"
        bye = Bye(because=because)
        alive = self._alive()
        return [TellRank(rank=rank, order=bye, because=because) for rank in alive]

    def _finished(self, event: RankFinished) -> list[HeldAction]:
        place = self._book.places[event.rank]
        place.seat, place.address = Finished(), None
        if self.is_healing:
            because = f"rank {event.rank} has ended while others were held"
            return self._fall(CannotHold(rung=Rung.FINISHED, because=because))
        return self._dismiss()

    # -------------------------------------------------------------- deadlines

    def _time_passed(self, now: float) -> list[HeldAction]:
        due = self.due_at()
        if due is None or now < due:
            return []
        book, rules = self._book, self._book.rules
        match book.phase:
            case Parking(heal=heal) | Rebuilding(heal=heal) if now >= heal.began_at + rules.held_s:
                late = f"{heal.first}; the ranks have been held for {rules.held_s:g} s"
                return self._fall(CannotHold(rung=Rung.TOO_LONG, because=late))
            case Rebuilding(heal=heal, awaited=awaited):
                late = f"{_named(awaited)} did not connect within {rules.rebuild_s:g} s"
                return self._fall(CannotHold(rung=Rung.UNHELD, because=f"{heal.first}; {late}"))
            case Parking(heal=heal) if (
                late_ones := self._unparked(heal)
            ) and now >= heal.epoch_at + rules.park_s:
                late = f"{_named(late_ones)} did not stop to wait within {rules.park_s:g} s"
                return self._absent(set(late_ones), late, now)
        slow = [
            rank
            for rank, place in book.places.items()
            if isinstance(place.seat, Coming)
            and not place.seat.is_ready
            and now >= place.seat.since + rules.ready_s
        ]
        late = (
            f"the replacement of {_named(slow)} did not come to everstep.restore within {rules.ready_s:g} s"
        )
        return self._fall(CannotHold(rung=Rung.LATE_NEWCOMER, because=late))

    # -------------------------------------------------------------- details

    def _fall(self, reason: CannotHold) -> list[HeldAction]:
        self._book.phase = Fallen(reason=reason)
        return [FallBack(reason=reason, because=f"not held ({reason.rung}): {reason.because}")]

    def _unit_of(self, rank: int) -> range:
        first = rank - rank % self._book.unit
        return range(first, first + self._book.unit)

    def _alive(self) -> list[int]:
        return [rank for rank, place in sorted(self._book.places.items()) if isinstance(place.seat, Alive)]

    def _absentees(self) -> tuple[int, ...]:
        absent = (Ending, Gone, Coming)
        return tuple(
            rank for rank, place in sorted(self._book.places.items()) if isinstance(place.seat, absent)
        )

    def _unparked(self, heal: Heal) -> list[int]:
        return [rank for rank in self._alive() if rank not in heal.parked]

    @property
    def _are_leaving(self) -> bool:
        """Ranks that are to be replaced, and are not yet."""
        return any(isinstance(place.seat, Ending | Gone) for place in self._book.places.values())

    @property
    def _coming(self) -> list[Coming]:
        return [place.seat for place in self._book.places.values() if isinstance(place.seat, Coming)]


def _named(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    return f"ranks {', '.join(map(str, found[:8]))}{', …' * (len(found) > 8)}"
