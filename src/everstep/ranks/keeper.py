"""The keeper of a node's ranks of one script task: a process of the agent's, in a worker's place.

It starts and ends ranks when the coordinator says so, life by life, and reports what becomes of them. It
decides nothing about other nodes; what it does by itself is what cannot wait for the coordinator: SIGKILL to
those that outlive their grace, and the end of all ranks when its agent is gone.

    BeginLife ──► ranks run ──RankFailed, RanksStill, RankProgressed──► …
    EndLife   ──► SIGTERM ──grace──► SIGKILL ──all gone──► RanksIdle, with the address of the next store

Between lives it stays, and so does its fork server: a new life begins with a fork.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from everstep.core.faults import testimony
from everstep.errors import EverstepError, UserError
from everstep.hold.settings import Born, HoldSettings
from everstep.hold.slate import Slate
from everstep.log import say, warn
from everstep.protocol import messages as msg
from everstep.protocol.codec import encode
from everstep.protocol.held import EndRank, KeeperOrder, RankWord, StartRank, TellRank
from everstep.protocol.messages import RankPace, RankPosition, RankRules, Sender
from everstep.ranks import looks as rank_looks
from everstep.ranks import words
from everstep.ranks.environment import RankPlace, unset_by_user
from everstep.ranks.fork_server import (
    AUTO,
    NONE,
    ForkingStarter,
    PlainStarter,
    RankStarter,
    imports_of,
    script_path,
)
from everstep.ranks.group import RankGroup, rank_folder
from everstep.ranks.nccl_records import NcclQuestion, Operations, SeenByRas
from everstep.ranks.rank_main import COPY_EVERY, EXACT, EXEC, HELD, RESTORE, SNAPSHOTS, STACKS_SIGNAL
from everstep.ranks.running_rank import RunningRank
from everstep.ranks.snapshots import NodeMemory
from everstep.ranks.stillness import Stillness
from everstep.stack_text import Frame, main_frames, of_script

LOOK_EVERY_S = 0.25
FAMILY_EVERY_S = 1.0  # also how often ranks are asked for their number of collectives
STILL_S = 1.0  # without progress, after which the coordinator hears of it; then each time it has doubled
STOPPED_PATIENCE_S = 5.0
LAST_WORDS_S = 0.5  # a rank that has raised may end by itself for so long
PROGRESS_EVERY_S = 1.0
KILL_EVERY_S = 1.0  # what is being killed may have forked meanwhile
ANSWER_S = 1.5  # for ranks to write their stacks and records
SAMPLES, SAMPLE_EVERY_S = 3, 0.15  # of a rank's stack: one that works is elsewhere each time
LEAST_ANSWER_S = 0.2  # after the last of them: a stack that is half written would blame the wrong rank
BUSY_IO_BYTES = 1 << 16  # while stacks are taken; who reads or writes more than this is at work
# A flight recorder of 2,000 collectives takes a rank some 60 ms to write: a thousandth of its time.
FIRST_PACE_S, PACE_EVERY_S = 10.0, 60.0  # looks for slow ranks; the first ones come sooner
MOST_PACES, MOST_PACED_GROUPS = 32, 4  # collectives of a group, and groups, of which a rank tells
PARK_AFTER_S = 1.0  # from the start of ranks, or of a replacement
IDLE_SHARE = 0.02  # of one core; a rank below it is not using the CPU

Say = Callable[[Any], None]  # a row of RankReport


class Inbox:
    """Orders from the thread that hears the agent, for a selector to wait for."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._orders: deque[Any] = deque()

    def put(self, order: Any) -> None:
        self._orders.append(order)
        os.write(self._writer, b"+")

    def take(self) -> list[Any]:
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 4096)
        found = list(self._orders)
        self._orders.clear()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSettings:
    sender: Sender
    rules: RankRules
    host: str  # where other nodes reach the store, if this one has it
    logs: Path
    environment: Mapping[str, str]
    order: int = 0  # of this node among those of the task
    secret: str  # of the task: its keepers know each other by it
    output: BinaryIO = field(default_factory=lambda: sys.stdout.buffer)
    errors: BinaryIO = field(default_factory=lambda: sys.stderr.buffer)
    note: Callable[[str], None] = say  # what it sees and does, for people


