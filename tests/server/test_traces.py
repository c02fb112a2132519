"""Incidents as traces, read by a receiver of OTLP over HTTP on loopback."""

from __future__ import annotations

import asyncio
import http.server
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.client import Client
from everstep.errors import UserError
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.incidents import Evidence, Incident, IncidentState, Remedy, Verdict
from everstep.protocol.ops import Worker
from everstep.server.record import ClusterRecord
from everstep.server.traces import IncidentTraces, provider
from tests.support.served import JOB, agent, served

requests = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="the extra otel is not installed"
)


def incident() -> Incident:
    return Incident(
        number=3,
        workers=[Worker(0, 1)],
        what="killed by SIGKILL",
        step=2,
        evidence_at=10.0,
        resumed_at=10.25,
        state=IncidentState.CLOSED,
        evidence=[Evidence(at=10.0, source="exit", text="worker 0:1 is gone")],
        verdict=Verdict(at=10.0, kind="crash", severity=2, because="it was killed"),
        remedies=[
            Remedy(at=10.0, what="restart the worker", because="first time", outcome="training resumed")
        ],
    )


@pytest.fixture
def receiver() -> Iterator[tuple[str, queue.SimpleQueue[Any]]]:
    """Its address, and what it is sent."""
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            heard.put((self.path, requests.ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", heard
    server.shutdown()
    thread.join()
    server.server_close()


def leading() -> ClusterRecord:
    record = ClusterRecord(say=lambda line: None)
    record.leads = True
    return record


def facts(span: Any) -> dict[str, str]:
    return {fact.key: fact.value.string_value for fact in span.attributes}


def test_an_incident_is_one_trace_from_evidence_to_resumed_with_the_reason_of_each(
    tmp_path: Path, receiver: tuple[str, queue.SimpleQueue[Any]]
) -> None:
    address, heard = receiver
    record, one = leading(), incident()
    one.planned_at = 10.1
    record.machine.log.incidents.append(one)
    traces = IncidentTraces(record, address)
    traces.hear({"kind": "NodeChanged", "at": 1.0})
    traces.hear({"kind": "IncidentClosed", "incident": 3, "at": 10.25})
    traces.close()
    path, told = heard.get(timeout=10)
    assert path == "/v1/traces"
    (resource,) = told.resource_spans
    assert {"service.name": "everstep"}.items() <= facts(resource.resource).items()
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    root = spans.pop("incident: killed by SIGKILL")
    assert set(spans) == {"evidence", "verdict: crash", "remedy: restart the worker", "resumed"}
    assert len({span.trace_id for span in (root, *spans.values())}) == 1
    assert all(span.parent_span_id == root.span_id for span in spans.values())
    assert root.parent_span_id == b""
    assert facts(spans["verdict: crash"])["because"] == "it was killed"
    assert facts(spans["remedy: restart the worker"])["because"] == "first time"
    assert [event.name for event in spans["evidence"].events] == ["exit"]
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (10 * 10**9, 10_250_000_000)
    assert spans["resumed"].start_time_unix_nano == 10_100_000_000
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans.values())


def test_what_is_read_from_the_journal_is_not_told_again(
    tmp_path: Path, receiver: tuple[str, queue.SimpleQueue[Any]]
) -> None:
    address, heard = receiver
    record = leading()
    record.leads = False
    record.machine.log.incidents.append(incident())
    traces = IncidentTraces(record, address)
    traces.hear({"kind": "IncidentClosed", "incident": 3, "at": 10.25})
    traces.close()
    assert heard.empty()


def test_a_mended_link_of_a_live_coordinator_arrives_as_a_trace(
    tmp_path: Path, receiver: tuple[str, queue.SimpleQueue[Any]]
) -> None:
    """From the agent's words through journal, machine and listeners to the collector."""
    address, heard = receiver

    async def play(coordinator: str) -> None:
        async with agent(coordinator, "a") as one:
            submitted = {"name": "llama", "job": JOB}
            await asyncio.to_thread(Client(address=coordinator).post, "/v1/tasks", submitted)
            order = await one.until(msg.StartProcess)
            started = ev.WorkerStarted(worker=order.worker, incarnation=1, address=("127.0.0.1", 1))
            await one.say(1, msg.TaskEvent(task="llama", event=started))
            await one.say(2, msg.LinkMended(task="llama", worker=order.worker, peer=order.worker))
            await one.acknowledged(2)

    with served(tmp_path, otel=address) as coordinator:
        asyncio.run(play(coordinator))
    _, told = heard.get(timeout=10)
    names = {s.name for r in told.resource_spans for scope in r.scope_spans for s in scope.spans}
    assert any(name.startswith("incident: connection reset") for name in names)


def test_an_address_that_is_none_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="--otel 'collector' is not an address"):
        provider("collector")


def test_a_collector_that_is_away_costs_only_its_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither who tells of an incident nor the end of the coordinator waits for it."""
    monkeypatch.setattr("everstep.server.traces.EXPORT_S", 0.5)
    record = leading()
    record.machine.log.incidents.append(incident())
    with socket.socket() as away:
        away.bind(("127.0.0.1", 0))  # nothing listens: a connection is refused
        traces = IncidentTraces(record, f"http://127.0.0.1:{away.getsockname()[1]}")
        began = time.monotonic()
        traces.hear({"kind": "IncidentClosed", "incident": 3, "at": 10.25})
        assert time.monotonic() - began < 0.4, "it was sent by the thread that told of it"
        traces.close()
    assert time.monotonic() - began < 10
