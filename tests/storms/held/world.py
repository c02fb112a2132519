"""Virtual ranks of a held script, and everything that can happen to them. The machine, its plan and the
ranks' books are the product's; processes, collectives and lines are made here, on a clock that jumps.

Safety is checked wherever something becomes true: each input, result and update is compared with that of the
failure-free run. Liveness at the end: the run has ended, or it fell back for a reason that the faults account
for.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

from everstep.core.held import machine as held
from everstep.core.held.ledger import Answer, AnswerError, GroupLedger, RankBook
from everstep.core.held.machine import EndRank, FallBack, Healed, HeldRules, HeldRun, StartRank, TellRank
from everstep.protocol.held import (
    PRELUDE,
    Bye,
    CannotHold,
    Hold,
    Position,
    RankEnded,
    RankOpened,
    RankParked,
    RankPlan,
    RankReady,
    RankRebuilt,
    RankUnheld,
    Rebuild,
    Record,
    Resume,
    Rung,
)
from tests.storms.held.program import (
    Collective,
    Memory,
    Program,
    Reference,
    Update,
    Work,
    reference,
    result_of,
)

Wait = Callable[[], bool] | float  # what a script waits for: that something is true, or some time


class Violation(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Faults:
    """`kills`: how many; `is_wild`: at any moment, else only while nothing is healing and all have begun."""

    kills: int
    is_wild: bool
    at_once: float = 0.0  # how often a second rank dies with the first
    stops: float = 0.0  # how often a rank is stopped instead
    follows: float = 0.0  # how often another one follows within the heal

    @classmethod
    def drawn(cls, draw: random.Random) -> Faults:
        is_wild = draw.random() < 0.5
        at_once = draw.choice([0.0, 0.0, 0.3]) if is_wild else 0.0
        follows = draw.choice([0.0, 0.5]) if is_wild else 0.0
        return cls(draw.randint(1, 6), is_wild, at_once, draw.choice([0.0, 0.0, 0.3]), follows)


@dataclass(slots=True)
class Inner:
    """A communicator: it pairs collectives by nothing but their order."""

    issued: dict[int, list[tuple[Collective, int, Position]]] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)  # by rank: completions that are on their way to it


@dataclass(slots=True)
class Pending:
    item: Collective
    position: Position
    input: int
    value: int | None = None
    is_finished: bool = False


@dataclass(slots=True)
class Kept:
    """What a rank keeps of an interval's beginning: the small things."""

    other: int
    draws: int
    updates: tuple[int, ...]


