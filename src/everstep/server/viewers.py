"""What open pages receive: the whole picture once, then only changes.

A change after a pause is sent at once; changes within the next moment (`SOON_S`) are sent together.
Where looking costs much, the moments are longer, so that looking never takes more than a tenth of the loop.
The changes are found and written once for all viewers, so a viewer costs the coordinator one send. A node's
heartbeats are not changes; that it is quiet is: `quiet_since` is empty while it is heard every second, and
the page counts on from there by itself. A viewer that reads too slowly gets the whole picture again in place
of what it missed. Rejected: events as they happen, and each page works out the state itself; that would be
the roster's rules a second time, in another language.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from aiohttp import web

from everstep.server import views
from everstep.server.record import ClusterRecord

SOON_S = 0.1
LATEST_S = 0.2
SHARE = 0.1  # of the loop's time, at most, for looking
LOOK_S = 1.0  # though nothing was announced: a node may have gone quiet
NEWS_AT_ONCE = 60
NEWS_AT_FIRST = 200
MAX_UNREAD = 4  # messages


class Viewers:
    def __init__(self, record: ClusterRecord, connected: Callable[[], set[str]]) -> None:
        self.record, self._connected = record, connected
        self._queues: dict[asyncio.Queue[str], tuple[str, ...]] = {}  # with what this reader may do
        self._stirred = asyncio.Event()
        self._news: deque[dict[str, Any]] = deque(maxlen=NEWS_AT_ONCE)
        self._steps: dict[str, deque[dict[str, Any]]] = {}
        self._nodes: dict[str, views.NodeMark] = {}  # as last sent
        self._tasks: dict[str, Any] = {}
        self._looking: asyncio.Task[None] | None = None

    async def show(self, line: web.WebSocketResponse, may: tuple[str, ...]) -> None:
        """Until the viewer is gone. `may`: what the page offers it."""
        self._tell_changes()  # to the others: nothing may be in this picture and sent after it too
        queue: asyncio.Queue[str] = asyncio.Queue()
        queue.put_nowait(self._whole(may))
        self._queues[queue] = may
        if self._looking is None:
            self.record.listeners.add(self._hear)
            self._looking = asyncio.create_task(self._look())
        writing = asyncio.create_task(_write(line, queue))
        try:
            async for _ in line:
                pass
        finally:
            self._queues.pop(queue, None)
            writing.cancel()
            if not self._queues and self._looking is not None:
                self.record.listeners.discard(self._hear)
                self._looking.cancel()
                self._looking = None

    def _hear(self, news: dict[str, Any]) -> None:
        if news["kind"] == "begin":  # another state, not a change of this one
            self._changes()
            for queue in self._queues:
                self._renew(queue)
            return
        if news["kind"] == "step":
            rows = self._steps.setdefault(news["task"], deque(maxlen=NEWS_AT_ONCE))
            rows.append(views.step_row(news["row"]))
        else:
            self._news.append(news)
        self._stirred.set()

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), LOOK_S)
            await asyncio.sleep(0)  # what is handled together is sent together
            self._stirred.clear()
            began = time.thread_time()  # not the clock: a moment without a core says nothing about the cost
            self._tell_changes()
            took = time.thread_time() - began
            await asyncio.sleep(min(LATEST_S, max(SOON_S, took / SHARE)))

    def _tell_changes(self) -> None:
        changes = self._changes()
        if changes is not None:
            text = _json(changes)
            for queue in self._queues:
                self._give(queue, text)

    def _give(self, queue: asyncio.Queue[str], text: str) -> None:
        if queue.qsize() < MAX_UNREAD:
            queue.put_nowait(text)
        else:
            self._renew(queue)

    def _renew(self, queue: asyncio.Queue[str]) -> None:
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(self._whole(self._queues[queue]))

    def _whole(self, may: tuple[str, ...]) -> str:
        now = time.time()
        marks = views.node_marks(self.record, self._connected(), now)
        return _json(
            {
                "kind": "picture",
                "at": now,
                "may": may,
                "nodes": [mark.row(name) for name, mark in marks.items()],
                "tasks": [views.task_row(self.record, task) for task in self.record.machine.tasks.values()],
                "incidents": views.incident_counts(self.record),
                "news": list(self.record.news)[-NEWS_AT_FIRST:],
            }
        )

    def _changes(self) -> dict[str, Any] | None:
        """None: nothing has."""
        now = time.time()
        nodes = views.node_marks(self.record, self._connected(), now)
        tasks = {t.name: views.task_row(self.record, t) for t in self.record.machine.tasks.values()}
        update = {
            "nodes": [mark.row(name) for name, mark in nodes.items() if self._nodes.get(name) != mark],
            "tasks": [row for name, row in tasks.items() if self._tasks.get(name) != row],
            "steps": {task: list(rows) for task, rows in self._steps.items()},
            "news": list(self._news),
        }
        self._nodes, self._tasks = nodes, tasks
        self._steps.clear()
        self._news.clear()
        found = {key: value for key, value in update.items() if value}
        if not found:
            return None
        return {"kind": "changes", "at": now, "incidents": views.incident_counts(self.record), **found}


async def _write(line: web.WebSocketResponse, queue: asyncio.Queue[str]) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await line.send_str(await queue.get())


def _json(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"))