@dataclass(slots=True, kw_only=True)
class _Life:
    """What the keeper knows of the ranks that run."""

    number: int
    ranks: range
    world: int
    stillness: Stillness
    codes: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)  # told already
    raised_at: dict[int, float] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)  # as ranks have told
    stepped_at: float | None = None
    told_still_s: float = 0.0
    told_steps: bool = False
    tell_at: float = 0.0  # progress is told no sooner
    handed: dict[int, dict[int, words.RankHandedOver]] = field(default_factory=dict)  # by step and rank
    left: list[int] = field(default_factory=list)  # their script has ended, and that is not told yet
    pace_at: float
    pace_every_s: float = FIRST_PACE_S
    pacing: set[int] = field(default_factory=set)  # ranks that write down when they entered collectives
    paces: list[RankPace] = field(default_factory=list)
    timed: NcclQuestion | None = None  # by NCCL's Inspector, beside the paces
    unit: int = 0  # of held ranks; 0: they are not held
    places: dict[int, RankPlace] = field(default_factory=dict)
    slates: dict[int, Slate] = field(default_factory=dict)
    ending: set[int] = field(default_factory=set)  # ranks that are to be replaced: their end is no failure
    said: list[RankWord] = field(default_factory=list)  # and not told yet
    park_at: float | None = None  # a process for the next replacement
    terminate_at: float | None = None  # those that were saying last words
    kill_at: float | None = None  # it is ending
    is_killed: bool = False


