"""What Prometheus reads. Collected when asked, from the state itself: nothing is counted twice.

`METRICS` is the one table of names, labels and the values that a label may have: what is exported is made
from it, and the alert rules (`deploy/prometheus`) and the Grafana board are checked against it. A counter
never goes back, whatever a task does; what can, such as the step it is at, is a gauge.

A coordinator that stands by answers with its own two lines: it is up, and it does not lead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from everstep import __version__
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.node_states import NodeState
from everstep.core.cluster.progress import SHOWN_STATES
from everstep.core.cluster.task import Task, TaskState
from everstep.core.task.states import Member
from everstep.drive.goodput import STEPS, Cause
from everstep.errors import UserError
from everstep.job.job import Job
from everstep.job.presets import flops_per_token
from everstep.plan.measured import Measurements
from everstep.plan.throughput import TaskSpeed
from everstep.protocol.incidents import RECOVERY_EDGES_S, ForgottenIncidents
from everstep.server import views
from everstep.server.record import ClusterRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of labels that have only these

    @property
    def suffix(self) -> str:
        return {"gauge": "", "counter": "_total", "histogram": "_bucket"}[self.kind]


def _gauge(text: str, *labels: str, **values: tuple[str, ...]) -> MetricRow:
    return MetricRow(kind="gauge", text=text, labels=(*labels, *values), values=values)


def _counter(text: str, *labels: str, **values: tuple[str, ...]) -> MetricRow:
    return MetricRow(kind="counter", text=text, labels=(*labels, *values), values=values)


METRICS: Mapping[str, MetricRow] = {  # by name, without the suffix that Prometheus wants
    "everstep_leader": _gauge("1 if this coordinator is the leader."),
    "everstep_build_info": _gauge("Always 1; the version is a label.", "version"),
    "everstep_nodes": _gauge("Nodes by state.", state=tuple(NodeState)),
    "everstep_node_heartbeat_age_seconds": _gauge("Seconds since the last heartbeat of a node.", "node"),
    "everstep_slots": _gauge("Slots of usable nodes.", use=("free", "lost", "taken")),
    "everstep_task_state": _gauge(
        "1 for the state that a task is in, 0 for the others; stalled: it should train, and a stage has no "
        "worker.",
        "task",
        state=SHOWN_STATES,
    ),
    "everstep_task_step": _gauge(
        "Newest completed step. It goes back if a task resumes from an older state.", "task"
    ),
    "everstep_task_steps": _counter("Completed steps, also those that were completed before.", "task"),
    "everstep_task_wanted_steps": _gauge("Steps a task runs in total.", "task"),
    "everstep_task_step_seconds": _gauge("Duration of the last step.", "task"),
    "everstep_task_step_tokens": _gauge("Tokens of a step, where known.", "task"),
    "everstep_task_step_model_flops": _gauge(
        "Model FLOPs of a step, where known: times the rate of productive steps, by the peak of the devices, "
        "they are MFU.",
        "task",
    ),
    "everstep_task_loss": _gauge("Loss of the last step.", "task"),
    "everstep_task_workers": _gauge("Workers of a task.", "task"),
    "everstep_task_places": _gauge("Maximum workers of a task: replicas times stages.", "task"),
    "everstep_task_weight": _gauge(
        "Weight of a task: times the rate of its model FLOPs, its share of WAF.", "task"
    ),
    "everstep_task_epoch": _gauge("Changes of membership or schedule.", "task"),
    "everstep_task_microbatches_issued": _gauge("Microbatches of the completed steps.", "task"),
    "everstep_task_microbatches_committed": _gauge(
        "Microbatches committed exactly once; any difference from issued is a bug.", "task"
    ),
    "everstep_task_protected_step": _gauge("Newest step whose state is saved, on disk or in memory.", "task"),
    "everstep_task_failed_saves": _counter("States that could not be saved.", "task"),
    "everstep_task_goodput_ratio": _gauge("Productive time as a part of all time.", "task"),
    "everstep_task_productive_seconds": _counter("Time in steps that count, once each.", "task"),
    "everstep_task_productive_steps": _counter("Steps that count, once each.", "task"),
    "everstep_task_lost_seconds": _counter(
        "Lost time by cause (docs/goodput.md).", "task", cause=tuple(Cause)
    ),
    "everstep_incidents": _counter("Incidents by verdict.", "severity", "kind"),
    "everstep_incidents_open": _gauge("Incidents that are not closed."),
    "everstep_recovery_seconds": MetricRow(
        kind="histogram",
        text="Time from first evidence to recovery, of closed incidents.",
    ),
    "everstep_waf_workers": _gauge("Weighted achieved work (WAF), in units of one worker."),
    "everstep_waf_full_workers": _gauge(
        "Weighted achieved work (WAF) at full capacity, in units of one worker."
    ),
    "everstep_journal_entries": _counter("Events in the journal."),
    "everstep_event_handling_median_seconds": _gauge("Time to handle an event, median of the last 10,000."),
    "everstep_event_handling_p99_seconds": _gauge("Time to handle an event, p99 of the last 10,000."),
}


class _Families:
    """The metrics of the table, with the samples that they have been given."""

    def __init__(self) -> None:
        self._found: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """`value` None: not known."""
        if value is not None:
            self.named(name).add_metric(labels, value)

    def named(self, name: str) -> GaugeMetricFamily | CounterMetricFamily:
        """Also without a sample yet."""
        if name not in self._found:
            row = METRICS[name]
            family = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            self._found[name] = family(name, row.text, labels=row.labels)
        return self._found[name]

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._found.values())


class ClusterMetrics(Collector):
    def __init__(self, record: ClusterRecord) -> None:
        self.record = record
        self.registry = CollectorRegistry()
        self.registry.register(self)
        # By task: its job, and the tokens and the model FLOPs of a step.
        self._work: dict[str, tuple[Any, tuple[int | None, int | None]]] = {}

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        found = _Families()
        found.set("everstep_leader", int(self.record.leads))
        found.set("everstep_build_info", 1, __version__)
        if not self.record.leads:
            yield from found
            return
        self._nodes(found)
        self._tasks(found)
        self._goodput(found)
        recoveries = self._incidents(found)
        now, full = waf(self.record.machine, self.record.measured)
        found.set("everstep_waf_workers", now)
        found.set("everstep_waf_full_workers", full)
        found.set("everstep_journal_entries", self.record.number)
        handled = sorted(self.record.handled_s) or [0.0]
        for name, share in (("median", 0.5), ("p99", 0.99)):
            value = handled[int(share * (len(handled) - 1))]
            found.set(f"everstep_event_handling_{name}_seconds", value)
        yield from found
        yield _recoveries(recoveries, self.record.machine.log.forgotten)

    def _nodes(self, found: _Families) -> None:
        nodes, roster = self.record.machine.nodes.values(), self.record.machine.roster
        for state in NodeState:
            found.set("everstep_nodes", sum(node.state is state for node in nodes), state)
        now = time.monotonic()
        for node in nodes:
            found.set(
                "everstep_node_heartbeat_age_seconds", self.record.hearts.age_s(node.name, now), node.name
            )
        found.set("everstep_slots", roster.num_free, "free")
        found.set("everstep_slots", sum(len(node.lost_slots) for node in nodes), "lost")
        found.set("everstep_slots", roster.num_taken, "taken")

    def _tasks(self, found: _Families) -> None:
        for name in METRICS:
            if name.startswith("everstep_task_"):
                found.named(name)
        for task in self.record.machine.tasks.values():
            row = views.task_row(self.record, task)
            for state in SHOWN_STATES:
                found.set("everstep_task_state", int(row["state"] == state), task.name, state)
            values = {
                "step": row["step"],
                "steps": row["made"],
                "wanted_steps": row["steps"],
                "step_seconds": row["step_seconds"],
                "loss": row["loss"],
                "workers": row["workers"],
                "places": row["places"],
                "weight": task.weight,
                "epoch": row["epoch"],
                "microbatches_issued": row["microbatches"]["issued"],
                "microbatches_committed": row["microbatches"]["committed"],
                "protected_step": row["saved"]["protected"],
                "failed_saves": row["saved"]["failed"],
            }
            for name, value in values.items():
                found.set(f"everstep_task_{name}", value, task.name)

    def _goodput(self, found: _Families) -> None:
        tasks = self.record.machine.tasks
        self._work = {name: known for name, known in self._work.items() if name in tasks}
        for name, task in tasks.items():
            if (account := self.record.accounts.tasks.get(name)) is None:
                continue
            found.set("everstep_task_goodput_ratio", account.ratio, name)
            found.set("everstep_task_productive_seconds", account.productive_s, name)
            found.set("everstep_task_productive_steps", account.totals.get(STEPS, 0.0), name)
            for cause, seconds_lost in account.lost().items():
                found.set("everstep_task_lost_seconds", seconds_lost, name, cause)
            if name not in self._work or self._work[name][0] is not task.job:
                self._work[name] = task.job, work_in_step(task.job)
            num_tokens, num_flops = self._work[name][1]
            found.set("everstep_task_step_tokens", num_tokens, name)
            found.set("everstep_task_step_model_flops", num_flops, name)

    def _incidents(self, found: _Families) -> list[float]:
        """How long the recoveries took."""
        log = self.record.machine.log
        counts = dict(log.forgotten.verdicts)
        recoveries = []
        for incident in log.incidents:
            counts[incident.label] = counts.get(incident.label, 0) + 1
            if incident.resumed_at is not None:
                recoveries.append(incident.resumed_at - incident.evidence_at)
        found.named("everstep_incidents")
        for key, count in counts.items():
            found.set("everstep_incidents", count, *key.split(" ", 1))
        found.set("everstep_incidents_open", len(log.open_ones()))
        return recoveries


def work_in_step(job: Any) -> tuple[int | None, int | None]:
    """Tokens and model FLOPs. None: the data are not known to be tokens; the model is not one of ours."""
    try:
        parsed = Job.from_dict(job)
        language = parsed.language()
    except (UserError, OSError, TypeError):
        return None, None
    length = parsed.data.sequence or (language and language[1])
    if parsed.data.kind not in ("synthetic", "tokens") or not length:
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
        METRICS["everstep_recovery_seconds"].text,
        buckets=[*buckets, ("+Inf", everything)],
        sum_value=sum(recoveries) + forgotten.recovery_s,
    )


def waf(machine: Coordinator, measured: Measurements) -> tuple[float, float]:
    """What the planner maximises: the sum over running tasks of weight times throughput, in the work of one
    slot; and what it is with every place taken and no worker slow.
    """
    now = full = 0.0
    for task in machine.tasks.values():
        if task.state is TaskState.RUNNING:
            speed = TaskSpeed(task.shape, measured.of(task.name), task.speeds.slow)
            now += task.weight * speed.now(_live(task))
            full += task.weight * speed.now((task.shape.replicas,) * task.shape.stages, {})
    return round(now, 4), round(full, 4)


def _live(task: Task) -> list[int]:
    """Workers of each stage that train."""
    if task.managed is None:
        return [0 if task.recovery is None else task.recovery.num_members] * task.shape.stages
    live = [0] * task.shape.stages
    for worker, place in task.managed.places.items():
        live[worker.stage] += isinstance(place, Member)
    return live
