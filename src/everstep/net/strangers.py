"""HTTP servers of ours, and connections to them whose client has not shown yet that it may ask.

What a stranger sends is not unpacked: four bodies of 900 KB in gzip, which became 900 MB each before they
were refused, kept a coordinator from its agents for 10 s.

Anyone who reaches the port can open connections and send half a request on each. A server that waits for
them runs out of file descriptors, and agents and operators cannot reach it any more. So a connection that
has brought no valid request is closed after a while, and the oldest ones at once if they take half of what
there is. Counted in looks, not in seconds: while this process is stopped or busy, no client is late.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

LOOK_S = 1.0
LOOKS = 15  # until a connection must have brought a valid request


class StrangerLimit:
    def __init__(self) -> None:
        self._known: set[RequestHandler] = set()
        self._looks: dict[RequestHandler, int] = {}

    def know(self, request: web.BaseRequest) -> None:
        """This request is one of a client that may ask."""
        self._known.add(request.protocol)

    def runner(self, app: web.Application, **options: Any) -> web.AppRunner:
        """Serves this application, and hangs up on strangers meanwhile."""
        runner = web.AppRunner(app, access_log=None, auto_decompress=False, **options)

        async def watched(app: web.Application) -> AsyncIterator[None]:
            watching = asyncio.create_task(self._watch(runner))
            yield
            watching.cancel()

        app.cleanup_ctx.append(watched)
        return runner

    async def _watch(self, runner: web.AppRunner) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for connection in self.late(runner.server.connections) if runner.server is not None else ():
                if connection.transport is not None:
                    connection.transport.abort()

    def late(self, connections: list[RequestHandler]) -> list[RequestHandler]:
        """The connections that are to be closed now."""
        self._known &= set(connections)
        looks = {one: self._looks.get(one, 0) + 1 for one in connections if one not in self._known}
        self._looks = looks
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        oldest = sorted(looks, key=lambda one: -looks[one])[: max(0, len(looks) - most)]
        return [one for one in looks if looks[one] > LOOKS or (one in oldest and looks[one] > 1)]
