"""Notices of cloud providers that this machine will be taken away, read from their metadata services.

    aws     spot/instance-action; scheduled events that stop or restart the instance; IMDSv2 (a session token)
    gcp     instance/preempted (30 s are left), maintenance-event TERMINATE_ON_HOST_MAINTENANCE
    azure   scheduledevents of this machine: Preempt, Terminate, Reboot, Redeploy; a Freeze takes seconds only

A thread asks every few seconds; what does not answer is said once, and asked again. A notice is told once,
and again if its time changes.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from everstep import outbound
from everstep.errors import UserError
from everstep.protocol.messages import LeaveNoticed

ASK_EVERY_S = 5.0  # spot notices come 30 s (gcp, azure) or 120 s (aws) before
TIMEOUT_S = 2.0
MOST_BYTES = 1 << 18
SESSION_S = 21_600
GCP_PREEMPTED_S = 30.0
GCP_MAINTENANCE_S = 60.0  # at least; hours for some machines, which is not said
SERVICES: Mapping[str, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
_AWS_ENDS = ("instance-stop", "instance-retirement", "instance-reboot", "system-reboot", "system-maintenance")
_AZURE_ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")


@dataclass(frozen=True, slots=True)
class CloudEvent:
    """A notice: what it is, and when the machine goes, in seconds since 1970."""

    what: str
    at: float


@dataclass(slots=True)
class CloudNotice:
    cloud: str
    say: Callable[[str], None]
    service: str = ""  # its address; the provider's own by default
    clock: Callable[[], float] = time.time
    _told: set[tuple[str, int]] = field(default_factory=set)
    _trouble: str = ""
    _session: tuple[str, float] = ("", -math.inf)  # of aws, and until when
    _name: str = ""  # of this machine, for azure

    def __post_init__(self) -> None:
        if self.cloud not in SERVICES:
            raise UserError(f"--cloud is {self.cloud!r}; give one of {', '.join(SERVICES)}.")
        self.service = self.service or SERVICES[self.cloud]

    def look(self) -> LeaveNoticed | None:
        """A notice that is new; the most urgent."""
        try:
            found = {"aws": self._aws, "gcp": self._gcp, "azure": self._azure}[self.cloud]()
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            self._complain(f"the metadata service of {self.cloud} cannot be read: {_reason(error)}")
            return None
        self._trouble = ""
        new = [one for one in found if (one.what, round(one.at)) not in self._told]
        if not new:
            return None
        self._told |= {(one.what, round(one.at)) for one in new}
        first = min(new, key=lambda one: one.at)
        return LeaveNoticed(leaves_in_s=max(0.0, first.at - self.clock()), by=f"{self.cloud} ({first.what})")

    def _complain(self, sentence: str) -> None:
        if sentence != self._trouble:
            self._trouble = sentence
            self.say(sentence)

    # -------------------------------------------------------------- providers

    def _aws(self) -> list[CloudEvent]:
        token, until = self._session
        if self.clock() > until:
            wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(SESSION_S)}
            token = self._ask("/latest/api/token", wanted, method="PUT") or ""
            self._session = token, self.clock() + SESSION_S / 2
        headers = {"X-aws-ec2-metadata-token": token}
        found = []
        if text := self._ask("/latest/meta-data/spot/instance-action", headers):
            action = json.loads(text)
            found.append(CloudEvent(f"spot {action['action']}", _iso(action["time"])))
        if text := self._ask("/latest/meta-data/events/maintenance/scheduled", headers):
            for event in json.loads(text):
                if event.get("State") == "active" and event.get("Code") in _AWS_ENDS:
                    found.append(CloudEvent(event["Code"], _written(event["NotBefore"])))
        return found

    def _gcp(self) -> list[CloudEvent]:
        headers, now, found = {"Metadata-Flavor": "Google"}, self.clock(), []
        base = "/computeMetadata/v1/instance"
        if (self._ask(f"{base}/preempted", headers) or "").strip() == "TRUE":
            found.append(CloudEvent("preempted", self._first_seen("preempted", now) + GCP_PREEMPTED_S))
        if (self._ask(f"{base}/maintenance-event", headers) or "").startswith("TERMINATE"):
            found.append(CloudEvent("maintenance", self._first_seen("maintenance", now) + GCP_MAINTENANCE_S))
        return found

    def _first_seen(self, what: str, now: float) -> float:
        """These notices have no time: it runs from when they were first seen."""
        wait = {"preempted": GCP_PREEMPTED_S, "maintenance": GCP_MAINTENANCE_S}[what]
        return next((at - wait for name, at in self._told if name == what), now)

    def _azure(self) -> list[CloudEvent]:
        headers = {"Metadata": "true"}
        if not self._name:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = (self._ask(path, headers) or "").strip()
        text = self._ask("/metadata/scheduledevents?api-version=2020-07-01", headers) or "{}"
        found = []
        for event in json.loads(text).get("Events", ()):
            ours = self._name in event.get("Resources", ())
            if ours and event["EventType"] in _AZURE_ENDS:
                began = event.get("EventStatus") == "Started" or not event.get("NotBefore")
                at = 0.0 if began else _written(event["NotBefore"])
                found.append(CloudEvent(f"{event['EventType']} {event['EventId']}", at))
        return found

    def _ask(self, path: str, headers: Mapping[str, str], *, method: str = "GET") -> str | None:
        """Its answer; None: it has nothing to say (404)."""
        request = urllib.request.Request(f"{self.service}{path}", headers=dict(headers), method=method)
        try:
            with outbound.opener().open(request, timeout=TIMEOUT_S) as answer:
                text: str = answer.read(MOST_BYTES).decode(errors="replace")
                return text
        except urllib.error.HTTPError as error:
            if error.code == 401:
                self._session = "", -math.inf
            if error.code == 404:
                return None
            raise


def _iso(text: Any) -> float:
    at = datetime.fromisoformat(str(text))
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def _written(text: Any) -> float:
    """21 Jan 2026 09:00:43 GMT, with or without the day of the week."""
    at = parsedate_to_datetime(str(text))
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"it answers {error.code}"
    return str(getattr(error, "reason", None) or error) or type(error).__name__
