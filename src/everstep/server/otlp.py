"""Metrics and decisions, sent to an OpenTelemetry collector: OTLP over HTTP, in its JSON form.

    metrics   the families of /metrics; a counter is a cumulative sum, a histogram keeps its bounds
    logs      what the coordinator has decided about nodes, tasks, incidents and plans, with its `because`;
              orders to single workers are not among them

Needs no library of OpenTelemetry. Only the leader sends. A collector that is away is tried again at the next
turn, and said once; of logs the newest thousands are kept for it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from prometheus_client.core import Metric

from everstep import __version__
from everstep.errors import UserError
from everstep.log import say, warn
from everstep.server.metrics import ClusterMetrics
from everstep.server.record import ClusterRecord

EVERY_S = 15.0
LOGS_EVERY_S = 1.0
MOST_LOGS, LOGS_AT_ONCE = 5_000, 500
STANDBY_S = 0.5  # between two looks at whether this coordinator leads
ANSWER_S = 5.0
_CUMULATIVE = 2  # AGGREGATION_TEMPORALITY_CUMULATIVE
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1"}
_INFO, _WARN = (9, "INFO"), (13, "WARN")  # SeverityNumber
_ORDERS = ("Dispatch", "Think")
_NOT_FACTS = ("at", "kind", "text")  # of news: they have places of their own in a log record


def endpoint(address: str, what: str = "metrics") -> str:
    """Where to post; an address without a path gets OTLP's usual one."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--otlp-{what} {address!r} is not an address; write it like http://127.0.0.1:4318.")
    return address if parts.path.strip("/") else f"{address.rstrip('/')}/v1/{what}"


class Collector:
    """Where one kind of data is posted."""

    def __init__(self, address: str, what: str) -> None:
        self._url, self._what, self._failing = endpoint(address, what), what, False

    async def post(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> bool:
        """Has it arrived?"""
        try:
            async with session.post(self._url, json=body, allow_redirects=False) as answer:
                because = "" if answer.status < 300 else f"it answers {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            because = str(error) or type(error).__name__
        if because and not self._failing:
            warn(f"coordinator: {self._what} cannot be sent to {self._url}: {because}. Trying again.")
        elif self._failing and not because:
            say(f"coordinator: {self._what} reach {self._url} again")
        self._failing = bool(because)
        return not because


class MetricsExporter:
    def __init__(
        self, record: ClusterRecord, address: str, *, instance: str, every_s: float = EVERY_S
    ) -> None:
        self._record, self._every_s = record, every_s
        self._instance, self._metrics = instance, ClusterMetrics(record)
        self._since_ns, self._collector = time.time_ns(), Collector(address, "metrics")

    async def run(self) -> None:
        """Until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            while True:
                if self._record.leads:
                    await self._send(session)
                await asyncio.sleep(self._every_s if self._record.leads else STANDBY_S)

    async def _send(self, session: aiohttp.ClientSession) -> None:
        families = self._metrics.registry.collect()
        body = document(families, at_ns=time.time_ns(), since_ns=self._since_ns, instance=self._instance)
        await self._collector.post(session, body)


class LogsExporter:
    """Hears what the record publishes, and sends it in turns."""

    def __init__(self, record: ClusterRecord, address: str, *, instance: str) -> None:
        self._record, self._instance, self._collector = record, instance, Collector(address, "logs")
        self._waiting: deque[Mapping[str, Any]] = deque(maxlen=MOST_LOGS)

    def hear(self, news: Mapping[str, Any]) -> None:
        if self._record.leads and "text" in news and news["kind"] not in _ORDERS:
            self._waiting.append(news)

    def close(self) -> None:
        """What waits is lost with the process; it is in the journal."""

    async def run(self) -> None:
        """Until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            while True:
                if not self._waiting or not await self._send(session):
                    await asyncio.sleep(LOGS_EVERY_S)

    async def _send(self, session: aiohttp.ClientSession) -> bool:
        some = [*islice(self._waiting, LOGS_AT_ONCE)]
        if not await self._collector.post(session, log_document(some, instance=self._instance)):
            return False
        for one in some:
            if self._waiting and self._waiting[0] is one:  # else newer ones took its place meanwhile
                self._waiting.popleft()
        return True


def log_document(news: Sequence[Mapping[str, Any]], *, instance: str) -> dict[str, Any]:
    """An ExportLogsServiceRequest."""
    scope = {**_SCOPE, "logRecords": [_log_record(one) for one in news]}
    return {"resourceLogs": [{"resource": _resource(instance), "scopeLogs": [scope]}]}


def _log_record(news: Mapping[str, Any]) -> dict[str, Any]:
    number, word = _WARN if news["kind"].startswith("Incident") else _INFO
    facts = {key: str(news[key]) for key in news if key not in _NOT_FACTS and news[key] not in ("", None)}
    facts["kind"] = news["kind"]
    return {
        "timeUnixNano": str(int(news["at"] * 1e9)),
        "severityNumber": number,
        "severityText": word,
        "body": {"stringValue": news["text"]},
        "attributes": _attributes({f"everstep.{key}": fact for key, fact in facts.items()}),
    }


def document(families: Iterable[Metric], *, at_ns: int, since_ns: int, instance: str) -> dict[str, Any]:
    """An ExportMetricsServiceRequest."""
    times = {"startTimeUnixNano": str(since_ns), "timeUnixNano": str(at_ns)}
    scope = {**_SCOPE, "metrics": [_metric(family, times) for family in families if family.samples]}
    return {"resourceMetrics": [{"resource": _resource(instance), "scopeMetrics": [scope]}]}


_SCOPE = {"scope": {"name": "everstep", "version": __version__}}


def _resource(instance: str) -> dict[str, Any]:
    named = {"service.name": "everstep", "service.version": __version__, "service.instance.id": instance}
    return {"attributes": _attributes(named)}


def _metric(family: Metric, times: dict[str, str]) -> dict[str, Any]:
    unit = _UNITS.get(family.name.rpartition("_")[2], "")
    made: dict[str, Any] = {"name": family.name, "description": family.documentation, "unit": unit}
    if family.type == "histogram":
        made["histogram"] = {"dataPoints": _histogram(family, times), "aggregationTemporality": _CUMULATIVE}
        return made
    points = [
        {"attributes": _attributes(sample.labels), **times, "asDouble": float(sample.value)}
        for sample in family.samples
        if math.isfinite(sample.value)  # JSON has no other numbers
    ]
    if family.type == "counter":
        made["sum"] = {"dataPoints": points, "aggregationTemporality": _CUMULATIVE, "isMonotonic": True}
    else:
        made["gauge"] = {"dataPoints": points}
    return made


def _histogram(family: Metric, times: dict[str, str]) -> list[dict[str, Any]]:
    """Prometheus counts up to each bound, OTLP between two of them."""
    total = sum(sample.value for sample in family.samples if sample.name.endswith("_sum"))
    edges = [
        (float(sample.labels["le"]), int(sample.value))
        for sample in family.samples
        if sample.name.endswith("_bucket")
    ]
    counts = [count for _, count in edges]
    between = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    point = {
        **times,
        "count": str(counts[-1]),
        "sum": total,
        "bucketCounts": [str(count) for count in between],
        "explicitBounds": [edge for edge, _ in edges if math.isfinite(edge)],
    }
    return [point]


def _attributes(labels: dict[str, str]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in labels.items()]