class VirtualRank:
    """One process."""

    def __init__(self, world: World, rank: int, born: StartRank | None) -> None:
        self.world, self.rank = world, rank
        program = world.program
        self.book = RankBook(rank=rank, world=program.world, unit=program.unit)
        self.memory = Memory.fresh(program, rank)
        self.before: dict[int, int] = {}  # parameters of an optimizer before its last step
        self.kept: dict[int, Kept] = {}
        self.after: dict[int, tuple[int, int, int]] = {}  # by optimizer: at which update, and what then
        self.pending: dict[str, list[Pending]] = {name: [] for name in self.own_groups()}
        self.inners: dict[str, tuple[str, int]] = {}
        self.is_dead = self.is_stopped = self.has_ended = self.is_dismissed = False
        self.attempt = 0  # of rebuilding
        self.backlog: list[Any] = []  # orders that a stopped process has not taken
        self.generation = 0 if born is None else born.epoch
        if born is not None:
            self.book.hold(born.epoch, born.absent)
            self.book.is_new = True
        for name in self.own_groups():
            self.book.open_group(name, program.groups[name])
            self.inners[name] = (name, self.generation)
        if born is not None:
            for name in self.own_groups():
                if not self.book.spans_units(program.groups[name]):
                    self.book.groups[name].is_broken = False  # its members begin together
        self.main = self.script(begins_anew=born is None)
        self.waits: Wait | None = None
        world.say(self, RankOpened(rank=rank, address=("here", rank)))
        self.step()

    def own_groups(self) -> list[str]:
        return [name for name, members in self.world.program.groups.items() if self.rank in members]

    # -------------------------------------------------------------- the script

    def script(self, *, begins_anew: bool) -> Generator[Wait, None, None]:
        world, book = self.world, self.book
        yield world.draw.random() * 3.0
        first = 0
        if not begins_anew:
            world.say(self, RankReady(rank=self.rank))
            yield lambda: not book.is_held
            assert book.arrives is not None
            first = book.arrives.interval
            yield world.draw.random()  # it loads what it was given
        for interval in range(first, len(world.program.intervals)):
            yield from self.snapshot(interval)
            for item in world.program.intervals[interval]:
                match item:
                    case Work(most=most):
                        self.memory.work()
                        yield most * world.draw.random()
                    case Collective(group=group) if group in self.pending:
                        one = self.issue(item)
                        if item.is_awaited:
                            yield lambda one=one: one.is_finished
                            self.hear(one)
                    case Update():
                        yield from self.update(item.optimizer, item.inside)
        yield from self.drain()
        self.has_ended = True
        world.say(self, RankEnded(rank=self.rank))
        yield lambda: self.is_dismissed
        world.check_last(self)
        world.exited(self)

    def drain(self) -> Generator[Wait, None, None]:
        for name in self.pending:
            while self.pending[name]:
                one = self.pending[name][0]
                yield lambda one=one: one.is_finished
                self.hear(one)

    def hear(self, one: Pending) -> None:
        for waiting in self.pending.values():
            if one in waiting:
                waiting.remove(one)
                assert one.value is not None
                self.memory.hear(one.item, one.value)

    def snapshot(self, interval: int) -> Generator[Wait, None, None]:
        yield from self.drain()
        yield lambda: self.book.may_change
        book = self.book
        book.enter("snapshot")
        if book.arrives is not None:
            self.memory.draws = self.world.records[self.rank][interval].draws
        book.begin(interval)
        self.memory.gradient = 0
        updates = tuple(book.updates)
        self.kept = {at: kept for at, kept in self.kept.items() if at >= interval - 1}
        self.kept[interval] = Kept(self.memory.other, self.memory.draws, updates)
        records = self.world.records.setdefault(self.rank, {})
        records[interval] = WrittenRecord(
            Record(interval=interval, step=interval, updates=updates), self.memory.draws
        )
        for old in [at for at in records if at < interval - 1]:
            del records[old]
        book.leave()
        yield 0.0
        self.report()

    def update(self, optimizer: int, inside: tuple[Collective, ...]) -> Generator[Wait, None, None]:
        yield from self.drain()
        yield lambda: self.book.may_change
        book = self.book
        book.enter("update")
        self.before[optimizer] = self.memory.parameters[optimizer]
        yield self.world.draw.random() * 0.5
        self.memory.half_update(optimizer)
        for item in inside:
            if item.group in self.pending:
                one = self.issue(item)
                yield lambda one=one: one.is_finished
                self.hear(one)
        yield lambda: self.book.may_change or not self.book.is_parked
        self.memory.update(optimizer)
        book.updated(optimizer)
        if (after := self.after.get(optimizer)) is not None and after[0] == book.updates[optimizer]:
            _, self.memory.parameters[optimizer], self.memory.moments[optimizer] = after
            del self.after[optimizer]
        book.leave()
        self.world.check_update(self, optimizer)
        self.report()

    # -------------------------------------------------------------- collectives

    def issue(self, item: Collective) -> Pending:
        group = self.book.groups[item.group]
        position = group.place(self.book.interval)
        one = Pending(item, position, self.memory.input(item.group, *position))
        self.pending[item.group].append(one)
        self.world.check_input(self, item.group, position, one.input)
        if group.answer(position, shape_of(item)) is None and not group.is_broken:
            self.world.issue(self, one)
        self.settle(item.group)
        return one

    def arrived(self, inner: tuple[str, int], position: Position, value: int) -> None:
        """A communicator has finished; what the book does not take is as if it had not."""
        name = inner[0]
        if self.is_dead or self.inners[name] != inner:
            return
        for one in self.pending[name]:
            if one.position == position:
                one.value = value
        self.settle(name)

    def settle(self, name: str) -> None:
        """Finish, in order, what can be."""
        group = self.book.groups[name]
        spans = self.book.spans_units(group.members)
        for one in [each for each in self.pending[name] if not each.is_finished]:
            shape = shape_of(one.item)
            told = group.answer(one.position, shape)
            if told is not None:
                one.value = told.outputs
            if one.value is None:
                return
            if not group.finish(one.position, Answer(shape, one.value)):
                return
            one.is_finished = True
            self.world.check_result(self, name, one.position, one.value)
            if not spans:
                group.log.clear()
            elif one.item.root < 0:
                self.book.entered_by_all(group, one.position)

    # -------------------------------------------------------------- a heal

    def take(self, order: Any) -> None:
        if self.is_stopped:
            self.backlog.append(order)
            return
        match order:
            case Hold():
                if self.book.hold(order.epoch, order.absent):
                    self.attempt += 1
                self.report()
            case Rebuild():
                if order.epoch == self.book.epoch:
                    self.attempt += 1
                    self.world.later(self.world.draw.random(), self.rebuild, order, self.attempt)
            case Resume():
                if self.book.resume(order.epoch):
                    self.reissue()
            case Bye():
                self.is_dismissed = True

    def report(self) -> None:
        if (said := self.book.parked()) is not None:
            self.world.say(self, said)

    def rebuild(self, order: Rebuild, attempt: int) -> None:
        """Connect, which takes all members, then fetch, then say so."""
        if attempt != self.attempt or self.is_dead:
            return
        broken = [name for name, group in self.book.groups.items() if group.is_broken]
        for name in broken:
            self.inners[name] = (name, order.epoch)
        self.world.connecting[self.rank] = order.epoch
        members = {each for name in broken for each in self.world.program.groups[name]}
        if any(self.world.connecting.get(each) != order.epoch for each in members):
            self.world.later(0.3, self.rebuild, order, attempt)
            return
        try:
            if not self.fetch(order.plan):
                return  # its peer is dead, of which the machine will hear
        except AnswerError as error:
            self.world.say(self, RankUnheld(rank=self.rank, epoch=order.epoch, because=str(error)))
            return
        self.world.say(self, RankRebuilt(rank=self.rank, epoch=order.epoch))

    def fetch(self, plan: RankPlan) -> bool:
        world, book = self.world, self.book
        for ask in plan.asks:
            peer = world.ranks[ask.rank]
            if peer.is_dead or peer.is_stopped:
                return False
            book.groups[ask.group].learn(peer.book.groups[ask.group].answers(ask.after))
        if plan.interval == PRELUDE:
            return True
        donor = world.ranks[plan.donor]
        if donor.is_dead or donor.is_stopped:
            return False
        book.arrive(plan)
        kept = donor.kept[plan.interval]
        self.memory.other, self.after = kept.other, {}
        for optimizer in range(world.program.optimizers):
            had = plan.updates[optimizer] if optimizer < len(plan.updates) else 0
            has = donor.book.updates[optimizer] if optimizer < len(donor.book.updates) else 0
            parameters, moments = donor.memory.parameters[optimizer], donor.memory.moments[optimizer]
            self.memory.parameters[optimizer], self.memory.moments[optimizer] = parameters, moments
            if optimizer in donor.after:  # it computes this very step again itself
                self.after[optimizer] = donor.after[optimizer]
            elif has > had:
                self.memory.parameters[optimizer] = donor.before[optimizer]
                self.after[optimizer] = (has, parameters, moments)
        return True

    def reissue(self) -> None:
        """In their order, what nobody has finished."""
        for name, waiting in self.pending.items():
            group = self.book.groups[name]
            for one in [each for each in waiting if not each.is_finished]:
                is_lost = not self.world.is_issued(self, one)
                if is_lost and group.answer(one.position, shape_of(one.item)) is None:
                    one.value = None
                    self.world.issue(self, one)
            self.settle(name)

    # -------------------------------------------------------------- running

    def step(self) -> None:
        """Run the script as far as it goes."""
        if self.is_dead or self.is_stopped:
            return
        while True:
            waits = self.waits
            if isinstance(waits, float):
                return  # the clock wakes it
            if waits is not None:
                inside = bool(self.book.section) and not waits()
                if inside != self.book.waits_inside:
                    self.book.waits_inside = inside
                    self.report()
                if not waits():
                    return
            try:
                self.waits = next(self.main)
            except StopIteration:
                self.waits = float("inf")
                return
            except AnswerError as error:
                self.waits = float("inf")
                self.world.say(self, RankUnheld(rank=self.rank, epoch=self.book.epoch, because=str(error)))
                return
            if isinstance(self.waits, float):
                self.world.later(self.waits, self.wake)
                return

    def wake(self) -> None:
        if isinstance(self.waits, float):
            self.waits = None
        self.step()


