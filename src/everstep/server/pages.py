"""The dashboard's files, and the tickets its live line is opened with.

The files contain no data, so anyone who reaches the port gets them; the page asks for data with the token. A
strict Content-Security-Policy lets it load nothing from elsewhere, run no script but our files, and forbids
frames: a page that can drain a node must not be clicked unawares.

A browser cannot put a header on a WebSocket, and a token in a URL ends up in logs. So the page posts its
token like any other call, gets a ticket that opens one line within seconds, and hands it over as a
subprotocol. A ticket that is seen later is worth nothing.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from importlib import resources

from aiohttp import web

from everstep.server import words
from everstep.server.access import Caller

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}
PROTOCOL = "everstep"
TICKET_S = 10.0
MAX_TICKETS = 1000
_TICKET = "ticket."


class Pages:
    """All files are read once; nothing a caller says ever becomes a path."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, str, str]] = {}  # by path: content, type, its hash
        for file in resources.files("everstep.server").joinpath("web").iterdir():
            kind = TYPES.get(file.name[file.name.rfind(".") :])
            if kind is not None:
                self._add(f"/web/{file.name}", file.read_bytes(), kind)
        self._add("/web/tables.js", words.script().encode(), TYPES[".js"])
        self._files["/"] = self._files["/web/index.html"]

    def _add(self, path: str, content: bytes, kind: str) -> None:
        self._files[path] = content, kind, hashlib.sha256(content).hexdigest()[:16]

    def has(self, path: str) -> bool:
        return path in self._files

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.path not in self._files:
            raise web.HTTPNotFound(text="page not found")
        content, kind, tag = self._files[request.path]
        headers = {**HEADERS, "ETag": f'"{tag}"'}
        if request.headers.get("If-None-Match") == f'"{tag}"':
            return web.Response(status=304, headers=headers)
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)


class Tickets:
    """Single use, a few seconds, a bounded number."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, Caller]] = {}

    def issue(self, caller: Caller) -> str:
        now = time.monotonic()
        self._until = {ticket: held for ticket, held in self._until.items() if held[0] > now}
        if len(self._until) >= MAX_TICKETS:
            raise web.HTTPTooManyRequests(text="too many tickets are in use; retry in a few seconds")
        ticket = secrets.token_urlsafe(24)
        self._until[ticket] = now + TICKET_S, caller
        return ticket

    def take(self, request: web.Request) -> Caller | None:
        """Who has asked for the ticket that this request holds. It is used up then."""
        for offer in request.headers.get("Sec-WebSocket-Protocol", "").split(","):
            ticket = offer.strip()
            if ticket.startswith(_TICKET):
                until, caller = self._until.pop(ticket.removeprefix(_TICKET), (0.0, None))
                return caller if until > time.monotonic() else None
        return None
