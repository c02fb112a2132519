"""The metrics of /metrics, sent to an OpenTelemetry collector: OTLP over HTTP, in its JSON form.

The same families, collected at the same moment; a counter is a cumulative sum, a histogram keeps its bounds.
Needs no library of OpenTelemetry. Only the leader sends. A collector that is away is tried again at the next
turn, and said once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
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
STANDBY_S = 0.5  # between two looks at whether this coordinator leads
ANSWER_S = 5.0
_CUMULATIVE = 2  # AGGREGATION_TEMPORALITY_CUMULATIVE
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1"}


def endpoint(address: str) -> str:
    """Where to post; an address without a path gets OTLP's usual one."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--otlp-metrics {address!r} is not an address; write it like http://127.0.0.1:4318.")
    return address if parts.path.strip("/") else f"{address.rstrip('/')}/v1/metrics"


class MetricsExporter:
    def __init__(
        self, record: ClusterRecord, address: str, *, instance: str, every_s: float = EVERY_S
    ) -> None:
        self._record, self._url, self._every_s = record, endpoint(address), every_s
        self._instance, self._metrics = instance, ClusterMetrics(record)
        self._since_ns, self._failing = time.time_ns(), False

    async def run(self) -> None:
        """Until cancelled."""
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(timeout=limit) as session:
            while True:
                if self._record.leads:
                    await self._send(session)
                await asyncio.sleep(self._every_s if self._record.leads else STANDBY_S)

    async def _send(self, session: aiohttp.ClientSession) -> None:
        families = self._metrics.registry.collect()
        body = document(families, at_ns=time.time_ns(), since_ns=self._since_ns, instance=self._instance)
        try:
            async with session.post(self._url, json=body, allow_redirects=False) as answer:
                because = "" if answer.status < 300 else f"it answers {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            because = str(error) or type(error).__name__
        if because and not self._failing:
            warn(f"coordinator: metrics cannot be sent to {self._url}: {because}. Trying again.")
        elif self._failing and not because:
            say(f"coordinator: metrics reach {self._url} again")
        self._failing = bool(because)


def document(families: Iterable[Metric], *, at_ns: int, since_ns: int, instance: str) -> dict[str, Any]:
    """An ExportMetricsServiceRequest."""
    times = {"startTimeUnixNano": str(since_ns), "timeUnixNano": str(at_ns)}
    of_service = {"service.name": "everstep", "service.version": __version__, "service.instance.id": instance}
    metrics = [_metric(family, times) for family in families if family.samples]
    scope = {"scope": {"name": "everstep", "version": __version__}, "metrics": metrics}
    resource = {"attributes": _attributes(of_service)}
    return {"resourceMetrics": [{"resource": resource, "scopeMetrics": [scope]}]}


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
