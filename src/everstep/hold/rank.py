"""A rank of a held run: its book, its line to the keeper, its peers, and the moments at which it may change.

    keeper ── Hold, Rebuild, Resume, Bye ──► a thread ──► book (one lock) ◄── collectives, updates, snapshots
       ▲                                       │
       └──── RankParked, RankRebuilt, … ───────┘            peers ◄── state and answers ──► peers

What an optimizer's parameters were before its last step is kept, so that a newcomer can compute a step again
which others have made already. Such a newcomer is given what they have after it, and takes that at the end of
its own step: moments before it are not kept. Until then it hands on to others what it was given.

Tensors of a state that no optimizer changes (buffers, averages) are copied at each snapshot; parameters and
moments are not. Small ones are also written down, for they may be each rank's own: running means of batch
norm are, until DDP takes rank 0's.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from weakref import ReferenceType

import torch
import torch.distributed as dist

from everstep.core.held.ledger import Answer, RankBook
from everstep.errors import EverstepError, PeerError, UserError
from everstep.hold import peers, state_tree
from everstep.hold.groups import ALIKE, HEAR_S, KEPT_IN_PRELUDE, Collective, Grave, HeldGroup, Tensors
from everstep.hold.settings import HoldSettings
from everstep.hold.slate import Slate
from everstep.hold.state_tree import local, mapped, shard
from everstep.log import warn
from everstep.protocol.held import (
    PRELUDE,
    Address,
    Bye,
    Hold,
    Position,
    RankEnded,
    RankOpened,
    RankOrder,
    RankPlan,
    RankReady,
    RankRebuilt,
    RankRefused,
    RankUnheld,
    RankUnit,
    RankWord,
    Rebuild,
    Record,
    Resume,
)

SMALL = 1 << 16  # bytes of a collective; in DDP's constructor larger ones are the model, which a state has
LEAST_LOG = 256 << 20
MOST_OWN = 2 << 20  # bytes of tensors that no optimizer changes, to be written down
Say = Callable[[RankWord], None]


class Found(NamedTuple):
    """The step to begin with, and the state at its beginning."""

    step: int
    state: Any


@dataclass(slots=True)
class After:
    """What an optimizer has after a step that a newcomer makes again: its parameters and its state."""

    updates: int
    parameters: Tensors
    state: list[dict[str, Any]]


@dataclass(slots=True)
class Kept:
    """The beginning of an interval, by reference."""

    state: Any
    updates: tuple[int, ...]


@dataclass(slots=True)
class Given:
    """What a newcomer was given, until it has used it."""

    plan: RankPlan
    state: Any = None
    before: dict[int, Tensors] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict)
    written: Any = None  # by its predecessor: random states, loaders


class HeldRank:
    def __init__(self, settings: HoldSettings, say: Say) -> None:
        self._settings, self._say = settings, say
        self.rank = settings.rank
        self.book = RankBook(rank=settings.rank, world=settings.world, unit=settings.unit)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.groups: dict[str, HeldGroup] = {}
        self.optimizers: list[ReferenceType[Any]] = []
        self.ddps: list[ReferenceType[Any]] = []
        self.loaders: list[ReferenceType[Any]] = []
        self.is_structural = self.is_in_ddp = False
        self.is_restored = False  # a newcomer's script has been given its state
        self.is_forked = False  # this process is a child of the rank's
        self.refusal = ""
        self._own_maps = 0  # collectives of DDP's first iteration, that only a newcomer has
        self._depth = 0  # of updates within updates
        self._before: dict[int, Tensors] = {}
        self._after: dict[int, After] = {}
        self._versions: dict[int, int] = {}
        self._kept: dict[int, Kept] = {}
        self._given: Given | None = None
        self.is_dismissed = False
        self._attempt = 0
        self._prelude_bytes = 0
        self._most_log = LEAST_LOG
        self._entered: dict[str, int] = {}  # by group: the newest interval that all members have entered
        self._graves: list[Grave] = []
        self.device: Any = None  # the GPU of the script's own thread; ours begin with another one
        self._key = bytes.fromhex(settings.key)
        self._slate = Slate(Path(settings.slate))
        self._store: Any | None = None
        self._has_begun = self._has_warned = False
        self.held_s = 0.0
        if settings.born is not None:
            self.book.hold(settings.born.epoch, settings.born.absent)
            self.book.is_new = True
        self._server = peers.PeerServer(settings.host, self._key, self._answer)
        say(RankOpened(rank=self.rank, address=self._server.address))

    @property
    def is_replacement(self) -> bool:
        return self._settings.born is not None

    @property
    def store(self) -> Any:
        if self._store is None:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = dist.TCPStore(host, port, None, False)  # type: ignore[attr-defined]
        return self._store

    def _see_device(self) -> None:
        """In the script's own thread."""
        if _has_cuda():
            self.device = torch.device("cuda", torch.cuda.current_device())

    # -------------------------------------------------------------- orders

    def take(self, order: RankOrder) -> None:
        """In the thread that hears the keeper."""
        match order:
            case Hold():
                with self.changed:
                    if not self.book.hold(order.epoch, order.absent):
                        return
                    self._attempt += 1
                    broken = [group for group in self.groups.values() if group.ledger.is_broken]
                    graves = [group.abandon() for group in broken if group.inner]
                    self.changed.notify_all()
                    self._report()
                for grave in graves:
                    grave.end()
            case Rebuild():
                with self.changed:
                    self._attempt += 1
                    attempt = self._attempt
                threading.Thread(
                    target=self._rebuild, args=(order, attempt), name="everstep-rebuild", daemon=True
                ).start()
            case Resume():
                with self.changed:
                    broken = [group for group in self.groups.values() if group.ledger.is_broken]
                    if self.book.resume(order.epoch):
                        for group in broken:
                            group.reissue()
                        self.changed.notify_all()
            case Bye():
                with self.changed:
                    self.is_dismissed = True
                    self.changed.notify_all()

    def _report(self) -> None:
        """Under the lock."""
        if (said := self.book.parked()) is not None:
            self._say(said)

    def _rebuild(self, order: Rebuild, attempt: int) -> None:
        with self.lock:
            if order.epoch != self.book.epoch or attempt != self._attempt:
                return
            broken = [group for group in self.groups.values() if group.ledger.is_broken]
            unknown = [ask.group for ask in order.plan.asks if ask.group not in self.groups]
        try:
            if self.device is not None:
                torch.cuda.set_device(self.device)
            if unknown:
                late = f"group {unknown[0]} is made after everstep.restore"
                raise EverstepError(f"{late}; call restore when all groups are made")
            began = time.monotonic()
            connecting = _Connecting(broken, order.epoch, self.device)
            given, answers = self._fetch(order.plan)
            fetched = time.monotonic()
            made = connecting.made()
        except (OSError, RuntimeError) as error:  # mostly a peer that has died meanwhile
            self._could_not_rebuild(order.epoch, attempt, error, HEAR_S)
            return
        except (EverstepError, ValueError, KeyError) as error:
            self._could_not_rebuild(order.epoch, attempt, error, 0.0)
            return
        with self.changed:
            if attempt != self._attempt:
                for group in made.values():
                    grave = Grave(inner=group)
                    self.bury(grave)
                    grave.end()
                return
            for name, inner in made.items():
                self.groups[name].inner = inner
            for name, learned in answers.items():
                self.groups[name].ledger.learn(learned)
            if given is not None:
                self._given = given
                self.book.arrive(order.plan)
            self._say(
                RankRebuilt(
                    rank=self.rank,
                    epoch=order.epoch,
                    connect_s=connecting.took_s,
                    fetch_s=fetched - began,
                )
            )

    def _could_not_rebuild(self, epoch: int, attempt: int, error: Exception, patience_s: float) -> None:
        """Unless another death has been heard of, which is the reason then."""
        with self.changed:
            if not self.changed.wait_for(lambda: attempt != self._attempt, timeout=patience_s):
                self._say(RankUnheld(rank=self.rank, epoch=epoch, because=f"{error}"[:500]))

    def bury(self, grave: Grave) -> None:
        self._graves.append(grave)

    # -------------------------------------------------------------- what peers ask

    def _answer(self, question: Mapping[str, Any]) -> Any:
        with self.lock:
            match question:
                case {"opening": str(name)}:
                    return self._opening(name)
                case {"answers": dict(wanted), "interval": int(interval), "updates": list(updates)}:
                    found = {
                        name: self._answers_of(name, Position(*after))
                        for name, after in sorted(wanted.items())
                    }
                    state = None if interval == PRELUDE else self._package(interval, updates)
                    return {"answers": found, "state": state}
        raise PeerError("a question that is none")

    def _opening(self, name: str) -> Any:
        if name not in self.groups:
            raise EverstepError(f"rank {self.rank} has no group {name}")
        if self.book.interval == PRELUDE and self._settings.born is None:
            raise EverstepError(f"rank {self.rank} is in its own prelude")
        group = self.groups[name]
        if group.beginning is not None:
            return [[answer.shape, answer.outputs] for answer in group.beginning]
        places = sorted(at for at in group.ledger.log if at.interval == PRELUDE)
        return [[group.ledger.log[at].shape, group.ledger.log[at].outputs] for at in places]

    def _answers_of(self, name: str, after: Position) -> Any:
        group = self.groups[name]
        found = group.ledger.answers(after)
        answers = [
            [list(at), what.shape, what.outputs]
            for at, what in sorted(found.items())
            if at.interval > PRELUDE
        ]
        return {
            "log": answers,
            "awaited": [[list(one.position), one.shape] for one in group.queue if one.kind in ALIKE],
            "structure": [[at, what.shape, what.outputs] for at, what in group.structure],
        }

    def _package(self, interval: int, updates: Sequence[int]) -> Any:
        """The beginning of an interval: for each optimizer that has stepped since, before and after."""
        kept = self._kept[interval]
        had = {
            number: updates[number] if number < len(updates) else 0 for number in range(len(self.optimizers))
        }
        before: dict[int, Tensors] = {}
        after: dict[int, Any] = {}
        hashes: dict[int, str] = {}
        for number, optimizer in self._living_optimizers():
            parameters = _parameters(optimizer)
            self._require_unchanged(number, parameters)
            hashes[number] = _digest(parameters)
            made = self.book.updates[number] if number < len(self.book.updates) else 0
            if (pending := self._after.get(number)) is not None:
                before[number] = parameters
                after[number] = [pending.updates, pending.parameters, pending.state]
            elif made > had[number]:
                before[number] = self._before[number]
                after[number] = [made, parameters, _state_of(optimizer)]
        return {"state": kept.state, "before": before, "after": after, "hashes": hashes}

    def _require_unchanged(self, number: int, parameters: Tensors) -> None:
        if self._has_changed(number, parameters):
            raise EverstepError("parameters are changed outside of their optimizer's step")

    def _has_changed(self, number: int, parameters: Tensors) -> bool:
        return self._versions.get(number, -1) not in (-1, _version(parameters))

    # -------------------------------------------------------------- what is fetched

    def _fetch(self, plan: RankPlan) -> tuple[Given | None, dict[str, dict[Position, Answer]]]:
        questions: dict[Address, dict[str, Any]] = {}
        for ask in plan.asks:
            wanted = questions.setdefault(
                _address(ask.address), {"answers": {}, "interval": PRELUDE, "updates": []}
            )
            wanted["answers"][ask.group] = list(ask.after)
        if plan.interval != PRELUDE:
            empty: dict[str, Any] = {"answers": {}}
            questions.setdefault(_address(plan.donor_address), empty).update(
                interval=plan.interval, updates=list(plan.updates)
            )
        answers: dict[str, dict[Position, Answer]] = {}
        given: Given | None = None
        for address, question in questions.items():
            found = peers.ask(address, self._key, question)
            for name, about in found["answers"].items():
                answers[name] = {Position(*at): Answer(shape, out) for at, shape, out in about["log"]}
                group = self.groups[name]
                if self.book.is_new:
                    group.ledger.awaited = {Position(*at): shape for at, shape in about["awaited"]}
                    group.structure = [(at, Answer(shape, out)) for at, shape, out in about["structure"]]
            if found["state"] is not None:
                package = found["state"]
                given = Given(plan, package["state"], dict(package["before"]), dict(package["hashes"]))
                given.written = state_tree.from_bytes(self._slate.content(plan.interval))
                self._after = {number: After(*after) for number, after in package["after"].items()}
        return given, answers

    # -------------------------------------------------------------- groups

    def spans_units(self, members: Sequence[int]) -> bool:
        return self.book.spans_units(members)

    def opened(self, group: HeldGroup) -> None:
        """A script has made a group: it is connected, or, in a newcomer, learns how it began."""
        if self._has_begun:
            self.refuse("it makes a process group after its first snapshot")
        self._see_device()
        self.groups[group.name] = group
        born = self._settings.born
        if born is None:
            group.inner = group.connect("everstep/held/0")
            return
        veterans = [rank for rank in group.members if rank in born.peers]
        if not veterans:
            if self.spans_units(group.members):
                self.give_up(f"no rank is left that knows how group {group.name} began")
            group.inner = group.connect(f"everstep/held/{born.epoch}/unit")
            group.ledger.is_broken = False
            return
        group.beginning = self._beginning(group.name, {rank: born.peers[rank] for rank in veterans})
        group.opening = list(group.beginning)

    def _beginning(self, name: str, veterans: Mapping[int, Address]) -> list[Answer]:
        """As one of them knows it. If none can be reached, all of them have died: that is the machine's to
        say, and this process is ended.
        """
        until = time.monotonic() + HEAR_S
        troubles: dict[int, str] = {}
        while time.monotonic() < until:
            for veteran, address in veterans.items():
                try:
                    found = peers.ask(_address(address), self._key, {"opening": name})
                    return [Answer(shape, outputs) for shape, outputs in found]
                except OSError as error:
                    troubles[veteran] = f"{error}"
                except EverstepError as error:
                    troubles[veteran], until = f"{error}", 0.0
            time.sleep(0.1)
        said = "; ".join(f"rank {rank}: {trouble}" for rank, trouble in troubles.items())
        self.give_up(f"how group {name} began is not known: {said}"[:500])

    def kept_in_prelude(self, outputs: Any) -> Any:
        """What a newcomer is given there; None: what it has itself."""
        size = sum(each.numel() * each.element_size() for each in outputs or ())
        if self.is_in_ddp and size > SMALL:
            return None
        self._prelude_bytes += size
        if self._prelude_bytes > KEPT_IN_PRELUDE:
            self.refuse(
                f"its collectives before the first snapshot give more than {KEPT_IN_PRELUDE >> 20} MiB"
            )
            return None
        return [each.detach().clone() for each in outputs or ()]

    def is_own_answer(self, group: HeldGroup, one: Collective) -> bool:
        """DDP with static_graph asks which parameters are used in its first iteration only."""
        is_map = one.in_backward and one.kind == "allreduce" and one.outputs[0].dtype == torch.int32
        if not self._own_maps or not is_map:
            return False
        self._own_maps -= 1
        group.ledger.queue.remove(one.position)
        group.ledger.next_number -= 1
        group.queue.remove(one)
        one.is_done = True
        return True

    def entered_by_all(self, group: HeldGroup, position: Position) -> list[Answer]:
        if self._entered.get(group.name, PRELUDE) >= position.interval:
            return []
        self._entered[group.name] = position.interval
        size = sum(
            each.numel() * each.element_size()
            for ledger in self.book.groups.values()
            for answer in ledger.log.values()
            for each in answer.outputs or ()
        )
        if size > self._most_log:  # of the interval before
            self.refuse(f"collectives of one step give {size >> 20} MiB, more than is kept of them")
        return self.book.entered_by_all(group.ledger, position)

    def committed(self) -> None:
        """A collective is done: it may have been the last of a section."""

    # -------------------------------------------------------------- waiting

    @property
    def may_hear_of_a_death(self) -> bool:
        return self.book.interval > PRELUDE

    def hear_of_a_death(self, group: HeldGroup, patience_s: float) -> bool:
        """A communicator has failed: because a peer died?"""
        inner = dict(group.inner)
        with self.changed:
            return self.changed.wait_for(
                lambda: group.ledger.is_broken or group.inner != inner, timeout=patience_s
            )

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        began = time.monotonic()
        with self.changed:
            while not is_true():
                self.changed.wait(timeout=1.0)  # signals are handled in between
        self.held_s += time.monotonic() - began

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A collective is waited for. Inside an update, others must not wait until that is over."""
        if not self.book.section or threading.current_thread() is not threading.main_thread():
            yield
            return
        with self.lock:
            self.book.waits_inside = True
            self._report()
        try:
            yield
        finally:
            with self.changed:  # nobody is told that it is parked in between
                self.wait_until(lambda: not self.book.is_parked)
                self.book.waits_inside = False

    def refuse(self, because: str) -> None:
        """Nothing is held from now on; the script continues."""
        if not self.refusal:
            self.refusal = because
            warn(f"ranks of this run cannot be held: {because}. If one dies, all are restarted")
            self._say(RankRefused(rank=self.rank, because=because))

    def give_up(self, because: str) -> NoReturn:
        """This heal cannot be finished, so all ranks are about to be restarted. No exception reaches the
        script.
        """
        self._say(RankUnheld(rank=self.rank, epoch=self.book.epoch, because=because))
        while True:
            time.sleep(1.0)

    # -------------------------------------------------------------- updates

    def before_update(self, optimizer: Any) -> None:
        if self._depth == 0:
            self._enter("update")
        self._depth += 1
        number = self._number_of(optimizer)
        if self.is_restored and self.book.interval == PRELUDE:
            self.give_up(
                "it makes an update before its first everstep.snapshot; call it first in the loop's body"
            )
        if self.book.interval == PRELUDE or number is None:
            return
        with torch.no_grad():
            now = _parameters(optimizer)
            if self._has_changed(number, now):
                self.refuse("its parameters are changed outside of their optimizer's step")
            kept = self._before.get(number)
            if kept is None or [each.shape for each in kept] != [each.shape for each in now]:
                self._before[number] = [each.clone() for each in now]
            elif now:
                torch._foreach_copy_(kept, now)

    def after_update(self, optimizer: Any) -> None:
        self._depth -= 1
        number = self._number_of(optimizer)
        with self.changed:
            if number is not None:
                self.book.updated(number)
                self._refuse_several_updates(number)
                after = self._after.get(number)
                if after is not None and after.updates == self.book.updates[number]:
                    del self._after[number]
                    _take_over(optimizer, after)
                self._versions[number] = _version(_parameters(optimizer))
            if self._depth == 0:
                self.book.leave()
                self._report()

    def _refuse_several_updates(self, number: int) -> None:
        """Of what an optimizer changes, only what was before its last step is kept."""
        if (kept := self._kept.get(self.book.interval)) is not None:
            had = kept.updates[number] if number < len(kept.updates) else 0
            if self.book.updates[number] > had + 1:
                self.refuse(
                    "an optimizer makes several steps from one everstep.snapshot to the next; call it once "
                    "per optimizer step"
                )

    def _enter(self, section: str) -> None:
        with self.changed:
            while not self.book.may_change:
                self.wait_until(lambda: self.book.may_change)
            self.book.enter(section)

    def _number_of(self, optimizer: Any) -> int | None:
        return next((n for n, each in enumerate(self.optimizers) if each() is optimizer), None)

    def _living_optimizers(self) -> list[tuple[int, Any]]:
        return [(n, found) for n, each in enumerate(self.optimizers) if (found := each()) is not None]

    # -------------------------------------------------------------- the script's two lines, and its end

    def restore(self) -> Found | None:
        if self._settings.born is None or self.is_restored:
            return None
        self._see_device()
        self._say(RankReady(rank=self.rank))
        self.wait_until(lambda: not self.book.is_held)
        self.is_restored = True
        given = self._given
        assert given is not None, "a newcomer is resumed with what it was told to fetch"
        step = next(each.step for each in self._slate.records() if each.interval == given.plan.interval)
        own, numbers = given.written["own"], itertools.count()

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            mine = own.get(next(numbers))
            if mine is None:
                return tensor.clone()
            if mine.shape != tensor.shape:
                self.give_up("its state has another form than its predecessor's")
            placed: torch.Tensor = mine.to(tensor.device)
            return placed

        return Found(step, mapped(given.state, chosen))

    def snapshot(self, step: int, state_fn: Callable[[], Any]) -> None:
        state = state_fn()
        self._see_device()
        for group in self.groups.values():
            group.drain()
        self._enter("snapshot")
        with self.changed:
            try:
                self._begin(step, state, state_fn)
            finally:
                self.book.leave()
                self._report()

    def _begin(self, step: int, state: Any, state_fn: Callable[[], Any]) -> None:
        book, arrives = self.book, self.book.arrives
        if self._settings.born is not None and not self.is_restored:
            self.give_up("it calls everstep.snapshot without everstep.restore before its loop")
        if not self._has_begun:
            self._check(state)
        if arrives is not None:
            state = self._arrive(arrives, state_fn)
        interval = book.interval + 1 if arrives is None else arrives.interval
        carries = interval > 0 and arrives is None and self._carries_gradients()
        if carries and not self._has_warned:
            self._has_warned = True
            warn(
                "gradients are kept from one everstep.snapshot to the next; a death in such a step restarts "
                "all ranks. Call it once per optimizer step, where gradients have been cleared"
            )
        book.begin(interval)
        updates = tuple(book.updates)
        changing, numbers = self.managed(), itertools.count()
        own: dict[int, torch.Tensor] = {}

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            number = next(numbers)
            if shard(tensor).data_ptr() in changing:
                return tensor
            own[number] = _copy(tensor)
            return own[number]

        kept = mapped(state, chosen)
        if sum(each.numel() * each.element_size() for each in own.values()) > MOST_OWN:
            own = {}
        self._kept = {at: each for at, each in self._kept.items() if at == interval - 1} | {
            interval: Kept(kept, updates)
        }
        record = Record(
            interval=interval,
            step=step,
            updates=updates,
            refusal="gradients are kept from one snapshot to the next" if carries else "",
        )
        self._slate.write(
            record, state_tree.to_bytes({"random": _random_states(), "own": own, **self._more()})
        )
        self._has_begun = True
        self._graves = [grave for grave in self._graves if not grave.is_at_rest()]

    def _check(self, state: Any) -> None:
        """Once: what cannot be sent is said now, not in the fault."""
        state_tree.pack(state)
        size = sum(
            each.numel() * each.element_size()
            for _, opt in self._living_optimizers()
            for each in _parameters(opt)
        )
        self._most_log = max(LEAST_LOG, 3 * size)
        if (unit := self._unit()) != self.book.unit:
            if unit == self.book.world:
                self.refuse("its parameters are sharded over all ranks: no other rank has a copy of a shard")
            else:
                self.book.unit = unit
                self._say(RankUnit(rank=self.rank, unit=unit))

    def _unit(self) -> int:
        """How many ranks hold one replica, by the placement of parameters; as given, if they do not say."""
        sizes = {
            found for _, optimizer in self._living_optimizers() for found in _shards_of(optimizer, self.rank)
        }
        return max(sizes, default=self.book.unit)

    def _carries_gradients(self) -> bool:
        """No optimizer has stepped since the last snapshot, and there are gradients."""
        last = self._kept.get(self.book.interval)
        if last is None or tuple(self.book.updates) != last.updates:
            return False
        return any(
            each.grad is not None
            for _, optimizer in self._living_optimizers()
            for group in optimizer.param_groups
            for each in group["params"]
        )

    def managed(self) -> set[int]:
        """Addresses of the tensors that optimizers change."""
        found: set[int] = set()
        for _, optimizer in self._living_optimizers():
            found.update(each.data_ptr() for each in _parameters(optimizer))
            for own in optimizer.state.values():
                found.update(
                    [shard(each).data_ptr() for each in own.values() if isinstance(each, torch.Tensor)]
                )
        found.discard(0)
        return found

    def _more(self) -> dict[str, Any]:
        from everstep.hold import torch_hooks

        return {
            "loaders": [torch_hooks.loader_state(each()) for each in self.loaders],
            "ddps": [torch_hooks.ddp_state(each()) for each in self.ddps],
        }

    def _arrive(self, plan: RankPlan, state_fn: Callable[[], Any]) -> Any:
        """A newcomer's first snapshot: from here on it is where its predecessor was at the record's."""
        from everstep.hold import torch_hooks

        given = self._given
        assert given is not None, "a newcomer arrives with what it was given"
        for number, optimizer in self._living_optimizers():
            if number in given.hashes and _digest(_parameters(optimizer)) != given.hashes[number]:
                missing = f"the parameters of its optimizer {number}"
                self.give_up(f"the script has not loaded {missing} from everstep.restore")
            if number in given.before:
                with torch.no_grad():
                    for mine, theirs in zip(_parameters(optimizer), given.before[number], strict=True):
                        mine.copy_(theirs)
            self._versions[number] = _version(_parameters(optimizer))
        for each, had in zip(self.ddps, given.written["ddps"], strict=False):
            if (ddp := each()) is not None:
                self._own_maps += torch_hooks.ddp_arrives(ddp, had, plan.interval)
        _set_random_states(given.written["random"])
        for each, progress in zip(self.loaders, given.written["loaders"], strict=False):
            torch_hooks.loader_arrives(each(), progress)
        for group in self.groups.values():
            group.opening = None
        self._given = None
        return state_fn()

    def end(self) -> None:
        """The script has come to its end: others may still need this rank's answers."""
        if not self._has_begun:
            return
        self._say(RankEnded(rank=self.rank))
        self.wait_until(lambda: self.is_dismissed)


