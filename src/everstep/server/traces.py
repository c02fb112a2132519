"""Incidents as OpenTelemetry traces: one trace per incident, sent when it is closed.

    incident ───────────────────────────────────────────────► (root: what, who, where, how it ended)
      evidence ───► verdict                 each piece of evidence is an event of this span
                    verdict ─► remedy
                               remedy ───────► (one span each, to the next or to the end)
                               planned ─────► first op of the new epoch
Every span carries its `because`. Spans are handed to a queue of the SDK, which drops rather than waits: a
collector that is away costs nothing but its traces.

Needs the extra `otel`; nothing of it is imported without an endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from everstep.errors import UserError
from everstep.protocol.incidents import Incident
from everstep.server.record import ClusterRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

FLUSH_MS = 3000  # at the end
EXPORT_S = 3.0  # for one attempt


class IncidentTraces:
    def __init__(self, record: ClusterRecord, endpoint: str) -> None:
        """`endpoint`: of OTLP over HTTP, such as http://127.0.0.1:4318."""
        self._record = record
        self._provider = provider(endpoint)
        self._tracer = self._provider.get_tracer("everstep")

    def hear(self, news: Mapping[str, Any]) -> None:
        if news["kind"] == "IncidentClosed" and self._record.leads:
            for one in self._record.machine.log.incidents:
                if one.number == news["incident"]:
                    self.export(one)

    def export(self, one: Incident) -> None:
        end = one.resumed_at if one.resumed_at is not None else one.evidence_at
        root = self._span(f"incident: {one.what}", one.evidence_at, None, _facts(one))
        self._explain(one, root, end)
        root.end(self._ns(end))

    def close(self) -> None:
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _explain(self, one: Incident, root: Any, end: float) -> None:
        first = one.remedies[0].at if one.remedies else end
        verdict_at = one.verdict.at if one.verdict is not None else first
        evidence = self._span("evidence", one.evidence_at, root, {"because": one.what})
        for item in one.evidence:
            evidence.add_event(item.source, {"because": item.text}, timestamp=self._ns(item.at))
        evidence.end(self._ns(max(verdict_at, one.evidence_at)))
        if one.verdict is not None:
            facts = {"because": one.verdict.because, "everstep.severity": f"SEV{one.verdict.severity}"}
            span = self._span(f"verdict: {one.verdict.kind}", verdict_at, root, facts)
            span.end(self._ns(max(first, verdict_at)))
        ends = [*(remedy.at for remedy in one.remedies[1:]), end]
        for remedy, until in zip(one.remedies, ends, strict=False):
            facts = {"because": remedy.because, "everstep.outcome": remedy.outcome}
            self._span(f"remedy: {remedy.what}", remedy.at, root, facts).end(self._ns(max(until, remedy.at)))
        if one.planned_at is not None and one.resumed_at is not None:
            because = f"the rest of step {one.step} is planned, in epoch {one.epoch}"
            self._span("resumed", one.planned_at, root, {"because": because}).end(self._ns(one.resumed_at))

    def _span(self, name: str, at: float, parent: Any, facts: Mapping[str, Any]) -> Any:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        context = Context() if parent is None else set_span_in_context(parent, Context())
        return self._tracer.start_span(name, context, attributes=dict(facts), start_time=self._ns(at))

    def _ns(self, at: float) -> int:
        return int((at + self._record.ahead_s) * 1e9)


def provider(endpoint: str) -> TracerProvider:
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
        raise UserError(f"--otel {endpoint!r} is not an address; write it like http://127.0.0.1:4318.")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        raise UserError(f"--otel needs other packages: pip install {packages}.") from None
    made = TracerProvider(resource=Resource.create({"service.name": "everstep"}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_S)
    made.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    return made


def _facts(one: Incident) -> dict[str, Any]:
    return {
        "everstep.incident": one.number,
        "everstep.task": one.task,
        "everstep.node": one.node,
        "everstep.workers": [str(worker) for worker in one.workers],
        "everstep.step": one.step,
        "everstep.stopped_training": one.stops_training,
        "everstep.replayed_ops": one.replayed_ops,
        "because": one.verdict.because if one.verdict is not None else one.what,
    }
