"""The coordinator as a process: events into the journal, then into the machine, then its actions out.

One loop takes all events that are waiting, appends them to the journal in one transaction, and only then lets
the machine handle them and sends what follows. A restart reads the journal and asks `unfinished` what must be
sent again; agents that have it already ignore it by its number.

Times are wall-clock seconds that never run backwards, because they outlive the process.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.snapshot import digest, freeze, thaw
from everstep.core.faults.detector import Heartbeats
from everstep.core.words import actions as act
from everstep.core.words import cluster_messages as msg
from everstep.core.words import events as ev
from everstep.core.words.codec import decode, encode
from everstep.diagnose.watch import Watch
from everstep.plan.ask import choose
from everstep.schedule.task_scheduler import TaskScheduler
from everstep.server import words
from everstep.server.journal import Journal, LostLeadership

TICK_S = 0.05
SILENCE_S = 1.0
RETURN_S = 15.0  # for agents to notice that a coordinator's machine is dead, and to find another
SNAPSHOT_EVERY = 5000  # entries
MAX_BATCH = 512
KEPT_ROWS = 2000  # of a task's steps, for those who look
KEPT_NEWS = 2000
_ZIPPED = b"z"
Send = Callable[[str, dict[str, Any]], None]  # node, message


@dataclass(slots=True)
class StepsOfTask:
    """What a task's steps were like."""

    rows: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_ROWS))
    last_at: float = 0.0
    first: int = 0
    last: int = 0
    committed: int = 0