class _Connecting(threading.Thread):
    """All members have to come; the state is fetched meanwhile."""

    def __init__(self, groups: Sequence[HeldGroup], epoch: int, device: Any) -> None:
        super().__init__(name="everstep-connect", daemon=True)
        self._groups, self._epoch, self._device = groups, epoch, device
        self._made: dict[str, dict[str, Any]] = {}
        self._error: Exception | None = None
        self.took_s = 0.0
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            for group in self._groups:
                self._made[group.name] = group.connect(f"everstep/held/{self._epoch}")
        except (OSError, RuntimeError) as error:
            self._error = error
        self.took_s = time.monotonic() - began

    def made(self) -> dict[str, dict[str, Any]]:
        self.join()
        if self._error is not None:
            raise self._error
        return self._made


# ------------------------------------------------------------------ optimizers


def _parameters(optimizer: Any) -> Tensors:
    return [shard(each) for group in optimizer.param_groups for each in group["params"]]


def _version(parameters: Tensors) -> int:
    """Counts changes in place."""
    return sum(each._version for each in parameters)


def _state_of(optimizer: Any) -> list[dict[str, Any]]:
    """By parameter, in order."""
    return [
        {k: local(v) if isinstance(v, torch.Tensor) else v for k, v in optimizer.state.get(each, {}).items()}
        for group in optimizer.param_groups
        for each in group["params"]
    ]


