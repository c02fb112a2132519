"""This node's memory store: states in it outlive the workers, and a server gives other nodes access.

Only the workers of a task that was opened here may read or write, by a token made of the task's secret; only
its own files, by plain names; and no more than half of the memory that is free. The server runs in a thread
of its own, so that gigabytes on their way delay no heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
import shutil
import threading
from pathlib import Path

import psutil
from aiohttp import web

from everstep.net.strangers import StrangerLimit
from everstep.store import memory
from everstep.store.places import step_name

_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}\.(safetensors|json)")
_BLOCK = 1 << 20


def token_of(secret: str) -> str:
    """What the workers of a task show to a memory server. The secret itself is not sent."""
    return hmac.new(bytes.fromhex(secret), b"everstep memory", hashlib.sha256).hexdigest()


class MemoryStore:
    """A folder in RAM; removed with its owner."""

    def __init__(self) -> None:
        self.folder, self._lock = memory.new_directory()
        self._tokens: dict[str, str] = {}

    def open_task(self, task: str, secret: str) -> None:
        self._tokens[task] = token_of(secret)

    def drop(self, task: str, before: int) -> None:
        memory.drop(self.folder, task, before)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def knows(self, task: str, token: str) -> bool:
        return hmac.compare_digest(self._tokens.get(task, "").encode(), token.encode()) and bool(token)


class MemoryServer:
    """Serves a memory store to other nodes: PUT and range GET of /<task>/<step>/<part>."""

    def __init__(self, store: MemoryStore, host: str) -> None:
        self.store, self.host, self.port = store, host, 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._strangers = StrangerLimit()
        self._thread = threading.Thread(target=self._run, name="memory-server", daemon=True)

    def open(self) -> None:
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._serve())
        self._ready.set()
        assert runner.server is not None
        watching = self._loop.create_task(self._strangers.watch(runner.server))
        self._loop.run_forever()
        watching.cancel()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _serve(self) -> web.AppRunner:
        app = web.Application(client_max_size=0)
        app.router.add_get("/{task}/{step}/{part}", self._get)
        app.router.add_put("/{task}/{step}/{part}", self._put)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, self.host, 0)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    def _path(self, request: web.Request) -> Path:
        """The file that is asked for, once the asker has shown the task's token."""
        task, step, part = (request.match_info[name] for name in ("task", "step", "part"))
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not _TASK.fullmatch(task) or not self.store.knows(task, token):
            raise web.HTTPForbidden(text="this token opens nothing here")
        self._strangers.know(request)
        if not _PART.fullmatch(part) or not re.fullmatch(r"\d{1,18}", step):
            raise web.HTTPBadRequest(text="this is not a name of a part")
        return self.store.folder / task / step_name(int(step)) / part

    async def _get(self, request: web.Request) -> web.StreamResponse:
        path = self._path(request)
        if not path.is_file():
            raise web.HTTPNotFound(text="it is not here, or not any more")
        return web.FileResponse(path, chunk_size=_BLOCK)

    async def _put(self, request: web.Request) -> web.Response:
        path, size = self._path(request), request.content_length
        if size is None or size > psutil.virtual_memory().available // 2:
            raise web.HTTPRequestEntityTooLarge(max_size=0, actual_size=size or 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        arriving = path.with_name(f".{path.name}")
        try:
            with arriving.open("wb") as file:
                left = size
                async for block in request.content.iter_chunked(_BLOCK):
                    left -= len(block)
                    if left < 0:
                        raise web.HTTPBadRequest(text="more bytes than were announced")
                    file.write(block)
            if left:
                raise web.HTTPBadRequest(text=f"{left} bytes are missing")
            arriving.rename(path)
        except OSError as error:  # no room, or no such name
            raise web.HTTPInsufficientStorage(text=str(error.strerror)) from None
        finally:
            with contextlib.suppress(FileNotFoundError):
                arriving.unlink()
        return web.Response(status=201)