class Daemon:
    def __init__(
        self,
        journal: Journal,
        *,
        folder: Path,
        policy: msg.PolicySet | None = None,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self.journal, self.folder, self.say = journal, folder, say
        self.policy = policy
        self.machine = Coordinator()
        self.hearts = Heartbeats(patience_s=silence_s)
        self.send: Send = lambda node, message: None  # set by the API, which has the lines
        self.listeners: set[Callable[[dict[str, Any]], None]] = set()
        self.news: deque[dict[str, Any]] = deque(maxlen=KEPT_NEWS)
        self.steps: dict[str, StepsOfTask] = {}
        self.desks: dict[str, TaskScheduler] = {}
        self.paces: dict[str, Watch] = {}
        self.leads = False
        self.term = 0  # of its leadership: agents refuse the orders of an older one
        self.ahead_s = 0.0  # from the machine's moments to those of the wall clock
        self.number = 0  # of the last journal entry
        self.handled_s: deque[float] = deque(maxlen=10_000)
        self._returning: set[str] = set()  # nodes that have not spoken to this coordinator since it leads
        self._returned_by = 0.0
        self._clock, self._now = clock, 0.0
        self._waiting: deque[tuple[msg.ClusterEvent, asyncio.Future[None] | None]] = deque()
        self._arrived = asyncio.Event()
        self._snapshot_at = 0
        self._background: set[asyncio.Task[None]] = set()

    # -------------------------------------------------------------- life

    async def start(self) -> None:
        """Read the journal; be where the last coordinator was."""
        began = time.monotonic()
        self.machine = Coordinator()
        self.steps.clear()
        snapshot = await self.journal.latest_snapshot()
        if snapshot is not None:
            self.number, body = snapshot
            thaw(self.machine, json.loads(zlib.decompress(body)))
        self._snapshot_at = self.number
        while entries := await self.journal.entries(after=self.number):
            for entry in entries:
                at, event = _unpack(entry.body)
                self._now = max(self._now, at)
                self._remember(self._apply(event, at), at)
                self.number = entry.number
        self.leads, self.term = True, self.journal.term
        now = time.monotonic()
        for node in self.machine.nodes:
            self.hearts.heard(node, now)
        self._returning = {n.name for n in self.machine.nodes.values() if n.reachable}
        self._returned_by = now + RETURN_S
        self.say(
            f"coordinator: {self.number} entries in {now - began:.2f} s, state {digest(self.machine)[:12]}, "
            f"{len(self.machine.nodes)} nodes, {len(self.machine.tasks)} tasks"
        )
        now_set = msg.PolicySet(patience=self.machine.patience, planned=self.machine.policy.planned)
        if self.policy is not None and self.policy != now_set:
            self.tell(self.policy)
        self._perform([a for a in self.machine.unfinished() if not isinstance(a, msg.Dispatch)])

    async def run(self) -> None:
        """Until cancelled, or until another coordinator leads."""
        ticking = asyncio.create_task(self._tick())
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                while self._waiting:
                    await self._take_batch()
        except LostLeadership:
            self.leads = False
            raise
        finally:
            ticking.cancel()
            for job in list(self._background):
                job.cancel()

    def tell(self, event: msg.ClusterEvent) -> None:
        """Something has happened."""
        self._waiting.append((event, None))
        self._arrived.set()

    async def told(self, event: msg.ClusterEvent) -> None:
        """Something has happened; returns when it is on disk and handled."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((event, done))
        self._arrived.set()
        await done

    # -------------------------------------------------------------- events

    async def _take_batch(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
        self._now = max(self._now, self._clock())
        now = self._now
        try:
            self.number = await self.journal.append([_pack(event, now) for event, _ in batch])
        except BaseException as error:
            for _, done in batch:
                if done is not None and not done.done():
                    done.set_exception(error)
            raise
        for event, done in batch:
            began = time.perf_counter()
            actions = self._apply(event, now)
            self.handled_s.append(time.perf_counter() - began)
            self._remember(actions, now)
            self._perform(actions)
            if isinstance(event, msg.FromNode):
                self.send(event.node, {"heard": event.number})
            if done is not None and not done.done():
                done.set_result(None)
        if self.number - self._snapshot_at >= SNAPSHOT_EVERY:
            self._snapshot_at = self.number
            frozen = json.dumps(freeze(self.machine), separators=(",", ":"))
            await self.journal.snapshot(self.number, zlib.compress(frozen.encode(), 1))

    def _apply(self, event: msg.ClusterEvent, now: float) -> list[msg.ClusterAction]:
        if isinstance(event, msg.NodeJoined):
            self._returning.discard(event.node)
        try:
            return self.machine.handle(event, now)
        except Exception:  # the main loop: a bug met once must not be met again at every restart
            self.say(f"coordinator: {type(event).__name__} was not understood\n{traceback.format_exc()}")
            return []

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - last > self.hearts.patience_s / 2:
                self.hearts.excuse(now)  # we were away ourselves
            last = now
            self._wait_for_returns(now)
            for node, silent_s in self.hearts.fell_silent(now):
                self.tell(msg.NodeFellSilent(node=node, silent_s=silent_s))
            due = self.machine.due_at()
            if due is not None and due <= self._clock():
                self.tell(msg.TimePassed())

    def _wait_for_returns(self, now: float) -> None:
        """A restart is no node's silence: agents must find us first, and do so one after the other.

        Who comes first may bring a witness that waits, for whom all who are still on their way would look
        dead. The last one missing is waited for no longer than any silent node.
        """
        if now > self._returned_by or len(self._returning) <= 1:
            self._returning.clear()
        for node in self._returning:
            self.hearts.heard(node, now)

    # -------------------------------------------------------------- actions

    def _remember(self, actions: list[msg.ClusterAction], now: float) -> None:
        """What people may ask for later. Also while the journal is read."""
        for action in actions:
            match action:
                case msg.RecordRow():
                    self._record(action, now)
                case msg.Dispatch(order=msg.NotifyWorker(words=act.ResumeStep())):
                    pass
                case _:
                    self._announce(action, now)

    def _perform(self, actions: list[msg.ClusterAction]) -> None:
        for action in actions:
            match action:
                case msg.Dispatch():
                    self.send(
                        action.node,
                        {"number": action.number, "order": encode(action.order), "because": action.because},
                    )
                case msg.Think():
                    self._in_background(self._think(action))
                case msg.RecordRow():
                    self._log_step(action)
                case msg.TaskEnded():
                    self.desks.pop(action.task, None)
                    self.paces.pop(action.task, None)
                    self.say(f"task {action.task} is {action.state}: {action.because}")
                case msg.TaskReshaped():
                    self.desks.pop(action.task, None)
                    self.paces.pop(action.task, None)
                    self.say(f"task {action.task}: {action.because}")
                case msg.NodeChanged():
                    self.say(f"node {action.node} is {action.state}: {action.because}")
                case msg.IncidentClosed():
                    self.say(f"incident {action.number} is closed: {action.because}")
                case msg.ChooseAssignment():
                    self._in_background(self._choose(action))

    def learn(self, told: msg.TimesReported) -> None:
        """For the scheduler and the watch only: not journaled, and forgotten by a restart."""
        desk, task = self._desk(told.task), self.machine.tasks.get(told.task)
        if desk is not None and task is not None:
            desk.learn(told)
            if told.task not in self.paces:
                self.paces[told.task] = Watch(told.task, task.speeds.slow)
            for found in self.paces[told.task].told(told):
                self.tell(found)

    def _desk(self, name: str) -> TaskScheduler | None:
        task = self.machine.tasks.get(name)
        if task is None:
            return None
        if name not in self.desks:
            stagger = task.job.get("optimizer", {}).get("stagger")
            self.desks[name] = TaskScheduler(task.shape, "decoupled" if stagger == "never" else "staggered")
        return self.desks[name]

    async def _think(self, action: msg.Think) -> None:
        desk = self._desk(action.task)
        if desk is not None:
            answer = await asyncio.to_thread(desk.answer, action.question, action.slow)
            self.tell(msg.PlanAnswered(task=action.task, event=answer))

    async def _choose(self, action: msg.ChooseAssignment) -> None:
        await asyncio.sleep(0)  # several changes at once are one question: the last
        if action.version == self.machine.version:
            self.tell(choose(self.machine, action.version, action.because))

    def _in_background(self, work: Any) -> None:
        job = asyncio.create_task(work)
        self._background.add(job)
        job.add_done_callback(self._background.discard)

    def _record(self, action: msg.RecordRow, now: float) -> None:
        record, steps = action.record, self.steps.setdefault(action.task, StepsOfTask())
        losses = dict(record.losses)
        steps.rows.append(
            {
                "step": record.step,
                "loss": sum(losses[m] for m in sorted(losses)) / len(losses) if losses else math.nan,
                "grad_norm": record.norm,
                "seconds": round(now - steps.last_at, 6) if steps.last_at else 0.0,
                "epoch": record.epoch,
                "attempt": record.attempt,
                "at": round(now, 6),
            }
        )
        steps.last_at = now
        steps.first = min(steps.first or record.step, record.step)
        if record.step <= steps.last:  # done again, from a checkpoint: only the last time counts
            steps.committed -= (steps.last - record.step + 1) * record.microbatches_committed
        steps.last = record.step
        steps.committed += record.microbatches_committed
        self._publish({"at": now, "kind": "step", "task": action.task, "row": steps.rows[-1]})

    def _log_step(self, action: msg.RecordRow) -> None:
        steps = self.steps[action.task]
        path = self.folder / "tasks" / f"{action.task}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(steps.rows[-1]) + "\n")
        desk, task = self._desk(action.task), self.machine.tasks[action.task]
        step = action.record.step
        if desk is not None and step < task.steps:
            stale = desk.wants_new_schedule(step - steps.first + 1, step)
            if stale is not None:
                event = ev.ProfileChanged(because=f"a new schedule: {stale}")
                self.tell(msg.PlanAnswered(task=action.task, event=event))

    def _announce(self, action: msg.ClusterAction, now: float) -> None:
        told: dict[str, Any] = {
            "at": now,
            "kind": type(action).__name__,
            "text": words.decision(action),
            "because": action.because,
        }
        match action:
            case msg.Dispatch(node=node, order=order):
                told |= {"node": node, "order": type(order).__name__, "task": getattr(order, "task", "")}
                if (worker := getattr(order, "worker", None)) is not None:
                    told["worker"] = str(worker)
            case msg.NodeChanged(node=node, state=state):
                told |= {"node": node, "state": state}
            case msg.TaskEnded(task=task, state=state):
                told |= {"task": task, "state": state}
            case msg.IncidentClosed(number=number):
                told |= {"incident": number}
            case msg.Think(task=task):
                told |= {"task": task}
        self.news.append(told)
        self._publish(told)

    def _publish(self, told: dict[str, Any]) -> None:
        for listener in list(self.listeners):
            listener(told)


def _pack(event: msg.ClusterEvent, now: float) -> bytes:
    body = json.dumps([now, encode(event)], separators=(",", ":")).encode()
    return body if len(body) < 4096 else _ZIPPED + zlib.compress(body, 1)


def _unpack(body: bytes) -> tuple[float, msg.ClusterEvent]:
    text = zlib.decompress(body[1:]) if body[:1] == _ZIPPED else body
    at, event = json.loads(text)
    return at, decode(msg.ClusterEvent, event)
