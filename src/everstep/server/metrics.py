"""What Prometheus reads. Collected when asked, from the state itself: nothing is counted twice."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from everstep.core.roster import NodeState
from everstep.server.daemon import Daemon


class ClusterMetrics(Collector):
    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._nodes()
        yield from self._tasks()
        yield from self._incidents()
        entries = CounterMetricFamily("everstep_journal_entries", "Events in the journal.")
        entries.add_metric([], self.daemon.number)
        yield entries
        handled = sorted(self.daemon.handled_s)
        if handled:
            p99 = GaugeMetricFamily(
                "everstep_event_handling_seconds", "Time to decide on an event.", labels=["quantile"]
            )
            for quantile in (0.5, 0.99):
                p99.add_metric([str(quantile)], handled[int(quantile * (len(handled) - 1))])
            yield p99

    def _nodes(self) -> Iterator[Metric]:
        states = GaugeMetricFamily("everstep_nodes", "Nodes by state.", labels=["state"])
        nodes = self.daemon.machine.nodes.values()
        for state in NodeState:
            states.add_metric([state], sum(node.state is state for node in nodes))
        yield states
        ages = GaugeMetricFamily(
            "everstep_node_heartbeat_age_seconds", "Since a node was last heard.", labels=["node"]
        )
        now = time.monotonic()
        for node in nodes:
            age = self.daemon.hearts.age_s(node.name, now)
            if age is not None:
                ages.add_metric([node.name], age)
        yield ages
        slots = GaugeMetricFamily("everstep_slots", "Slots of usable nodes.", labels=["use"])
        free = len(self.daemon.machine.roster.free())
        slots.add_metric(["free"], free)
        slots.add_metric(["taken"], len(self.daemon.machine.roster.taken()))
        yield slots

    def _tasks(self) -> Iterator[Metric]:
        step = CounterMetricFamily("everstep_task_steps", "Steps on record.", labels=["task"])
        seconds = GaugeMetricFamily(
            "everstep_task_step_seconds", "How long the last step took.", labels=["task"]
        )
        loss = GaugeMetricFamily("everstep_task_loss", "The loss of the last step.", labels=["task"])
        workers = GaugeMetricFamily("everstep_task_workers", "Workers a task has.", labels=["task"])
        for task in self.daemon.machine.tasks.values():
            step.add_metric([task.name], task.recovery.recorded if task.recovery is not None else 0)
            workers.add_metric([task.name], len(task.seats))
            steps = self.daemon.steps.get(task.name)
            if steps is not None and steps.rows:
                seconds.add_metric([task.name], steps.rows[-1]["seconds"])
                loss.add_metric([task.name], steps.rows[-1]["loss"])
        yield from (step, seconds, loss, workers)

    def _incidents(self) -> Iterator[Metric]:
        total = CounterMetricFamily(
            "everstep_incidents", "Incidents by verdict.", labels=["severity", "kind"]
        )
        counts: dict[tuple[str, str], int] = {}
        recoveries = []
        for incident in self.daemon.machine.log.incidents:
            verdict = incident.verdict
            key = (f"SEV{verdict.severity}", verdict.kind) if verdict is not None else ("none", "none")
            counts[key] = counts.get(key, 0) + 1
            if incident.resumed_at is not None:
                recoveries.append(incident.resumed_at - incident.evidence_at)
        for key, count in counts.items():
            total.add_metric(list(key), count)
        yield total
        still = GaugeMetricFamily("everstep_incidents_open", "Incidents that are not closed.")
        still.add_metric([], len(self.daemon.machine.log.open_ones()))
        yield still
        if recoveries:
            last = GaugeMetricFamily(
                "everstep_last_recovery_seconds", "From evidence to closed, the last one."
            )
            last.add_metric([], recoveries[-1])
            yield last