@dataclass(slots=True)
class WrittenRecord:
    record: Record
    draws: int


def shape_of(item: Collective) -> str:
    return f"{'broadcast' if item.root >= 0 else 'allreduce'} {item.root}"


class World:
    def __init__(self, seed: int, *, run: type[HeldRun] = HeldRun) -> None:
        self.draw = random.Random(seed)
        self.program = Program.drawn(seed)
        self.faults = Faults.drawn(self.draw)
        self.reference: Reference = reference(self.program)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        rules = HeldRules(most_strikes=100)
        self.machine = run(world=self.program.world, unit=self.program.unit, rules=rules)
        self.inners: dict[tuple[str, int], Inner] = {}
        self.connecting: dict[int, int] = {}
        self.records: dict[int, dict[int, WrittenRecord]] = {}
        self.lines: dict[tuple[int, str], float] = {}  # what is said arrives in order
        self.fallen: CannotHold | None = None
        self.heals: list[Healed] = []
        self.seen: Counter[str] = Counter()
        self.exits: set[int] = set()
        self.has_killed_wildly = False
        self.ranks = {rank: VirtualRank(self, rank, None) for rank in range(self.program.world)}
        for _ in range(self.faults.kills):
            self.later(self.draw.random() * 30.0, self.strike)

    # -------------------------------------------------------------- time

    def later(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        if delay != float("inf"):
            heapq.heappush(self._events, (self.now + delay, next(self._numbers), call, arguments))

    def run(self) -> World:
        for _ in range(200_000):
            if self.fallen is not None or len(self.exits) == self.program.world:
                return self
            due = self.machine.due_at()
            if due is not None and (not self._events or due <= self._events[0][0]):
                self.now = max(self.now, due)
                self.tell_machine(held.TimePassed())
                continue
            if not self._events:
                raise Violation(f"nothing happens any more: {self.picture()}")
            self.now, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
            for rank in list(self.ranks.values()):
                rank.step()
        raise Violation(f"no end: {self.picture()}")

    def picture(self) -> str:
        waits = {
            rank: (each.book.interval, each.book.section, each.book.is_held, each.is_dead)
            for rank, each in self.ranks.items()
        }
        return f"{self.machine.phase}, {waits}"

    # -------------------------------------------------------------- lines

    def _in_order(self, rank: int, direction: str, delay: float) -> float:
        at = max(self.now + delay, self.lines.get((rank, direction), 0.0))
        self.lines[rank, direction] = at
        return at - self.now

    def say(self, rank: VirtualRank, word: Any) -> None:
        self.later(self._in_order(rank.rank, "up", self.draw.random() * 0.2), self.tell_machine, word)

    def tell_machine(self, event: Any) -> None:
        if isinstance(event, RankParked):
            self.seen["parked"] += 1
        actions = self.machine.handle(event, self.now)
        self.machine.validate()
        if self.draw.random() < 0.02:  # a coordinator begins again
            frozen = json.loads(json.dumps(self.machine.freeze()))
            self.machine = type(self.machine).thaw(frozen)
            if self.machine.freeze() != frozen:
                raise Violation("a state that is thawed is another one")
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action: held.HeldAction) -> None:
        if not action.because:
            raise Violation(f"no reason: {action}")
        match action:
            case TellRank(rank=rank, order=order):
                self.later(self._in_order(rank, "down", self.draw.random() * 0.2), self._deliver, rank, order)
            case EndRank(rank=rank):
                self.later(self.draw.random() * 0.1, self.kill, self.ranks[rank], "ended")
            case StartRank():
                delay = self._in_order(action.rank, "down", self.draw.random() * 0.5)
                self.later(delay, self._start, action)
            case Healed():
                self.heals.append(action)
            case FallBack():
                self.fallen = action.reason

    def _deliver(self, rank: int, order: Any) -> None:
        """A replacement does not hear what was said to its predecessor: its start is in this order, too."""
        if not self.ranks[rank].is_dead:
            self.ranks[rank].take(order)

    def _start(self, action: StartRank) -> None:
        if not self.ranks[action.rank].is_dead:
            raise Violation(f"a second process of rank {action.rank}")
        self.ranks[action.rank] = VirtualRank(self, action.rank, action)

    # -------------------------------------------------------------- faults

    def strike(self) -> None:
        if self.machine.phase.__class__ in (held.Dismissed, held.Fallen):
            return
        calm = isinstance(self.machine.phase, held.Running) and all(
            not each.is_dead and not each.is_stopped and each.book.interval >= 0
            for each in self.ranks.values()
        )
        if not calm and not self.faults.is_wild:
            if not self.exits:
                self.later(1.0, self.strike)
            return
        if self.draw.random() < self.faults.follows:
            self.later(self.draw.random() * 1.5, self.strike)
        alive = [each for each in self.ranks.values() if not each.is_dead and not each.is_dismissed]
        for victim in self.draw.sample(
            alive, min(len(alive), 1 + (self.draw.random() < self.faults.at_once))
        ):
            if self.draw.random() < self.faults.stops:
                victim.is_stopped = True
                why = f"rank {victim.rank} is stopped"
                self.later(2.0, self._condemn, victim, why)
            else:
                self.kill(victim, "killed by SIGKILL")

    def _condemn(self, victim: VirtualRank, why: str) -> None:
        if not victim.is_dead:
            self.tell_machine(held.RankCondemned(rank=victim.rank, because=why))

    def kill(self, process: VirtualRank, how: str) -> None:
        if process.is_dead or process is not self.ranks[process.rank]:
            return
        process.is_dead = True
        self.connecting.pop(process.rank, None)
        records = self.records.get(process.rank, {})
        died = held.RankDied(
            rank=process.rank,
            because=f"rank {process.rank} {how}",
            records=tuple(each.record for _, each in sorted(records.items())),
        )
        self.later(self._in_order(process.rank, "up", self.draw.random() * 0.2), self.tell_machine, died)

    def exited(self, process: VirtualRank) -> None:
        process.is_dead = True
        self.exits.add(process.rank)
        self.later(
            self._in_order(process.rank, "up", 0.1), self.tell_machine, held.RankFinished(rank=process.rank)
        )

    # -------------------------------------------------------------- communicators

    def issue(self, rank: VirtualRank, one: Pending) -> None:
        key = rank.inners[one.item.group]
        inner = self.inners.setdefault(key, Inner())
        inner.issued.setdefault(rank.rank, []).append((one.item, one.input, one.position))
        self._advance(key)

    def is_issued(self, rank: VirtualRank, one: Pending) -> bool:
        inner = self.inners.get(rank.inners[one.item.group])
        return inner is not None and any(
            position == one.position for _, _, position in inner.issued.get(rank.rank, ())
        )

    def _advance(self, key: tuple[str, int]) -> None:
        inner, members = self.inners[key], self.program.groups[key[0]]
        for rank in members:
            while True:
                number = inner.done.get(rank, 0)
                mine = inner.issued.get(rank, [])
                if number >= len(mine):
                    break
                item, _, position = mine[number]
                needed = members if item.root < 0 else [item.root]
                if any(len(inner.issued.get(each, ())) <= number for each in needed):
                    break
                parts = {each: inner.issued[each][number][1] for each in needed}
                value = result_of(item, parts)
                inner.done[rank] = number + 1
                self.later(self.draw.random() * 0.3, self.ranks[rank].arrived, key, position, value)

    # -------------------------------------------------------------- safety

    def check_input(self, rank: VirtualRank, group: str, position: Position, value: int) -> None:
        if self.reference.inputs[(group, *position)][rank.rank] != value:
            raise Violation(f"rank {rank.rank} puts something else into {group} {position}")

    def check_result(self, rank: VirtualRank, group: str, position: Position, value: int) -> None:
        if self.reference.results[(group, *position)] != value:
            raise Violation(f"rank {rank.rank} is given another result of {group} {position}")

    def check_update(self, rank: VirtualRank, optimizer: int) -> None:
        number = sum(rank.book.updates) - 1
        updates = self.reference.updates[rank.rank]
        has = (optimizer, rank.memory.parameters[optimizer], rank.memory.moments[optimizer])
        if number >= len(updates) or updates[number] != has:
            raise Violation(f"rank {rank.rank}: update {number} of optimizer {optimizer} is another one")

    def check_last(self, rank: VirtualRank) -> None:
        last = self.reference.last[rank.rank]
        if (rank.memory.parameters, rank.memory.draws) != (last.parameters, last.draws):
            raise Violation(f"rank {rank.rank} ends with something else")
        if sum(rank.book.updates) != len(self.reference.updates[rank.rank]):
            raise Violation(f"rank {rank.rank} has missed an update")


EXPECTED = {Rung.NO_REPLICA, Rung.PRELUDE, Rung.FINISHED}


def storm(seed: int, world: type[World] = World, run: type[HeldRun] = HeldRun) -> World:
    """Raises a Violation."""
    found = world(seed, run=run).run()
    if found.fallen is not None:
        drifted = found.program.may_drift and found.fallen.rung in (Rung.NO_REPLICA, Rung.UNANSWERED)
        drifted = drifted or (found.program.tears_states and found.fallen.rung == Rung.NO_REPLICA)
        if not (found.faults.is_wild or drifted or found.fallen.rung == Rung.FINISHED):
            raise Violation(f"a single death was not held: {found.fallen.because}")
        if found.fallen.rung not in EXPECTED and not drifted:
            raise Violation(f"fell back without a need: {found.fallen.rung}, {found.fallen.because}")
    return found


def storms(seeds: Iterable[int]) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        try:
            found = storm(seed)
        except Violation as error:
            raise Violation(f"seed {seed}: {error}") from None
        outcomes["fell back" if found.fallen is not None else "held"] += 1
        outcomes["heals"] += len(found.heals)
    return outcomes


__all__ = ["Faults", "GroupLedger", "Violation", "World", "storm", "storms"]
