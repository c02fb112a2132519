"""HTTP as a client: every request that Everstep itself makes begins here.

No proxy: a request may carry a token, and `http_proxy` is a setting for the web, not for the machines of a
cluster; the token of a coordinator on 127.0.0.1 would be sent to it in clear. No redirect: a header with a
secret belongs to the address that a user gave, and to no other. And nothing of another program's answer is
read as a coordinator's: each answer of ours says that it is one.
"""

from __future__ import annotations

import ssl
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp


OURS = "Everstep"  # a header of every answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The answer is an `HTTPError` like any other."""

    def redirect_request(self, *ignored: Any) -> None:
        return None


def opener(context: ssl.SSLContext | None = None) -> urllib.request.OpenerDirector:
    """For one request at a time."""
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _NoRedirect
    )


def session(**options: Any) -> aiohttp.ClientSession:
    """For those that are asyncio's. A redirect is a `ClientResponseError`."""
    import aiohttp

    async def refuse(session: Any, context: Any, answer: aiohttp.TraceRequestRedirectParams) -> None:
        found = answer.response
        why = "a redirect, not followed"
        raise aiohttp.ClientResponseError(found.request_info, found.history, status=found.status, message=why)

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return aiohttp.ClientSession(trust_env=False, trace_configs=[trace], **options)