class Keeper:
    """`run` is called once, and returns the process's exit code."""

    def __init__(
        self,
        settings: KeeperSettings,
        starter: RankStarter,
        memory: NodeMemory,
        tell: Say,
        inbox: Inbox,
    ) -> None:
        rules = settings.rules
        self._settings, self._rules, self._tell, self._inbox = settings, rules, tell, inbox
        self._group = RankGroup(
            [EXEC, *rules.command] if rules.is_program else rules.command,
            starter,
            happened=self._happened,
            output=settings.output,
            errors=settings.errors,
            environment=settings.environment,
            folder=rules.folder,
            hidden=rules.hidden,
        )
        self.codes: dict[int, int] = {}  # of the ranks of the last life that has ended
        self.port_error = ""  # why the next store could not be here
        self._life: _Life | None = None
        self._number = 0  # of the last life
        self._question: _StacksQuestion | None = None
        self._look_at = self._family_at = 0.0
        self._is_leaving = False
        self._memory = memory
        self._can_hold = asks_to_be_held(rules)

    def run(self) -> int:
        try:
            self.open()
            while not self.is_done:
                self.turn()
        finally:
            self.close()
        return 0

    @property
    def is_done(self) -> bool:
        """It was told to leave, and no rank is left."""
        return self._is_leaving and self._life is None

    def open(self) -> None:
        self._group.open()
        self._group.selector.register(self._inbox.reader, selectors.EVENT_READ, (-1, "order"))
        self._is_idle({})

    def close(self) -> None:
        """No process and no state is left behind."""
        self._group.close()
        self._memory.close()

    def turn(self, until: float | None = None) -> None:
        """Wait for what happens next, at most until then, and see to it."""
        now = time.monotonic()
        life = self._life
        own = (now + 1.0,) if life is None else (self._look_at, life.terminate_at, life.kill_at)
        dues = (*own, until)
        due = min(at for at in dues if at is not None)
        ready = self._group.selector.select(max(0.0, due - now))
        for key, _ in sorted(ready, key=lambda item: item[0].data[1] == "exited"):  # last words first
            rank, what = key.data
            if what == "order":
                for order in self._inbox.take():
                    self._obey(order)
            else:
                self._group.take(rank, what)
        if self._life is not None:
            self._tell_left(self._life)
            self._tell_said(self._life)
            if self._life is None:
                return
            self._press(self._life, time.monotonic())
            self._look(self._life, time.monotonic())

    # -------------------------------------------------------------- orders

    def _obey(self, order: Any) -> None:
        match order:
            case msg.BeginLife() if not self._is_leaving:
                self._begin(order)
            case msg.EndLife(life=number) if self._life is not None and number == self._life.number:
                self._end(self._life, order.grace_s, f"{order.because}; all ranks end together")
            case msg.EndLife(life=number) if self._life is None and number == self._number:
                pass  # its ranks have ended by themselves, and that was told
            case msg.OrderRanks(life=number) if self._life is not None and number == self._life.number:
                for each in order.orders:
                    self._order_rank(self._life, each)
            case msg.LocateRanks(life=number) if self._life is not None and number == self._life.number:
                self._question = _StacksQuestion(self._group.ranks, self._ask_nccl(self._life.world))
            case msg.CopySnapshot():
                threading.Thread(target=self._copy, args=(order, self._number), daemon=True).start()
            case msg.DrainSnapshot():
                self._drain(order)
            case msg.SnapshotCopied() | msg.SnapshotDrained():  # of a thread of ours
                self._tell(order)
            case msg.EndWorker(gently=gently):
                self._is_leaving = True
                if self._life is not None:
                    self._end(self._life, self._rules.grace_s if gently else 0.0, "the run is stopped")

    def _begin(self, order: msg.BeginLife) -> None:
        assert self._life is None, "a life begins within another"
        now, rules = time.monotonic(), self._rules
        here = range(order.first_rank, order.first_rank + rules.ranks)
        self._number, self._look_at, self._family_at = order.life, now + LOOK_EVERY_S, now
        life = self._life = _Life(
            number=order.life,
            unit=order.unit,
            ranks=here,
            world=order.world,
            stillness=Stillness(idle_share=IDLE_SHARE, moved_at=now),
            pace_at=now + FIRST_PACE_S,
        )
        if not order.hosts_store:
            self._group.stop_listening()
        host, port = order.master
        private = {SNAPSHOTS: str(self._memory.folder), COPY_EVERY: str(rules.copy_every)}
        if rules.exact:
            private[EXACT] = "1"
        if order.unit:
            private[HELD] = "1"
        if order.restore is not None:
            step = order.restore.step
            if failed := self._memory.fetch(step, order.restore.files):
                self._could_not_restore(self._life, step, failed)
                return
            self._memory.leave_only(step, order.restore.files)
            private[RESTORE] = str(step)
        try:
            check(rules)
            if order.hosts_store and self.port_error:
                raise UserError(self.port_error)
            life.places = {
                rank: RankPlace(
                    rank=rank,
                    ranks=order.world,
                    life=order.life,
                    restarts=order.restarts,
                    max_restarts=rules.max_restarts,
                    run_id=rules.run_id,
                    master_address=host,
                    master_port=port,
                    folder=rank_folder(self._settings.logs, rules.run_id, order.life - 1, rank),
                    role=rules.role,
                    group=order.group,
                    num_groups=order.num_groups,
                    first_rank=order.first_rank,
                    has_own_device=rules.has_own_device,
                )
                for rank in here
            }
            if life.unit:
                life.slates = {rank: self._slate(rank) for rank in here}
            pids = self._group.start(life.places.values(), private)
            for rank in here if life.unit else ():
                self._settle_rank(life, rank)
            life.park_at = self._park_at() if life.unit else None
        except (OSError, EverstepError) as error:
            self._could_not_start(self._life, error)
            return
        self._say(msg.RanksStarted, pids=pids)

    # -------------------------------------------------------------- held ranks

    def _slate(self, rank: int) -> Slate:
        """A new one: what ranks of the life before wrote down is of no use to this one."""
        path = self._slate_path(rank)
        path.unlink(missing_ok=True)
        return Slate(path)

    def _slate_path(self, rank: int) -> Path:
        return self._memory.folder / f"slate-{rank}"

    def _settle_rank(self, life: _Life, rank: int, born: Born | None = None) -> None:
        """The first it hears."""
        settings = HoldSettings(
            rank=rank,
            world=life.world,
            unit=life.unit,
            key=hmac.digest(self._settings.secret.encode(), b"everstep held ranks", "sha256").hex(),
            slate=str(self._slate_path(rank)),
            host=self._settings.host,
            born=born,
        )
        self._group.ranks[rank].ask(hold=encode(settings))

    def _order_rank(self, life: _Life, order: KeeperOrder) -> None:
        match order:
            case TellRank(rank=rank) if rank in self._group.ranks:
                self._group.ranks[rank].ask(order=encode(order.order))
            case EndRank(rank=rank) if rank in self._group.ranks:
                life.ending.add(rank)
                self._signal([rank], "SIGKILL", order.because)
            case StartRank(rank=rank) if life.kill_at is None:
                self._replace(life, order)

    def _replace(self, life: _Life, order: StartRank) -> None:
        rank = order.rank
        for known in (life.failed, life.ending):
            known.discard(rank)
        for about in (life.codes, life.raised_at):
            about.pop(rank, None)
        life.unit, life.park_at = order.unit, self._park_at()
        try:
            self._group.start_one(life.places[rank], is_replacement=True)
        except (OSError, EverstepError) as error:
            self._could_not_start(life, error)
            return
        self._settings.note(f"rank {rank} is replaced: {order.because}.")
        self._settle_rank(life, rank, Born(epoch=order.epoch, absent=order.absent, peers=order.peers))

    def _park_at(self) -> float | None:
        """Once those that run have what they need of the machine."""
        return time.monotonic() + PARK_AFTER_S if self._rules.standby == "parked" else None

    def _gone(self, life: _Life, event: words.RankExited) -> None:
        life.ending.discard(event.rank)
        records = life.slates[event.rank].records()
        self._say(msg.RankGone, rank=event.rank, code=event.code, reason=event.reason, records=records)

    def _tell_said(self, life: _Life) -> None:
        if life.said:
            said, life.said = tuple(life.said), []
            self._say(msg.RanksSaid, said=said)

    def _could_not_start(self, life: _Life, error: Exception) -> None:
        """No rank, or not all: what runs ends with the rest of the life."""
        missing = [rank for rank in life.ranks if rank not in self._group.ranks]
        text = f"{type(error).__name__}: {error}"
        for rank in missing:
            life.codes[rank] = 1
        self._fail(
            life,
            rank=missing[0],
            what=f"rank {missing[0]} could not be started: {error}",
            source="exception",
            text=text,
            program_error=text if isinstance(error, UserError | FileNotFoundError) else "",
        )
        self._is_over(life)

    def _could_not_restore(self, life: _Life, step: int, because: str) -> None:
        first = life.ranks[0]
        life.codes.update(dict.fromkeys(life.ranks, 1))
        what = f"the state of step {step} cannot be read on this node: {because}"
        self._fail(life, rank=first, what=what, source="log", text=what, lost_snapshot=step)
        self._is_over(life)

    def _end(self, life: _Life, grace_s: float, because: str) -> None:
        now = time.monotonic()
        at = now + grace_s
        if life.kill_at is not None:
            life.kill_at = min(life.kill_at, at)
            return
        life.kill_at = at
        speaking = {rank for rank, since in life.raised_at.items() if now - since < LAST_WORDS_S}
        life.terminate_at = now + LAST_WORDS_S if speaking else None
        self._signal([rank for rank in self._group.ranks if rank not in speaking], "SIGTERM", because)
        self._is_over(life)  # of held ranks, the last may be gone

    def _press(self, life: _Life, now: float) -> None:
        if life.terminate_at is not None and now >= life.terminate_at:
            life.terminate_at = None
            late = [rank for rank in life.raised_at if rank in self._group.ranks]
            self._signal(late, "SIGTERM", f"has raised, and has not ended within {LAST_WORDS_S:g} s")
        if life.kill_at is not None and now >= life.kill_at:
            life.kill_at = now + KILL_EVERY_S
            because = "" if life.is_killed else "not gone when its grace was over"
            life.is_killed = True
            self._signal(list(self._group.ranks), "SIGKILL", because)

    def _signal(self, ranks: list[int], name: str, because: str) -> None:
        if ranks and because:
            self._settings.note(f"{name} to {testimony.names(tuple(sorted(ranks)))}: {because}.")
        self._group.signal(ranks, name)

    # -------------------------------------------------------------- what has happened

    def _happened(self, event: words.Event) -> None:
        life, now = self._life, time.monotonic()
        if life is None:
            return
        match event:
            case words.RankRaised():
                life.raised_at[event.rank] = now
                self._fail(
                    life,
                    rank=event.rank,
                    what=testimony.raised_what(event.rank, event.error, event.where),
                    source="exception",
                    text=testimony.raised_text(event.error, event.traceback),
                    ago_s=0.0 if event.raised_at is None else max(0.0, now - event.raised_at),
                    traceback=event.traceback,
                    program_error=testimony.program_error(event.error, event.where),
                )
            case words.RankExited():
                life.codes[event.rank] = event.code
                life.stillness.forget(event.rank)
                if event.code != 0 and event.rank not in life.ending:
                    self._fail(
                        life,
                        rank=event.rank,
                        what=f"rank {event.rank} {event.reason}",
                        source="exit",
                        text=testimony.exit_text(event.code, event.reason, event.words),
                        code=event.code,
                        evidence=testimony.last_words(event.rank, event.words),
                    )
                if life.unit and life.kill_at is None:
                    self._tell_said(life)
                    self._gone(life, event)
                self._is_over(life)
            case words.HeldRankSaid():
                life.said.append(event.word)
            case words.StepSeen():
                self._progressed(life, event, now)
            case words.RankHandedOver():
                self._handed_over(life, event)
            case words.RankRecorded():
                self._paced(life, event)
            case words.RankLeft() if life.kill_at is None:
                life.left.append(event.rank)

    def _fail(self, life: _Life, *, rank: int, **fields: Any) -> None:
        """Once for each rank, and not for what follows from our own signals."""
        if rank not in life.failed and life.kill_at is None:
            life.failed.add(rank)
            finished = tuple(sorted(each for each, code in life.codes.items() if code == 0))
            self._say(msg.RankFailed, rank=rank, finished=finished, **fields)

    def _tell_left(self, life: _Life) -> None:
        """Before their processes have ended: peers that wait for them may fail at once."""
        if life.left:
            self._say(msg.RanksLeft, ranks=tuple(sorted(life.left)))
            life.left = []

    def _is_over(self, life: _Life) -> None:
        is_awaited = life.unit and life.kill_at is None and any(life.codes.values())  # a replacement
        if not self._group.ranks and len(life.codes) == len(life.ranks) and not is_awaited:
            for slate in life.slates.values():
                slate.close()
            self._life, self._question, self.codes = None, None, life.codes
            self._is_idle(life.codes)

    def _is_idle(self, codes: Mapping[int, int]) -> None:
        if self._is_leaving:
            return
        self.port_error = ""
        try:
            address = self._group.listen(self._settings.host, self._rules.port)
        except UserError as error:  # the store may be on another node
            address, self.port_error = (self._settings.host, 0), str(error)
        self._say(
            msg.RanksIdle,
            address=address,
            codes=dict(codes),
            order=self._settings.order,
            memory=self._memory.address,
            can_hold=self._can_hold,
        )

    def _say(self, kind: Any, **fields: Any) -> None:
        task, worker, incarnation = self._settings.sender
        self._tell(kind(task=task, worker=worker, incarnation=incarnation, life=self._number, **fields))

    # -------------------------------------------------------------- progress

    def _progressed(self, life: _Life, event: words.StepSeen, now: float) -> None:
        life.steps[event.rank], life.stepped_at = event.step, now
        if now < life.tell_at and not event.is_saved:
            return
        life.tell_at = now + PROGRESS_EVERY_S
        self._say(
            msg.RankProgressed,
            rank=event.rank,
            step=event.step,
            tokens=event.tokens,
            is_saved=event.is_saved,
        )

    def _handed_over(self, life: _Life, event: words.RankHandedOver) -> None:
        """Told once all ranks of this node have handed over the state of a step."""
        if event.failed:
            warn(f"rank {event.rank} could not keep its state of step {event.step}: {event.failed}")
            return
        handed = life.handed.setdefault(event.step, {})
        handed[event.rank] = event
        if len(handed) < len(life.ranks):
            return
        for step in [step for step in life.handed if step <= event.step]:
            del life.handed[step]
        files = {e.name: msg.SnapshotFile(size=e.size, hash=e.hash) for e in handed.values() if e.name}
        self._memory.trim()
        self._say(msg.SnapshotTaken, step=event.step, files=files)

    def _copy(self, order: msg.CopySnapshot, life: int) -> None:
        """In a thread: ranks are watched meanwhile."""
        failed = self._memory.fetch(order.step, order.files)
        if failed:
            warn(f"a copy of the state of step {order.step} failed: {failed}")
        self._memory.trim()
        task, worker, incarnation = self._settings.sender
        self._inbox.put(
            msg.SnapshotCopied(
                task=task,
                worker=worker,
                incarnation=incarnation,
                life=life,
                step=order.step,
                owner=order.owner,
                failed=failed,
            )
        )

    def _drain(self, order: msg.DrainSnapshot) -> None:
        """The files are held now; written in a thread, whatever becomes of the ranks."""
        try:
            held = self._memory.hold(order.step, order.names)
        except OSError as error:
            self._drained(order.step, order.life, f"{error.strerror}: {error.filename}")
            return
        threading.Thread(
            target=lambda: self._drained(order.step, order.life, self._memory.drain(order.step, held)),
            name="everstep-drain",
            daemon=True,
        ).start()

    def _drained(self, step: int, life: int, failed: str) -> None:
        if failed:
            warn(f"the state of step {step} could not be written to disk: {failed}")
        task, worker, incarnation = self._settings.sender
        said = msg.SnapshotDrained(
            task=task, worker=worker, incarnation=incarnation, life=life, step=step, failed=failed
        )
        self._inbox.put(said)

    def _look(self, life: _Life, now: float) -> None:
        if self._question is not None and (answer := self._question.answers(self._group.ranks)):
            self._question = None
            positions = tuple(
                position(rank, found, step=life.steps.get(rank), is_busy=life.stillness.is_busy(rank))
                for rank, found in answer.items()
            )
            finished = tuple(sorted(rank for rank, code in life.codes.items() if code == 0))
            self._say(msg.RanksLocated, positions=positions, finished=finished)
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        if life.park_at is not None and now >= life.park_at and life.kill_at is None:
            life.park_at = None
            with contextlib.suppress(EverstepError):  # without a fork server no rank starts; that is said
                self._group.park()
        if now >= self._family_at:
            self._family_at = now + FAMILY_EVERY_S
            self._group.look_at_families()
            self._group.ask_for_counts()
        stopped, resumed = life.stillness.see(self._group.looks(), now)
        patience_s = min(STOPPED_PATIENCE_S, self._rules.hang_after_s or STOPPED_PATIENCE_S)
        for rank in stopped:
            self._settings.note(
                f"rank {rank} is stopped (SIGSTOP); the others wait for it; it has {patience_s:g} s to "
                "continue before all ranks are restarted."
            )
        for rank, after_s in resumed:
            self._settings.note(f"rank {rank} continues after {after_s:.1f} s; no action was needed.")
        for rank, since in life.stillness.stopped.items():
            if now - since >= patience_s:
                because = "its process is in state T since a SIGSTOP; the other ranks wait for it"
                what = f"rank {rank} has been stopped for {now - since:.1f} s"
                self._fail(
                    life,
                    rank=rank,
                    what=what,
                    source="progress",
                    text=what,
                    ago_s=now - since,
                    evidence=(because,),
                )
        if not life.stillness.stopped:  # else that is the reason, and it is on its way
            self._tell_stillness(life, now)

        if now >= life.pace_at and self._question is None:
            life.pace_every_s = min(2 * life.pace_every_s, PACE_EVERY_S)
            life.pace_at = now + life.pace_every_s
            life.pacing, life.paces = self._group.ask_for_paces(self._memory.folder), []
            if life.timed is None or life.timed.is_over:
                life.timed = self._ask_nccl(0)

    def _ask_nccl(self, world: int) -> NcclQuestion:
        processes = {
            pid: number
            for number, rank in self._group.ranks.items()
            for pid in (rank.process.pid, *rank_looks.family(rank.process.pid))
        }
        environment, folder = self._settings.environment, self._rules.folder
        return NcclQuestion(environment, processes, folder=folder, world=world, seconds=ANSWER_S)

    def _paced(self, life: _Life, event: words.RankRecorded) -> None:
        """Told once all ranks of this node have answered."""
        path = self._memory.folder / f"pace_rank_{event.rank}.json"
        if event.rank not in life.pacing:
            return
        life.pacing.discard(event.rank)
        with contextlib.suppress(OSError):
            if event.is_written:
                life.paces += paces(event.rank, path.read_bytes())
            path.unlink(missing_ok=True)
        if not life.pacing:
            known = {pace.rank for pace in life.paces}
            for rank, operations in ({} if life.timed is None else life.timed.completed).items():
                if rank not in known:
                    life.paces += paces_of(rank, operations)
            self._say(msg.RanksPaced, paces=tuple(life.paces))

    def _tell_stillness(self, life: _Life, now: float) -> None:
        """Where the script tells its steps, by these once they are late."""
        still_s, limit_s = now - life.stillness.moved_at, self._rules.hang_after_s
        late_s = 0.0 if life.stepped_at is None else now - life.stepped_at
        tells_steps = limit_s is not None and late_s >= limit_s
        if tells_steps:
            still_s = max(still_s, late_s)
        if still_s < STILL_S:
            if life.told_still_s:
                life.told_still_s, life.told_steps = 0.0, False
                self._say(msg.RanksMoved)
            return
        if still_s >= max(STILL_S, 2 * life.told_still_s) or tells_steps > life.told_steps:
            life.told_still_s, life.told_steps = still_s, tells_steps
            self._say(msg.RanksStill, still_s=still_s, tells_steps=tells_steps)