def _take_over(optimizer: Any, after: After) -> None:
    given = [each for group in optimizer.param_groups for each in group["params"]]
    with torch.no_grad():
        for mine, theirs in zip(given, after.parameters, strict=True):
            local(mine).copy_(theirs)
        for each, state in zip(given, after.state, strict=True):
            own = optimizer.state[each] if state else {}
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and isinstance(own.get(key), torch.Tensor):
                    local(own[key]).copy_(value)
                else:
                    own[key] = value


def _digest(tensors: Tensors) -> str:
    import xxhash

    whole = hashlib.sha256()
    for each in tensors:
        if each.is_cuda:  # two sums on the device instead of a copy to the host
            flat = each.detach().contiguous().reshape(-1).view(torch.uint8)
            words = (flat.view(torch.int32) if flat.numel() % 4 == 0 else flat).to(torch.int64)
            places = torch.arange(1, words.numel() + 1, device=each.device)
            sums = torch.stack([words.sum(), (words * places).sum()]).tolist()
            whole.update(f"{sums}".encode())
        elif each.numel():
            host = each.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            whole.update(xxhash.xxh3_128_digest(host.data))
    return whole.hexdigest()


def _shards_of(optimizer: Any, rank: int) -> Iterator[int]:
    """Of parameters that are DTensors: how many ranks share one replica of it."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            if state_tree.is_distributed(each):
                size = 1
                for dimension, placement in enumerate(each.placements):
                    if not placement.is_replicate():
                        size *= each.device_mesh.size(dimension)
                yield size


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _address(given: Sequence[Any]) -> Address:
    host, port = given
    return str(host), int(port)


# ------------------------------------------------------------------ random states


def _has_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _random_states() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _has_cuda() else None,
        "numpy": list(numpy.random.get_state()) if numpy is not None else None,
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
    }


def _set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"].cpu())
    if states["numpy"] is not None and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(tuple(states["numpy"]))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))


__all__ = ["Found", "HeldRank", "HoldSettings", "UserError"]
