"""Tells people: posts what they should know to the addresses of a file.

    [[webhook]]
    url = "https://hooks.slack.com/services/..."     a secret, so the file has mode 600
    form = "slack"                                   or "json", the default
    tell = ["tasks", "nodes", "incidents"]           all, if not given
    header = "Authorization: Bearer ..."             optional

tasks      one has finished, failed or was cancelled
nodes      one is gone, isolated, a lemon, or up again after that
incidents  one is closed: what it was and how long it took

The same message about the same thing is sent once in `AGAIN_S`; the next one says how often it came
meanwhile. A thread sends: a receiver that is slow, away or broken delays nothing. Each message is tried
`ATTEMPTS` times, and at most `MOST_WAITING` wait; what is given up is counted and said in the log. The URL is
never said.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from everstep.core.cluster.node_states import NodeState
from everstep.errors import UserError
from everstep.job.tables import read
from everstep.log import warn
from everstep.server.access import read_private
from everstep.server.record import ClusterRecord

AGAIN_S = 300.0
ATTEMPTS, FIRST_WAIT_S, TIMEOUT_S = 5, 1.0, 10.0
MOST_WAITING = 1000
MOST_KNOWN = 10_000  # messages whose repetition is noticed
MAX_FILE = 1 << 16
TOPICS = ("tasks", "nodes", "incidents")
_BAD = (NodeState.GONE, NodeState.ISOLATED, NodeState.LEMON)


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    url: str
    form: Literal["json", "slack"] = "json"
    tell: list[str] = field(default_factory=lambda: list(TOPICS))
    header: str | None = None

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise UserError("webhook.url is not an address; write it like https://host/path.")
        for topic in self.tell:
            if topic not in TOPICS:
                raise UserError(f"webhook.tell has {topic!r}; give some of {', '.join(TOPICS)}.")
        if self.header is not None and ": " not in self.header:
            raise UserError("webhook.header is not of the form Name: value.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    topic: str
    about: str  # task t, node n1, incident 7
    state: str
    text: str
    because: str
    at: float

    def body(self, form: str, repeated: int) -> dict[str, Any]:
        more = f" ({repeated} times more since the last message)" if repeated else ""
        if form == "slack":
            return {"text": f"*{self.text}*{more}\n{self.because}".rstrip()}
        return {
            "source": "everstep",
            "topic": self.topic,
            "about": self.about,
            "state": self.state,
            "text": self.text,
            "because": self.because,
            "at": self.at,
            "repeated": repeated,
        }


def read_webhooks(path: Path) -> list[Webhook]:
    try:
        document = tomllib.loads(read_private(path, "the webhooks file", MAX_FILE))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the webhooks file {path} is not TOML: {error}.") from None
    rows = document.get("webhook")
    if not isinstance(rows, list) or set(document) != {"webhook"}:
        raise UserError(f"the webhooks file {path} must contain [[webhook]] tables and nothing else.")
    return [read(Webhook, row, "webhook") for row in rows]


class Repetition:
    """Which messages are sent, and how often each came since it was last sent."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, str], tuple[float, int]] = {}

    def take(self, one: Notification, now: float) -> int | None:
        """How often it came unsent; None: it is not to be sent now."""
        key = one.about, one.state
        sent_at, count = self._sent.pop(key, (None, 0))
        again = sent_at is not None and now - sent_at < AGAIN_S
        self._sent[key] = (sent_at, count + 1) if again and sent_at is not None else (now, 0)
        while len(self._sent) > MOST_KNOWN:
            del self._sent[next(iter(self._sent))]
        return None if again else count


def notification(news: Mapping[str, Any], was_bad: bool) -> Notification | None:
    """What people should know of this news, if anything. `was_bad`: of the node that it is about."""
    at, because = float(news["at"]), str(news.get("because", ""))
    match news["kind"]:
        case "TaskEnded":
            name, state = str(news["task"]), str(news["state"])
            text = f"task {name} is {state}"
            return Notification(
                topic="tasks", about=f"task {name}", state=state, text=text, because=because, at=at
            )
        case "NodeChanged" if news["state"] in _BAD or was_bad:
            name, state = str(news["node"]), str(news["state"])
            text = f"node {name} is {state}"
            return Notification(
                topic="nodes", about=f"node {name}", state=state, text=text, because=because, at=at
            )
        case "IncidentClosed":
            text = f"incident {news['incident']} is closed"
            about = f"incident {news['incident']}"
            return Notification(
                topic="incidents", about=about, state="closed", text=text, because=because, at=at
            )
    return None


class Notifier:
    """A listener of the record."""

    def __init__(
        self,
        record: ClusterRecord,
        hooks: list[Webhook],
        *,
        clock: Callable[[], float] = time.monotonic,
        first_wait_s: float = FIRST_WAIT_S,
        warn: Callable[[str], None] = warn,
    ) -> None:
        self._record, self._hooks, self._clock = record, hooks, clock
        self._first_wait_s, self._warn = first_wait_s, warn
        self._repetition = Repetition()
        self._bad: set[str] = set()
        self._waiting: queue.Queue[tuple[Notification, int] | None] = queue.Queue(MOST_WAITING)
        self._over = threading.Event()
        self.given_up = 0
        self._thread = threading.Thread(target=self._send_all, name="webhooks", daemon=True)
        self._thread.start()

    def hear(self, news: Mapping[str, Any]) -> None:
        node = str(news.get("node", "")) if news["kind"] == "NodeChanged" else ""
        one = notification(news, node in self._bad)
        if node:
            (self._bad.add if news["state"] in _BAD else self._bad.discard)(node)
        if one is None or not self._record.leads:  # what is read from the journal was told before
            return
        repeated = self._repetition.take(one, self._clock())
        if repeated is None:
            return
        try:
            self._waiting.put_nowait((one, repeated))
        except queue.Full:
            self._give_up("too many messages wait")

    def close(self) -> None:
        """What waits gets one attempt each, for a few seconds."""
        self._over.set()
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(TIMEOUT_S / 2)

    def _send_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            for number, hook in enumerate(self._hooks, 1):
                if item[0].topic in hook.tell:
                    self._send(number, hook, *item)

    def _send(self, number: int, hook: Webhook, one: Notification, repeated: int) -> None:
        wait, reason = self._first_wait_s, ""
        for attempt in range(ATTEMPTS):
            if attempt and self._over.wait(wait):
                break
            wait = wait * 2 if attempt else wait
            try:
                post(hook, one.body(hook.form, repeated))
            except urllib.error.HTTPError as error:
                reason = f"it answers {error.code}"
                if 400 <= error.code < 500 and error.code not in (408, 429):
                    break  # it will not be another answer the next time
            except (OSError, ValueError) as error:
                reason = type(error).__name__
            else:
                return
        self._give_up(f"webhook {number} could not be told that {one.text}: {reason}")

    def _give_up(self, why: str) -> None:
        self.given_up += 1
        self._warn(f"coordinator: {why} ({self.given_up} messages were given up)")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A header with a secret must not follow to another host."""

    def redirect_request(self, *ignored: Any) -> None:
        return None


def post(hook: Webhook, body: Mapping[str, Any]) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "everstep"}
    if hook.header is not None:
        name, _, value = hook.header.partition(": ")
        headers[name] = value
    request = urllib.request.Request(hook.url, data=json.dumps(body).encode(), headers=headers)
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S) as answer:
        answer.read(1 << 16)