def keep(settings: KeeperSettings, tell: Say, inbox: Inbox) -> int:
    """The whole life of a keeper."""
    return made(settings, tell, inbox).run()


def made(settings: KeeperSettings, tell: Say, inbox: Inbox) -> Keeper:
    rules = settings.rules
    disk = Path(rules.folder, rules.snapshots, rules.run_id) if rules.snapshots else None
    memory = NodeMemory(settings.host, settings.secret, disk)
    return Keeper(settings, _starter(settings), memory, tell, inbox)


def _starter(settings: KeeperSettings) -> RankStarter:
    """Forks, where there is something to load before; what cannot be loaded is left to the script."""
    rules, names = settings.rules, [name for name in settings.rules.preload if name != NONE]
    is_chosen = AUTO not in names
    if not is_chosen:
        names = imports_of(rules.command, rules.folder) + [name for name in names if name != AUTO]
    if not names or rules.is_program:
        return PlainStarter()
    environment = {**unset_by_user(settings.environment, rules.ranks), **settings.environment}
    starter = ForkingStarter(names, environment, is_chosen=is_chosen).open()
    try:
        starter.warm_up()
    except (EverstepError, OSError) as error:
        if is_chosen:
            warn(f"{error} Ranks are started without it.")
        starter.close()
        return PlainStarter()
    except BaseException:  # the run is stopped meanwhile
        starter.close()
        raise
    return starter


