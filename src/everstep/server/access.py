"""Who may call the API. A token guards every route that holds data. A page of another origin is refused in
any case, and without a token a Host that is not ours: a web page must not talk to a coordinator unnoticed.
"""

from __future__ import annotations

import hmac
import json
from urllib.parse import urlsplit

from aiohttp import web

from everstep.errors import UserError


class AccessControl:
    def __init__(self, token: str | None, hosts: frozenset[str]) -> None:
        """`hosts`: names this server may be called by, beside loopback's; empty with a token means any."""
        self._token, self._hosts = token, hosts

    @property
    def needs_token(self) -> bool:
        return self._token is not None

    def check_token(self, request: web.Request) -> None:
        if self._token is None:
            return
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._token.encode()):
            raise web.HTTPUnauthorized(
                text=json.dumps(
                    {"error": "the token is missing or wrong; give it by --token or EVERSTEP_TOKEN."}
                ),
                content_type="application/json",
            )

    def check_origin(self, request: web.Request) -> None:
        origin = request.headers.get("Origin")
        host = request.headers.get("Host", "")
        try:
            asking = None if origin is None else urlsplit(origin).netloc
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            raise UserError("the Host or Origin header is not an address.") from None
        if asking is not None and asking != host:
            raise web.HTTPForbidden(text=f"a page of {origin} may not talk to this coordinator")
        ours = {"localhost", "127.0.0.1", "::1"} | self._hosts
        if self._token is None and name not in ours:
            raise web.HTTPForbidden(text=f"{name!r} is not a name of this coordinator")
