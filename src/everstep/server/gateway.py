"""etcd over its own HTTP gateway: one request at a time, to whichever of its endpoints answers.

etcd serves its gRPC interface as JSON too (`/v3/kv/txn` and so on), so the journal needs no gRPC. Bytes
travel as base64, 64-bit numbers as strings, and a field that is zero or false is left out.

A request whose answer is lost may have been carried out. `call` then sends it again, to the next endpoint,
until its time is up: every request must therefore be one that may be carried out twice. What etcd refuses
(`Refused`) is raised at once; no answer in time is `Unreachable`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncGenerator, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from everstep import outbound
from everstep.errors import EverstepError, UserError

ATTEMPT_S = 1.0  # for one endpoint, before the next one is asked
_PAUSE_S = 0.05  # after a round without an answer
_PASSING = frozenset({4, 14})  # gRPC's DEADLINE_EXCEEDED and UNAVAILABLE: another endpoint may do better

Json = dict[str, Any]


class Unreachable(EverstepError):
    """No endpoint answered in time; the request may have been carried out all the same."""


class RequestRefused(EverstepError):
    """etcd has understood and will not: asking again is of no use."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def text_of(data: bytes | str) -> str:
    """Bytes as the gateway wants them."""
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def bytes_of(text: str) -> bytes:
    return base64.b64decode(text)


def end_of(prefix: str) -> str:
    """The first key behind all keys that begin with `prefix`."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


class Gateway:
    def __init__(
        self, endpoints: Sequence[str], *, token: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.endpoints = [_checked(endpoint) for endpoint in endpoints]
        if not self.endpoints:
            raise UserError("no etcd endpoint was given; give at least one, like http://127.0.0.1:2379.")
        self._token = token
        self._tls = tls
        self._current = 0
        self._session: aiohttp.ClientSession | None = None

    def another(self) -> Gateway:
        """To the same etcd, for another thread."""
        return Gateway(self.endpoints, token=self._token, tls=self._tls)

    async def open(self) -> None:
        headers = {"Authorization": self._token} if self._token else {}
        connector = aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True)
        self._session = outbound.session(headers=headers, connector=connector)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(self, method: str, body: Json, *, within_s: float) -> Json:
        """The answer of the first endpoint that has one."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + within_s
        reason, attempts = "", 0
        while (left_s := deadline - clock()) > 0:
            try:
                return await self._ask(method, body, min(ATTEMPT_S, left_s))
            except TimeoutError:  # the last attempt may only lack time: an earlier error says more
                reason = reason or "no answer in time"
            except (aiohttp.ClientError, OSError) as error:
                reason = str(error) or type(error).__name__
            except RequestRefused as error:
                if error.code not in _PASSING:
                    raise
                reason = str(error)
            self._turn()
            attempts += 1
            if attempts % len(self.endpoints) == 0:
                await asyncio.sleep(_PAUSE_S)
        raise Unreachable(
            f"no etcd answers at {', '.join(self.endpoints)} ({reason or 'no time was left to ask'})"
        )

    async def stream(self, method: str, body: Json) -> AsyncGenerator[Json, None]:
        """The answers of one endpoint to a request that has many, until it hangs up."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ATTEMPT_S)
        try:
            async with self._opened.post(self._url(method), json=body, timeout=timeout) as response:
                async for line in response.content:
                    answer = json.loads(line)
                    yield _result(answer)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._turn()
            raise Unreachable(str(error)) from None

    @property
    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise Unreachable("the connection to etcd is closed")
        return self._session

    def _url(self, method: str) -> str:
        return f"{self.endpoints[self._current]}/v3/{method}"

    def _turn(self) -> None:
        self._current = (self._current + 1) % len(self.endpoints)

    async def _ask(self, method: str, body: Json, timeout_s: float) -> Json:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._opened.post(self._url(method), json=body, timeout=timeout) as response:
            content = await response.read()
        try:
            answer = json.loads(content)
        except ValueError:
            words = " ".join(content[:200].decode(errors="replace").split())
            raise aiohttp.ClientPayloadError(f"HTTP status {response.status}: {words}") from None
        return _result(answer)


def _result(answer: Any) -> Json:
    if not isinstance(answer, dict):
        raise aiohttp.ClientPayloadError("the answer is not an object")
    fault = answer.get("error")
    if isinstance(fault, dict):  # of a stream
        raise RequestRefused(int(fault.get("grpc_code", 2)), str(fault.get("message", fault)))
    if fault is not None:
        raise RequestRefused(int(answer.get("code", 2)), str(fault))
    result = answer.get("result", answer)
    if not isinstance(result, dict) or "revision" not in result.get("header", {}):
        raise aiohttp.ClientPayloadError("the answer is not etcd's")
    return result


def _checked(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"etcd endpoint {endpoint!r} is not an address; write it like http://127.0.0.1:2379.")
    return endpoint.rstrip("/")