# ------------------------------------------------------------------ where ranks are


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one rank: its stacks, one text for each moment, and its record of collectives."""

    stacks: tuple[str, ...]
    record: bytes = b""
    reads_or_writes: bool = False
    nccl: SeenByRas = field(default_factory=SeenByRas)
    completed: Operations = field(default_factory=dict)


class _StacksQuestion:
    """One question to all ranks: where are you? Their stacks and their records of collectives answer."""

    def __init__(self, ranks: Mapping[int, RunningRank], nccl: NcclQuestion) -> None:
        self._ranks, self._nccl = tuple(ranks), nccl
        self._starts: dict[int, list[int]] = {number: [] for number in ranks}  # of each text in the file
        self._io = {number: rank_looks.io_bytes(rank.process.pid) for number, rank in ranks.items()}
        self._asked_at = self._sampled_at = time.monotonic()
        for number, rank in ranks.items():
            rank.is_recorded = False
            rank.ask(record=str(rank.record_path(number)))
        self._sample(ranks)

    def answers(self, ranks: Mapping[int, RunningRank]) -> dict[int, Found] | None:
        """By rank; None while ranks may still answer."""
        there = {number: ranks[number] for number in self._ranks if number in ranks}
        now = time.monotonic()
        if max(map(len, self._starts.values()), default=SAMPLES) < SAMPLES:
            if now - self._sampled_at >= SAMPLE_EVERY_S:
                self._sample(there)
            return None
        has_answered = self._nccl.is_over and all(rank.has_answered for rank in there.values())
        is_late = now - self._asked_at >= ANSWER_S
        if now - self._sampled_at < LEAST_ANSWER_S or not (has_answered or is_late):
            return None
        return {number: self._found(number, rank) for number, rank in there.items()}

    def _sample(self, ranks: Mapping[int, RunningRank]) -> None:
        self._sampled_at = time.monotonic()
        for number, rank in ranks.items():
            self._starts[number].append(len(rank.stacks()))
            if rank_looks.handles(rank.process.pid, STACKS_SIGNAL):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, STACKS_SIGNAL)

    def _found(self, number: int, rank: RunningRank) -> Found:
        text, starts = rank.stacks(), self._starts[number]
        ends = [*starts[1:], len(text)]
        moved = rank_looks.io_bytes(rank.process.pid) - self._io[number] - 2 * len(text)
        return Found(
            stacks=tuple(text[a:b] for a, b in zip(starts, ends, strict=True)),
            record=rank.record(number),
            reads_or_writes=moved > BUSY_IO_BYTES + len(rank.record(number)),
            nccl=self._nccl.seen.get(number, SeenByRas()),
            completed=self._nccl.completed.get(number, {}),
        )


_MOST_CHAIN = 1000
_SNAPSHOT = b"everstep.snapshot"


def position(rank: int, found: Found, *, step: int | None = None, is_busy: bool = False) -> RankPosition:
    """By its last stack; `stack` if all of them are alike and it neither reads nor writes."""
    moments = [main_frames(text) for text in found.stacks]
    frames = next((each for each in reversed(moments) if each), [])
    chains = {_chain(each) for each in moments if each}
    entered, kinds, num_ops = _entered(found.record)
    script = of_script(frames)
    inside = not frames or frames[0].is_torch
    at = "an unknown place" if script is None else str(script)
    if importer := _importer(frames):
        inner = next((frame for frame in frames if not frame.is_import), importer)
        inside, at = False, f"{inner}, imported at {importer.short_file}:{importer.line}"
    return RankPosition(
        rank=rank,
        at=at,
        is_inside_torch=inside,
        doing=frames[0].name if frames and inside else "",
        entered=entered,
        kinds=kinds,
        step=step,
        is_busy=is_busy,
        stack=chains.pop() if len(chains) == 1 and not found.reads_or_writes else "",
        num_ops=num_ops,
        launched=found.nccl.launched,
        completed={name: max(numbers) for name, numbers in found.completed.items()},
        trouble=found.nccl.trouble,
    )


def _importer(frames: list[Frame]) -> Frame | None:
    """The script's own line that imports what a rank has not finished to import."""
    return next((outer for outer, inner in pairwise(reversed(frames)) if inner.is_import), None)


