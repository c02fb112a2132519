"""Calls a coordinator over HTTP, one request at a time."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from everstep import outbound
from everstep.errors import EverstepError, PeerError, UserError
from everstep.node.coordinator_address import current
from everstep.server.certificates import client_context

DEFAULT_ADDRESS = "http://127.0.0.1:7077"
MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    address: str = DEFAULT_ADDRESS  # or @FILE, which holds it
    token: str = ""
    ca: Path | None = None  # or a folder of `everstep ca issue`

    def get(self, path: str) -> Any:
        return self._call("GET", path, None)

    def text(self, path: str) -> str:
        """An answer that is not JSON."""
        return str(self._call("GET", path, None, decoded=lambda data, base: data.decode(errors="replace")))

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._call("POST", path, json.dumps(body or {}).encode())

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        decoded: Callable[[bytes, str], Any] | None = None,
    ) -> Any:
        base = current(self.address).rstrip("/")
        if not base:
            raise UserError(f"no coordinator has written its address into {self.address[1:]} yet.")
        if not _is_address(base):
            raise UserError(f"--address {self.address!r} is not of the form {DEFAULT_ADDRESS}.")
        request = urllib.request.Request(f"{base}{path}", data=body, method=method)
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        context = None
        if base.startswith("https"):
            context = client_context(self.ca)
        try:
            with outbound.opener(context).open(request, timeout=30) as answer:
                if outbound.OURS not in answer.headers:
                    raise UserError(_another(base, "its answer is another program's"))
                return (decoded or _decoded)(answer.read(MAX_ANSWER_BYTES + 1), base)
        except urllib.error.HTTPError as error:
            if 300 <= error.code < 400:
                raise UserError(
                    f"{base} sends callers elsewhere ({error.code}), and the token belongs to this address; "
                    "give the address of the coordinator itself by --address."
                ) from None
            if outbound.OURS not in error.headers and error.code < 500:  # else a proxy may say this
                raise UserError(_another(base, f"it answers {error.code} {error.reason}")) from None
            sentence = _sentence(error.read(1 << 16)) or f"it answers {error.code} {error.reason}."
            if error.code in (400, 401, 403, 404):
                raise UserError(f"{base}: {sentence}") from None
            raise EverstepError(f"{base}: {sentence}") from None
        except urllib.error.URLError as error:
            raise UserError(
                f"no coordinator at {base} ({error.reason}); start one with everstep coordinator, or give "
                f"--address.{_proxy_is_not_used(base)}"
            ) from None
        except (TimeoutError, OSError) as error:
            raise EverstepError(f"the coordinator at {base} does not answer: {error}.") from None
        except (
            http.client.HTTPException,
            ValueError,
        ) as error:  # an address of something else, or of nothing
            raise UserError(_another(base, str(error))) from None


def _another(base: str, because: str) -> str:
    return f"{base} is not the address of a coordinator ({because}); give --address."


def _is_address(text: str) -> bool:
    try:
        return urlsplit(text).scheme in ("http", "https") and bool(urlsplit(text).netloc)
    except ValueError:  # half of the brackets of an IPv6 address
        return False


def _proxy_is_not_used(address: str) -> str:
    """To someone who can only reach it through a proxy; see `outbound`."""
    where = urlsplit(address)
    if where.scheme not in urllib.request.getproxies() or urllib.request.proxy_bypass(where.hostname or ""):
        return ""
    return f" {where.scheme}_proxy is not used: it would see the token."


def in_path(name: str) -> str:
    """The name of a task or node as a part of a path, whatever a user has typed."""
    if name in ("", ".", ".."):
        raise UserError(f"{name!r} is not a name of a task or node; everstep status shows them.")
    return quote(name, safe="")


def _decoded(data: bytes, base: str) -> Any:
    if len(data) > MAX_ANSWER_BYTES:
        raise PeerError(f"{base} answers with more than {MAX_ANSWER_BYTES} bytes")
    try:
        return json.loads(data)
    except ValueError:
        raise PeerError(f"{base} does not answer as a coordinator does") from None


def _sentence(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"])
    except ValueError:
        return data.decode(errors="replace").strip()[:200]
    except (KeyError, TypeError):
        return ""
