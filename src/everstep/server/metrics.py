"""What Prometheus reads. Collected when asked, from the state itself: nothing is counted twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from everstep import __version__
from everstep.core.cluster.node_states import NodeState
from everstep.core.cluster.task import TaskState
from everstep.drive.goodput import STEPS
from everstep.errors import UserError
from everstep.job.job import Job
from everstep.job.presets import flops_per_token
from everstep.protocol.incidents import RECOVERY_EDGES_S, ForgottenIncidents
from everstep.server import views
from everstep.server.outlook import waf
from everstep.server.record import ClusterRecord


class ClusterMetrics(Collector):
    def __init__(self, record: ClusterRecord) -> None:
        self.record = record
        self.registry = CollectorRegistry()
        self.registry.register(self)
        # By task: its job, and the tokens and the model FLOPs of a step.
        self._tokens: dict[str, tuple[Any, tuple[int | None, int | None]]] = {}

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._nodes()
        yield from self._tasks()
        yield from self._incidents()
        yield from self._goodput()
        now, full = waf(self.record.machine)
        yield _one("everstep_waf_workers", "Weighted achieved work (WAF), in units of one worker.", now)
        yield _one(
            "everstep_waf_full_workers",
            "Weighted achieved work (WAF) at full capacity, in units of one worker.",
            full,
        )
        entries = CounterMetricFamily("everstep_journal_entries", "Events in the journal.")
        entries.add_metric([], self.record.number)
        yield entries
        yield _one("everstep_leader", "1 if this coordinator is the leader.", int(self.record.leads))
        handled = sorted(self.record.handled_s) or [0.0]
        for name, share in (("median", 0.5), ("p99", 0.99)):
            text = f"Time to handle an event, {name} of the last {len(handled)}."
            value = handled[int(share * (len(handled) - 1))]
            yield _one(f"everstep_event_handling_{name}_seconds", text, value)

    def _nodes(self) -> Iterator[Metric]:
        states = GaugeMetricFamily("everstep_nodes", "Nodes by state.", labels=["state"])
        nodes = self.record.machine.nodes.values()
        for state in NodeState:
            states.add_metric([state], sum(node.state is state for node in nodes))
        yield states
        ages = GaugeMetricFamily(
            "everstep_node_heartbeat_age_seconds",
            "Seconds since the last heartbeat of a node.",
            labels=["node"],
        )
        now = time.monotonic()
        for node in nodes:
            age = self.record.hearts.age_s(node.name, now)
            if age is not None:
                ages.add_metric([node.name], age)
        yield ages
        slots = GaugeMetricFamily("everstep_slots", "Slots of usable nodes.", labels=["use"])
        free = self.record.machine.roster.num_free
        slots.add_metric(["free"], free)
        slots.add_metric(["lost"], sum(len(node.lost_slots) for node in nodes))
        slots.add_metric(["taken"], self.record.machine.roster.num_taken)
        yield slots

    def _tasks(self) -> Iterator[Metric]:
        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"everstep_task_{name}", text, labels=["task"])

        step = CounterMetricFamily("everstep_task_steps", "Completed steps.", labels=["task"])
        wanted = gauge("wanted_steps", "Steps a task runs in total.")
        seconds = gauge("step_seconds", "Duration of the last step.")
        loss = gauge("loss", "Loss of the last step.")
        dropped = gauge("dropped_ratio", "Share of the experts that tokens chose which were full.")
        workers = gauge("workers", "Workers of a task.")
        places = gauge("places", "Maximum workers of a task: replicas times stages.")
        running = gauge("running", "1 if the task is training, 0 if it waits, stalls, is paused or ended.")
        weight = gauge("weight", "Weight of a task: times the rate of its model FLOPs, its share of WAF.")
        epoch = gauge("epoch", "Changes of membership or schedule.")
        issued = gauge("microbatches_issued", "Microbatches of the completed steps.")
        protected = gauge("protected_step", "Newest step whose state is saved, on disk or in memory.")
        not_saved = CounterMetricFamily(
            "everstep_task_failed_saves", "States that could not be saved.", labels=["task"]
        )
        committed = gauge(
            "microbatches_committed",
            "Microbatches committed exactly once; any difference from issued is a bug.",
        )
        for task in self.record.machine.tasks.values():
            row, name = views.task_row(self.record, task), [task.name]
            step.add_metric(name, row["step"])
            wanted.add_metric(name, row["steps"])
            workers.add_metric(name, row["workers"])
            places.add_metric(name, row["places"])
            running.add_metric(name, int(row["state"] == TaskState.RUNNING))
            epoch.add_metric(name, row["epoch"])
            weight.add_metric(name, task.weight)
            protected.add_metric(name, row["saved"]["protected"])
            not_saved.add_metric(name, row["saved"]["failed"])
            issued.add_metric(name, row["microbatches"]["issued"])
            committed.add_metric(name, row["microbatches"]["committed"])
            if row["step_seconds"] is not None:
                seconds.add_metric(name, row["step_seconds"])
            if row["loss"] is not None:
                loss.add_metric(name, row["loss"])
            if row["dropped"] is not None:
                dropped.add_metric(name, row["dropped"])
        yield from (step, wanted, seconds, loss, workers, places, running, epoch, issued, committed)
        yield from (weight, protected, not_saved, dropped)

    def _goodput(self) -> Iterator[Metric]:
        ratio = GaugeMetricFamily(
            "everstep_task_goodput_ratio", "Productive time as a part of all time.", labels=["task"]
        )
        productive = CounterMetricFamily(
            "everstep_task_productive_seconds", "Time in steps that count, once each.", labels=["task"]
        )
        lost = CounterMetricFamily(
            "everstep_task_lost_seconds", "Lost time by cause (docs/goodput.md).", labels=["task", "cause"]
        )
        tokens = CounterMetricFamily(
            "everstep_task_tokens", "Tokens of the steps that count, where known.", labels=["task"]
        )
        flops = CounterMetricFamily(
            "everstep_task_model_flops",
            "Model FLOPs of the steps that count, where known: its rate by the peak of the devices is MFU.",
            labels=["task"],
        )
        tasks = self.record.machine.tasks
        self._tokens = {name: known for name, known in self._tokens.items() if name in tasks}
        for name, task in tasks.items():
            if (account := self.record.accounts.tasks.get(name)) is None:
                continue
            if account.ratio is not None:
                ratio.add_metric([name], account.ratio)
            productive.add_metric([name], account.productive_s)
            for cause, seconds_lost in account.lost().items():
                lost.add_metric([name, cause], seconds_lost)
            if name not in self._tokens or self._tokens[name][0] is not task.job:
                self._tokens[name] = task.job, work_in_step(task.job)
            num_tokens, num_flops = self._tokens[name][1]
            num_steps = account.totals.get(STEPS, 0.0)
            if num_tokens is not None:
                tokens.add_metric([name], num_tokens * num_steps)
            if num_flops is not None:
                flops.add_metric([name], num_flops * num_steps)
        yield from (ratio, productive, lost, tokens, flops)
        text = "Always 1; the version is a label."
        build = GaugeMetricFamily("everstep_build_info", text, labels=["version"])
        build.add_metric([__version__], 1)
        yield build

    def _incidents(self) -> Iterator[Metric]:
        total = CounterMetricFamily(
            "everstep_incidents", "Incidents by verdict.", labels=["severity", "kind"]
        )
        log = self.record.machine.log
        counts = dict(log.forgotten.verdicts)
        recoveries = []
        for incident in log.incidents:
            counts[incident.label] = counts.get(incident.label, 0) + 1
            if incident.resumed_at is not None:
                recoveries.append(incident.resumed_at - incident.evidence_at)
        for key, count in counts.items():
            total.add_metric(key.split(" ", 1), count)
        yield total
        yield _one(
            "everstep_incidents_open",
            "Incidents that are not closed.",
            len(self.record.machine.log.open_ones()),
        )
        yield _recoveries(recoveries, log.forgotten)


def work_in_step(job: Any) -> tuple[int | None, int | None]:
    """Tokens and model FLOPs. None: the data are not known to be tokens; the model is not one of ours."""
    try:
        parsed = Job.from_dict(job)
        language = parsed.language()
    except (UserError, OSError, TypeError):
        return None, None
    length = parsed.data.sequence or (language and language[1])
    if parsed.data.kind not in ("synthetic", "file", "tokens") or not length:
        return None, None
    tokens, form = parsed.data.rows * length * parsed.microbatches_in_step, parsed.model.shape()
    return tokens, None if form is None else tokens * flops_per_token(form, length)


def _recoveries(recoveries: list[float], forgotten: ForgottenIncidents) -> Metric:
    """Of all closed incidents, also those that are no longer kept."""
    buckets, before = [], 0
    for edge in RECOVERY_EDGES_S:
        before += forgotten.recoveries.get(str(edge), 0)
        buckets.append((str(edge), before + sum(took <= edge for took in recoveries)))
    everything = sum(forgotten.recoveries.values()) + len(recoveries)
    return HistogramMetricFamily(
        "everstep_recovery_seconds",
        "Time from first evidence to recovery, of closed incidents.",
        buckets=[*buckets, ("+Inf", everything)],
        sum_value=sum(recoveries) + forgotten.recovery_s,
    )


def _one(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