def _chain(frames: list[Frame]) -> str:
    """Without lines: a loop goes through several."""
    return " < ".join(f"{frame.name} ({frame.file.rpartition('/')[2]})" for frame in frames)[:_MOST_CHAIN]


def _entered(record: bytes) -> tuple[dict[str, int], dict[str, str], int]:
    """By process group: number and kind of the last collective that the flight recorder has; and how many
    collectives and messages it has seen in all.
    """
    try:
        entries = json.loads(record)["entries"] if record else []
    except (ValueError, KeyError, TypeError):
        entries = []
    entered: dict[str, int] = {}
    kinds: dict[str, str] = {}
    num_ops = 0
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict):
            continue
        if isinstance(op := entry.get("record_id"), int):
            num_ops = max(num_ops, op + 1)
        group, number = entry.get("process_group"), entry.get("collective_seq_id")
        name = str(group[0]) if isinstance(group, list | tuple) and group else str(group)
        if isinstance(number, int) and not entry.get("is_p2p") and number >= entered.get(name, 0):
            entered[name], kinds[name] = number, str(entry.get("profiling_name", ""))
    return entered, kinds, num_ops


def paces(rank: int, record: bytes) -> list[RankPace]:
    """Of the groups with most collectives, when it entered some of them. Only numbers that a power of two
    divides are told: then all ranks tell the same ones, though their recorders end at different moments.
    """
    try:
        dump = json.loads(record)
        entries, configured = dump["entries"], dump.get("pg_config")
    except (ValueError, KeyError, TypeError):
        return []
    times: dict[str, dict[int, tuple[float, float | None]]] = {}  # entered; inside, by the device
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict):
            continue
        number, created = entry.get("collective_seq_id"), entry.get("time_created_ns")
        if entry.get("is_p2p") or not isinstance(number, int) or not isinstance(created, int):
            continue
        inside = entry.get("duration_ms")  # where TORCH_NCCL_ENABLE_TIMING is set
        inside_s = inside / 1e3 if isinstance(inside, int | float) else None
        times.setdefault(_full_name(entry, configured), {})[number] = (created / 1e9, inside_s)
    return paces_of(rank, times)


