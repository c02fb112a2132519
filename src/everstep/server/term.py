"""One term of leadership: the machine, its place in the journal, what waits, the lines to agents.

A coordinator that loses its leadership throws the whole term away: agents are disconnected and find the new
leader, callers that wait get an error, and the next term of the same process starts from the journal again.

Times are wall-clock seconds, because they outlive the process. A term reads the wall clock once, when it
begins; after that its time goes on with the monotonic clock, from the wall's or from the journal's last
entry, whichever is later. So a clock that is set, or one that is behind that of the last coordinator, delays
no timer: with the wall clock alone, time would stand still until the clock has caught up.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
import traceback
import zlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from everstep import __version__
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.snapshot import digest_of, freeze, thaw
from everstep.core.faults.detector import Heartbeats
from everstep.drive.driver import BEFORE_ALL
from everstep.drive.ports import ClusterDriver, ClusterPorts, HandledEvent
from everstep.drive.thinking import Thinking, answered, sentence, unanswered, unchosen
from everstep.errors import InternalError, PeerError, UserError, clipped
from everstep.plan.ask import is_about, think
from everstep.protocol import messages as msg
from everstep.protocol.codec import decode, encode
from everstep.protocol.moment import Moment
from everstep.schedule.task_scheduler import TaskScheduler
from everstep.server.agent_connections import AgentConnections
from everstep.server.journal import Journal, JournalEntry, JournalFull, LostLeadership, check_entries
from everstep.server.record import SILENCE_S, ClusterRecord
from everstep.server.step_files import StepFiles
from everstep.traffic import Planner

TICK_S = 0.05
SNAPSHOT_EVERY = 5000  # entries
# What a restart may have to replay, in CPU seconds: then a snapshot is taken, in an idle moment or in any.
REPLAY_IDLE_S, REPLAY_MOST_S = 0.3, 0.8
SNAPSHOT_SHARE = 0.2  # of the time for decisions: a state that is slow to freeze is frozen less often
MOST_WAITING = 20_000  # events that the journal has not taken: then agents are not read any more
FORGET_S = 10.0
MOST_THINK_S = 120.0  # for a schedule or an assignment: then a plain one is used
TRY_AGAIN_S, SAY_AGAIN_S = 0.5, 60.0  # where the journal has no room
REPLAY_S, REPLAY_PAUSE_S = 0.05, 0.002  # at once, and then for the rest of the loop: it keeps the lease
RETURN_S = 15.0  # for agents to notice that a coordinator's machine is dead, and to find another
LAST_WRITE_S, LAST_SNAPSHOT_S = 1.0, 10.0  # at a clean end
COLLECT_S, COLLECT_LATE_S = 5.0, 60.0  # between two collections of garbage, in idle moments; or in any
# Thresholds: objects between two collections of the youngest, and collections that are never reached.
YOUNG_COLLECTIONS, MIDDLE_COLLECTIONS, FULL_COLLECTIONS = 50_000, 1000, 1_000_000
LAST_S = 3.0  # an agent that is up tries again within 2.5 s (everstep.node.agent)
_ZIPPED = b"z"
_json = json.JSONEncoder(separators=(",", ":")).encode


def keep_collections_short() -> None:
    """Of garbage, for a process that leads. A full collection looks at every object: with the state of a task
    of 512 workers it takes 60 ms, and it begins in the middle of a recovery, where objects are made. So what
    has survived one is set apart, and is freed by its reference count like nearly everything here. Cycles
    that become garbage after that stay; those that a connection or an exception leaves are younger. And the
    youngest are looked at rarely: one decision about 4,096 workers makes 200,000 objects, and hundreds of
    collections among them took a third of its time.
    """
    gc.set_threshold(YOUNG_COLLECTIONS, MIDDLE_COLLECTIONS, FULL_COLLECTIONS)
    gc.freeze()


def collect_new() -> None:
    """What was made since the last time."""
    if gc.get_threshold()[2] == FULL_COLLECTIONS:
        gc.collect()
        gc.freeze()


class DecisionError(InternalError):
    """The machine raised while it handled an entry of the journal: its state is half changed."""

    def __init__(self, number: int, event: msg.ClusterEvent, error: str) -> None:
        super().__init__(f"internal error while handling {type(event).__name__}: {error}")
        self.number, self.event, self.error = number, event, error


@dataclass(slots=True)
class Unsaved:
    """What a coordinator that starts now would have to replay. An entry of a large cluster costs a hundred
    times as much as one of a small cluster, so what counts is their time, not only their number.
    """

    after: int = 0  # the number of the last entry in a snapshot
    cost_s: float = 0.0  # CPU time of the entries since
    freeze_s: float = 0.0  # of the last snapshot

    def wants_snapshot(self, number: int, *, is_idle: bool) -> bool:
        limit_s = max(REPLAY_IDLE_S if is_idle else REPLAY_MOST_S, self.freeze_s / SNAPSHOT_SHARE)
        return number - self.after >= SNAPSHOT_EVERY or self.cost_s >= limit_s


class Term:
    def __init__(
        self,
        journal: Journal,
        record: ClusterRecord,
        *,
        silence_s: float,
        clock: Callable[[], float] = time.time,
        aside: Mapping[int, str] | None = None,
        traffic: Planner | None = None,
    ) -> None:
        """`aside`: entries of the journal that are not to be handled, with the error each led to."""
        self.journal, self.record = journal, record
        self._aside = aside or {}
        self.number = journal.term  # agents refuse orders of an older one
        self.machine = Coordinator()
        self.hearts = Heartbeats(patience_s=silence_s)
        self.sent_before: dict[str, int] = {}  # by node not heard yet in this term: orders sent before it
        self.closed: set[str] = set()  # nodes whose last connection was closed, and not opened again
        self.thinking = Thinking()
        self.traffic = traffic
        self._is_routing = False
        self.lines = AgentConnections(self)
        self.returns = Returns(self.hearts)
        self._clock = clock
        self._began_at, self._began = clock(), time.monotonic()
        self._ports = ClusterPorts(self.lines, self, record)
        self._to_write: asyncio.Queue[tuple[list[bytes], Callable[[], None]]] = asyncio.Queue()
        self._unsaved = Unsaved()
        self._is_replay_long = asyncio.Event()
        self._deciding = asyncio.Lock()  # held while the state changes, or is read for a snapshot
        self._jobs: set[asyncio.Task[None]] = set()
        self._callers: dict[asyncio.Future[None], msg.ClusterEvent] = {}
        self._failed: DecisionError | None = None
        self._is_over = False
        self.driver = self._driver(BEFORE_ALL)

    def _driver(self, last: Moment) -> ClusterDriver:
        return ClusterDriver(
            self.machine,
            clock=self,
            store=self,
            port=self._take,
            time_passed=msg.TimePassed(),
            decide=self._decide,
            last=last,
        )

    # -------------------------------------------------------------- life

    async def read(self, policy: msg.PolicySet | None) -> None:
        """Read the journal; be where the last coordinator was."""
        began = time.monotonic()
        snapshot = await self.journal.latest_snapshot()
        number, steps, at = 0, None, 0.0
        if snapshot is not None:
            number, body = snapshot
            # In a thread: a loop that stands still for too long loses its leadership (etcd.LeaseKeeper).
            steps, at = await asyncio.to_thread(self._thaw, body)
        self._unsaved = Unsaved(after=number)
        self.driver = self._driver(Moment(at, number))
        self.record.begin(self.machine, self.hearts, number, steps)
        self.record.measured = self.thinking.measured
        while entries := await self.journal.entries(after=self.driver.number):
            await self._replay(entries)
        self._began_at, self._began = max(self._clock(), self.driver.now), time.monotonic()
        if any(number > self._unsaved.after for number in self._aside):
            await self._take_snapshot()  # another version of Everstep must not handle it after all
        self.sent_before = {node.name: node.sent for node in self.machine.nodes.values()}
        self.returns.expect([n.name for n in self.machine.nodes.values() if n.reachable], time.monotonic())
        self.record.lead()
        self.record.say(
            f"coordinator: {self.driver.number} entries in {time.monotonic() - began:.2f} s, "
            f"{len(self.machine.nodes)} nodes, {len(self.machine.tasks)} tasks"
        )
        policy_now = self.machine.policy
        if not policy_now.journal or policy_now.version != __version__:
            if self.driver.number > self._unsaved.after:  # what another version decided is not decided again
                await self._take_snapshot()
            self._hear_journal(
                policy_now.journal or uuid4().hex,
                "it is new" if not policy_now.journal else f"version {policy_now.version} has kept it before",
            )
        in_force = msg.PolicySet(patience=self.machine.patience, planned=self.machine.policy.planned)
        if policy is not None and policy != in_force:
            self.hear(policy)
        self.driver.resume()

    def _hear_journal(self, journal: str, because: str) -> None:
        self.hear(msg.JournalBegun(journal=journal, version=__version__, because=because))

    async def begin_journal(self, because: str) -> None:
        """With an id of its own, on which agents do not compare terms and orders of the one before. A deposed
        coordinator cannot write that.
        """
        await self.handle(msg.JournalBegun(journal=uuid4().hex, version=__version__, because=because))

    async def _replay(self, entries: Sequence[JournalEntry]) -> None:
        """By time, not by number: what an entry costs depends on the size of the cluster. A pause is long
        enough for a whole request, because a lease is kept by one.
        """
        busy_since, began = time.monotonic(), time.thread_time()
        for each in _readable(entries):
            self.driver.replay([each])
            self._unsaved.cost_s += time.thread_time() - began
            if time.monotonic() - busy_since > REPLAY_S:
                await asyncio.sleep(REPLAY_PAUSE_S)
                busy_since = time.monotonic()
            began = time.thread_time()

    def _thaw(self, body: bytes) -> tuple[Any, float]:
        """Fill the machine from a snapshot; the rows of steps, and its time."""
        document = json.loads(zlib.decompress(body))
        thaw(self.machine, document["state"])
        return document["steps"], document.get("at", 0.0)

    async def run(self) -> None:
        """Until cancelled, or until another coordinator leads: then LostLeadership."""
        works = (self._tick(), self._write(), self._keep_replay_short(), self._until_lost())
        jobs = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in jobs:
                if job.done():
                    job.result()
        except asyncio.CancelledError:  # the process ends in good order
            await self._written()
            self.close()
            await _ended(jobs)
            await self._last_snapshot()
            raise
        finally:
            self.close()
            await _ended(jobs)

    def close(self) -> None:
        """Nothing of this term acts any more."""
        if self._is_over:
            return
        self._is_over = True
        self.record.leads = False
        self.driver.close()
        self.lines.close()
        for job in list(self._jobs):
            job.cancel()
        for caller, event in list(self._callers.items()):
            if caller.done():
                continue
            if self._failed is not None and event is self._failed.event:
                sentence = f"{self._failed}; the traceback is in the coordinator's log"
                caller.set_exception(InternalError(sentence))
            else:
                caller.set_exception(LostLeadership("another coordinator leads, or may; try again"))

    async def _until_lost(self) -> None:
        await self.journal.lost.wait()
        raise LostLeadership("the lease is lost")

    # -------------------------------------------------------------- events

    def hear(self, event: msg.ClusterEvent) -> None:
        """Something has happened."""
        if isinstance(event, msg.NodeJoined):
            self.returns.came(event.node)
        self.driver.hear(event)

    async def handle(self, event: msg.ClusterEvent) -> None:
        """Something has happened; returns when it is durable and carried out."""
        if self._is_over:
            raise LostLeadership("another coordinator leads, or may; try again")
        check_entries([pack(event, 0.0)])
        if isinstance(event, msg.NodeJoined):
            self.returns.came(event.node)
        caller: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._callers[caller] = event
        caller.add_done_callback(lambda done: self._callers.pop(done, None))
        self.driver.hear(event, handled=lambda: None if caller.done() else caller.set_result(None))
        await caller

    def packed_bytes(self, event: msg.ClusterEvent) -> int:
        """Of its journal entry."""
        return len(pack(event, self.driver.now))

    async def has_room(self) -> None:
        """Returns when the journal has taken most of what waits. A journal that stands still must not fill
        the memory: agents keep their reports, and send them later.
        """
        while self.driver.num_waiting > MOST_WAITING and not self._is_over:
            self.hearts.excuse(time.monotonic())  # we do not listen
            await asyncio.sleep(TICK_S)

    def learn(self, report: msg.TimesReported) -> None:
        """For the scheduler and the watch only: not journaled, and forgotten by a restart."""
        try:
            learned = list(self.thinking.learn(self.machine, report))
            if self.traffic is not None:
                self.traffic.learn(report)
        except Exception:  # the main loop: it would end the agent's line, and the report would come again
            self.record.say(f"coordinator: nothing learned from {report.task}\n{traceback.format_exc()}")
            return
        for found in learned:
            self.hear(found)

    def _decide(self, event: msg.ClusterEvent, now: float) -> list[msg.ClusterAction]:
        """A bug met here leaves the state half changed, so this term is over: the next one starts from the
        journal. An entry that fails then too is set aside, and the state is as if it had not happened.
        """
        number, began = self.driver.number + 1, time.perf_counter()
        given = event if number not in self._aside else _set_aside(number, event, self._aside[number])
        try:
            return self.machine.handle(given, now)
        except Exception as error:  # the main loop
            self._failed = DecisionError(number, event, clipped(f"{type(error).__name__}: {error}"))
            self.record.say(f"coordinator: entry {number}: {self._failed}\n{traceback.format_exc()}")
            raise self._failed from error
        finally:
            self.record.handled_s.append(time.perf_counter() - began)

    def _take(self, one: HandledEvent) -> None:
        self._ports.take(one)
        self.thinking.handled(one, self.machine)
        for action in one.actions:
            match action:
                case msg.RecordRow() if not one.replayed:
                    self._look_at_schedule(action)

    def _look_at_schedule(self, action: msg.RecordRow) -> None:
        """Is it outdated? An error in thinking about that must not end the coordinator: training goes on."""
        try:
            first, task = self.record.steps[action.task].first, self.machine.tasks[action.task]
            wish = self.thinking.outdated(task, action.record.step, first)
        except Exception:  # the main loop
            self.record.say(f"coordinator: no new schedule for {action.task}\n{traceback.format_exc()}")
        else:
            if wish is not None:
                self.hear(wish)

    # -------------------------------------------------------------- the clock

    def time(self) -> float:
        return self._began_at + time.monotonic() - self._began

    def wake_at(self, when: float) -> None:
        """`_tick` looks often enough."""

    async def _tick(self) -> None:
        last = forget_at = collect_at = time.monotonic()
        handled = self.driver.number
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - last > self.hearts.patience_s / 2:
                self.hearts.excuse(now)  # we were away ourselves
            last = now
            self.returns.wait(now)
            for node, silent_s in self.hearts.fell_silent(now):
                self.hear(msg.NodeFellSilent(node=node, silent_s=silent_s, closed=node in self.closed))
            self.driver.look_at_clock()
            self._look_at_traffic()
            if now > forget_at:
                forget_at = now + FORGET_S
                self.hearts.keep_only(self.machine.nodes)
            is_idle, handled = handled == self.driver.number, self.driver.number
            if now > collect_at + (0.0 if is_idle else COLLECT_LATE_S):
                collect_at = now + COLLECT_S
                collect_new()
            if self._unsaved.wants_snapshot(handled, is_idle=is_idle):
                self._is_replay_long.set()

    # -------------------------------------------------------------- the journal

    def write(self, entries: Sequence[tuple[float, msg.ClusterEvent]], done: Callable[[], None]) -> None:
        self._to_write.put_nowait(([pack(event, at) for at, event in entries], done))

    async def _write(self) -> None:
        while True:
            bodies, done = await self._to_write.get()
            await self._append(bodies)
            await self._deciding.acquire()
            began = time.thread_time()
            done()
            self._unsaved.cost_s += time.thread_time() - began
            self._deciding.release()  # not if it raised: a state that is half changed is not for a snapshot

    async def _keep_replay_short(self) -> None:
        """When `_tick` says so: two loops that look take twice as much from cores that train."""
        while True:
            await self._is_replay_long.wait()
            await self._take_snapshot()
            self._is_replay_long.clear()

    async def _append(self, bodies: list[bytes]) -> None:
        """While the disk has no room nothing is decided, and training goes on: agents keep their reports."""
        said_at = -math.inf
        while True:
            try:
                await self.journal.append(bodies)
            except JournalFull as error:
                if time.monotonic() - said_at > SAY_AGAIN_S:
                    said_at = time.monotonic()
                    self.record.say(
                        f"coordinator: {error}; decisions are paused until the journal is writable"
                    )
                await asyncio.sleep(TRY_AGAIN_S)
            else:
                if said_at > 0:
                    self.record.say("coordinator: the journal can be written again")
                return

    async def _written(self) -> None:
        """What has been heard is on disk and decided; agents are not listened to any more."""
        self.lines.close()
        until = time.monotonic() + LAST_WRITE_S
        while not self.driver.is_settled and time.monotonic() < until and not self.journal.lost.is_set():
            await asyncio.sleep(TICK_S)

    async def _last_snapshot(self) -> None:
        """At a clean end: the next coordinator, perhaps of another version, replays nothing."""
        if self._failed is not None or self.driver.number == self._unsaved.after:
            return
        try:
            await asyncio.wait_for(self._take_snapshot(), LAST_SNAPSHOT_S)
        except Exception as error:  # the entries are there
            self.record.say(f"coordinator: no snapshot was taken at the end: {error}")

    async def _take_snapshot(self) -> None:
        try:
            await self._snapshot()
        except JournalFull as error:  # the entries are there; the next one may find room
            self.record.say(f"coordinator: {error}; no snapshot was taken")

    async def _snapshot(self) -> None:
        """Decisions wait while the state is read, in a thread, so that agents and callers are heard; not
        while it is packed and written.
        """
        async with self._deciding:
            number, at = self.driver.number, self.driver.now
            self.record.accounts.advance()  # here, because callers may ask for them while the thread reads
            state, rows, freeze_s = await asyncio.to_thread(self._frozen)
            self._unsaved = Unsaved(after=number, freeze_s=freeze_s)
        packed = await asyncio.to_thread(_packed, {"state": state, "steps": rows, "at": at})
        await self.journal.snapshot(number, packed)

    async def digest(self) -> tuple[int, str]:
        """The state is read as for a snapshot."""
        async with self._deciding:
            number, frozen = self.driver.number, await asyncio.to_thread(freeze, self.machine)
        return number, await asyncio.to_thread(digest_of, frozen)

    def _frozen(self) -> tuple[Any, Any, float]:
        began = time.thread_time()
        return freeze(self.machine), self.record.snapshot(), time.thread_time() - began

    # -------------------------------------------------------------- slow questions

    def think(self, action: msg.Think) -> None:
        self._in_background(self._answer(action))

    def choose(self, action: msg.ChooseAssignment) -> None:
        self._in_background(self._choose(action))

    async def _answer(self, action: msg.Think) -> None:
        task = self.machine.tasks.get(action.task)
        if task is not None:
            scheduler = self.thinking.scheduler(task)
            try:
                events = await asyncio.wait_for(asyncio.to_thread(answered, scheduler, action), MOST_THINK_S)
            except TimeoutError:
                events = unanswered(scheduler, action, f"no answer within {MOST_THINK_S:g} s")
            for event in events:
                self.hear(event)

    async def _choose(self, action: msg.ChooseAssignment) -> None:
        """The planner thinks in a thread; a question that is out of date by then is not answered."""
        await asyncio.sleep(0)  # several changes at once are one question: the last
        thinking, machine = self.thinking, self.machine
        if action.version != machine.version:
            return
        events: list[msg.ClusterEvent]
        try:
            asked, thought = thinking.question(machine, self._clock()), None
            if asked is not None:
                thought = await asyncio.wait_for(asyncio.to_thread(think, asked), MOST_THINK_S)
                if not is_about(asked, machine):
                    self.choose(action)
                    return
            events = [thinking.chosen(machine, action, thought, self._clock())]
        except TimeoutError:
            events = unchosen(machine, action, f"no answer within {MOST_THINK_S:g} s")
        except Exception as error:  # whatever a planner can raise: tasks must not wait without end
            events = unchosen(machine, action, sentence(error))
        if action.version == machine.version:
            for event in events:
                self.hear(event)

    def _look_at_traffic(self) -> None:
        """Where workers came, went or moved, their flows get paths."""
        if self.traffic is not None and not self._is_routing:
            question = self.traffic.question(self.machine.tasks)
            if question is not None:
                self._is_routing = True
                self._in_background(self._route(self.traffic, question))

    async def _route(self, traffic: Planner, question: Callable[[], Any]) -> None:
        try:
            answer = await asyncio.to_thread(question)
        except UserError as error:  # no way from one of them to another
            self.record.say(f"coordinator: routes stay as they are: {error}")
        else:
            self.record.say(f"coordinator: routes: {traffic.took(answer)}")
            self.lines.give_routes(traffic.advice)
        finally:
            self._is_routing = False

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)


async def _ended(jobs: Iterable[asyncio.Task[None]]) -> None:
    jobs = list(jobs)
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)


class Returns:
    """After a restart: agents come back one after the other, and who is still on the way is not silent.

    The first to come may bring a witness that waits, to whom all that are still on their way would look dead.
    The last one missing is waited for as long as an agent may sleep before it tries again: until then it is
    as likely to be on its way as to be dead, and giving it up costs its workers.
    """

    def __init__(self, hearts: Heartbeats) -> None:
        self._hearts = hearts
        self._missing: set[str] = set()
        self._by = 0.0
        self._came_at: float | None = None  # the last of them; None: since the last look

    def expect(self, nodes: Iterable[str], now: float) -> None:
        self._missing, self._by, self._came_at = set(nodes), now + RETURN_S, now
        for node in self._missing:
            self._hearts.heard(node, now)

    def came(self, node: str) -> None:
        if node in self._missing:
            self._missing.discard(node)
            self._came_at = None

    def wait(self, now: float) -> None:
        """Called often."""
        if self._came_at is None:
            self._came_at = now
        is_last_late = len(self._missing) <= 1 and now > self._came_at + LAST_S
        if now > self._by or is_last_late:
            self._missing.clear()
        for node in self._missing:
            self._hearts.heard(node, now)


def _set_aside(number: int, event: msg.ClusterEvent, error: str) -> msg.EventSetAside:
    node, report = (event.node, event.number) if isinstance(event, msg.FromNode) else ("", 0)
    what = type(event.report if isinstance(event, msg.FromNode) else event).__name__
    return msg.EventSetAside(number=number, what=what, error=error, node=node, report=report)


def _packed(document: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 1)


def _readable(entries: Sequence[JournalEntry]) -> Iterator[tuple[float, msg.ClusterEvent]]:
    for entry in entries:
        try:
            yield unpack(entry.body)
        except PeerError as error:
            raise UserError(
                f"entry {entry.number} of the journal cannot be read by this version ({error}); start the "
                "version of Everstep that wrote it, or move the journal away to start with nothing."
            ) from None


def pack(event: msg.ClusterEvent, now: float) -> bytes:
    body = _json([now, encode(event)]).encode()
    return body if len(body) < 4096 else _ZIPPED + zlib.compress(body, 1)


def unpack(body: bytes) -> tuple[float, msg.ClusterEvent]:
    text = zlib.decompress(body[1:]) if body[:1] == _ZIPPED else body
    at, event = json.loads(text)
    return at, decode(msg.ClusterEvent, event)


class Daemon:
    """The coordinator as a process: it stands by, leads for a term, and stands by again."""

    def __init__(
        self,
        journal: Journal,
        *,
        folder: Path,
        policy: msg.PolicySet | None = None,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] | None = None,
        traffic: Callable[[], Planner] | None = None,
    ) -> None:
        self.journal, self._traffic = journal, traffic
        self.record = ClusterRecord() if say is None else ClusterRecord(say=say)
        self.record.files = StepFiles(folder, self.record.say)
        self._policy, self._silence_s, self._clock = policy, silence_s, clock
        self.term: Term | None = None
        self._failed_once: set[int] = set()  # entries of the journal
        self._aside: dict[int, str] = {}  # those that failed again, with the error

    async def begin(self) -> Term:
        """Read the journal; from then on this process acts."""
        while True:
            self.term = term = Term(
                self.journal,
                self.record,
                silence_s=self._silence_s,
                clock=self._clock,
                aside=dict(self._aside),
                traffic=None if self._traffic is None else self._traffic(),
            )
            try:
                await term.read(self._policy)
            except DecisionError as failed:
                self._restart_after(failed)
            else:
                return term

    async def lead(self) -> None:
        """Until cancelled, or LostLeadership."""
        while True:
            term = await self.begin()
            try:
                await term.run()
            except DecisionError as failed:
                self._restart_after(failed)
            finally:
                self.term = None

    def _restart_after(self, failed: DecisionError) -> None:
        """Once, what came before it may be to blame, or the machine; twice, the event is."""
        if failed.number in self._aside:
            raise failed  # not even without it
        if failed.number in self._failed_once:
            self._aside[failed.number] = failed.error
        self._failed_once.add(failed.number)

    # -------------------------------------------------------------- what the API asks

    @property
    def lines(self) -> AgentConnections:
        return self._leading().lines

    @property
    def schedulers(self) -> dict[str, TaskScheduler]:
        return self._leading().thinking.schedulers

    async def handle(self, event: msg.ClusterEvent) -> None:
        await self._leading().handle(event)

    async def digest(self) -> tuple[int, str]:
        return await self._leading().digest()

    def _leading(self) -> Term:
        if self.term is None:
            raise LostLeadership("this coordinator does not lead; try again")
        return self.term
