"""This node's memory store: states in it outlive the workers, and a server gives other nodes access.

Only the workers of a task that was opened here may read or write: every request proves that its sender knows
the task's secret (`memory.CopyRequest`), and its bytes are sealed as the job asks for. Only the task's own
files, by plain names; and no more than half of the memory that is free. The server runs in a thread
of its own, so that gigabytes on their way delay no heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
import secrets
import shutil
import threading
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from aiohttp import web

from everstep.errors import UserError
from everstep.net.seal import CHUNK_BYTES, Sealer, Suite, TamperedError, Unsealer, is_available, sealed_bytes
from everstep.net.strangers import StrangerLimit
from everstep.store import memory, owned_folders
from everstep.store.places import step_name
from everstep.store.unix_users import UnixUser, acting_as

_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}\.(safetensors|json)")
_BLOCK = 1 << 20
MOST_NONCES = 1 << 17  # older requests are about steps that are not kept any more


class MemoryStore:
    """A folder in RAM; removed with its owner, or with the last process that holds its lock."""

    def __init__(self) -> None:
        self.folder, self.lock = memory.new_directory()
        self._keys: dict[str, bytes] = {}
        self._users: dict[str, UnixUser] = {}

    def open_task(self, task: str, secret: str, user: UnixUser | None = None) -> None:
        """`user`: as whom its workers run; nobody else may read or write their copies."""
        self._keys[task] = memory.memory_key(secret)
        if user is not None:
            self._users[task] = user
            self.folder.chmod(0o711)
            user.make_folder(self.folder / task)

    def is_apart(self, task: str) -> bool:
        return task in self._users

    def as_its_user(self, task: str) -> AbstractContextManager[None]:
        return acting_as(self._users.get(task))

    def key(self, task: str) -> bytes | None:
        return self._keys.get(task)

    def drop(self, task: str, before: int) -> None:
        with self.as_its_user(task):
            memory.drop(self.folder, task, before)

    def adopt(self, folder: Path) -> bool:
        """Take over the folder of another owner instead. False: it is gone."""
        try:
            lock = owned_folders.shared(folder)
        except OSError:
            return False
        self.close()
        self.folder, self.lock = folder, lock
        return True

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


class MemoryServer:
    """Serves a memory store to other nodes: PUT and range GET of /<task>/<step>/<part>."""

    def __init__(self, store: MemoryStore, host: str, port: int = 0) -> None:
        """`port`: where others know it from, if that is still free."""
        self.store, self.host, self.port = store, host, port
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._failed: str | None = None  # why it does not listen
        self._strangers = StrangerLimit()
        self._nonces: dict[bytes, None] = {}  # of requests, oldest first: each is taken once
        self._thread = threading.Thread(target=self._run, name="memory-server", daemon=True)

    def open(self) -> None:
        """Returns when it listens; raises if it cannot."""
        self._thread.start()
        self._ready.wait()
        if self._failed is not None:
            raise UserError(f"the memory of this node cannot be served at {self.host}: {self._failed}.")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            runner = self._loop.run_until_complete(self._serve())
        except OSError as error:
            self._failed = error.strerror or str(error)
            return
        finally:
            self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _serve(self) -> web.AppRunner:
        app = web.Application(client_max_size=0)
        app.router.add_get("/{task}/{step}/{part}", self._get)
        app.router.add_put("/{task}/{step}/{part}", self._put)
        runner = self._strangers.runner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, self.port).start()
        except OSError:
            if not self.port:
                raise
            await web.TCPSite(runner, self.host, 0).start()
        self.port = runner.addresses[0][1]
        return runner

    def _known(self, request: web.Request, span: str) -> tuple[memory.CopyRequest, bytes, Path]:
        """What is asked for, the task's key and the file, once the asker has proved that it knows the key."""
        task, step, part = (request.match_info[name] for name in ("task", "step", "part"))
        key = self.store.key(task)
        try:
            header = request.headers.get(memory.CopyRequest.HEADER, "")
            asked, proof = memory.CopyRequest.read(request.method, request.raw_path, span, header)
        except ValueError:
            raise web.HTTPForbidden(text="this request proves nothing") from None
        if key is None or not hmac.compare_digest(proof, asked.proof(key)) or asked.nonce in self._nonces:
            raise web.HTTPForbidden(text="this request proves nothing")
        self._nonces[asked.nonce] = None
        while len(self._nonces) > MOST_NONCES:
            del self._nonces[next(iter(self._nonces))]
        self._strangers.know(request)
        if not is_available(asked.suite):
            raise web.HTTPNotImplemented(text="the package cryptography is not installed on this node")
        if not _TASK.fullmatch(task) or not _PART.fullmatch(part) or not re.fullmatch(r"\d{1,18}", step):
            raise web.HTTPBadRequest(text="this is not a name of a part")
        return asked, key, self.store.folder / task / step_name(int(step)) / part

    async def _get(self, request: web.Request) -> web.StreamResponse:
        asked, key, path = self._known(request, request.headers.get("Range", ""))
        task = request.match_info["task"]
        try:
            with self.store.as_its_user(task):
                file = path.open("rb")
        except OSError:
            raise web.HTTPNotFound(text="it is not here, or not any more") from None
        with file:
            if asked.suite is Suite.PLAIN and not self.store.is_apart(task):
                return web.FileResponse(path, chunk_size=_BLOCK)
            return await self._stream(request, asked, key, file)

    async def _stream(
        self, request: web.Request, asked: memory.CopyRequest, key: bytes, file: BinaryIO
    ) -> web.StreamResponse:
        size = os.fstat(file.fileno()).st_size
        try:
            span = request.http_range
        except ValueError:
            raise web.HTTPRequestRangeNotSatisfiable from None
        start, stop = span.start or 0, min(size, size if span.stop is None else span.stop)
        if not 0 <= start < stop:
            raise web.HTTPRequestRangeNotSatisfiable
        nonce = secrets.token_bytes(memory.NONCE_BYTES)
        answer = web.StreamResponse(status=206, headers={"Everstep-Nonce": nonce.hex()})
        answer.content_length = sealed_bytes(asked.suite, stop - start)
        sealer = Sealer(asked.suite, asked.body_key(key, nonce))
        await answer.prepare(request)
        file.seek(start)
        for piece in memory.sealed(sealer, file, stop - start):
            await answer.write(piece)
        await answer.write_eof()
        return answer

    async def _put(self, request: web.Request) -> web.Response:
        said = request.headers.get("Everstep-Size", "")
        asked, key, path = self._known(request, said)
        size = int(said) if re.fullmatch(r"\d{1,18}", said) else -1
        if size < 0 or request.content_length != sealed_bytes(asked.suite, size):
            raise web.HTTPBadRequest(text="the length of the part and that of the request do not agree")
        if because := memory.too_much(self.store.folder, size):
            raise web.HTTPRequestEntityTooLarge(max_size=0, actual_size=size, text=because)
        arriving = path.with_name(f".{path.name}")
        its_user, unsealer = (
            partial(self.store.as_its_user, request.match_info["task"]),
            Unsealer(asked.suite, asked.body_key(key)),
        )
        try:
            with its_user():
                path.parent.mkdir(parents=True, exist_ok=True)
                file = arriving.open("wb")
            with file:
                await self._write(file, request, size, unsealer)
            with its_user():
                arriving.rename(path)
        except OSError as error:  # no room, or no such name
            raise web.HTTPInsufficientStorage(text=str(error.strerror)) from None
        except TamperedError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        finally:
            with contextlib.suppress(OSError), its_user():
                arriving.unlink()
        return web.Response(status=201, headers={memory.CopyRequest.HEADER: asked.proof(key, b"stored")})

    @staticmethod
    async def _write(file: BinaryIO, request: web.Request, size: int, unsealer: Unsealer) -> None:
        chunk = memoryview(bytearray(CHUNK_BYTES))
        want, left = chunk[: min(size, CHUNK_BYTES)], size
        async for block in request.content.iter_chunked(_BLOCK):
            arrived = memoryview(block)
            while arrived:
                if not left:
                    raise web.HTTPBadRequest(text="more bytes than were announced")
                room = unsealer.room(want)[0][: len(arrived)]
                room[:] = arrived[: len(room)]
                arrived = arrived[len(room) :]
                if whole := unsealer.took(want, len(room)):
                    file.write(want[:whole])
                    left -= whole
                    want = chunk[: min(left, CHUNK_BYTES)]
        if left:
            raise web.HTTPBadRequest(text=f"{left} bytes are missing")