def paces_of(rank: int, times: Mapping[str, Mapping[int, tuple[float, float | None]]]) -> list[RankPace]:
    """Of the groups with most collectives. By number: when it entered, and how long the device was inside."""
    most = sorted(times.items(), key=lambda item: (-len(item[1]), item[0]))[:MOST_PACED_GROUPS]
    return [pace for group, entered in most if (pace := _pace(rank, group, entered)) is not None]


def _pace(rank: int, group: str, times: Mapping[int, tuple[float, float | None]]) -> RankPace | None:
    is_by_device = all(inside is not None for _, inside in times.values())
    if len(times) < MOST_PACES or (group.startswith("nccl") and not is_by_device):
        return None  # what is queued for a device early says nothing of when it begins
    stride = 1
    while len(times) // stride > MOST_PACES:
        stride *= 2
    created = [times[number][0] for number in sorted(times)]
    gaps = sorted(after - before for before, after in pairwise(created))
    return RankPace(
        rank=rank,
        group=group,
        entered={
            number: round(-inside if is_by_device and inside is not None else at, 6)
            for number, (at, inside) in times.items()
            if number % stride == 0
        },
        step_s=gaps[-3],  # two may be pauses, as for a checkpoint
        is_by_device=is_by_device,
    )


def _full_name(entry: Mapping[str, Any], configured: Any) -> str:
    """Groups that are split from another one may share a name, and have other members."""
    group = entry.get("process_group")
    name = str(group[0]) if isinstance(group, list | tuple) and group else str(group)
    about = configured.get(name) if isinstance(configured, dict) else None
    members = about.get("ranks", "") if isinstance(about, dict) else ""
    backend = str(entry.get("profiling_name", "")).partition(":")[0]
    return f"{backend} {name} {members}".strip()


def asks_to_be_held(rules: RankRules) -> bool:
    """Whether the script names everstep. What its own modules name is not looked at: --hold says it."""
    if rules.is_program or rules.hold == "off":
        return False
    if rules.hold == "on":
        return True
    path = script_path(rules.command, rules.folder)
    with contextlib.suppress(OSError):
        return path is not None and _SNAPSHOT in path.read_bytes()
    return False


def check(rules: RankRules) -> None:
    """What can be wrong before a rank is started: one sentence, not one traceback per rank."""
    folder = Path(rules.folder)
    if not folder.is_dir():
        raise UserError(f"the working directory {rules.folder} is not on this node.")
    if not rules.is_program and rules.command[0] != "-m" and not (folder / rules.command[0]).is_file():
        raise UserError(f"script {rules.command[0]!r} is not a file on this node.")
