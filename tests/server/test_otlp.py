"""Metrics and decisions as an OpenTelemetry collector reads them."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import HistogramMetricFamily

from everstep.cli.client import Client
from everstep.errors import UserError
from everstep.server.otlp import MOST_LOGS, LogsExporter, MetricsExporter, document, endpoint, log_document
from everstep.server.record import ClusterRecord
from tests.server.served import served
from tests.server.test_api import JOB


@contextlib.contextmanager
def collector(*statuses: int) -> Iterator[tuple[str, queue.SimpleQueue[Any]]]:
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    left = list(statuses)

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            heard.put((self.path, self.headers["Content-Type"], body))
            self.send_response(left.pop(0) if left else 200)
            self.end_headers()

        def log_message(self, *words: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_coordinator_sends_what_its_metrics_page_shows(tmp_path: Path) -> None:
    with collector() as (address, heard), served(tmp_path, token="t", otlp_metrics=address) as coordinator:
        Client(address=coordinator, token="t").post("/v1/tasks", {"name": "mine", "job": JOB})
        path, kind, body = heard.get(timeout=60)
    assert (path, kind) == ("/v1/metrics", "application/json")
    (resource,) = json.loads(body)["resourceMetrics"]
    attributes = {one["key"]: one["value"]["stringValue"] for one in resource["resource"]["attributes"]}
    assert attributes["service.name"] == "everstep"
    metrics = {one["name"]: one for one in resource["scopeMetrics"][0]["metrics"]}
    assert metrics["everstep_leader"]["gauge"]["dataPoints"][0]["asDouble"] == 1.0
    assert metrics["everstep_journal_entries"]["sum"]["isMonotonic"]
    assert metrics["everstep_recovery_seconds"]["unit"] == "s"


def test_what_is_sent_is_a_request_of_the_protocol() -> None:
    wire = pytest.importorskip(
        "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", reason="otel is not installed"
    )
    from google.protobuf.json_format import Parse

    record = ClusterRecord(say=lambda line: None)
    record.leads = True
    families = [*MetricsExporter(record, "http://h", instance="i")._metrics.registry.collect()]
    times = HistogramMetricFamily(
        "took_seconds", "Times.", buckets=[("0.1", 2), ("1", 5), ("+Inf", 6)], sum_value=7.5
    )
    sent = json.dumps(document([*families, times], at_ns=2, since_ns=1, instance="i"))
    read = Parse(sent, wire.ExportMetricsServiceRequest())
    *_, last = read.resource_metrics[0].scope_metrics[0].metrics
    (point,) = last.histogram.data_points
    assert (list(point.bucket_counts), list(point.explicit_bounds)) == ([2, 3, 1], [0.1, 1.0])
    assert (point.count, point.sum, point.time_unix_nano) == (6, 7.5, 2)


def test_a_collector_that_is_away_is_said_once_and_tried_again(capfd: pytest.CaptureFixture[str]) -> None:
    record = ClusterRecord(say=lambda line: None)
    record.leads = True

    async def until_heard(address: str, heard: queue.SimpleQueue[Any]) -> None:
        sending = asyncio.create_task(MetricsExporter(record, address, instance="i", every_s=0.01).run())
        for _ in range(4):
            await asyncio.to_thread(heard.get, timeout=60)
        sending.cancel()

    with collector(503, 503) as (address, heard):
        asyncio.run(until_heard(address, heard))
    err = capfd.readouterr().err
    assert err.count("cannot be sent") == 1
    assert "it answers 503" in err
    assert err.count("again") == 2


@pytest.mark.parametrize("address", ["", "collector:4318", "ftp://h", "http://"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="is not an address; write it like"):
        endpoint(address)


def test_an_address_with_a_path_is_used_as_it_is() -> None:
    assert endpoint("http://h:1/") == "http://h:1/v1/metrics"
    assert endpoint("https://h/otlp/v1/metrics") == "https://h/otlp/v1/metrics"


def test_a_coordinator_sends_what_it_decides_and_why(tmp_path: Path) -> None:
    with collector(503) as (address, heard), served(tmp_path, token="t", otlp_logs=address) as coordinator:
        client = Client(address=coordinator, token="t")
        client.post("/v1/tasks", {"name": "mine", "job": JOB})
        client.post("/v1/tasks/mine/cancel", {})
        heard.get(timeout=60)  # is not taken: it comes again
        path, kind, body = heard.get(timeout=60)
    assert (path, kind) == ("/v1/logs", "application/json")
    (resource,) = json.loads(body)["resourceLogs"]
    records = resource["scopeLogs"][0]["logRecords"]
    kind_of = {"key": "everstep.kind", "value": {"stringValue": "TaskEnded"}}
    (ended,) = (one for one in records if kind_of in one["attributes"])
    facts = {one["key"]: one["value"]["stringValue"] for one in ended["attributes"]}
    assert (facts["everstep.task"], facts["everstep.state"]) == ("mine", "cancelled")
    assert facts["everstep.because"]
    assert (ended["severityText"], int(ended["timeUnixNano"]) > 1e18) == ("INFO", True)


def test_logs_are_requests_of_the_protocol_of_the_leader_alone_and_bounded() -> None:
    wire = pytest.importorskip(
        "opentelemetry.proto.collector.logs.v1.logs_service_pb2", reason="otel is not installed"
    )
    from google.protobuf.json_format import Parse

    record = ClusterRecord(say=lambda line: None)
    exporter = LogsExporter(record, "http://h", instance="i")
    news = {"at": 1.5, "kind": "IncidentClosed", "text": "closed", "because": "it trains", "incident": 1}
    exporter.hear(news)
    assert not exporter._waiting, "replayed, or of another coordinator"
    record.leads = True
    for kind in ("step", "Dispatch", "IncidentClosed"):
        exporter.hear({**news, "kind": kind} if kind != "step" else {"at": 1.0, "kind": kind, "task": "t"})
    (one,) = exporter._waiting
    read = Parse(json.dumps(log_document([one], instance="i")), wire.ExportLogsServiceRequest())
    (sent,) = read.resource_logs[0].scope_logs[0].log_records
    assert (sent.body.string_value, sent.severity_text) == ("closed", "WARN")
    assert sent.time_unix_nano == 1_500_000_000
    for _ in range(MOST_LOGS + 5):
        exporter.hear(news)
    assert len(exporter._waiting) == MOST_LOGS
