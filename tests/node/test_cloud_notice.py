"""Notices of AWS, GCP and Azure, read from a server of our own that answers as theirs do."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from everstep.errors import UserError
from everstep.node.cloud_notice import CloudNotice

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z


class Metadata(http.server.BaseHTTPRequestHandler):
    """Strict as the real ones are: without its header a call is refused."""

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._say(200, "session-1")

    def do_GET(self) -> None:
        server: Any = self.server
        path = self.path.partition("?")[0]
        if path.startswith("/latest/") and self.headers["X-aws-ec2-metadata-token"] != "session-1":
            return self._say(401, "")
        if path.startswith("/computeMetadata/") and self.headers["Metadata-Flavor"] != "Google":
            return self._say(403, "")
        if path.startswith("/metadata/") and (
            self.headers["Metadata"] != "true" or "api-version" not in self.path
        ):
            return self._say(400, "")
        if path not in server.answers:
            return self._say(404, "")
        return self._say(*server.answers[path])

    def _say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words: Any) -> None: ...


@contextlib.contextmanager
def metadata() -> Iterator[tuple[str, dict[str, tuple[int, str]]]]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.answers = {}
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.answers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def watch(cloud: str, service: str, said: list[str], now: float = NOW) -> CloudNotice:
    return CloudNotice(cloud, said.append, service=service, clock=lambda: now)


def test_aws_spot_and_scheduled_events() -> None:
    said: list[str] = []
    with metadata() as (service, answers):
        notice = watch("aws", service, said)
        assert notice.look() is None, "404 is its usual answer"
        action = {"action": "terminate", "time": "2027-01-15T08:02:00Z"}
        answers["/latest/meta-data/spot/instance-action"] = 200, json.dumps(action)
        found = notice.look()
        assert found is not None
        assert (found.leaves_in_s, found.by) == (120.0, "aws (spot terminate)")
        assert notice.look() is None, "told once"
        event = {"Code": "system-reboot", "State": "active", "NotBefore": "15 Jan 2027 09:00:00 GMT"}
        others = [event | {"State": "completed"}, event | {"Code": "birthday"}]
        answers["/latest/meta-data/events/maintenance/scheduled"] = 200, json.dumps([*others, event])
        found = notice.look()
        assert found is not None
        assert (found.leaves_in_s, found.by) == (3600.0, "aws (system-reboot)")
    assert said == []


def test_gcp_preemption_and_maintenance() -> None:
    said: list[str] = []
    base = "/computeMetadata/v1/instance"
    with metadata() as (service, answers):
        now = [NOW]
        notice = CloudNotice("gcp", said.append, service=service, clock=lambda: now[0])
        answers[f"{base}/preempted"] = 200, "FALSE"
        answers[f"{base}/maintenance-event"] = 200, "MIGRATE_ON_HOST_MAINTENANCE"
        assert notice.look() is None
        answers[f"{base}/preempted"] = 200, "TRUE"
        found = notice.look()
        assert found is not None
        assert (found.leaves_in_s, found.by) == (30.0, "gcp (preempted)")
        now[0] += 5
        assert notice.look() is None
        answers[f"{base}/maintenance-event"] = 200, "TERMINATE_ON_HOST_MAINTENANCE"
        found = notice.look()
        assert found is not None
        assert found.leaves_in_s == 60.0
        now[0] += 5
        assert notice.look() is None
    assert said == []


def test_azure_events_of_this_machine_only() -> None:
    said: list[str] = []
    event = {
        "EventId": "1",
        "EventType": "Preempt",
        "EventStatus": "Scheduled",
        "Resources": ["vm-7"],
        "NotBefore": "Fri, 15 Jan 2027 08:00:30 GMT",
    }
    with metadata() as (service, answers):
        answers["/metadata/instance/compute/name"] = 200, "vm-7"
        notice = watch("azure", service, said)
        for quiet in ([], [event | {"Resources": ["vm-8"]}], [event | {"EventType": "Freeze"}]):
            answers["/metadata/scheduledevents"] = 200, json.dumps({"Events": quiet})
            assert notice.look() is None
        answers["/metadata/scheduledevents"] = 200, json.dumps({"Events": [event]})
        found = notice.look()
        assert found is not None
        assert (found.leaves_in_s, found.by) == (30.0, "azure (Preempt 1)")
        started = event | {"EventStatus": "Started", "NotBefore": ""}
        answers["/metadata/scheduledevents"] = 200, json.dumps({"Events": [started]})
        found = notice.look()
        assert found is not None
        assert found.leaves_in_s == 0.0
    assert said == []


@pytest.mark.parametrize(
    ("cloud", "path"),
    [
        ("aws", "/latest/meta-data/spot/instance-action"),
        ("azure", "/metadata/scheduledevents"),
    ],
)
@pytest.mark.parametrize(
    "answer", [(200, "{"), (200, "[7]"), (200, '{"Events": [{}], "action": 3}'), (500, "")]
)
def test_a_service_that_talks_nonsense_is_said_once_and_asked_again(
    cloud: str, path: str, answer: tuple[int, str]
) -> None:
    said: list[str] = []
    with metadata() as (service, answers):
        answers["/metadata/instance/compute/name"] = 200, "vm-7"
        answers[path] = answer
        notice = watch(cloud, service, said)
        assert notice.look() is None
        assert notice.look() is None
        del answers[path]
        assert notice.look() is None
    assert notice.look() is None, "nobody is there"
    assert len(said) in (1, 2)


def test_an_unknown_cloud_is_one_sentence() -> None:
    with pytest.raises(UserError, match="--cloud is 'ibm'"):
        CloudNotice("ibm", print)
